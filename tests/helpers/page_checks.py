"""What the pages say beside their code, compared with what their code did and with the package."""

import re
from pathlib import Path
from typing import get_args

from doc_blocks import ROOT

import evo_grpo
from evo_grpo.envs.registry import FAMILIES
from evo_grpo.evolve.explore.registry import Exploration
from evo_grpo.evolve.select.registry import Selection
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.leaderboard import TIE_LEVEL
from evo_grpo.types import Decision


def _page(played):
    return (ROOT / played.page).read_text(encoding="utf-8")


def _first_column(text):
    return [
        name
        for cell in re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
        for name in re.findall(r"`([\w/]+)`", cell)
    ]


def whole_model(played, printed):
    """Its model learns, its checkpoints and its plots are written."""
    lines = printed.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *(f"step {n}" for n in (20, 40, 60, 80)),
        "pizza",
        "after 20 steps",
    ]
    space = played.space
    assert space["before"] < 0.3
    assert space["before"] < space["early"] <= space["after"]
    assert space["after"] > 0.9
    files = {p.name for p in Path("pizza").iterdir()}
    assert files == {"metrics.html", *(f"step_{n}" for n in (20, 40, 60, 80))}
    panels = [a.text for a in space["figure"].layout.annotations]
    assert [name.replace("_", " ") for name in _first_column(_page(played))] == panels


def optuna(played, printed):
    """What it names of a trial is there."""
    assert "lr" in printed
    page, study = _page(played), played.space["study"]
    attributes = re.search(r"its user attributes are (.*?)\. ", page, re.DOTALL)[1]
    assert set(study.user_attrs) == set(re.findall(r"`(\w+)`", attributes))
    table = page.partition("## What a trial says")[2].partition("\nFitness")[0]
    named, said = set(_first_column(table)), set(study.trials[0].user_attrs)
    assert named <= said
    assert {name for name in said if not name.startswith("train/")} <= named


def results(played, printed):
    """Its table lists every kind of decision, and its example compares three arms."""
    page = _page(played)
    table = page.partition("## Decisions")[2].partition("\n## ")[0]
    declared = Decision.__doc__.partition("kind: ")[2].partition("agent: ")[0]
    assert sorted(_first_column(table)) == sorted(re.findall(r'"(\w+)"', declared))
    assert f"at {TIE_LEVEL:g}, cannot" in " ".join(page.split())
    assert [line.split()[0] for line in printed.splitlines()] == ["guess", "random", "evolved"]


def strategies(played, printed):
    """Its tables list every strategy, and those of the reader's own are used."""
    page = _page(played)
    for known in (Selection, Exploration):
        for entry in get_args(get_args(known)[0]):
            kind = get_args(entry)[0]
            if not hasattr(kind, "tag"):
                assert f"| `{kind().kind}` | `{kind.__name__}` |" in page
                assert getattr(evo_grpo, kind.__name__) is kind
    rounds = read_rounds("runs/own")
    assert {agent.hparams.temperature for agent in rounds[0].agents} == {1.0}
    copies = [member for member in rounds[0].members if member.parent is not None]
    assert copies
    assert all(m.mutation.changes == {"temperature": (1.0, 0.8)} for m in copies)


def environments(played, printed):
    """Every kind is on it, and its program prints prompts."""
    assert re.fullmatch(r"\['\d\d\+07='(, '\d\d\+07='){3}\]\n", printed)
    text = _page(played)
    for kind in FAMILIES:
        assert kind in text


def multi_turn(played, printed):
    """Episodes are played and end."""
    assert re.search(r"agent +fitness", printed)
    assert re.search(r"^(terminated|max_turns|context) \d\.\d ", printed, re.M)
    ((_, config),) = played.configs
    assert config.env.max_turns == 4


CHECKS = {
    "docs/whole_model.md": whole_model,
    "docs/optuna.md": optuna,
    "docs/results.md": results,
    "docs/strategies.md": strategies,
    "docs/environments.md": environments,
    "docs/multi_turn.md": multi_turn,
}
