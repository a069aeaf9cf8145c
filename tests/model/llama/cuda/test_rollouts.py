"""Whole rollouts by kernels against those by torch; in Triton's interpreter, or each by torch."""

import os
from contextlib import nullcontext

import kernel_reference
import pytest
import tiny
from architectures import FAMILIES
from engine_contract import prompts_of

from evo_grpo.model.forward import choice
from evo_grpo.model.llama import decode
from evo_grpo.model.llama.cache import FixedCache
from evo_grpo.model.llama.cuda import operators
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native import native_engine as native
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings, EngineConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.kernels] if INTERPRETED else []

SERVED = {"llama": tiny.llama, "qwen2": tiny.qwen2} | {
    name: build for name, build in FAMILIES.items() if not name.startswith("olmo")
}


@pytest.fixture(autouse=True)
def _by_torch_without_an_interpreter(monkeypatch):
    if not INTERPRETED:
        monkeypatch.setattr(choice, "_refusal", lambda base: None)
    with nullcontext() if INTERPRETED else kernel_reference.instead():
        yield


def rollout(slots, kernels, adapters, lengths=(3, 4), rows=None, **sampling):
    """Token ids and log-probs of each completion; the second agent has two of each prompt."""
    requests = [
        RolloutRequest(i, name, prompts_of(*lengths), 1 + (i == 1), Sampling(**sampling), i)
        for i, name in enumerate(adapters)
    ]
    settings = EngineConfig(kernels=kernels, max_decode_rows=rows)
    groups = NativeEngine(slots, AgentSettings(engine=settings)).rollout(requests)
    assert "kernels refused" not in slots.base.derived
    done = [c for mine in groups for group in mine for c in group.completions]
    return [c.token_ids for c in done], [c.logprobs for c in done]


def compared(build, *, ranks=(4, 1, 7), tokens=5, lengths=(3, 7, 1), ends=(1,), **given):
    """Sample for some agents and the base alone by kernels and by torch."""
    changes = {"target_modules": given.pop("targets")} if "targets" in given else {}
    results = []
    for kernels in ("off", "on"):
        slots = tiny.population(build(), ranks, **changes)
        slots.base.model.generation_config.eos_token_id = list(ends)
        adapters = (*slots.names, None)
        results.append(
            rollout(slots, kernels, adapters, lengths, max_output_tokens=tokens, **given)
        )
    (ids, logprobs), (ours, own) = results
    assert ours == ids
    for one, two in zip(own, logprobs, strict=True):
        assert one == pytest.approx(two, abs=1e-5)
    return ids


@pytest.mark.parametrize("family", SERVED)
def test_each_family(family):
    compared(SERVED[family])


def test_several_ends_and_least_lengths():
    ids = compared(tiny.llama, tokens=9, ends=(1, 5, 6, 7, 8, 9), min_output_tokens=2)
    assert len({len(row) for row in ids}) > 2


@pytest.mark.parametrize("given", [
    {"temperature": 0.0, "min_output_tokens": 2},
    {"temperature": 0.3},
    {"top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2},  # drawn by torch
    {"targets": ["q_proj", "up_proj"]},
    {"targets": ["o_proj", "v_proj", "down_proj"], "ranks": (2,)},
    {"ranks": (64, 3)},  # too wide to lie below the weights
], ids=str)  # fmt: skip
def test_ways_of_drawing_and_adapters(given):
    compared(tiny.qwen2, **{"ranks": (4, 1), **given})


def test_rows_that_take_the_places_of_others(monkeypatch):
    monkeypatch.setattr(native, "refills_rows", lambda device: True)
    monkeypatch.setattr(decode, "cache_for", lambda device, *layers: FixedCache(*layers))
    lengths = (3, 9, 1, 5, 2)
    given = {"rows": 12, "tokens": 7, "lengths": lengths, "ends": (1, *range(5, 17))}
    compared(SERVED["qwen3-window"], **given)


def test_attention_in_splits(monkeypatch):
    monkeypatch.setattr(operators, "UNSPLIT", 16)
    monkeypatch.setattr(operators, "_SPLIT", 16)
    compared(SERVED["gemma3"], ranks=(4,), tokens=4, lengths=(3, 20))


def test_weights_keep_their_values_and_take_up_other_adapters():
    model = tiny.llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    slots = tiny.population(model, (4, 4))
    for change in range(3):
        tiny.stir(slots, "a0", 50 + change)
        ours, theirs = (
            rollout(slots, kernels, slots.names, max_output_tokens=4) for kernels in ("on", "off")
        )
        assert ours[0] == theirs[0]
        if change == 0:
            places = [p.data_ptr() for p in model.parameters()]
        if change == 1:
            assert [p.data_ptr() for p in model.parameters()] == places
            slots.add("a2", tiny.lora(9))
            tiny.stir(slots, "a2", 9)
    now = {
        k.replace(".base_layer", ""): v for k, v in model.state_dict().items() if "lora" not in k
    }
    assert now.keys() == before.keys()
    assert all((now[name] == value).all() for name, value in before.items())
