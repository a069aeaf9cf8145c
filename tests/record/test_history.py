"""The history of a run: a typed row per round and agent, also while the run goes on."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from random_runs import make_run
from small_run import small

from evo_grpo import run
from evo_grpo.analysis.verify import verify
from evo_grpo.errors import CheckpointError, RunNotFoundError
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.history import history, metric_rows, read_metrics
from evo_grpo.record.observer import Observer
from evo_grpo.record.run_dir import RunDir
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Mutation

COLUMNS = {
    **dict.fromkeys(("round", "agent", "member", "parent"), "Int64"),
    "state": "string",
    **dict.fromkeys(("fitness", "fitness_se"), "float64"),
    **dict.fromkeys(("lr", "beta", "clip_coef", "clip_low", "clip_high"), "float64"),
    "group_size": "Int64",
    **dict.fromkeys(("op", "mutated"), "string"),
    **dict.fromkeys(("reward", "kl", "loss", "entropy", "zero_variance"), "float64"),
    **dict.fromkeys(("clip_fraction", "completion_length"), "float64"),
    "tokens": "Int64",
    "wall_seconds": "float64",
    **dict.fromkeys(("checkpoint", "reason"), "string"),
    "between": "boolean",
}


def types(frame):
    return {name: str(dtype) for name, dtype in frame.dtypes.items()}


def test_columns_and_types_are_the_same_with_and_without_rounds():
    assert types(history([])) == COLUMNS
    assert len(history([])) == 0
    records = make_run(size=4, rounds=2)
    left = [agent for agent in records[1].agents if agent.agent in (3, 1)]
    frame = history([records[0], replace(records[1], agents=tuple(reversed(left)))])
    assert types(frame) == COLUMNS
    assert frame["round"].tolist() == [0] * 4 + [1] * 2
    assert frame["agent"].tolist() == [0, 1, 2, 3, 1, 3]
    assert frame["member"].tolist()[4:] == [agent.member for agent in left]


def test_a_row_is_what_the_record_holds():
    records = make_run(size=4, rounds=4, failures=0.4)
    frame = history(records).set_index(["round", "agent"])
    states = set()
    for agent in (agent for record in records for agent in record.agents):
        row = frame.loc[agent.round, agent.agent]
        assert row["member"] == agent.member
        assert row["parent"] is pd.NA if agent.parent is None else row["parent"] == agent.parent
        assert row["lr"] == agent.hparams.lr
        assert (row["state"], row["reason"]) == (agent.state, agent.reason)
        assert (row["tokens"], row["wall_seconds"]) == (agent.tokens, agent.wall_seconds)
        assert (row["reward"], row["kl"]) == (0.5, 0.01)
        assert math.isnan(row["entropy"])  # this agent has no such metric
        assert row["checkpoint"] == agent.checkpoint
        if agent.score is None:
            assert frame[["fitness", "fitness_se"]].loc[agent.round, agent.agent].isna().all()
        else:
            assert (row["fitness"], row["fitness_se"]) == (agent.score.mean, 0.05)
        states.add(agent.state)
    assert states == {"ok", "failed"}


def test_a_member_that_trains_on_continues_and_its_birth_is_told_once():
    (first,) = make_run(size=2, rounds=1)
    first = replace(first, agents=first.agents[:1])
    born = replace(
        first.agents[0],
        member=5,
        parent=0,
        round=1,
        hparams=Hparams(clip_coef=(0.8, 1.3)),
        mutation=Mutation("mutate", {"lr": (1e-3, 2e-3), "clip_high": (1.28, 1.3)}),
    )
    second = replace(first, round=1, agents=(born,))
    third = replace(first, round=2, agents=(replace(born, round=2),))
    frame = history([first, second, third])
    assert frame["op"].tolist() == ["init", "mutate", "continue"]
    assert frame["mutated"].tolist() == ["", "lr,clip_high", ""]
    assert math.isnan(frame["clip_coef"].iloc[1])
    assert frame["clip_high"].iloc[1] == 1.3


def test_a_run_folder_gives_the_same_as_its_records_also_while_it_goes_on(tmp_path):
    records = make_run(failures=0.3)
    with RunDir.create(tmp_path / "run", "population", "name: x\n") as run:
        assert types(history(run.path)) == COLUMNS
        for record in records:
            run.append_round(record)
            frame = history(str(run.path))
            pd.testing.assert_frame_equal(frame, history(records[: record.round + 1]))


TOLD = {
    *("reward", "loss", "clip_fraction", "clip_low", "clip_high", "zero_variance"),
    *("entropy", "completion_length", "ended", "sampler_gap", "grad_norm", "ratio_max"),
    *("lr", "tokens", "completions", "rows", "updates"),
}


class Steps(Observer):
    """Keeps what it hears of steps."""

    def __init__(self):
        self.heard = []

    def step_done(self, round, step, metrics):
        self.heard += [{"round": round, "step": step, "agent": a, **m} for a, m in metrics.items()]


def config(**changes):
    return small(
        population__steps_per_round=2,
        population__rounds=2,
        algorithm__lr_schedule={"steps": 4, "warmup_proportion": 0.5},
        **changes,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    observer = Steps()
    return run(config(), out=tmp_path_factory.mktemp("runs") / "run", observer=observer), observer


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "run")
    return tmp_path / "run"


def test_a_row_for_each_step_and_agent(folder):
    rows = metric_rows(folder)
    assert [(row["round"], row["step"], row["agent"]) for row in rows] == [
        (round, step, agent) for round in range(2) for step in range(2) for agent in range(3)
    ]
    assert all(set(row) >= TOLD for row in rows)


def test_the_means_of_a_round_are_those_of_its_steps(folder):
    frame = read_metrics(folder)
    for record in read_rounds(folder):
        for agent in record.agents:
            steps = frame[(frame["round"] == record.round) & (frame["agent"] == agent.agent)]
            assert steps["reward"].tolist() == list(agent.step_rewards)
            assert steps["tokens"].sum() == agent.tokens
            # Without a beta no KL is computed, and none is recorded.
            assert ("kl" in agent.metrics) == (agent.hparams.beta > 0) == (steps["kl"].count() == 2)
            assert steps["kl"].mean() == pytest.approx(
                agent.metrics.get("kl", math.nan), nan_ok=True
            )
            assert steps["ratio_max"].max() == agent.metrics["ratio_max"]
            assert steps["rows"].sum() == agent.metrics["rows"]
            assert not {"lr", "tokens", "completions"} & set(agent.metrics)
            # Half of the four steps warm up, then a cosine of two steps.
            factors = [[0.5, 1.0], [1.0, 0.5]][record.round]
            assert steps["lr"].tolist() == pytest.approx([agent.hparams.lr * f for f in factors])


def test_an_observer_hears_of_each_step_what_is_recorded(made):
    folder, observer = made
    assert [json.loads(json.dumps(row)) for row in observer.heard] == metric_rows(folder)


def test_without_metrics_a_run_records_all_else(folder, tmp_path):
    without = run(config(record__metrics=False), out=tmp_path / "without")
    assert not (without / "metrics").exists()
    assert not any(name.startswith("metrics") for r in read_rounds(without) for name in r.files)
    assert read_metrics(without).empty
    assert list(read_metrics(without)) == ["round", "step", "agent"]
    for one, other in zip(read_rounds(without), read_rounds(folder), strict=True):
        assert [a.metrics for a in one.agents] == [a.metrics for a in other.agents]
        assert [a.adapter_sha256 for a in one.agents] == [a.adapter_sha256 for a in other.agents]
    assert verify(without).damage == []


def test_each_of_several_reward_functions_has_a_mean(tmp_path, monkeypatch):
    (tmp_path / "scores.py").write_text(
        "def length(completion):\n"
        "    return float(len(completion))\n"
        "def sometimes(completion, answer):\n"
        "    return 1.0 if completion.startswith('1') else None\n"
    )
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(60))
    )
    monkeypatch.syspath_prepend(tmp_path)
    env = {
        "kind": "dataset",
        "train": str(tmp_path / "rows.jsonl"),
        "prompt": "{question}",
        "reward": ["scores:length", "scores:sometimes"],
        "reward_weights": [0.25, 1.0],
    }
    folder = run(config(env=env, algorithm__max_output_tokens=6), out=tmp_path / "run")
    frame = read_metrics(folder)
    assert {"reward/length", "reward/sometimes"} <= set(frame)
    assert frame["reward/length"].between(0, 6).all()
    assert set(frame["reward/sometimes"].dropna()) <= {1.0}
    for record in read_rounds(folder):
        for agent in record.agents:
            steps = frame[(frame["round"] == record.round) & (frame["agent"] == agent.agent)]
            mean = agent.metrics["reward/length"]
            assert mean == pytest.approx(steps["reward/length"].mean())


def test_damaged_lines_are_named_with_their_file(folder):
    path = folder / "metrics/round-0000.jsonl"
    lines = path.read_text().splitlines()
    for damage in (
        "{",
        "[]",
        '{"round": 0, "step": 0}',
        lines[1].replace('"agent": 1', '"agent": "x"'),
    ):
        path.write_text("\n".join([lines[0], damage, *lines[2:]]))
        with pytest.raises(
            CheckpointError, match=r"round-0000\.jsonl, line 2: expected the metrics"
        ):
            metric_rows(folder)


def test_numbers_that_are_not_finite_are_null_and_read_as_nan(folder, tmp_path):
    path = folder / "metrics/round-0000.jsonl"
    path.write_text(json.dumps({"round": 0, "step": 0, "agent": 0, "kl": None, "loss": 1}) + "\n")
    frame = read_metrics(folder)
    assert math.isnan(frame["kl"][0])
    assert frame["loss"][0] == 1.0
    assert (frame.dtypes["agent"], frame.dtypes["kl"]) == ("Int64", np.float64)
    with pytest.raises(RunNotFoundError):
        read_metrics(tmp_path)
