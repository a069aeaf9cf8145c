"""How a task asks, without its data and code of the user's; and the environment of a task."""

import sys

import pytest

from evo_grpo.envs.asking import asking
from evo_grpo.envs.registry import build_task
from evo_grpo.envs.resolve import environment_of
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


def test_the_first_of_several_prompts_is_asked_unless_another_one_is_named():
    prompts = {"sum": {"prompt": "{question}"}, "words": {"prompt": "{a} plus {b}?"}}
    env = EnvConfig(kind="sums", prompts=prompts)
    assert asking(env, 0).columns == ["question"]
    assert asking(env, 0, "words").columns == ["a", "b"]


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


GAME = """
class Game:
    def reset(self, seed=None):
        return "?", {}

    def step(self, action):
        return "", 1.0, True, False, {}
"""


def test_episodes_are_played_as_the_configuration_says(write_module, tokenizer):
    write_module("resolved_game", GAME)
    config = EnvConfig(kind="python:resolved_game:Game", max_turns=3, reward_timeout=7.0)
    env = environment_of(config, 0, 2, 5)(tokenizer)
    assert (env.name, env.max_turns, env.reward_timeout) == (config.kind, 3, 7.0)
    assert (env.batch_size, env.max_output_tokens) == (2, 5)


def test_rows_are_scored_as_the_configuration_says(tokenizer):
    env = environment_of(EnvConfig(kind="sums", reward_timeout=7.0), 0, 2, 5)(tokenizer)
    assert (env.name, env.batch_size, env.task.calls.reward_timeout) == ("sums", 2, 7.0)
    assert env.batch(0) == environment_of(EnvConfig(kind="sums"), 0, 2, 5)(tokenizer).batch(0)
