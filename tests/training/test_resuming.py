"""A finished run that is given more rounds is the run that had them from the start.

It keeps its lists of decisions and sizes, which the longer run is given.
"""

import json
import pkgutil
import re
import shutil
from unittest import mock

import pytest
import torch
from small_run import Told, broken_step, outcome, small, stopped_and_resumed
from steered_runs import OPERATIONS, Steers, steered_outcome

from evo_grpo import resume, run
from evo_grpo.errors import ConfigError, RunDirError, RunFailedError
from evo_grpo.record.files import seal, unseal
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.summary import read_summary

SIZES = {"population__size": 4, "population__sizes": None}
SETS = {"attention": ["q_proj", "v_proj"], "mlp": ["up_proj", "down_proj"]}
EAGER = {"kind": "mutate", "no_mutation": 0, "choice": 2.0}
CASES = {
    "plain": {},
    "shrinking": SIZES,
    "last": {**SIZES, "record__checkpoints": "last"},
    "archive and mutation": {
        **SIZES,
        "algorithm__lr": 1e-2,
        "evolve__archive": True,
        "evolve__exploration": {
            "no_mutation": 0.3,
            "rl_hp": 0.7,
            "mutate_elite": True,
            "step": "factors",
        },
        "evolve__fitness__window": 2,
        "evolve__significance": None,
    },
    "rounds in between": {
        "population__size": 4,
        "population__decisions": [2],
        "population__sizes": [4, 4, 3],
        "population__init": "same",
        "evolve__archive": True,
    },
    "optuna proposes": {"evolve__exploration": {"kind": "optuna"}},
    "ranks": {
        "evolve__hyperparameters": {"lora.r": {"min": 1, "max": 16}},
        "evolve__exploration": {"kind": "mutate", "no_mutation": 0, "step": "factors"},
    },
    "layers": {
        "model__lora": {"r": 2, "target_sets": SETS},
        "evolve__hyperparameters": {"lora.target_modules": {"choices": list(SETS)}},
        "evolve__exploration": EAGER,
    },
    "choices and schedules": {
        "evolve__hyperparameters": {
            "loss_type": {"choices": ["grpo", "sapo"]},
            "adam_beta2": {"min": 0.9, "max": 0.9995},
        },
        "algorithm__beta": 0.5,
        "algorithm__lr_schedule": {"steps": 3},
        "evolve__exploration": EAGER,
    },
    "parts": {**SIZES, "engine__shards": 2},
    "parts that take turns": {**SIZES, "engine__overlap": True},
    "racing": {"population__size": 4, "evolve__significance": 0.3, "evolve__fitness__racing": 2.0},
}


def interrupted(*_):
    raise KeyboardInterrupt


def equal_but_for_the_way(first, second, outcome=outcome):
    """Equal in all that is trained and recorded of the rounds."""
    first, second = outcome(first), outcome(second)
    for one in (first, second):
        one["files"] = [name for name in one["files"] if ".rounds-" not in name]
    assert first == second


def longer(config, rounds):
    """Return the settings of a run with the decisions and sizes of another one, and more rounds."""
    config = config.settled(8)
    return config.replace(population=config.population.replace(rounds=rounds))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_extended_run_equals_the_longer_one(tmp_path, case):
    config = small(population__rounds=2, **CASES[case])
    long = run(longer(config, 4), out=tmp_path / "long")
    short = run(config, out=tmp_path / "short")
    ended = read_summary(short)
    assert resume(short, rounds=4) == short
    equal_but_for_the_way(long, short)
    assert read_summary(short, "summary.rounds-2.json") == ended


@pytest.mark.parametrize(
    "place", ["learn.updates.OwnOptimizers.step", "rollout.native.loop.DecodeLoop.run"]
)
def test_a_device_that_fails_ends_the_run_in_a_sentence_and_a_resume_goes_on(tmp_path, place):
    config, calls = small(population__rounds=2, record__optuna=False), []
    whole = run(config, out=tmp_path / "whole")
    works = pkgutil.resolve_name(f"evo_grpo.{place}")

    def fails(*given):
        calls.append(place)
        if len(calls) > 3:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with")
        return works(*given)

    says = r"^engine\.device: the device failed \(CUDA error: unspecified launch.*evo-grpo resume"
    with mock.patch(f"evo_grpo.{place}", fails), pytest.raises(RunFailedError, match=says):
        run(config, out=tmp_path / "parts")
    resume(tmp_path / "parts")
    assert outcome(tmp_path / "parts") == outcome(whole)
    assert not (whole / "journal.log").exists()


@pytest.mark.slow
def test_a_steered_run_that_is_extended_equals_the_longer_one_that_is_steered_alike(tmp_path):
    before = {
        ("evaluate", 0): [OPERATIONS["set"]],
        ("evaluate", 1): [OPERATIONS["clone"], OPERATIONS["stop"]],
    }
    after = {("evaluate", 2): [("set", {"agent": 0, "values": {"lr": 0.004}})]}
    long = small(population__rounds=4, population__sizes=[3, 3, 3, 3])
    short = small(population__rounds=2, population__sizes=[3, 3])
    long = run(long, out=tmp_path / "long", observer=Steers(before | after))
    folder = run(short, out=tmp_path / "short", observer=Steers(dict(before)))
    resume(folder, rounds=4, observer=Steers(dict(after)))
    asked = [[one.request.op for one in record.steering] for record in read_rounds(folder)]
    assert asked == [["set"], ["clone", "stop-agent"], ["set"], []]
    equal_but_for_the_way(long, folder, steered_outcome)


@pytest.mark.slow
def test_a_run_that_is_extended_twice_keeps_both_ends(tmp_path):
    long = run(small(population__rounds=3), out=tmp_path / "long")
    short = run(small(population__rounds=1), out=tmp_path / "short")
    for rounds in (2, 3):
        resume(short, rounds=rounds)
    equal_but_for_the_way(long, short)
    assert [read_summary(short, f"summary.rounds-{n}.json")["rounds"] for n in (1, 2)] == [1, 2]
    changes = json.loads((short / "inputs.json").read_text())["changes"]
    assert [(c["round"], c["name"], c["from"], c["to"]) for c in changes] == [
        (1, "population.rounds", 1, 2),
        (2, "population.rounds", 2, 3),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "stop"), [(3, ("done", 0)), (2, ("test", 1))])
def test_an_unfinished_run_may_be_given_more_rounds(tmp_path, rounds, stop):
    long = run(small(population__rounds=4), out=tmp_path / "long")
    with pytest.raises(KeyboardInterrupt):
        run(small(population__rounds=rounds), out=tmp_path / "short", observer=Told(stop))
    resume(tmp_path / "short", rounds=4)
    equal_but_for_the_way(long, tmp_path / "short")


@pytest.mark.slow
def test_an_extension_goes_on_after_a_stop(tmp_path):
    long = run(small(population__rounds=4), out=tmp_path / "long")
    short = run(small(population__rounds=2), out=tmp_path / "short")
    with pytest.raises(KeyboardInterrupt):
        resume(short, rounds=4, observer=Told(("done", 2)))
    resume(short)
    equal_but_for_the_way(long, short)


@pytest.mark.slow
@pytest.mark.parametrize("again", [3, None], ids=["the same command", "resume"])
@pytest.mark.parametrize("at", ["compare", "summary", "rounds.jsonl", "population.yaml", "inputs"])
def test_a_kill_in_the_middle_of_an_extension_is_made_good(tmp_path, monkeypatch, at, again):
    long = run(small(population__rounds=3), out=tmp_path / "long")
    short = run(small(population__rounds=2), out=tmp_path / "short")
    (short / "compare").mkdir()
    from evo_grpo.record import files

    def stop_at(real):
        def call(path, *arguments, **given):
            if at in path.name:
                raise KeyboardInterrupt
            return real(path, *arguments, **given)

        return call

    for name in ("append", "atomic_write", "remove", "writing"):
        monkeypatch.setattr(files, name, stop_at(getattr(files, name)))
    with pytest.raises(KeyboardInterrupt):
        resume(short, rounds=3)
    monkeypatch.undo()
    resume(short, rounds=again)
    if at == "inputs" and again is None:  # nothing was recorded of the extension
        assert read_summary(short)["rounds"] == 2
    else:
        assert (short / "compare.rounds-2").is_dir()
        equal_but_for_the_way(long, short)


@pytest.mark.slow
def test_an_extension_that_was_stopped_at_once_may_be_made_longer_but_not_taken_back(
    tmp_path, monkeypatch
):
    long = run(small(population__rounds=4), out=tmp_path / "long")
    short = run(small(population__rounds=2), out=tmp_path / "short")
    monkeypatch.setattr(RunDir, "reopen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resume(short, rounds=3)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="expected more than the 2 that this run has played"):
        resume(short, rounds=2)
    resume(short, rounds=4)
    equal_but_for_the_way(long, short)


@pytest.mark.slow
def test_a_failed_agent_of_the_last_round_is_planned_for_as_in_the_longer_run(
    tmp_path, monkeypatch
):
    with broken_step(monkeypatch, {1}, round=1):
        long = run(small(population__rounds=3), out=tmp_path / "long")
        short = run(small(population__rounds=2), out=tmp_path / "short")
        assert read_rounds(short)[1].agents[1].state == "failed"
        resume(short, rounds=3)
    equal_but_for_the_way(long, short)


def test_as_many_rounds_as_there_are_change_nothing(tmp_path):
    folder = run(small(population__rounds=1), out=tmp_path / "run")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}
    told = Told()
    resume(folder, rounds=1, observer=told)
    assert told.calls == [("finished", 1)]
    after = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}
    assert after == before


def test_finished_rounds_are_never_dropped(tmp_path):
    folder = run(small(population__rounds=2), out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"more than the 2 .*, got 1; rounds that"):
        resume(folder, rounds=1)
    for rounds in ("5", True, 4.5):
        with pytest.raises(ConfigError, match=rf"rounds: expected an integer >= 1, got {rounds!r}"):
            resume(folder, rounds=rounds)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_run_that_ended_without_a_plan_is_not_extended(tmp_path, rounds, finished):
    config = small(population__rounds=rounds, population__stop={"tokens": 1})
    folder = run(config, out=tmp_path / "run")
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["plan"] is not None
    (folder / "rounds.jsonl").write_text(seal({**unseal(lines[0].encode()), "plan": None}))
    if not finished:
        (folder / "summary.json").unlink()
    before = (folder / "inputs.json").read_bytes()
    with pytest.raises(RunDirError, match=r"ended with a plan for a further round, got none"):
        resume(folder, rounds=2)
    assert (folder / "inputs.json").read_bytes() == before


@pytest.mark.slow
def test_an_extended_run_is_replaced_as_a_whole(tmp_path):
    folder = run(small(population__rounds=1), out=tmp_path / "run")
    resume(folder, rounds=2)
    run(small(population__rounds=1), out=folder, force=True)
    assert not list(folder.glob("*.rounds-*"))
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [("done", 0), ("learn", 1), ("done", 1), ("done", 2)])
def test_a_run_that_stops_between_two_decisions_goes_on_as_if_it_had_not(tmp_path, stop):
    # Before its first decision a run has no archive, whoever leads.
    config = small(population__rounds=8, population__sizes=None, evolve__archive=True)
    whole = run(config, out=tmp_path / "whole")
    assert [record.between for record in read_rounds(whole)] == [True, False] * 4
    stopped = stopped_and_resumed(config, tmp_path / "stopped", stop)
    assert outcome(stopped) == outcome(whole)


@pytest.mark.slow
def test_a_run_that_a_rule_ended_between_two_decisions_gets_the_decisions_it_had(tmp_path):
    stop = {"tokens": 1}
    config = small(
        population__rounds=8,
        population__decisions=[2, 4, 6, 8],
        population__stop=stop,
        evolve__archive=True,
    )
    folder = run(config, out=tmp_path / "run")
    (ended,) = read_rounds(folder)
    assert (ended.between, len(ended.agents[0].score.per_prompt)) == (False, 6)
    assert ended.archived == (0, read_summary(folder)["best"]["member"])
    file = folder / "population.yaml"
    file.write_text(re.sub(r"tokens: 1(\.0)?$", "tokens: null", file.read_text(), flags=re.M))
    stopped = shutil.copytree(folder, tmp_path / "stopped")
    resume(folder, rounds=8)
    assert [record.between for record in read_rounds(folder)] == [False, False, *[True, False] * 3]
    # The archive of the end is there from the first round of the extension on.
    assert read_rounds(folder)[1].fresh is not None
    with pytest.raises(KeyboardInterrupt):
        resume(stopped, rounds=8, observer=Told(("done", 1)))
    resume(stopped)
    assert outcome(stopped) == outcome(folder)
