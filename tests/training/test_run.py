"""run and resume: the same YAML gives the same run, whole or in pieces, and nothing is lost."""

import hashlib
import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import Told, broken_step, outcome, small, stopped_and_resumed, study_of

from evo_grpo import resume, run
from evo_grpo.analysis.export.export import export
from evo_grpo.errors import (
    CheckpointError,
    RunFailedError,
)
from evo_grpo.model.lora.adapter_files import WEIGHTS
from evo_grpo.population.evaluate import evaluate
from evo_grpo.record.family import ancestry, best_ever
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.leaderboard import leaderboard
from evo_grpo.record.run_dir import kept_checkpoints
from evo_grpo.record.summary import read_summary
from evo_grpo.training.assemble import prepare
from evo_grpo.training.writer import with_files

FILES = {
    "population.yaml",
    "rounds.jsonl",
    "inputs.json",
    "completions",
    "checkpoints",
    "journal.log",
    "leaderboard.csv",
    "summary.json",
}


def same_outcome(first, second):
    first, second = outcome(first), outcome(second)
    for key in first:
        if key == "leaderboard":
            frames = [pd.DataFrame(f[key]) for f in (first, second)]
            pd.testing.assert_frame_equal(*frames, check_exact=True)
        else:
            assert first[key] == second[key], key


class Keeps(Told):
    """Keeps the records too."""

    def round_done(self, record):
        super().round_done(record)
        self.records = [*getattr(self, "records", ()), record]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    told = Keeps()
    return run(small(), out=folder, observer=told), told


def test_a_run_leaves_what_others_rely_on(finished):
    folder, _ = finished
    assert {p.name for p in folder.iterdir() if not p.name.startswith(".")} >= FILES
    table = leaderboard(folder)
    assert sorted(table["agent"]) == [0, 1, 2]
    assert (table["round"] == 2).all()
    for name in table["checkpoint"]:
        assert (folder / name / "actor" / "adapter_model.safetensors").is_file()
    # By Python's float: pandas 2 is one bit off in some numbers.
    csv = pd.read_csv(folder / "leaderboard.csv", converters={"fitness": float})
    assert list(csv["agent"]) == list(table["agent"])
    assert csv["fitness"].tolist() == table["fitness"].tolist()
    lines = [
        json.loads(line)
        for line in (folder / "completions" / "round-0001.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 3 * 2
    assert {line["agent"] for line in lines} == {0, 1, 2}


def test_the_summary_compares_base_and_best_on_the_test_split(finished):
    folder, _ = finished
    summary, best = read_summary(folder), leaderboard(folder).iloc[0]
    assert summary["split"] == "test"
    assert summary["rounds"] == 3
    assert summary["base"]["n"] == summary["best"]["n"] == 6
    assert summary["best"]["agent"] == best["agent"]
    assert summary["best"]["fitness"] == best["fitness"]
    assert summary["best"]["checkpoint"] == best["checkpoint"]
    assert summary["gain"] == summary["best"]["mean"] - summary["base"]["mean"]


def test_the_error_of_the_gain_is_paired(tmp_path, monkeypatch):
    scores = []

    def spy(*arguments, **given):
        results = evaluate(*arguments, **given)
        scores.append([result.score for result in results])
        return results

    monkeypatch.setattr("evo_grpo.training.judge.evaluate", spy)
    folder = run(small(population__rounds=1, algorithm__lr=1e-2), out=tmp_path / "run")
    ((base, best),) = scores
    differences = np.subtract(best.per_prompt, base.per_prompt)
    summary = read_summary(folder)
    assert summary["gain_se"] == differences.std(ddof=1) / np.sqrt(6)
    assert summary["gain_se"] != pytest.approx(np.hypot(base.se, best.se))
    assert set(summary) == {
        *("split", "base", "best", "candidates", "final_tokens", "gain", "gain_se", "rounds"),
        *("wall_seconds", "files", "stopped", "passes"),
    }


def test_a_run_judged_on_one_sample_states_no_error(tmp_path):
    fitness = {"prompts": 1, "test_prompts": 1, "test_samples": 1}
    folder = run(small(population__rounds=1, evolve__fitness=fitness), out=tmp_path / "run")
    summary = read_summary(folder)
    assert (summary["base"]["se"], summary["best"]["se"], summary["gain_se"]) == (None,) * 3
    assert leaderboard(folder)["fitness_se"].isna().all()
    assert leaderboard(folder)["fitness"].notna().all()
    assert {trial.user_attrs["fitness_se"] for trial in study_of(folder).trials} == {None}
    card = (export(folder, tmp_path / "best") / "README.md").read_text()
    assert "nan" not in card
    assert "±" not in card


def test_the_observer_hears_every_round_in_order_and_gets_the_record_that_is_written(finished):
    folder, told = finished
    assert told.calls[0] == ("started", 0)
    assert [c for c in told.calls if c[0] == "done"] == [("done", 0), ("done", 1), ("done", 2)]
    assert told.calls[-2:] == [("test", 2), ("finished", 3)]
    written = read_rounds(folder)
    assert all(record.files for record in written)
    # The digests are known once the files are written.
    assert told.records == [with_files(record, {}) for record in written]
    for agent in (agent for record in written for agent in record.agents):
        checkpoint = folder / agent.checkpoint
        for file, digest in (
            ("actor/adapter_model.safetensors", agent.adapter_sha256),
            ("optimizer.safetensors", agent.optimizer_sha256),
        ):
            assert hashlib.sha256((checkpoint / file).read_bytes()).hexdigest() == digest


def test_two_runs_of_one_config_are_equal_and_of_another_seed_are_not(finished, tmp_path):
    folder, _ = finished
    same_outcome(folder, run(small(), out=tmp_path / "again"))
    other = run(small(seed=4), out=tmp_path / "other")
    tables = [leaderboard(f).drop(columns="wall_seconds") for f in (folder, other)]
    assert not tables[0].equals(tables[1])


@pytest.mark.parametrize(
    "stop",
    [
        ("learn", 0),  # before anything is finished; between rounds and within one: see below
        ("test", 2),  # all rounds finished, not judged
    ],
    ids=str,
)
def test_a_stopped_run_resumes_to_the_same_result(finished, tmp_path, stop):
    same_outcome(finished[0], stopped_and_resumed(small(), tmp_path / "run", stop))


def test_a_run_stopped_twice_resumes_to_the_same_result(finished, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(small(), out=tmp_path / "run", observer=Told(("done", 0)))
    with pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "run", observer=Told(("evaluate", 1)))
    told = Told()
    resume(tmp_path / "run", observer=told)
    assert told.calls[0] == ("started", 1)
    same_outcome(finished[0], tmp_path / "run")


EVERYTHING = small(
    population__rounds=4,
    evolve__fitness__window=3,
    evolve__exploration={"no_mutation": 0.7, "rl_hp": 0.3, "mutate_elite": True},
    evolve__inherit_optimizer=False,
    model__lora__dropout=0.1,
    algorithm__batch_size=5,
    algorithm__beta=0.05,
    algorithm__kind="cispo",
    record__checkpoints="last",
)


@pytest.fixture(scope="module")
def finished_with_everything(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, broken_step(patch, {1}, round=1):
        return run(EVERYTHING, out=tmp_path_factory.mktemp("runs") / "everything")


def test_a_run_with_everything_on_resumes_to_the_same_result(
    finished_with_everything, tmp_path, monkeypatch
):
    """A failed agent, averaged evaluations, dropout, minibatches, fresh optimizers for children."""
    assert read_rounds(finished_with_everything)[1].agents[1].state == "failed"
    with broken_step(monkeypatch, {1}, round=1):
        pieces = stopped_and_resumed(EVERYTHING, tmp_path / "pieces", ("evaluate", 2))
    same_outcome(finished_with_everything, pieces)


def test_a_run_whose_agents_leave_resumes_to_the_same_result(tmp_path):
    config = small(population__size=4, population__sizes=[4, 3, 2])
    whole = run(config, out=tmp_path / "whole")
    rounds = read_rounds(whole)
    assert [len(record.agents) for record in rounds] == [4, 3, 2]
    for before, after in pairwise(rounds):
        assert [(m.agent, m.id) for m in before.members] == [
            (a.agent, a.member) for a in after.agents
        ]
        assert {a.agent for a in after.agents} < {a.agent for a in before.agents}
    assert read_summary(whole)["best"]["agent"] in {agent.agent for agent in rounds[-1].agents}
    assert set(leaderboard(whole)["agent"]) == {0, 1, 2, 3}
    # What a restore after each of the rounds removes is shown below.
    same_outcome(whole, stopped_and_resumed(config, tmp_path / "pieces", ("done", 1)))


@pytest.fixture(scope="module")
def stopped_after_a_round(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(KeyboardInterrupt):
        run(small(), out=folder, observer=Told(("done", 0)))
    return folder


@pytest.fixture
def interrupted(stopped_after_a_round, tmp_path):
    """A copy for a test to damage."""
    return shutil.copytree(stopped_after_a_round, tmp_path / "run")


def change(file):
    """Change the tensors of a file; those of an optimizer, its first moments."""
    tensors = load_file(file)
    name = next((key for key in tensors if key.endswith(".exp_avg")), next(iter(tensors)))
    save_file({**tensors, name: tensors[name] + 1e-3}, file)


@pytest.mark.parametrize("file", ["actor/adapter_model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "got no file"),
        (lambda file: file.write_bytes(file.read_bytes()[:40]), "it is not the one that round 1"),
        (change, "it is not the one that round 1 recorded for agent 1"),
    ],
    ids=["missing", "truncated", "changed"],
)
def test_a_damaged_checkpoint_stops_a_resume(interrupted, file, damage, message):
    damage(interrupted / "checkpoints/round-0000/agent-01" / file)
    with pytest.raises(CheckpointError, match=rf"agent-01.*{file}: .*{message}"):
        resume(interrupted)


def test_what_a_crash_left_undone_is_made_up_for(finished, tmp_path):
    # The line of the last round counts, whatever of the rest was written.
    with pytest.raises(KeyboardInterrupt):
        run(small(), out=tmp_path / "run", observer=Told(("done", 2)))
    (tmp_path / "run" / "leaderboard.csv").write_text("stale")
    assert not (tmp_path / "run" / "journal.log").exists()
    resume(tmp_path / "run")
    same_outcome(finished[0], tmp_path / "run")
    csv = pd.read_csv(tmp_path / "run" / "leaderboard.csv", converters={"fitness": float})
    assert csv["fitness"].tolist() == leaderboard(finished[0])["fitness"].tolist()
    numbers = [t.user_attrs["round"] for t in study_of(tmp_path / "run").trials]
    assert numbers == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_run_whose_agents_all_failed_says_so(tmp_path, monkeypatch):
    with (
        broken_step(monkeypatch, {0, 1, 2}, round=1),
        pytest.raises(RunFailedError, match=r"round 2: no agent has a finite update.*lr") as caught,
    ):
        run(small(population__rounds=2), out=tmp_path / "run")
    assert caught.value.exit_code == 1
    assert [r.round for r in read_rounds(tmp_path / "run")] == [0]
    # What was finished stays, and the run can go on.
    resume(tmp_path / "run")
    assert len(read_rounds(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("keep", "stop"), [("best", None), (2, ("learn", 2)), ("last", ("learn", 2))]
)
def test_kept_checkpoints_are_enough_to_go_on_and_hold_the_best(finished, tmp_path, keep, stop):
    config = small(record__checkpoints=keep, evolve__archive=False)
    if stop is None:
        folder = run(config, out=tmp_path / "run")
    else:
        folder = stopped_and_resumed(config, tmp_path / "run", stop)
    rounds = read_rounds(folder)
    found = {p.relative_to(folder).as_posix() for p in folder.glob("checkpoints/round-*/*")}
    assert found == kept_checkpoints(rounds, keep)
    best = best_ever(rounds)
    weights = folder / "checkpoints" / "best" / "actor" / "adapter_model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == best.adapter_sha256


class Wanders(Told):
    """Changes the working folder whenever it is called, as no observer should."""

    def __init__(self, places, stop=None):
        super().__init__(stop)
        self.places = list(places)

    def round_done(self, record):
        os.chdir(self.places[record.round % 2])
        super().round_done(record)

    def step_done(self, round, step, metrics):
        os.chdir(self.places[step % 2])


def test_a_stopped_run_may_be_moved_and_goes_on_whatever_the_working_folder_becomes(
    finished, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    with pytest.raises(KeyboardInterrupt):
        run(small(), out="run", observer=Wanders(places, ("done", 1)))
    os.chdir(tmp_path)
    # Records hold paths relative to the folder.
    os.rename("run", "moved")
    os.chdir(places[0])
    assert resume("../moved", observer=Wanders(places)) == Path("../moved")
    same_outcome(finished[0], tmp_path / "moved")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "moved"]
    assert [list(place.iterdir()) for place in places] == [[], []]


def test_threads_are_set_when_asked_for(tmp_path):
    before = torch.get_num_threads()
    try:
        # Another number than now: the runner itself may have set it to 1.
        prepare(small(engine__threads=before + 1))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


#: Four agents, then two, with all that decides beside the selection.
SHRINKING = {
    "population__size": 4,
    "population__sizes": None,
    "population__rounds": 4,
    "population__steps_per_round": 2,
    "evolve__significance": 0.1,
    "evolve__archive": True,
    "evolve__dead_steps": 2,
    "evolve__fitness": {
        "prompts": 40,
        "test_prompts": 6,
        "test_samples": 2,
        "racing": 0.5,
        "final_samples": 1,
    },
    "record__checkpoints": "last",
}


@pytest.fixture
def ruinous(monkeypatch):
    """Exploration that gives everybody, once, a learning rate that ruins them."""

    def explore(self, candidate, hp_config, rng):
        old = candidate.hparams
        if old.lr in (0.5, 5e-3, 2.5e-3):
            return old
        return old.replace(lr=0.5)

    monkeypatch.setattr("evo_grpo.evolve.explore.mutate.Mutations.explore", explore)
    changes = {"algorithm__lr": 1e-2, "population__init": "same", "population__sizes": [4, 2]}
    # A fall is shown on fresh draws: so many of them leave no doubt.
    fitness = {**SHRINKING["evolve__fitness"], "samples": 4}
    return small(**SHRINKING | changes | {"evolve__fitness": fitness})


@pytest.mark.slow
def test_a_population_that_fell_goes_on_from_its_best_and_resumes_to_the_same_result(
    ruinous, tmp_path
):
    whole = run(ruinous, out=tmp_path / "whole")
    rounds = read_rounds(whole)
    assert [len(record.agents) for record in rounds] == [4, 2, 2, 2]
    restored = [d for d in rounds[1].decisions if d.kind == "restored"]
    assert [d.agent for d in restored] == [a.agent for a in rounds[1].agents]
    best = max(rounds[0].agents, key=lambda a: (a.score.mean, -a.agent))
    assert {m.parent for m in rounds[1].members} == {best.member}
    assert [h.lr for h in rounds[1].next_hparams] == [5e-3, 2.5e-3]
    # What comes back is what was the best, not what became of it.
    saved = json.loads((whole / "checkpoints" / "best" / "attributes.json").read_text())
    number, member = rounds[-1].archived
    (kept,) = (agent for agent in rounds[number].agents if agent.member == member)
    assert saved["files"]["actor/adapter_model.safetensors"] == kept.adapter_sha256
    path = [(a.round, a.member) for a in ancestry(rounds, rounds[3].agents[0].member)]
    assert path == [(0, best.member), *((r, rounds[r].agents[0].member) for r in (2, 3))]
    trial = next(
        t
        for t in study_of(whole).trials
        if t.user_attrs["round"] == 2 and t.user_attrs["agent"] == restored[0].agent
    )
    parent = study_of(whole).trials[trial.user_attrs["parent_trial"]].user_attrs
    assert (parent["member"], parent["round"]) == (best.member, 0)
    for stop in (("done", 0), ("evaluate", 1), ("done", 1), ("learn", 3), ("test", 3)):
        name = f"{stop[0]}-{stop[1]}"
        same_outcome(whole, stopped_and_resumed(ruinous, tmp_path / name, stop))


def test_a_changed_archive_stops_a_resume(ruinous, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(ruinous, out=tmp_path / "run", observer=Told(("learn", 2)))
    weights = tmp_path / "run" / "checkpoints" / "best" / "actor" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(CheckpointError, match="it is not the one that round 1 recorded"):
        resume(tmp_path / "run")
