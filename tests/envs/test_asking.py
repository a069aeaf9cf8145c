"""How a task asks, without its data and without code of the user's."""

import sys

import pytest

from evo_grpo.envs.asking import asking
from evo_grpo.envs.registry import build_task
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.settings.env import EnvConfig


def test_a_task_of_this_package_asks_as_it_does_in_training():
    env = EnvConfig(kind="sums")
    found, task = asking(env, 3), build_task(env, 3)
    assert found.columns == ["question"]
    assert found.max_output_tokens == task.max_output_tokens
    assert found.example == task.splits["validation"][0]
    assert found.template == task.template


def test_a_template_of_the_users_own_replaces_it():
    env = EnvConfig(kind="sums", conversation=[{"role": "user", "content": "{a} plus {b}?"}])
    assert asking(env, 0).columns == ["a", "b"]


def test_a_dataset_needs_neither_its_rows_nor_its_reward():
    env = EnvConfig(kind="dataset", train="gone.jsonl", reward="gone:score", prompt="{q}?")
    found = asking(env, 0)
    assert (found.columns, found.example) == (["q"], {})
    assert "gone" not in sys.modules


def test_a_dataset_without_a_template_asks_its_column(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    env = EnvConfig(kind="dataset", train=str(tmp_path / "rows.jsonl"), reward="gone:score")
    assert asking(env, 0).columns == ["question"]
    with pytest.raises(DataError, match=r"none\.jsonl"):
        asking(EnvConfig(kind="dataset", train="none.jsonl", reward="gone:score"), 0)


def test_several_turns_begin_with_what_the_environment_says():
    env = EnvConfig(kind="python:gone:make")
    assert asking(env, 0).template.conversation == ({"role": "user", "content": "{observation}"},)


def test_a_kind_that_there_is_not():
    with pytest.raises(ConfigError, match="was a Python object without a prompt template"):
        asking(EnvConfig(kind="object:Mine"), 0)
