"""Counts of decode steps and learn calls on the rehearsal device, and their committed table."""

import json
import os
from itertools import pairwise, zip_longest
from pathlib import Path

import pytest
import rehearsal
import tiny
from engine_contract import prompts_of
from tiny_cohort import PLAIN, build_cohort, build_model, learn, make_rows

from evo_grpo.model.llama.cache import FixedCache
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.batch import Batch
from evo_grpo.rollout.native.engine import NativeEngine
from evo_grpo.rollout.native.loop import DecodeLoop
from evo_grpo.rollout.sampling import Sampling

TABLE = Path(__file__).parents[1] / "device" / "counts.json"
ANEW = 'EVO_GRPO_WRITE_COUNTS=1 make test-device ARGS="-k counts_of -n 0"'
#: Tokens of a rollout after the first: five blocks of 8 steps.
STEPS = 40


class Watch:
    """Counts of each step of `rollout`, in blocks, and of each draw."""

    def __init__(self, monkeypatch):
        self.blocks, self.draws = [], []
        step, draw, reserve = DecodeLoop._step, Batch.draw, FixedCache.reserve

        def watched_step(loop):
            with rehearsal.counting() as counts:
                step(loop)
            self.blocks[-1].append(counts)

        def watched_draw(batch, *given):
            with rehearsal.counting() as counts:
                draw(batch, *given)
            self.draws.append(counts)

        def watched_reserve(cache, columns):
            self.blocks.append([])
            reserve(cache, columns)

        monkeypatch.setattr(DecodeLoop, "_step", watched_step)
        monkeypatch.setattr(Batch, "draw", watched_draw)
        monkeypatch.setattr(FixedCache, "reserve", watched_reserve)

    @property
    def steps(self):
        return [counts for block in self.blocks for counts in block]


def rollout(layers=2, agents=8, build=None, **sampling):
    """Completions of some agents with four prompts each; the counts of the whole call."""
    model = build() if build else tiny.llama(num_hidden_layers=layers)
    model = model.to(rehearsal.NAME)
    slots = tiny.population(model, (4,) * agents)
    asked = [
        RolloutRequest(
            i, name, prompts_of(3, 9, 1, 5), 2,
            Sampling(max_output_tokens=STEPS + 1, **sampling), i,
        )
        for i, name in enumerate(slots.names)
    ]  # fmt: skip
    engine = NativeEngine(slots)
    with rehearsal.counting() as counts:
        engine.rollout(asked)
    return counts


def counted_learn(agents, build=None, **changes):
    """A learn call of agents that have learned before."""
    model = (build() if build else build_model(num_hidden_layers=4)).to(rehearsal.NAME)
    cohort = build_cohort(agents, PLAIN.replace(**changes), model=model, warm=False)
    slots = list(cohort.agents)
    rows = [make_rows(7 + slot) for slot in slots]
    learn(cohort, slots, rows)
    with rehearsal.counting() as counts:
        learn(cohort, slots, rows)
    return counts


def differing(blocks):
    """The first entries in which two consecutive steps of a block differ."""
    for one, two in (pair for block in blocks for pair in pairwise(block)):
        for pair in zip_longest(one.entries, two.entries):
            if pair[0] != pair[1]:
                return pair
    return None


def compared(found, table):
    """Compare counts with those of the table, or write it."""
    if os.environ.get("EVO_GRPO_WRITE_COUNTS"):
        everything = json.loads(TABLE.read_text()) if TABLE.exists() else {}
        TABLE.write_text(json.dumps({**everything, table: found}, indent=1, sort_keys=True) + "\n")
    known = json.loads(TABLE.read_text())[table]
    grew = [
        f"{table}, {name}: {known.get(name)} in {TABLE.name}, now {count}"
        for name, count in found.items()
        if count > known.get(name, -1)
    ]
    assert not grew, "\n".join([*grew, f"to accept that, write the table anew: {ANEW}"])


def decode_counts():
    """The counts of a decode step of the joined layers, from models of two and of four."""
    steps = {}
    for layers in (2, 4):
        with pytest.MonkeyPatch.context() as patch:
            watch = Watch(patch)
            counts = rollout(layers)
        launches = {c.launches.total() for c in watch.steps}
        # Where rows have left, the agents have unequal numbers of them.
        steps[layers] = min(launches), max(launches)
        (draw,) = {c.launches.total() for c in watch.draws}
        looks = counts.syncs["evo_grpo/rollout/native/loop.py run"]
        assert looks <= sum(bool(block) for block in watch.blocks)
    equal, unequal = ((steps[4][i] - steps[2][i]) // 2 for i in (0, 1))
    return {
        "launches of a layer": equal,
        "launches of a layer, agents of unequal rows": unequal,
        "launches of a draw": draw,
        "launches of the rest": steps[2][0] - 2 * equal - draw,
        "syncs in steps": sum(c.syncs.total() for c in watch.steps),
        "copies in steps": sum(c.copies.total() for c in watch.steps),
    }


def family_counts(build):
    """The counts of a decode step and of a learn call of 8 agents, for a model of two layers."""
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        rollout(build=build)
    learned = counted_learn(8, build=build).totals()
    return {
        "launches of a decode step": min(c.launches.total() for c in watch.steps),
        "syncs in steps": sum(c.syncs.total() for c in watch.steps),
        "copies in steps": sum(c.copies.total() for c in watch.steps),
        **{f"{name} of learn": count for name, count in learned.items()},
    }
