import json
import math
import sys
from pathlib import Path

import pytest
import tiny
from engine_contract import RolloutContract, ids_of, logprobs_of, prompts, prompts_of
from peft import LoraConfig
from vllm_doubles import build, settings_of

from evo_grpo.errors import ConfigError, RunFailedError
from evo_grpo.model.base import SharedBase
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.rollout.vllm import vllm_engine as module
from evo_grpo.rollout.vllm.vllm_engine import VLLMEngine

TEXTS = ("12+07=", "3+4=")


def calls(double, *names):
    """What was done to the latest engine, by name."""
    return [what for name, what in double.made[-1].calls if name in names]


def order(double):
    return [name for name, _ in double.made[-1].calls]


def requests_for(slots, adapters=("a0", "a1", None), samples=2, **sampling):
    asked = prompts(slots.base, *TEXTS)
    settings = Sampling(**{"max_output_tokens": 4} | sampling)
    return [
        RolloutRequest(i, adapter, asked, samples, settings, 50 + i)
        for i, adapter in enumerate(adapters)
    ]


@pytest.fixture
def own():
    """Agents that a test may change."""
    slots = tiny.population(SharedBase.load("tiny-sums", device="cpu"), (4, 4))
    for index, name in enumerate(slots.names):
        tiny.stir(slots, name, 20 + index, scale=0.5)
    return slots


@pytest.mark.usefixtures("double")
class TestContract(RolloutContract):
    TELLS_BEHIND_FILTERS = False

    @pytest.fixture
    def make(self):
        return build


def test_one_call_for_all_adapters_and_one_for_the_base(slots, double):
    engine = build(slots)
    double.made[-1].calls.clear()
    engine.rollout(requests_for(slots, ("a0", None, "a1", "a2", None)))
    with_adapters, bare = calls(double, "generate")
    assert (with_adapters["rows"], with_adapters["bare"]) == (12, 0)
    assert len(with_adapters["adapters"]) == 3
    assert (bare["rows"], bare["adapters"], bare["bare"]) == (8, [], 8)
    engine.rollout(requests_for(slots, ("a0", "a1")))
    assert len(calls(double, "generate")) == 3
    engine.close()


def test_every_version_has_a_name_an_id_and_a_path_of_its_own(own, double, monkeypatch):
    engine, requested = build(own), []
    sampler = double.made[-1]._sampler
    sample = sampler.sample
    monkeypatch.setattr(
        sampler,
        "sample",
        lambda rows: requested.append({row[2] for row in rows if row[2]}) or sample(rows),
    )
    answers = []
    for change in range(3):
        tiny.stir(own, "a0", 70 + change, scale=0.5)
        own.mark_changed("a0")
        answers.append(ids_of(engine.rollout(requests_for(own, ("a0", "a1"), top_k=1))[0]))
        engine.rollout(requests_for(own, ("a0", "a1")))
    assert answers[0] != answers[1] != answers[2]
    seen = set().union(*requested)
    for part in ("lora_name", "lora_int_id", "lora_path"):
        assert len({getattr(one, part) for one in seen}) == 4  # three of a0, one of a1
    assert [len(one) for one in requested] == [2] * 6
    # What nobody asks for any more is gone, from vLLM and from the disk.
    removed = [what["id"] for what in calls(double, "remove_lora")]
    assert len(removed) == len(set(removed)) == 3  # with the one that vLLM was tried with
    assert {one.lora_int_id for one in requested[-1]}.isdisjoint(removed)
    kept = {one.lora_path for one in requested[-1]}
    assert {str(p) for p in Path(next(iter(kept))).parent.iterdir()} == kept
    engine.close()
    assert not Path(next(iter(kept))).parent.exists()


@pytest.mark.parametrize(
    ("lora", "scaling"),
    [
        ({"r": 4, "lora_alpha": 12}, [3.0]),
        ({"r": 4, "lora_alpha": 8, "use_rslora": True}, [4.0]),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2, "up_proj": 7}}, [8 / 7, 2.0, 4.0]),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {"o_proj": 20}}, [2.0, 5.0]),
    ],
)
@pytest.mark.usefixtures("double")
def test_whatever_pefts_settings_say_the_adapter_acts_as_it_does_there(lora, scaling):
    base = SharedBase.load("tiny-sums", device="cpu")
    slots = tiny.AdapterSlots(
        base, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **lora)
    )
    slots.add("a0")
    tiny.stir(slots, "a0", 3, scale=0.4)
    assert sorted({layer.scaling["a0"] for layer in slots.layers.values()}) == scaling
    engine = build(slots)
    (request,) = requests_for(slots, ("a0",))
    for group in engine.rollout([request])[0]:
        for completion in group.completions:
            expected = logprobs_of(slots, request, group.prompt, completion)
            assert completion.logprobs == pytest.approx(expected, abs=2e-4)
    engine.close()


def test_every_adapter_reaches_vllm_with_its_own_layers(own, double):
    own.rebuild("a1", tiny.lora(2, target_modules=["up_proj", "k_proj"]))
    tiny.stir(own, "a1", 3, scale=0.5)
    engine = build(own)
    requests = requests_for(own, ("a0", "a1"))
    for request, groups in zip(requests, engine.rollout(requests), strict=True):
        for group in groups:
            for completion in group.completions:
                expected = logprobs_of(own, request, group.prompt, completion)
                assert completion.logprobs == pytest.approx(expected, abs=2e-4)
    configs = [json.loads(file.read_text()) for file in engine._folders[1].rglob("*.json")]
    assert ["k_proj", "up_proj"] in [config["target_modules"] for config in configs]
    engine.close()


def test_an_agent_that_overflows_reaches_no_other(own, double):
    engine = build(own)
    healthy = requests_for(own, ("a0", None))
    before = engine.rollout(healthy)
    for parameter in own.parameters("a1"):
        parameter.data.mul_(1e30)
    assert all(bool(p.isfinite().all()) for p in own.parameters("a1"))
    own.mark_changed("a1")
    for _ in range(2):
        first, broken, base = [*engine.rollout(requests_for(own, ("a0", "a1"))), before[1]]
        assert [first, base] == before
        assert all(math.isnan(v) for g in broken for c in g.completions for v in c.logprobs)
        assert engine.rollout(healthy) == before
    # Also where log-probs are not told, so that an evaluation hears of it.
    (shaped,) = engine.rollout(requests_for(own, ("a1",), top_k=3))
    assert all(math.isnan(v) for g in shaped for c in g.completions for v in c.logprobs)
    engine.close()


@pytest.mark.usefixtures("double")
def test_weights_that_are_not_finite_never_reach_vllm(own):
    engine = build(own)
    before = engine.rollout(requests_for(own))
    own.parameters("a1")[0].data[0, 0] = math.inf
    own.mark_changed("a1")
    after = engine.rollout(requests_for(own))
    assert [after[0], after[2]] == [before[0], before[2]]
    assert all(math.isnan(v) for g in after[1] for c in g.completions for v in c.logprobs)
    assert not [p for p in engine._folders[1].iterdir() if p.name.startswith("a1-")]
    engine.close()


@pytest.mark.slow
def test_a_larger_rank_starts_vllm_anew(own, double):
    engine = build(own)
    assert double.made[-1].keywords["max_lora_rank"] == 8
    first = double.made[-1]
    before = engine.rollout(requests_for(own))
    own.add("a2", LoraConfig(r=24, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert engine.rollout(requests_for(own)) == before
    assert double.made[-1] is first
    after = engine.rollout(requests_for(own, ("a0", "a1", None, "a2")))
    assert after[:3] == before
    assert double.made[-1] is not first
    assert double.made[-1].keywords["max_lora_rank"] == 32
    engine.close()


def test_vllm_is_started_for_the_largest_rank_that_is_searched(own, double):
    settings = settings_of().replace(hyperparameters={"lora.r": {"min": 2, "max": 24}})
    engine = VLLMEngine(own, settings)
    assert double.made[-1].keywords["max_lora_rank"] == 32
    engine.close()


@pytest.mark.usefixtures("double")
def test_a_rank_beyond_the_one_that_was_asked_for(own):
    with pytest.raises(ConfigError, match=r"max_lora_rank: expected at least 4, .* got 2; raise"):
        build(own, max_lora_rank=2)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_stop_strings_end_a_completion(own):
    engine = build(own, algorithm={"stop": ["1"]})
    free = build(own)
    (request,) = requests_for(own, ("a0",), samples=8, max_output_tokens=6, temperature=1.5)
    decode = own.base.tokenizer.decode
    stopped = 0
    for whole, cut in zip(free.rollout([request])[0], engine.rollout([request])[0], strict=True):
        for one, other in zip(whole.completions, cut.completions, strict=True):
            assert one.token_ids[: len(other.token_ids)] == other.token_ids
            assert "1" not in decode(other.token_ids[:-1])
            if "1" in decode(one.token_ids):
                stopped += 1
                assert "1" not in other.text
                assert other.ended
            else:
                assert other == one
    assert stopped > 3
    engine.close()
    free.close()


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
@pytest.mark.usefixtures("double")
def test_vllms_own_penalties_shape_the_draws(own, penalty):
    (request,) = requests_for(own, ("a0",), samples=8, max_output_tokens=6, temperature=1.5)
    (plain,) = build(own).rollout([request])
    engine = build(own, **{penalty: 2.0})
    (penalised,) = engine.rollout([request])
    assert ids_of([penalised[0]]) != ids_of([plain[0]])
    assert all(c.logprobs is None for g in penalised for c in g.completions)
    engine.close()


def test_a_completion_ends_with_the_context(own, double):
    engine = build(own, algorithm={"max_model_len": 12})
    assert double.made[-1].keywords["max_model_len"] == 12
    request = RolloutRequest(
        0, "a0", prompts_of(9, 3), 3, Sampling(max_output_tokens=30, min_output_tokens=30), 1
    )
    short, long = engine.rollout([request])[0]
    assert {len(c.token_ids) for c in short.completions} == {3}
    assert {len(c.token_ids) for c in long.completions} == {9}
    engine.close()


# --- sleeping -------------------------------------------------------------------------------------


@pytest.fixture
def asleep(own, double, monkeypatch):
    """An engine on a device that can sleep, after its first rollout."""
    monkeypatch.setattr(module, "can_sleep", lambda base: True)
    monkeypatch.setattr("evo_grpo.rollout.vllm.process.can_sleep", lambda base: True)

    def make(level):
        engine = build(own, sleep_level=level)
        engine.rollout(requests_for(own))
        double.made[-1].calls.clear()
        return engine

    return make


@pytest.mark.parametrize(
    ("level", "waking"),
    [
        (1, [("wake_up", None)]),
        (2, [("wake_up", ["weights"]), ("reload_weights", None), ("wake_up", ["kv_cache"])]),
    ],
)
def test_waking_restores_base_and_adapters_and_is_compared(asleep, own, double, level, waking):
    engine = asleep(level)
    before = engine.rollout(requests_for(own))
    double.made[-1].calls.clear()
    engine.sleep()
    engine.sleep()
    assert order(double) == ["generate", "generate", "reset_prefix_cache", "sleep"]
    assert calls(double, "sleep") == [{"level": level}]
    double.made[-1].calls.clear()
    engine.wake()
    engine.wake()
    done = [(what.get("method", name), what.get("tags")) for name, what in double.made[-1].calls]
    assert (
        done == [*waking, ("remove_lora", None), ("remove_lora", None)] + [("generate", None)] * 2
    )
    assert engine.rollout(requests_for(own)) == before
    engine.close()


@pytest.mark.parametrize("lost", ["the base", "an adapter"])
def test_a_base_or_an_adapter_that_did_not_come_back_ends_the_run(asleep, own, double, lost):
    engine = asleep(2)
    engine.sleep()
    sampler = double.made[-1]._sampler
    if lost == "the base":
        sampler.reload = lambda: None
    else:
        sampler.remove = lambda number: None
    with pytest.raises(
        RunFailedError, match="samples differently after sleeping than before: log-p"
    ):
        engine.wake()
    engine.close()


def test_a_vllm_that_cannot_load_its_base_again_is_refused_at_once(asleep, monkeypatch):
    module = "vllm.v1.worker.lora_model_runner_mixin"
    monkeypatch.delattr(f"{module}.LoRAModelRunnerMixin.reset_lora_state")
    with pytest.raises(
        RunFailedError,
        match=r"sleep_level: expected 0 or 1 with vLLM 0\.0\.double, .* got 2; set it to 1, or",
    ):
        asleep(2)
    asleep(1).close()
    # One that has moved it says nothing of what it can.
    monkeypatch.setitem(sys.modules, module, None)
    asleep(2).close()


@pytest.mark.parametrize("level", [0, 1])
def test_where_nothing_sleeps_nothing_is_asked(own, double, level):
    """On a CPU, whatever the level; and at level 0, whatever the device."""
    engine = build(own, sleep_level=level)
    assert double.made[-1].keywords["enable_sleep_mode"] is False
    double.made[-1].calls.clear()
    engine.sleep()
    engine.wake()
    assert order(double) == []
    engine.close()
