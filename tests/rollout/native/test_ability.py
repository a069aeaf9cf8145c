import math
from dataclasses import replace
from functools import partial

import architectures
import pytest
import tiny
import torch
from engine_contract import (
    RolloutContract,
    greedy_by_transformers,
    ids_of,
    logprobs_of,
    prompts_of,
)
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    MoshiConfig,
    MoshiForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from evo_grpo.errors import ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.ability import mixes_lengths, window_of
from evo_grpo.rollout.native.decoder import ModuleDecoder
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling

LENGTHS = (3, 9, 1, 6)
HALF = (torch.bfloat16, torch.float16)
OUTPUT = 8
pytestmark = pytest.mark.filterwarnings("ignore:model .tiny.. all-linear adapts:UserWarning")

MODELS = {
    "mpt": (architectures.mpt, {}),
    "falcon": (architectures.falcon, {}),
    "bart": (architectures.bart, {}),
    "opt": (architectures.opt, {}),
    "gpt-neo": (architectures.gpt_neo, {}),
    "gemma3": (architectures.gemma3, {}),
    "mistral-window": (tiny.mistral, {"sliding_window": 6}),
    "mixtral-window": (architectures.mixtral, {"sliding_window": 6}),
    "qwen2-window": (
        tiny.qwen2,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
}


def asked_of(slots, samples=2, **sampling):
    settings = Sampling(**{"max_output_tokens": OUTPUT} | sampling)
    return [
        RolloutRequest(i, name, prompts_of(*LENGTHS), samples, settings, 7 + i)
        for i, name in enumerate(slots.names)
    ]


def pairs(requests, out):
    for request, groups in zip(requests, out, strict=True):
        for group in groups:
            for completion in group.completions:
                yield request, group.prompt, completion


@pytest.mark.parametrize(("build", "changes"), MODELS.values(), ids=MODELS)
class TestUnequalPrompts:
    def test_recorded_log_probs_are_those_of_one_forward(self, build, changes):
        """Prompts of four lengths, and completions that outgrow a window."""
        slots = tiny.population(build(**changes), (4, 2))
        requests = asked_of(slots, temperature=0.9)
        for request, prompt, done in pairs(requests, NativeEngine(slots).rollout(requests)):
            expected = logprobs_of(slots, request, prompt, done)
            assert done.logprobs == pytest.approx(expected, abs=1e-5)

    @pytest.mark.filterwarnings("ignore:.*generation flags are not valid.*:UserWarning")
    def test_greedy_equals_generate(self, build, changes):
        slots = tiny.population(build(**changes), (4, 2))
        requests = asked_of(slots, samples=1, temperature=0.0)
        for request, prompt, done in pairs(requests, NativeEngine(slots).rollout(requests)):
            expected = greedy_by_transformers(slots, request.adapter, prompt, OUTPUT)
            assert done.token_ids == expected


def one_length_at_a_time(slots):
    """An engine that decodes a Llama as it decodes models that padding would mislead."""
    slots.base.specialized = False
    engine = NativeEngine(slots)
    slots.base.specialized = True
    engine.mixes_lengths = False
    return engine


class TestEqualLengthContract(RolloutContract):
    """Every promise of an engine, one length of prompts at a time."""

    @pytest.fixture
    def make(self):
        return one_length_at_a_time


def counted(entry, calls):
    """Wrap a trunk's entry: each call adds its number of rows to a list."""

    def wrapped(**inputs):
        calls.append(len(inputs["input_ids"]))
        return entry(**inputs)

    return wrapped


class TestAbility:
    @pytest.mark.parametrize(
        ("build", "expected"),
        [
            (tiny.llama, True),
            (tiny.gpt2, True),
            (architectures.opt, True),
            (partial(architectures.gemma3, sliding_window=30), True),
            (architectures.mpt, False),
            (architectures.falcon, False),
            (architectures.bart, False),
        ],
    )
    def test_it_is_found_out(self, build, expected):
        assert mixes_lengths(SharedBase(build()), {}) is expected

    @pytest.mark.parametrize(
        ("build", "expected", "dtype"),
        [
            (architectures.opt, True, torch.bfloat16),
            (partial(architectures.gemma3, sliding_window=30), True, torch.bfloat16),
            (architectures.mpt, False, torch.bfloat16),
            (tiny.qwen2, True, torch.float16),
            (architectures.mpt, False, torch.float16),
        ],
    )
    def test_half_precision_hides_nothing(self, build, expected, dtype):
        """Weights as small as those of transformers: wrong positions move states by percents."""
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(0.02 / parameter.std())
        base = SharedBase(model.to(dtype))
        assert mixes_lengths(base, {}) is expected

    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    @pytest.mark.parametrize(
        ("build", "expected"),
        [(tiny.gpt2, True), (architectures.mpt, False)],
    )
    def test_what_tensor_cores_may_round_is_told_from_wrong_positions(
        self, build, expected, dtype, monkeypatch
    ):
        """With a tolerance that both are within, and results that are off by a few thousandths."""
        monkeypatch.setattr("evo_grpo.model.probing.tolerance", lambda _: 0.9)
        base = SharedBase(build().to(dtype))
        original, draws = base.entry, torch.Generator().manual_seed(3)

        def rounded(**inputs):
            out = original(**inputs)
            return out * (1 + 4e-3 * torch.randn(out.shape, generator=draws, dtype=out.dtype))

        base.entry = rounded
        assert mixes_lengths(base, {}) is expected

    @pytest.mark.parametrize("dtype", HALF)
    def test_a_layer_that_knows_half_precision_alone_is_decoded_by_length(self, dtype):
        """And what is not known to be right is not relied on."""
        model = tiny.gpt2().to(dtype)
        block = model.transformer.h[0]
        original = block.forward

        def narrow(x, *args, **kwargs):
            if x.dtype != dtype:
                raise RuntimeError("a kernel for half precision")
            return original(x, *args, **kwargs)

        block.forward = narrow
        base = SharedBase(model, None, "tiny")
        assert not mixes_lengths(base, {})

    @pytest.mark.parametrize("build", [tiny.llama, architectures.mpt])
    def test_it_is_found_out_once_per_base(self, build):
        runs = []
        base = SharedBase(build())
        base.entry = counted(base.entry, runs)
        mixes_lengths(base, {})
        before = len(runs)
        assert before
        mixes_lengths(base, {})
        assert len(runs) == before

    def test_it_goes_past_the_adapters_and_takes_no_draw(self):
        slots = tiny.population(architectures.mpt(), (4, 2))
        seen = []
        for layer in slots.layers.values():
            for module in layer.lora_A.values():
                module.register_forward_hook(lambda *_: seen.append(1))
        state = torch.get_rng_state()
        NativeEngine(slots)
        assert torch.equal(state, torch.get_rng_state())
        assert not seen

    @pytest.mark.parametrize(
        ("build", "changes", "window"),
        [
            (tiny.llama, {}, 0),
            (tiny.mistral, {"sliding_window": 6}, 6),
            (tiny.qwen2, {"sliding_window": 6}, 0),
            (architectures.gemma3, {}, 6),
            (architectures.gpt_neo, {}, 6),
            (architectures.mixtral, {}, 0),
        ],
    )
    def test_windows(self, build, changes, window):
        assert window_of(SharedBase(build(**changes))) == window

    def test_a_window_that_no_layer_has_counts_for_nothing(self):
        base = SharedBase(architectures.gemma3(layer_types=["full_attention"] * 2))
        assert base.model.config.sliding_window == 6
        assert window_of(base) == 0
        base = SharedBase(tiny.mistral(sliding_window=6))
        base.model.config.use_sliding_window = False
        assert window_of(base) == 0

    @pytest.mark.parametrize(
        ("window", "together"), [(10, False), (16, False), (17, True), (30, True)]
    )
    def test_rows_that_outgrow_a_window_that_the_probe_did_not(self, window, together):
        """Rows of nine and eight tokens: up to 17, of which the last one attends to nothing."""
        slots = tiny.population(architectures.gemma3(sliding_window=window), (4, 2))
        slots.base.specialized = False
        engine = NativeEngine(slots)
        assert engine.mixes_lengths
        calls = []
        slots.base.entry = counted(slots.base.entry, calls)
        requests = asked_of(slots, temperature=0.9)
        out = engine.rollout(requests)
        assert (calls[0] == len(slots.names) * len(LENGTHS)) is together
        longest = max(
            len(prompt.token_ids + done.token_ids) for _, prompt, done in pairs(requests, out)
        )
        assert longest == max(LENGTHS) + OUTPUT
        for request, prompt, done in pairs(requests, out):
            expected = logprobs_of(slots, request, prompt, done)
            assert done.logprobs == pytest.approx(expected, abs=1e-5)

    def test_draws_do_not_depend_on_the_batch(self):
        """The same prompts, alone and among those of other lengths."""
        slots = tiny.population(architectures.mpt(), (4,))
        (request,) = asked_of(slots)
        (together,) = NativeEngine(slots).rollout([request])
        for place, prompt in enumerate(request.prompts):
            alone = replace(request, prompts=[prompt], keys=[place])
            assert ids_of(NativeEngine(slots).rollout([alone])[0]) == ids_of([together[place]])


class TestRefused:
    def test_a_state_that_no_cache_holds(self):
        config = RwkvConfig(
            vocab_size=tiny.VOCABULARY,
            hidden_size=tiny.HIDDEN,
            num_hidden_layers=2,
            context_length=tiny.CONTEXT,
            eos_token_id=tiny.EOS,
            bos_token_id=2,
        )
        model = RwkvForCausalLM(config).eval()
        model.generation_config.eos_token_id = tiny.EOS
        with pytest.raises(ModelError, match=r"model 'tiny' \(RwkvForCausalLM\): "):
            mixes_lengths(SharedBase(model, None, "tiny"), {})

    def test_a_cache_that_forgets(self):
        """Decoding that is off one forward is refused, whatever the reason."""
        model = tiny.gpt2()
        original = model.transformer.forward

        def forgetful(*args, past_key_values=None, **kwargs):
            return original(*args, **kwargs)

        model.transformer.forward = forgetful
        slots = tiny.population(model, (4,))
        with pytest.raises(
            ModelError,
            match=r"\(GPT2LMHeadModel\): the native engine cannot decode it: token by token .*; use"
            r" another model, or engine.rollout: vllm",
        ):
            NativeEngine(slots)

    def test_a_cache_that_loses_its_rows_when_one_leaves(self, monkeypatch):
        """Decoding is right until a finished row leaves the batch."""
        original = ModuleDecoder.keep

        def shifted(self, rows):
            original(self, rows if len(rows) == 3 else rows - 1)

        monkeypatch.setattr(ModuleDecoder, "keep", shifted)
        with pytest.raises(ModelError, match="the native engine cannot decode it"):
            mixes_lengths(SharedBase(tiny.gpt2()), {})

    def test_too_little_memory_is_no_fault_of_the_model(self):
        base = SharedBase(architectures.mpt())

        def failing(**_):
            raise torch.OutOfMemoryError("CUDA out of memory")

        base.entry = failing
        with pytest.raises(torch.OutOfMemoryError):
            mixes_lengths(base, {})


def mamba2(**changes):
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=64, hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=1,
        num_hidden_layers=2, chunk_size=4, pad_token_id=0, eos_token_id=1, **changes,
    )  # fmt: skip
    return Mamba2ForCausalLM(config).eval()


@pytest.mark.parametrize("limit", [(0.001, math.inf), (0.0, 0.1)])
def test_time_steps_that_the_forward_alone_bounds_are_refused(limit):
    base = SharedBase(mamba2())
    assert not mixes_lengths(base, {})
    base = SharedBase(mamba2(time_step_limit=limit))
    with pytest.raises(ModelError, match=r"mixer clamps its time steps to .*engine.rollout"):
        mixes_lengths(base, {})


def test_a_window_that_the_cache_alone_has_is_refused_where_rows_may_outgrow_it():
    def moshi(window):
        torch.manual_seed(0)
        config = MoshiConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
            max_position_embeddings=16, sliding_window=window, pad_token_id=0, eos_token_id=1,
        )  # fmt: skip
        return SharedBase(MoshiForCausalLM(config).eval())

    assert mixes_lengths(moshi(16), {})
    with pytest.raises(ModelError, match=r"its cache keeps 6 tokens.*max_position_embeddings: 6"):
        mixes_lengths(moshi(6), {})
