"""Rows that wait take the places of rows that have ended: the same completions, in fewer steps."""

import random
from dataclasses import replace
from functools import partial

import architectures
import pytest
import tiny
import torch
from engine_contract import ids_of, prompts_of

from evo_grpo.model.llama import decode
from evo_grpo.model.llama.cache import FixedCache
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native import loop
from evo_grpo.rollout.native import native_engine as engines
from evo_grpo.rollout.native import rows as native_rows
from evo_grpo.rollout.native.loop import Batch
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.native.rows import RowQueue
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings

PLAIN = Sampling(temperature=0.9, max_output_tokens=20)


@pytest.fixture(autouse=True)
def refills(monkeypatch):
    """Refill as on a GPU; the list gets the number of rows that begin at a time."""
    monkeypatch.setattr(engines, "refills_rows", lambda device: True)
    monkeypatch.setattr(decode, "cache_for", lambda device, *layers: FixedCache(*layers))
    take, taken = RowQueue.take, []

    def counted(self, count):
        rows = take(self, count)
        taken.append(len(rows))
        return rows

    monkeypatch.setattr(RowQueue, "take", counted)
    return taken


@pytest.fixture
def blocks(monkeypatch):
    """The blocks of steps of a GPU."""
    monkeypatch.setattr(loop, "block_of", lambda device: 8)


def asked(slots, *kinds, lengths=(3, 9, 1, 6, 12, 2), samples=3):
    """One request per agent, each with its own sampling settings, in turn."""
    return [
        RolloutRequest(i, name, prompts_of(*lengths), samples, kinds[i % len(kinds)], i)
        for i, name in enumerate(slots.names)
    ]


def both(slots, requests, rows, **algorithm):
    """Completions of all rows at once, and of at most `rows`."""
    found = []
    for engine in ({}, {"max_decode_rows": rows}):
        settings = AgentSettings(algorithm=algorithm, engine=engine)
        found.append(NativeEngine(slots, settings).rollout(requests))
    return found


def assert_alike(found):
    one, other = found
    assert [ids_of(groups) for groups in one] == [ids_of(groups) for groups in other]
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(scores(a), scores(b), atol=1e-4, rtol=0.0)


def scores(groups):
    """All log-probs of one agent, (tokens,)."""
    return torch.tensor([x for g in groups for c in g.completions for x in c.logprobs])


@pytest.mark.parametrize("name", ["llama", *architectures.FAMILIES])
def test_completions_are_those_of_all_rows_at_once(name, blocks, refills):
    slots = tiny.population(architectures.FAMILIES.get(name, tiny.llama)(), (4, 2, 8))
    assert_alike(both(slots, asked(slots, PLAIN), 10))
    assert sum(refills) == 54
    assert len(refills) > 2


def test_each_agent_keeps_its_own_settings(blocks, refills):
    slots = tiny.population(tiny.llama(), (4, 4, 2, 8))
    kinds = (
        Sampling(temperature=1.2, max_output_tokens=30, top_p=0.9),
        Sampling(temperature=0.0, max_output_tokens=7),
        Sampling(max_output_tokens=16, repetition_penalty=1.3),
        Sampling(max_output_tokens=11, min_output_tokens=5, top_k=6),
    )
    assert_alike(both(slots, asked(slots, *kinds), 12))
    assert len(refills) > 2


def test_agents_may_have_other_numbers_of_prompts(blocks, refills):
    slots = tiny.population(tiny.llama(), (4, 2, 8))
    requests = asked(slots, PLAIN)
    requests = [requests[0].part([0]), requests[1], requests[2].part([0, 3, 5])]
    requests[1] = replace(requests[1], samples=1)
    assert_alike(both(slots, requests, 7))
    assert len(refills) > 2


def test_rows_stop_where_the_context_ends(blocks, refills):
    slots = tiny.population(tiny.llama(), (4, 2))
    found = both(slots, asked(slots, PLAIN, lengths=(3, 9, 20, 6)), 6, max_model_len=21)
    assert_alike(found)
    assert all(len(c.token_ids) == 1 for groups in found[1] for c in groups[2].completions)


def test_columns_that_are_used_up_are_freed(blocks, refills, monkeypatch):
    """Rows that begin late outlast the columns, and then move to the front."""
    monkeypatch.setattr(loop, "SPARE_COLUMNS", 8)
    monkeypatch.setattr(loop, "_LEAVE_SHARE", 1.0)
    slots = tiny.population(tiny.llama(), (4, 2))
    kinds = [replace(PLAIN, max_output_tokens=n, min_output_tokens=n) for n in (40, 20)]
    long, short = asked(slots, *kinds, lengths=(3, 9))
    assert_alike(both(slots, [long, short.part([0])], 6))
    assert refills == [6, 3, 0]


def test_a_heavy_tail_needs_few_steps_more_than_its_tokens(refills, monkeypatch):
    """1 row in 20 is eight times the median."""
    expand, draw, done = native_rows.expand_rows, Batch.draw, []

    def tailed(*given, **named):
        rows, source = expand(*given, **named)
        chance = random.Random(0)
        lengths = [64 if chance.random() < 1 / 20 else chance.randint(4, 12) for _ in rows.origin]
        rows.sampling = replace(rows.sampling, limit=torch.tensor(lengths), shortest=4)
        return rows, source

    def counted(batch, *given):
        done.append(len(batch.tokens))
        draw(batch, *given)

    monkeypatch.setattr(native_rows, "expand_rows", tailed)
    monkeypatch.setattr(Batch, "draw", counted)
    slots = tiny.population(tiny.llama(max_position_embeddings=128), (4, 4))
    plain = replace(PLAIN, max_output_tokens=64, min_output_tokens=64)
    requests = asked(slots, plain, lengths=(4,) * 32, samples=8)
    out = NativeEngine(slots, AgentSettings(engine={"max_decode_rows": 64})).rollout(requests)
    needed = sum(len(ids) for groups in out for group in ids_of(groups) for ids in group)
    assert sum(done) <= 1.12 * needed
    assert len(done) < 0.6 * 8 * 64  # in pieces of 64 rows, nearly each has a long one


def test_a_call_holds_the_draws_of_eight_times_its_places(refills, monkeypatch):
    """Else the memory that a call needs would not fall with its places."""
    slots = tiny.population(tiny.llama(), (4,))
    made = []
    monkeypatch.setattr(engines, "RowQueue", partial(_made, made))
    requests = asked(slots, PLAIN, lengths=(2,) * 20, samples=2)
    assert_alike(both(slots, requests, 2))
    assert made == [40, 16, 16, 8]


def _made(made, *given, **named):
    found = RowQueue(*given, **named)
    made.append(len(found.rows.origin))
    return found


class Replaying:
    """As `StepGraphs`: the step that it met first, as long as the memory is called the same."""

    work = True

    def __init__(self):
        self.memory = self.step = None

    def forget(self):
        self.memory = None

    def run(self, step, memory, count):
        if memory != self.memory:
            self.memory, self.step = memory, step
        for _ in range(count):
            self.step()


@pytest.mark.parametrize("rows", [1024, 9], ids=["at once", "refilled"])
def test_no_step_of_other_rows_is_replayed(rows):
    slots = tiny.population(tiny.llama(), (4, 2, 8))
    plain = replace(PLAIN, min_output_tokens=20)
    requests = [asked(slots, kind) for kind in (plain, plain, PLAIN)]
    expected = [NativeEngine(slots).rollout(one) for one in requests]
    engine = NativeEngine(slots, AgentSettings(engine={"max_decode_rows": rows}))
    engine._graphs = Replaying()
    for one, other in zip(requests, expected, strict=True):
        assert_alike((engine.rollout(one), other))
