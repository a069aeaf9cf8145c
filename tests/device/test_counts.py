"""What a decode step and a learn call ask of a device, counted on the rehearsal device.

counts.json has the numbers, which may fall and not grow. Write them anew after a change with

    EVO_GRPO_WRITE_COUNTS=1 make test-device ARGS="-k counts_of -n 0"
"""

import json
from functools import partial

import pytest
import rehearsal
import tiny
import torch
from architectures import FAMILIES
from device_counts import (
    STEPS,
    TABLE,
    compared,
    counted_learn,
    decode_counts,
    differing,
    family_counts,
    kernel_counts,
    learn_layer_counts,
    rollout,
    round_counts,
    watched,
)
from torch import nn

from evo_grpo.model.llama.cache import FixedCache
from evo_grpo.model.llama.cuda import operators
from evo_grpo.rollout.native.loop import DecodeLoop
from evo_grpo.rollout.native.rows import StopConditions

KL = {"beta": 0.1, "update_epochs": 2, "batch_size": 4}
pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def _counted(device):
    if device != rehearsal.NAME:
        pytest.skip(f"operations are counted on the rehearsal device, these tests run on {device}")


def test_counts_of_a_decode_step():
    compared(decode_counts(), "decode step")


KERNELS = "decode step by kernels"


def test_counts_of_a_decode_step_by_kernels():
    compared(kernel_counts(min_output_tokens=STEPS), KERNELS)


@pytest.mark.parametrize("given", [
    {"ranks": (1, 2, 3, 4, 5, 6, 7, 16)},
    {"samples": (1, 2, 3, 2, 5, 2, 1, 9)},
    {"samples": (1, 2, 3, 2, 5, 2, 1, 9), "min_output_tokens": 2},  # rows leave
])  # fmt: skip
def test_unequal_ranks_and_rows_launch_no_more_kernels(given):
    assert (
        kernel_counts(**{"min_output_tokens": STEPS, **given})
        == json.loads(TABLE.read_text())[KERNELS]
    )


def test_ranks_that_are_too_wide_are_a_product_more():
    compared(kernel_counts(ranks=(64,) * 8, min_output_tokens=STEPS), f"{KERNELS}, A apart")


def test_attention_in_splits_is_a_launch_more(monkeypatch):
    monkeypatch.setattr(operators, "UNSPLIT", 16)
    compared(kernel_counts(min_output_tokens=STEPS), f"{KERNELS}, over 2,048 columns")


def test_counts_of_a_rollout_without_its_steps():
    counts = rollout(min_output_tokens=STEPS)
    compared({"syncs": counts.syncs.total(), "copies": counts.copies.total()}, "rollout")


@pytest.mark.parametrize("agents", [2, 8, 32])
def test_counts_of_learn(agents):
    compared(counted_learn(agents).totals(), f"learn, {agents} agents")
    compared(counted_learn(agents, **KL).totals(), f"learn with a KL, 4 steps, {agents} agents")


def test_counts_of_a_round():
    """Four steps and an evaluation of eight agents, and the copies of their checkpoints."""
    compared(round_counts(), "a round of 8 agents, 4 steps")


@pytest.mark.parametrize("agents", [2, 32])
def test_counts_of_learn_by_kernels(agents):
    compared(counted_learn(agents, kernels="on").totals(), f"learn by kernels, {agents} agents")


#: The launches of a layer do not depend on agents, their ranks or prefixes.
LEARN_LAYERS = {
    "learn layer by kernels": {},
    "learn layer by kernels, recomputed": {"recompute": True},
    "learn layer by kernels, prompts of unequal lengths": {"lengths": (3, 7)},
    "learn layer by kernels, prompts of unequal lengths, recomputed": {
        "lengths": (3, 7), "recompute": True,
    },
    "learn layer by kernels, without shared prefixes": {"shared": False},
    "learn layer by kernels, window shorter than rows": {
        "build": partial(tiny.mistral, sliding_window=4),
    },
}  # fmt: skip


@pytest.mark.parametrize("key", LEARN_LAYERS)
def test_counts_of_a_learn_layer_by_kernels(key):
    compared(learn_layer_counts(8, **LEARN_LAYERS[key]), key)
    known = json.loads(TABLE.read_text())[key]
    most = 75 if "recomputed" in key else 63 if "window" in key else 60
    assert known["launches of a layer"] <= most


@pytest.mark.parametrize(
    "given", [{"agents": 2}, {"agents": 32}, {"ranks": (1, 4, 16, 4, 2, 4, 8, 4)}]
)
def test_agents_and_ranks_launch_no_more_kernels_of_a_learn_layer(given):
    found = learn_layer_counts(**{"agents": 8, **given})
    assert found == json.loads(TABLE.read_text())["learn layer by kernels"]


@pytest.mark.parametrize("family", ["llama", *FAMILIES])
def test_counts_of_each_family(family):
    compared(family_counts({"llama": tiny.llama, **FAMILIES}[family]), f"two layers, {family}")


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *((family, "auto") for family in ("llama", *FAMILIES)),
        *((family, "on") for family in ("llama", "qwen3-window", "gemma3")),
    ],
)
def test_steps_of_a_block_are_the_same_operations_on_the_same_memory(family, kernels):
    """So that a graph can hold them."""
    build = {"llama": tiny.llama, **FAMILIES}[family]
    _, watch = watched(build=build, kernels=kernels, min_output_tokens=STEPS)
    assert [len(block) for block in watch.blocks if block] == [8] * (STEPS // 8)
    assert differing(watch.blocks) is None
    assert len(watch.blocks[-1][0].entries) > 20


def test_a_tensor_of_the_cpu_in_a_step_is_refused(monkeypatch):
    met = StopConditions.met

    def mixed(self, drawn, tokens, sampling):
        return met(self, drawn, tokens, sampling) | torch.zeros(len(tokens), dtype=torch.bool)

    monkeypatch.setattr(StopConditions, "met", mixed)
    with pytest.raises(RuntimeError, match="found at least two devices, rehearsal:0 and cpu"):
        rollout()


def test_numbers_of_the_device_are_read_by_copies_alone():
    there = torch.arange(3, device=rehearsal.NAME)
    with rehearsal.counting() as counts:
        assert there.tolist() == [0, 1, 2]
        assert int(there[2]) == 2
    assert counts.totals() == {"launches": 0, "syncs": 2, "copies": 0}
    assert counts.moved == there.nbytes
    with pytest.raises(RuntimeError, match="found at least two devices"):
        torch.arange(3)[there]


def test_a_wait_in_the_loop_is_counted(monkeypatch):
    step = DecodeLoop._step

    def waits(self):
        step(self)
        self.batch.finished.sum().item()

    monkeypatch.setattr(DecodeLoop, "_step", waits)
    with pytest.raises(AssertionError, match=r"decode step, syncs in steps: 0 in .*, now \d"):
        compared(decode_counts(), "decode step")


def test_a_mask_that_grows_each_step_is_seen(monkeypatch):
    begin = FixedCache.begin

    def grows(self):
        begin(self)
        self._bias = nn.functional.pad(self._bias, (0, 1), value=float("-inf"))

    monkeypatch.setattr(FixedCache, "begin", grows)
    _, watch = watched(min_output_tokens=STEPS)
    one, two = differing(watch.blocks)
    assert one[0] == two[0] == "index_fill_"  # of the mask, which has another place and width
