"""The leaderboard: types, order, sums, and what a run without a finished round gives."""

import math
from dataclasses import replace

import pandas as pd
import pytest
from random_runs import make_run, with_scores
from shown_run import SUMMARY, mean_won, two_rounds

from evo_grpo.record.family import best_agent
from evo_grpo.record.leaderboard import (
    from_records,
    leaderboard,
    leaderboard_rows,
    order_text,
    write_csv,
)
from evo_grpo.record.run_dir import RunDir
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Request, RequestOutcome, Score

COLUMNS = {
    **dict.fromkeys(("rank", "agent", "member", "parent", "round", "left"), "Int64"),
    **dict.fromkeys(("fitness", "fitness_se"), "float64"),
    "tie": "boolean",
    **dict.fromkeys(("final", "final_se", "test", "test_se"), "Float64"),
    **dict.fromkeys(("lr", "beta", "clip_coef", "clip_low", "clip_high"), "float64"),
    **dict.fromkeys(("group_size", "tokens"), "Int64"),
    "wall_seconds": "float64",
    "checkpoint": "string",
}


def types(frame):
    return {name: str(dtype) for name, dtype in frame.dtypes.items()}


def test_columns_and_types_are_the_same_with_and_without_rounds():
    assert types(from_records(make_run())) == COLUMNS
    assert types(from_records(make_run(rounds=1))) == COLUMNS  # no agent has a parent yet
    empty = from_records([])
    assert types(empty) == COLUMNS
    assert len(empty) == 0


def test_rows_stand_by_fitness_then_by_agent_and_failed_ones_last():
    (record,) = make_run(size=5, rounds=1)
    frame = from_records([with_scores(record, [0.2, None, 0.9, 0.2, 0.5])])
    assert frame["rank"].tolist() == [1, 2, 3, 4, 5]
    assert frame["agent"].tolist() == [2, 4, 0, 3, 1]
    assert frame["fitness"].iloc[:4].tolist() == [0.9, 0.5, 0.2, 0.2]
    assert frame[["fitness", "fitness_se"]].iloc[4].isna().all()


def test_a_row_tells_of_the_last_round_and_sums_over_all():
    records = make_run(size=4, rounds=3)
    frame = from_records(records).set_index("agent")
    for agent in records[-1].agents:
        row = frame.loc[agent.agent]
        assert row["member"] == agent.member
        assert row["parent"] is pd.NA if agent.parent is None else row["parent"] == agent.parent
        assert row["round"] == 2
        assert row["fitness"] == agent.score.mean
        assert row["fitness_se"] == 0.05
        assert row["lr"] == agent.hparams.lr
        assert row["beta"] == agent.hparams.beta
        assert row["clip_coef"] == agent.hparams.clip_coef
        assert (row["clip_low"], row["clip_high"]) == agent.hparams.clip_bounds
        assert row["group_size"] == agent.hparams.group_size
        assert row["tokens"] == 3 * agent.tokens
        assert row["wall_seconds"] == pytest.approx(1.5)
        assert row["checkpoint"] == f"checkpoints/round-0002/agent-{agent.agent:02d}"


def test_the_clip_range_is_numbers_also_of_a_pair():
    (record,) = make_run(size=2, rounds=1)
    agents = (
        replace(record.agents[0], hparams=Hparams(clip_coef=(0.8, 1.28)), checkpoint=None),
        replace(record.agents[1], hparams=Hparams(clip_coef=0.25)),
    )
    frame = from_records([replace(record, agents=agents)]).set_index("agent")
    assert math.isnan(frame.loc[0, "clip_coef"])
    assert frame.loc[0, ["clip_low", "clip_high"]].tolist() == [0.8, 1.28]
    assert frame.loc[1, ["clip_coef", "clip_low", "clip_high"]].tolist() == [0.25, 0.75, 1.25]
    assert frame.loc[0, "checkpoint"] is pd.NA


def test_what_else_mutates_or_a_person_set_has_a_column_in_all_rounds():
    mutable = ("batch_size", "clip_high", "lr", "temperature")
    records = [replace(record, mutable=mutable) for record in make_run(size=2, rounds=2)]
    asked = RequestOutcome(Request("1", "set", agent=0, values={"top_k": 5}))
    refused = RequestOutcome(Request("2", "set", agent=0, values={"top_p": 0.5}), "no such agent")
    paused = RequestOutcome(Request("3", "pause"))
    records[0] = replace(records[0], steering=(asked, refused, paused))
    extra = {"temperature": "float64", "top_k": "Int64", "batch_size": "Int64"}
    expected = list(COLUMNS)
    place = expected.index("tokens")
    expected[place:place] = extra  # in the order of the schema
    for rounds in (records[:1], records):
        frame = from_records(rounds)
        assert list(frame.columns) == expected
        assert types(frame) == COLUMNS | extra
        assert frame["temperature"].tolist() == [1.0, 1.0]
        assert frame["batch_size"].isna().all()


def test_agents_that_left_stand_below_by_the_round_of_their_end():
    records = make_run(size=5, rounds=3)
    scores = [[0.1, 0.2, 0.3, 0.9, 0.8], [0.4, 0.7, 0.95, 0.1, 0.2], [0.5, 0.4, 0, 0, 0]]
    records = [with_scores(one, means) for one, means in zip(records, scores, strict=True)]
    alive = [{0, 1, 2, 3, 4}, {0, 1, 2}, {1, 0}]
    records = [
        # By number and not by place: in reverse order the numbers are all that is left.
        replace(one, agents=tuple(a for a in reversed(one.agents) if a.agent in there))
        for one, there in zip(records, alive, strict=True)
    ]
    frame = from_records(records)
    assert frame["agent"].tolist() == [0, 1, 2, 3, 4]
    assert frame["round"].tolist() == [2, 2, 1, 0, 0]
    assert frame["left"].isna().tolist() == [True, True, False, False, False]
    assert frame["left"].dropna().tolist() == [1, 0, 0]
    assert frame["tie"].isna().tolist() == [True, False, True, True, True]
    assert frame["fitness"].tolist() == [0.5, 0.4, 0.95, 0.9, 0.8]
    assert frame["tokens"].tolist() == [300, 600, 600, 400, 500]
    assert frame["rank"].tolist() == [1, 2, 3, 4, 5]
    assert best_agent(records[-1]).agent == 0


def rewarded(record, *rewards):
    """A round whose agents have these rewards per prompt."""
    scores = [Score(sum(r) / len(r), 0.1, len(r), r) for r in rewards]
    agents = [replace(a, score=s) for a, s in zip(record.agents, scores, strict=True)]
    return replace(record, agents=tuple(agents))


def ties(*rounds, summary=None):
    return from_records(rounds, summary)["tie"].tolist()


def test_whom_the_first_is_not_shown_to_be_ahead_of_is_a_tie():
    (record,) = make_run(size=3, rounds=1)
    better, near, worse = (1.0,) * 8, (1.0,) * 7 + (0.0,), (0.0,) * 8
    assert ties(rewarded(record, better, near, worse)) == [pd.NA, True, False]
    # Four prompts of one way have a p-value of 1/8, one-sided 1/16, and five 1/16.
    (record,) = make_run(size=2, rounds=1)
    four, five, none = ((1.0,) * n + (0.0,) * (8 - n) for n in (4, 5, 0))
    assert ties(rewarded(record, four, none)) == [pd.NA, True]
    assert ties(rewarded(record, five, none)) == [pd.NA, False]
    # The best of six was chosen among 15 pairs.
    (record,) = make_run(size=6, rounds=1)
    assert ties(rewarded(record, better, *[worse] * 5)) == [pd.NA, *[True] * 5]
    assert ties(rewarded(record, better * 2, *[worse * 2] * 5)) == [pd.NA, *[False] * 5]


def test_ties_rest_on_the_first_look_where_racing_looked_again():
    (record,) = make_run(size=2, rounds=1)
    first, second = rewarded(record, (1.0,) * 8, (0.0,) * 8).agents
    assert ties(replace(record, agents=(first, second))) == [pd.NA, False]
    first = replace(first, score=replace(first.score, first_look=(0.0,) * 8))
    assert ties(replace(record, agents=(first, second))) == [pd.NA, True]
    second = replace(second, score=replace(second.score, first_look=(1.0,) * 8))
    assert ties(replace(record, agents=(first, second))) == [pd.NA, True], "the first is behind"


def test_a_round_that_was_chosen_among_several_asks_for_more():
    """Five prompts of one way, p = 1/16, at .1 over three rounds."""
    records, better, worse = make_run(size=2, rounds=3), (1.0,) * 8, (0.0,) * 8
    records = [
        rewarded(one, (1.0,) * 5 + (0.0,) * 3 if one.round == 0 else (0.1,) * 8, worse)
        for one in records
    ]
    records[1:] = [replace(one, agents=one.agents[:1]) for one in records[1:]]
    best = {**SUMMARY["best"], "kind": "archive", "agent": 0, "member": records[0].agents[0].member}
    summary = {**SUMMARY, "best": best, "candidates": []}
    assert ties(*records, summary=summary) == [pd.NA, True]
    records[0] = rewarded(records[0], better, worse)
    assert ties(*records, summary=summary) == [pd.NA, False]


def test_a_run_folder_and_its_csv_give_the_same_as_its_records(tmp_path):
    *records, last = make_run()
    records.append(with_scores(last, [float("nan"), 0.5, 0.5, None]))  # which JSON could not hold
    with RunDir.create(tmp_path / "run", "population", "name: x\n") as run:
        assert types(leaderboard(run.path)) == COLUMNS
        for record in records:
            run.append_round(record)
        frame = leaderboard(str(run.path))
        write_csv(records, run.path)
    pd.testing.assert_frame_equal(frame, from_records(records))
    assert frame["agent"].tolist()[:2] == [1, 2]
    text = (run.path / "leaderboard.csv").read_text()
    assert text.splitlines()[0] == ",".join(COLUMNS)
    read = pd.read_csv(run.path / "leaderboard.csv", dtype=COLUMNS)
    pd.testing.assert_frame_equal(read, from_records(records))


def test_a_mean_that_won_is_the_first_row():
    frame = from_records(two_rounds(), mean_won())
    assert frame["rank"].tolist() == [1, 2, 3]
    assert frame["agent"].tolist() == [pd.NA, 1, 0]
    first, second, third = (row for _, row in frame.iterrows())
    assert (first["member"], first["parent"], first["round"]) == (3, 2, 1)
    assert (first["fitness"], first["final"], first["test"]) == (0.72, 0.72, 0.807)
    assert (first["lr"], first["tokens"]) == (1.2e-3, 0)  # lr of its better parent
    assert first["checkpoint"] == "checkpoints/mean"
    assert (second["fitness"], second["final"], second["tie"]) == (0.75, 0.70, True)
    assert (third["final"], third["tie"]) == (0.60, False)  # it is the other finalist
    assert frame["test"].tolist() == [0.807, pd.NA, pd.NA]
    assert frame["tokens"].sum() == 4000
    # Rows of equal runs are equal, also where a value is missing.
    again = from_records(two_rounds(), mean_won())
    assert again.to_dict("records") == frame.to_dict("records")


def test_a_mean_has_the_larger_rank_and_no_name_of_unequal_layers():
    own = {1: {"lora_r": 2, "lora_target_modules": "mlp"}, 0: {"lora_r": 8}}
    records = []
    for one in two_rounds():
        layers = {"lora_target_modules": "attention"}
        agents = tuple(
            replace(a, hparams=a.hparams.replace(**{**layers, **own[a.agent]})) for a in one.agents
        )
        names = (*one.mutable, "lora.r", "lora.target_modules")
        records.append(replace(one, agents=agents, mutable=names))
    first, *others = from_records(records, mean_won()).to_dict("records")
    assert (first["lora.r"], first["lora.target_modules"]) == (8, None)
    assert {(one["lora.r"], one["lora.target_modules"]) for one in others} == {
        (2, "mlp"),
        (8, "attention"),
    }


def test_an_agent_that_won_as_it_was_earlier_has_the_row_of_that_round():
    rounds = two_rounds()
    first = rounds[0].agents[0]
    better = replace(first, score=replace(first.score, mean=0.9))
    rounds[0] = replace(rounds[0], agents=(better, rounds[0].agents[1]))
    best = {**SUMMARY["best"], "kind": "archive", "agent": 0, "member": 0, "parents": []}
    frame = from_records(rounds, {**SUMMARY, "best": best})
    assert frame["agent"].tolist() == [0, 1]
    row = frame.iloc[0]
    assert (row["round"], row["fitness"], row["test"], row["left"]) == (0, 0.9, 0.807, pd.NA)
    assert row["checkpoint"] == "checkpoints/round-0000/agent-00"
    assert row["tokens"] == 2000  # of all its rounds


def test_rows_are_the_frame_as_plain_values():
    rows = leaderboard_rows(two_rounds(), mean_won())
    frame = from_records(two_rounds(), mean_won())
    assert [list(row) for row in rows] == [list(frame.columns)] * 3
    for row, (_, values) in zip(rows, frame.iterrows(), strict=True):
        assert row == {n: None if pd.isna(v) else v for n, v in values.items()}


@pytest.mark.parametrize(
    ("fitness", "said"),
    [
        ((0.9, 0.9, None, 0.4), False),
        ((0.5, 0.6, 0.4), True),
        ((0.5, None, 0.6), True),
        ((), False),
    ],
)
def test_the_order_is_named_where_a_rank_shows_less_than_the_next(fitness, said):
    text = order_text([{"fitness": value} for value in fitness])
    assert text.startswith("Order: the winner, the other agents of the last round") == said
    assert bool(text) == said
