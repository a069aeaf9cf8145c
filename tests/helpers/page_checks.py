"""What the pages say beside their code, compared with what their code did and with the package."""

import json
import re
import shutil
from pathlib import Path

from doc_blocks import ROOT
from typer.testing import CliRunner

from evo_grpo.cli.commands import app
from evo_grpo.envs.registry import kinds
from evo_grpo.evolve.claims import TIE_LEVEL
from evo_grpo.quickstart import StepMetrics
from evo_grpo.record.arms import read_comparison
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.summary import read_summary
from evo_grpo.record.view import view_of
from evo_grpo.schema.hparams import MUTABLE
from evo_grpo.types import Decision


def _page(played):
    return (ROOT / played.page).read_text(encoding="utf-8")


def _first_column(text):
    return [
        name
        for cell in re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
        for name in re.findall(r"`([\w/.]+)`", cell)
    ]


def whole_model(played, printed):
    """Its model learns, its checkpoints are written."""
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
    assert files == {f"step_{n}" for n in (20, 40, 60, 80)}
    metrics = [name for name in StepMetrics.__dataclass_fields__ if name != "step"]
    assert _first_column(_page(played)) == metrics


def optuna(played, printed):
    """What it names of a trial is there."""
    assert "lr" in printed
    page, study = _page(played), played.space["study"]
    attributes = re.search(r"its user attributes are (.*?)\. ", page, re.DOTALL)[1]
    assert set(study.user_attrs) == set(re.findall(r"`(\w+)`", attributes))
    table = page.partition("## Contents of a trial")[2].partition("\nFitness")[0]
    named, said = set(_first_column(table)), set(study.trials[0].user_attrs)
    assert named <= said
    assert {name for name in said if not name.startswith("train/")} <= named


def results(played, printed):
    """Its table lists every kind of decision, and its example compares three arms."""
    page = _page(played)
    table = page.partition("## Decisions")[2].partition("\n## ")[0]
    declared = Decision.__doc__.partition("kind: ")[2].partition("agent: ")[0]
    assert sorted(_first_column(table)) == sorted(re.findall(r'"(\w+)"', declared))
    assert f"at {TIE_LEVEL:g}, that the first agent is ahead" in " ".join(page.split())
    assert [line.split()[0] for line in printed.splitlines()] == ["guess", "random", "evolved"]


def strategies(played, printed):
    """The strategies of the reader's own are used."""
    rounds = read_rounds("runs/own")
    assert {agent.hparams.temperature for agent in rounds[0].agents} == {1.0}
    copies = [member for member in rounds[0].members if member.parent is not None]
    assert copies
    assert all(m.mutation.changes == {"temperature": (1.0, 0.8)} for m in copies)


def what_to_search(played, printed):
    """Its table lists every name that may be searched."""
    searched = _page(played).partition("## What may be searched")[2].partition("\n## ")[0]
    assert set(_first_column(searched)) == {*MUTABLE, "reward_weights.NAME"}


def environments(played, printed):
    """Every kind is on it, and its program prints prompts."""
    assert re.fullmatch(r"\['\d\d\+07='(, '\d\d\+07='){3}\]\n", printed)
    text = _page(played)
    for kind in kinds():
        assert kind.removesuffix("<name>") in text


def multi_turn(played, printed):
    """Episodes are played and end."""
    assert re.search(r"agent +fitness", printed)
    assert re.search(r"^(terminated|max_turns|context) \d\.\d ", printed, re.M)
    ((_, config),) = played.configs
    assert config.env.max_turns == 4


def own_data(played, printed):
    """200 rows are enough to learn from, as it says."""
    assert len(Path("rows.jsonl").read_text().splitlines()) == 200
    summary = json.loads(Path("runs/mine/summary.json").read_text())
    assert summary["best"]["mean"] > summary["base"]["mean"] + 0.1
    (told,) = [line for line in _page(played).splitlines() if line.startswith("Base 0.")]
    number = r"[01]\.\d+"
    (result,) = [one.text for one in view_of("runs/mine").story if one.kind == "result"]
    assert re.sub(number, "#", told) == re.sub(number, "#", result)
    base, best = (float(n) for n in re.findall(rf"(?:Base|winner) ({number})", told))
    assert abs(summary["base"]["mean"] - base) < 0.01
    # Sampled tokens may differ from machine to machine, and a test on 20 rows with them.
    assert abs(summary["best"]["mean"] - best) < 0.15
    assert "zero_variance" in printed


def troubleshooting(played, printed):
    """The warning that it shows is given."""
    page = " ".join(_page(played).split())
    ((command, output),) = played.runs
    assert command[:2] == ["run", "zero.yaml"]
    said = " ".join(output.split())
    shown = re.search(r"warning: (round 1 had nothing to learn from: .*?all of them 0)", page)[1]
    assert shown in said


def run_folder(played, printed):
    """Its table names every file of a run that has all of them, and what it lets go comes back."""
    table = _page(played).partition("| file |")[2].partition("\n\n")[0]
    rows = {
        re.search(r"`([^`]+)`", line)[1].replace("round-0001", "round-0000"): line.split("|")[-2]
        for line in table.splitlines()
        if line.startswith("| `")
    }
    run = Path("runs/first")
    found = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    folders = [name for name in rows if name.endswith("/")]
    for path in found:
        path = re.sub(r"round-\d+", "round-0000", re.sub(r"agent-\d+", "agent-00", path))
        assert path in rows or path.startswith(tuple(folders)), path
    there = {name for name in rows if (run / name).exists()}
    # What some runs alone have: a mean that won, a best agent of an earlier round, notes, a judge.
    assert set(rows) - there <= {"checkpoints/mean/", "checkpoints/best/", "notes.jsonl", "judge/"}
    for name, verdict in rows.items():
        if verdict.strip().startswith("yes"):
            gone = run / name
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink(missing_ok=True)
    result = CliRunner().invoke(app, ["resume", str(run), "--rounds", "4"])
    assert result.exit_code == 0, result.output
    for name in ("journal.log", "leaderboard.csv", "summary.json"):
        assert (run / name).is_file()


def quickstart(played, printed):
    """The adapter answers, with PEFT alone; each run has learned what it is for."""
    assert re.fullmatch(r"12\+07=\d+\n", printed)
    # What `make run` shows: a guess learns nothing, random ones something, evolution most.
    guess, random, evolved = read_comparison("runs/first")["arms"]
    assert guess["test"]["mean"] < 0.45
    assert guess["test"]["mean"] + 0.2 < random["test"]["mean"] < evolved["test"]["mean"] - 0.03
    totals = [sum(arm["tokens"].values()) for arm in (guess, random, evolved)]
    assert max(totals) < 1.02 * min(totals)
    learned = read_summary("runs/dataset-1")
    assert learned["gain"] > 4 * learned["gain_se"]


def exporting(played, printed):
    """The adapter answers, by itself and as a run would sample it."""
    assert re.match(r".{0,4}\n12\+07= \(", printed)


def python(played, printed):
    """The error names the right keyword."""
    assert "Here it is lr" in printed


def tracking(played, printed):
    """Both trackers have written, and the observer has printed."""
    assert played.page == "docs/tracking.md"
    made = {str(path) for path in Path().rglob("agent-00") if path.is_dir()}
    assert "runs/tracked/trackers/tensorboard/agent-00" in made
    (board,) = (path for path in made if path.startswith("boards"))
    assert re.fullmatch(r"boards/run-[\d-]+/agent-00", board)
    assert "round 1, step 1: best reward" in printed


CHECKS = {
    "docs/tracking.md": tracking,
    "docs/own_data.md": own_data,
    "docs/exporting.md": exporting,
    "docs/troubleshooting.md": troubleshooting,
    "docs/run_folder.md": run_folder,
    "docs/quickstart.md": quickstart,
    "docs/python.md": python,
    "docs/whole_model.md": whole_model,
    "docs/optuna.md": optuna,
    "docs/results.md": results,
    "docs/strategies.md": strategies,
    "docs/what_to_search.md": what_to_search,
    "docs/environments.md": environments,
    "docs/multi_turn.md": multi_turn,
}
