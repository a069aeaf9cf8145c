"""The page docs/environments.md, run: its files are written, settings build, code prints."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from evo_grpo.envs.registry import FAMILIES, build_multi_turn, build_task, is_multi_turn
from evo_grpo.settings import EnvConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"
BLOCKS = re.findall(r'^```(\w+)(?: title="([^"\n]+)")?\n(.*?)^```$', PAGE.read_text(), re.M | re.S)
SETTINGS = [text for language, _, text in BLOCKS if language == "yaml"]
PROGRAMS = [text for language, title, text in BLOCKS if language == "python" and not title]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for _, title, text in BLOCKS:
        if title:
            (tmp_path / title).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("my_game", "my_rewards"):
        monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_settings_build(settings):
    env = EnvConfig.model_validate(yaml.safe_load(settings)["env"])
    if is_multi_turn(env.kind):
        text, _ = build_multi_turn(env, 0)().reset(seed=0)
        assert text == "Guess my number, from 1 to 5."
        return
    if env.kind.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym")
    task = build_task(env, 0)
    assert all(task.splits[split] for split in ("train", "validation", "test"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_run(program, capsys):
    exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
    assert re.fullmatch(r"\['\d\d\+07='(, '\d\d\+07='){3}\]\n", capsys.readouterr().out)


def test_every_kind_is_on_the_page():
    text = PAGE.read_text()
    assert len(SETTINGS) == 5
    assert len(PROGRAMS) == 1
    for kind in FAMILIES:
        assert kind in text
