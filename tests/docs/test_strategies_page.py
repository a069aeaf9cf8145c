"""docs/strategies.md: its tables list every strategy, and its example runs."""

import re
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from small_run import SETTINGS

import evo_grpo
from evo_grpo.evolve.explore.registry import Exploration
from evo_grpo.evolve.select.registry import Selection
from evo_grpo.record.folder import read_rounds
from evo_grpo.settings import from_dict
from evo_grpo.training import run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "strategies.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("strategies", [Selection, Exploration])
def test_every_strategy_is_in_a_table_by_its_kind_and_its_public_name(strategies):
    for entry in get_args(get_args(strategies)[0]):
        kind = get_args(entry)[0]
        if not hasattr(kind, "tag"):
            assert f"| `{kind().kind}` | `{kind.__name__}` |" in PAGE
            assert getattr(evo_grpo, kind.__name__) is kind


@pytest.mark.parametrize("block", blocks("yaml"))
def test_the_files_are_valid(block):
    from_dict({"model": "tiny-sums", "env": "sums", **yaml.safe_load(block)})


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_strategies", raising=False)
    (tmp_path / "my_strategies.py").write_text(blocks("python")[0])
    *_, own = blocks("yaml")
    evolve = {**SETTINGS["evolve"], **yaml.safe_load(own)["evolve"]}
    folder = run({**SETTINGS, "evolve": evolve}, out="run")
    rounds = read_rounds(folder)
    assert {agent.hparams.temperature for agent in rounds[0].agents} == {1.0}
    copies = [member for member in rounds[0].members if member.parent is not None]
    assert [m.mutation.changes for m in copies] == [{"temperature": (1.0, 0.8)}]
    assert sorted(agent.hparams.temperature for agent in rounds[1].agents) == [0.8, 1.0, 1.0]
