"""The history of a run: a typed row per round and agent, also while the run goes on."""

import math
from dataclasses import replace

import pandas as pd
import pytest

from evo_grpo.errors import RunNotFoundError
from evo_grpo.record.history import history
from evo_grpo.record.run_dir import RunDir
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Mutation

COLUMNS = {
    "round": "Int64",
    "agent": "Int64",
    "member": "Int64",
    "parent": "Int64",
    "state": "string",
    "fitness": "float64",
    "fitness_se": "float64",
    "lr": "float64",
    "beta": "float64",
    "clip_coef": "float64",
    "clip_low": "float64",
    "clip_high": "float64",
    "group_size": "Int64",
    "op": "string",
    "mutated": "string",
    "reward": "float64",
    "kl": "float64",
    "loss": "float64",
    "entropy": "float64",
    "zero_variance": "float64",
    "clip_fraction": "float64",
    "completion_length": "float64",
    "tokens": "Int64",
    "wall_seconds": "float64",
    "checkpoint": "string",
    "reason": "string",
    "between": "boolean",
}


def types(frame):
    return {name: str(dtype) for name, dtype in frame.dtypes.items()}


def test_columns_and_types_are_the_same_with_and_without_rounds(make_run):
    assert types(history([])) == COLUMNS
    assert len(history([])) == 0
    frame = history(make_run(size=3, rounds=2))
    assert types(frame) == COLUMNS
    assert list(zip(frame["round"], frame["agent"], strict=True)) == [
        (number, agent) for number in range(2) for agent in range(3)
    ]


def test_what_mutates_has_a_column(make_run):
    records = [replace(one, mutable=("lr", "top_k")) for one in make_run(size=2, rounds=1)]
    frame = history(records)
    assert list(frame.columns)[13:15] == ["top_k", "op"]
    assert frame["top_k"].tolist() == [0, 0]


def test_a_row_is_what_the_record_holds(make_run):
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


def test_a_member_that_trains_on_continues_and_its_birth_is_told_once(make_run):
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


def test_agents_that_leave_have_no_further_rows_and_numbers_stay(make_run):
    records = make_run(size=4, rounds=2)
    left = [agent for agent in records[1].agents if agent.agent in (3, 1)]
    frame = history([records[0], replace(records[1], agents=tuple(reversed(left)))])
    assert frame["agent"].tolist() == [0, 1, 2, 3, 1, 3]
    assert frame["member"].tolist()[4:] == [agent.member for agent in left]


def test_a_run_folder_gives_the_same_as_its_records_also_while_it_goes_on(tmp_path, make_run):
    records = make_run(failures=0.3)
    with RunDir.create(tmp_path / "run", "population", "name: x\n") as run:
        assert types(history(run.path)) == COLUMNS
        for record in records:
            run.append_round(record)
            frame = history(str(run.path))
            pd.testing.assert_frame_equal(frame, history(records[: record.round + 1]))


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(RunNotFoundError, match=r"expected one with rounds\.jsonl"):
        history(tmp_path)
