"""Counts of decode steps and learn calls on the rehearsal device, and their committed table."""

import json
import os
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import kernel_reference
import numpy as np
import pytest
import rehearsal
import tiny
import torch
from engine_contract import prompts_of
from played_rounds import play
from small_run import small
from tiny_cohort import PLAIN, build_cohort, build_model, learn, make_rows

from evo_grpo.model.forward.prefix import find_shared_prefixes
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.llama.cache import FixedCache
from evo_grpo.model.llama.cuda.generate import KernelDecoder
from evo_grpo.model.llama.cuda.learn import KernelForward
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.loop import Batch, DecodeLoop
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings
from evo_grpo.training.assemble import prepare
from evo_grpo.training.writer import RankWriter

TABLE = Path(__file__).parents[1] / "device" / "counts.json"
ANEW = 'EVO_GRPO_WRITE_COUNTS=1 make test-device ARGS="-k counts_of -n 0"'
#: Tokens of a rollout after the first: five blocks of 8 steps.
STEPS = 40


class Watch:
    """Counts of each step of `rollout`, in blocks, and of each draw and prefill by kernels."""

    def __init__(self, monkeypatch):
        self.blocks, self.draws, self.kernel_draws, self.prefills = [], [], [], []

        def watch(kind, name, counts_of=None):
            """Count each call for a list, or begin a block of steps."""
            method = getattr(kind, name)

            def watched(*given):
                if counts_of is None:
                    self.blocks.append([])
                    return method(*given)
                with rehearsal.counting() as counts:
                    made = method(*given)
                counts_of().append(counts)
                return made

            monkeypatch.setattr(kind, name, watched)

        watch(KernelDecoder, "prefill", lambda: self.prefills)
        watch(DecodeLoop, "_step", lambda: self.blocks[-1])
        watch(Batch, "draw", lambda: self.draws)
        watch(Batch, "draw_by_kernels", lambda: self.kernel_draws)
        watch(FixedCache, "reserve")
        watch(KernelDecoder, "reserve")

    @property
    def steps(self):
        return [counts for block in self.blocks for counts in block]


def rollout(layers=2, agents=8, build=None, kernels="auto", ranks=None, samples=2, **sampling):
    """Completions of some agents with four prompts each; the counts of the whole call.

    `samples` are those of each prompt, one number or one for each agent.
    """
    samples = [samples] * agents if isinstance(samples, int) else samples
    model = build() if build else tiny.llama(num_hidden_layers=layers)
    model = model.to(rehearsal.NAME)
    slots = tiny.population(model, ranks or (4,) * agents)
    asked = [
        RolloutRequest(
            i, name, prompts_of(3, 9, 1, 5), samples[i],
            Sampling(max_output_tokens=STEPS + 1, **sampling), i,
        )
        for i, name in enumerate(slots.names)
    ]  # fmt: skip
    engine = NativeEngine(slots, AgentSettings(engine={"kernels": kernels}))
    with rehearsal.counting() as counts, kernel_reference.instead():
        engine.rollout(asked)
    assert kernels != "on" or "kernels refused" not in engine.base.derived
    return counts


def counted_learn(agents, build=None, kernels="off", **changes):
    """A learn call of agents that have learned before."""
    model = (build() if build else build_model(num_hidden_layers=4)).to(rehearsal.NAME)
    cohort = build_cohort(agents, PLAIN.replace(**changes), model=model, warm=False)
    base = cohort.slots.base
    base.kernels, base.head_kernels = kernels, kernels == "on"
    slots = list(cohort.agents)
    rows = [make_rows(7 + slot) for slot in slots]
    with kernel_reference.instead():
        learn(cohort, slots, rows)
        with rehearsal.counting() as counts:
            learn(cohort, slots, rows)
    assert base.head_kernels == (kernels == "on")
    assert "kernels refused" not in base.derived
    return counts


def round_counts():
    """Waits and copies of a round of eight agents, whose checkpoints are copied, not written."""
    with TemporaryDirectory() as folder:
        config = small(
            engine__device=rehearsal.NAME, engine__dtype="float32", population__size=8,
            population__steps_per_round=4,
        )  # fmt: skip
        prepared, writer = prepare(config), RankWriter(Path(folder), shared=False)
        past = []
        for number in range(2):  # the first makes the moments of AdamW
            with rehearsal.counting() as counts:
                past.append(play(prepared, number, writer, past))
    return {"syncs": counts.syncs.total(), "copies": counts.copies.total()}


def learn_layer_counts(
    agents, *, shared=True, recompute=False, ranks=None, lengths=(5, 5), build=tiny.llama
):
    """Launches of a learn layer by kernels, forward and backward, and the waits and copies.

    They are those of a second micro-batch, which adds to gradients. On a card, the backward of
    flash attention with groups of heads is six launches, one of zeros.
    """
    found = []
    for layers in (2, 4):
        model = build(num_hidden_layers=layers).to(rehearsal.NAME)
        slots = tiny.population(model, ranks or (4,) * agents)
        rows = [make_rows(agent, prompt=(lengths[0], lengths[1] + 1)) for agent in range(agents)]
        width = max(len(row.token_ids) for own in rows for row in own)
        ids = np.zeros((sum(map(len, rows)), width), np.int64)
        masks = ids.astype(bool)
        for i, row in enumerate(row for own in rows for row in own):
            ids[i, : len(row.token_ids)], masks[i, : len(row.mask)] = row.token_ids, row.mask
        owners = np.arange(agents).repeat([len(own) for own in rows])
        layout = RowLayout(slots.names, tuple(len(own) for own in rows))
        step = KernelForward(slots, slots.names, recompute=recompute)
        for _ in range(2):
            with rehearsal.counting() as counts, kernel_reference.instead(), step.rows(layout):
                device = slots.base.device
                prefix = find_shared_prefixes(owners, ids, masks, device) if shared else None
                assert (prefix is None) is not shared
                given = torch.tensor(ids).to(device), torch.arange(ids.size).to(device)
                step.hidden_at(*given, prefix).sum().backward()
        launches = counts.launches
        found.append(launches.total() + 5 * launches["evo_grpo::flash_backward"])
    return {
        "launches of a layer": (found[1] - found[0]) // 2,
        "syncs": counts.syncs.total(), "copies": counts.copies.total(),
    }  # fmt: skip


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


def watched(**given):
    """The counts of a whole rollout, and of its steps, draws and prefills."""
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        return rollout(**given), watch


def launches(counts):
    return {c.launches.total() for c in counts}


def waits(watch):
    """The waits and copies in the steps of a rollout."""
    return {
        "syncs in steps": sum(c.syncs.total() for c in watch.steps),
        "copies in steps": sum(c.copies.total() for c in watch.steps),
    }


def decode_counts():
    """The counts of a decode step of the joined layers, from models of two and of four."""
    steps = {}
    for layers in (2, 4):
        counts, watch = watched(layers=layers)
        # Where rows have left, the agents have unequal numbers of them.
        steps[layers] = min(launches(watch.steps)), max(launches(watch.steps))
        (draw,) = launches(watch.draws)
        looks = counts.syncs["evo_grpo/rollout/native/loop.py run"]
        assert looks <= sum(bool(block) for block in watch.blocks)
    equal, unequal = ((steps[4][i] - steps[2][i]) // 2 for i in (0, 1))
    return {
        "launches of a layer": equal,
        "launches of a layer, agents of unequal rows": unequal,
        "launches of a draw": draw,
        "launches of the rest": steps[2][0] - 2 * equal - draw,
        **waits(watch),
    }


def kernel_counts(**given):
    """The counts of a decode step by kernels, from models of two layers and of four."""
    steps, prefills = {}, {}
    for layers in (2, 4):
        # Wide enough for the A of eight agents to lie below its weights.
        wide = {"hidden_size": 256, "intermediate_size": 256}
        build = partial(tiny.llama, num_hidden_layers=layers, **wide)
        _, watch = watched(build=build, kernels="on", **given)
        (steps[layers],) = launches(watch.steps)
        (draw,) = launches(watch.kernel_draws)
        (prefills[layers],) = launches(watch.prefills)
    layer = (steps[4] - steps[2]) // 2
    return {
        "launches of a layer": layer,
        "launches of a layer of a prefill": (prefills[4] - prefills[2]) // 2,
        "launches of a draw": draw,
        "launches of the rest": steps[2] - 2 * layer - draw,
        **waits(watch),
    }


def family_counts(build):
    """The counts of a decode step and of a learn call of 8 agents, for a model of two layers."""
    _, watch = watched(build=build)
    learned = counted_learn(8, build=build).totals()
    return {
        "launches of a decode step": min(launches(watch.steps)),
        **waits(watch),
        **{f"{name} of learn": count for name, count in learned.items()},
    }
