"""Records: JSON brings them back as they were, and what is not finite survives as NaN."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import make_run

from evo_grpo.record.family import best_ever, founder_of, next_member_id
from evo_grpo.record.leaderboard import from_records
from evo_grpo.record.records import (
    FORMAT,
    AgentRecord,
    RoundRecord,
    outline,
    round_from_json,
    to_json,
)
from evo_grpo.record.run_dir import kept_checkpoints
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Member, Mutation, Score

PROPERTY = settings(max_examples=40)
finite = st.floats(allow_nan=False, allow_infinity=False)
ids = st.integers(0, 1000)
# A few letters say it all, and the table of all letters takes ten seconds to build.
text = st.text(st.sampled_from('aä\n"\\'), max_size=6)
mutations = st.builds(
    Mutation,
    op=st.sampled_from(["init", "clone", "mutate"]),
    changes=st.dictionaries(st.sampled_from(["lr", "clip_low"]), st.tuples(finite, finite)),
)
hparams = st.builds(
    Hparams,
    lr=st.floats(1e-9, 1.0),
    clip_coef=st.one_of(st.floats(0.01, 1.0), st.just((0.8, 1.28))),
    group_size=st.integers(2, 64),
    batch_size=st.none() | st.integers(1, 64),
)
scores = st.builds(
    Score, mean=finite, se=finite, n=ids, per_prompt=st.lists(finite, max_size=3).map(tuple)
)
agents = st.builds(
    AgentRecord,
    agent=ids,
    member=ids,
    parent=st.none() | ids,
    round=ids,
    state=st.sampled_from(["ok", "failed"]),
    hparams=hparams,
    score=st.none() | scores,
    metrics=st.dictionaries(text, finite, max_size=3),
    tokens=ids,
    wall_seconds=finite,
    checkpoint=st.none() | st.just("checkpoints/round-0000/agent-00"),
    adapter_sha256=st.none() | text,
    optimizer_sha256=st.none() | text,
    mutation=mutations,
    seed=st.integers(0, 2**63),
    reason=text,
)
members = st.builds(Member, id=ids, agent=ids, parent=st.none() | ids, born=ids, mutation=mutations)
rounds = st.builds(
    RoundRecord,
    round=ids,
    agents=st.lists(agents, max_size=2).map(tuple),
    seconds=st.dictionaries(text, finite, max_size=3),
    members=st.lists(members, max_size=2).map(tuple),
    next_hparams=st.lists(hparams, max_size=2).map(tuple),
    mutable=st.lists(st.sampled_from(["lr", "clip_low", "top_k"]), unique=True).map(tuple),
)


@PROPERTY
@given(rounds)
def test_json_brings_a_round_back(record):
    line = json.dumps(to_json(record), allow_nan=False)
    assert round_from_json(json.loads(line)) == record


@pytest.fixture
def agent():
    return AgentRecord(
        agent=0,
        member=0,
        parent=None,
        round=0,
        state="ok",
        hparams=Hparams(),
        score=Score(
            0.5, math.nan, 1, (0.5, math.nan)
        ),  # all rewards of the second prompt abstained
        metrics={"kl": math.inf, "reward": 0.5},
        tokens=10,
        wall_seconds=0.1,
    )


def test_numbers_that_are_not_finite_come_back_as_nan(agent):
    data = to_json(RoundRecord(0, (agent,), {"learn": 1.0}))
    text = json.dumps(data, allow_nan=False)
    assert data["format"] == FORMAT == 4
    assert data["agents"][0]["metrics"] == {"kl": None, "reward": 0.5}
    (read,) = round_from_json(json.loads(text)).agents
    assert math.isnan(read.metrics["kl"])
    assert read.metrics["reward"] == 0.5
    assert (read.score.mean, read.score.per_prompt[0]) == (0.5, 0.5)
    assert math.isnan(read.score.per_prompt[1])
    assert math.isnan(read.score.se)
    failed = RoundRecord(0, (replace(agent, score=Score(math.inf, math.nan, 1)),), {})
    data = json.loads(json.dumps(to_json(failed), allow_nan=False))
    assert data["agents"][0]["score"]["mean"] is None
    assert math.isnan(round_from_json(data).agents[0].score.mean)


def test_the_outlines_of_rounds_tell_the_rest_of_a_run_all_that_it_asks():
    rounds = make_run(size=4, rounds=5, failures=0.3)
    outlines = [*map(outline, rounds[:-1]), rounds[-1]]
    assert not any(agent.metrics for record in outlines[:-1] for agent in record.agents)
    assert from_records(outlines).equals(from_records(rounds))
    best, same = best_ever(rounds), best_ever(outlines)
    assert (best.member, best.round, best.score.mean) == (same.member, same.round, same.score.mean)
    assert next_member_id(outlines) == next_member_id(rounds)
    for policy in ("last", "best", 2):
        assert kept_checkpoints(outlines, policy) == kept_checkpoints(rounds, policy)
    for agent in rounds[-1].agents:
        assert founder_of(outlines, agent.member) == founder_of(rounds, agent.member)


def test_equal_hyperparameters_of_agents_are_one_object_and_unequal_types_are_refused():
    (record,) = make_run(size=2, rounds=1)
    data = to_json(replace(record, next_hparams=tuple(one.hparams for one in record.agents)))
    read = round_from_json(data)
    assert read.next_hparams[1] is read.agents[1].hparams
    data["next_hparams"][1]["group_size"] = 1.0
    data["agents"][1]["hparams"]["group_size"] = 1
    with pytest.raises(ValueError, match=r"hparams.*group_size"):
        round_from_json(data)
