"""Whole rollouts with the kernels in Triton's interpreter, against those by torch."""

import os

import pytest
import tiny
from architectures import FAMILIES
from engine_contract import prompts_of

from evo_grpo.model.llama import decode
from evo_grpo.model.llama.cache import FixedCache
from evo_grpo.model.llama.cuda import operators
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native import engine as native
from evo_grpo.rollout.native.engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings, EngineConfig

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: make test-kernels", allow_module_level=True)
pytestmark = pytest.mark.kernels

SERVED = {"llama": tiny.llama, "qwen2": tiny.qwen2} | {
    name: build for name, build in FAMILIES.items() if not name.startswith("olmo")
}


def sampled(
    build,
    kernels,
    *,
    ranks=(4, 1, 7),
    tokens=5,
    lengths=(3, 7, 1),
    rows=None,
    targets=None,
    ends=(1,),
    **sampling,
):
    """Tokens and log-probs of some agents and the base alone."""
    changes = {} if targets is None else {"target_modules": targets}
    slots = tiny.population(build(), ranks, **changes)
    slots.base.model.generation_config.eos_token_id = list(ends)
    asked = [
        RolloutRequest(
            i,
            name,
            prompts_of(*lengths),
            1 + (i == 1),
            Sampling(max_output_tokens=tokens, **sampling),
            i,
        )
        for i, name in enumerate((*slots.names, None))
    ]
    settings = EngineConfig(kernels=kernels, max_decode_rows=rows)
    groups = NativeEngine(slots, AgentSettings(engine=settings)).rollout(asked)
    assert "kernels refused" not in slots.base.derived
    done = [c for mine in groups for group in mine for c in group.completions]
    return [c.token_ids for c in done], [c.logprobs for c in done]


def compared(build, **given):
    tokens, logprobs = sampled(build, "off", **given)
    ours, own = sampled(build, "on", **given)
    assert ours == tokens
    for one, two in zip(own, logprobs, strict=True):
        assert one == pytest.approx(two, abs=1e-5)
    return tokens


@pytest.mark.parametrize("family", SERVED)
def test_each_family(family):
    compared(SERVED[family])


def test_several_ends_and_least_lengths():
    tokens = compared(tiny.llama, tokens=9, ends=(1, 5, 6, 7, 8, 9), min_output_tokens=2)
    assert len({len(row) for row in tokens}) > 2


def test_greedy_and_cold_rows():
    compared(tiny.qwen2, ranks=(4, 1), temperature=0.0, min_output_tokens=2)
    compared(tiny.qwen2, ranks=(4, 1), temperature=0.3)


def test_filters_are_drawn_by_torch():
    compared(tiny.llama, top_k=5, top_p=0.9, repetition_penalty=1.2)


def test_some_layers_adapted():
    compared(tiny.llama, targets=["q_proj", "up_proj"])
    compared(tiny.llama, ranks=(2,), targets=["o_proj", "v_proj", "down_proj"])


def test_ranks_too_wide_to_lie_below_the_weights():
    compared(tiny.llama, ranks=(64, 3))


def test_rows_that_take_the_places_of_others(monkeypatch):
    monkeypatch.setattr(native, "hands_on_places", lambda device: True)
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
    engine = NativeEngine(slots, AgentSettings(engine=EngineConfig(kernels="on")))
    plain = NativeEngine(slots, AgentSettings(engine=EngineConfig(kernels="off")))
    for change in range(3):
        tiny.stir(slots, "a0", 50 + change)
        asked = [
            RolloutRequest(i, name, prompts_of(3, 4), 1, Sampling(max_output_tokens=4), i)
            for i, name in enumerate(slots.names)
        ]
        ours, wanted = engine.rollout(asked), plain.rollout(asked)
        assert [[c.token_ids for g in m for c in g.completions] for m in ours] == [
            [c.token_ids for g in m for c in g.completions] for m in wanted
        ]
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
