"""When kernels decode, and what is said where they do not."""

from types import SimpleNamespace

import kernel_reference
import pytest
import tiny
import torch
from engine_contract import ids_of, prompts_of

from evo_grpo.errors import RunFailedError
from evo_grpo.model.forward.fused import population_forward
from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.model.llama.cuda import choice
from evo_grpo.model.llama.cuda.decode import KernelDecoder
from evo_grpo.model.llama.decode import LlamaDecoder
from evo_grpo.model.llama.weights import LlamaWeights
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings

pytestmark = pytest.mark.filterwarnings("always:engine.kernels:UserWarning")


@pytest.fixture
def on_card(monkeypatch):
    """Bases of the CPU that say that they are on a card with Triton."""

    def card(slots, dtype=torch.bfloat16, version=(9, 0), triton=True):
        monkeypatch.setattr(choice.torch.cuda, "get_device_capability", lambda device: version)
        monkeypatch.setattr(
            choice.importlib.util, "find_spec", lambda name: object() if triton else None
        )
        device = property(lambda self: SimpleNamespace(type="cuda"))
        monkeypatch.setattr(type(slots.base), "device", device)
        monkeypatch.setattr(LlamaWeights, "dtype", property(lambda self: dtype))

    return card


def opened(slots, wanted):
    weights = LlamaWeights.of(slots.base, slots.layers)
    layout = RowLayout(tuple(slots.names), (1,) * len(slots.names))

    def kernels(*given):
        decoder = KernelDecoder.__new__(KernelDecoder)
        decoder.weights, decoder._linears, decoder._described = weights, [], weights.description
        decoder._adapters = ()
        return decoder

    def plain(*given):
        return LlamaDecoder.__new__(LlamaDecoder)

    with (
        pytest.MonkeyPatch.context() as patch,
        population_forward(slots.layers, layout, frozen=True) as fused,
    ):
        patch.setattr(choice, "KernelDecoder", kernels)
        patch.setattr(choice, "LlamaDecoder", plain)
        found = choice.open_decoder(weights, fused, 9, wanted)
    return "kernels" if isinstance(found, KernelDecoder) else "torch"


def said(recwarn):
    return [str(one.message) for one in recwarn if "engine.kernels" in str(one.message)]


def test_auto_takes_kernels_in_half_precision_on_cards_that_serve(pair, on_card, recwarn):
    on_card(pair)
    assert opened(pair, "auto") == "kernels"
    assert opened(pair, "off") == "torch"
    on_card(pair, torch.float32)
    assert opened(pair, "auto") == "torch"
    assert opened(pair, "on") == "kernels"
    assert not said(recwarn)


@pytest.mark.parametrize(("facts", "reason"), [
    ({"version": (7, 5)}, "compute capability 8.0"),
    ({"triton": False}, "Triton is not installed"),
])  # fmt: skip
def test_a_card_that_cannot_is_named_once(pair, on_card, recwarn, facts, reason):
    on_card(pair, **facts)
    assert [opened(pair, "auto") for _ in range(2)] == ["torch", "torch"]
    (line,) = said(recwarn)
    assert reason in line
    assert "engine.kernels" in line


def test_a_cpu_without_the_interpreter(pair, recwarn, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert opened(pair, "auto") == "torch"
    assert not said(recwarn)
    assert opened(pair, "on") == "torch"
    assert "TRITON_INTERPRET" in said(recwarn)[0]


def drawn(slots, kernels):
    """Tokens by an engine that meets no refusal, whose kernels compute by torch."""
    engine = NativeEngine(slots, AgentSettings(engine={"kernels": kernels}))
    sampling = Sampling(max_output_tokens=4)
    asked = [
        RolloutRequest(i, name, prompts_of(3, 5), 2, sampling, i)
        for i, name in enumerate(slots.names)
    ]
    with pytest.MonkeyPatch.context() as patch, kernel_reference.instead():
        patch.setattr(choice, "_refusal", lambda base: None)
        found = [ids_of(groups) for groups in engine.rollout(asked)]
    return found, *engine.decodes_by


@pytest.mark.parametrize(("error", "shown"), [
    (RuntimeError("Failed to find C compiler. Please\nmore"), "Failed to find C compiler"),
    (FileNotFoundError(2, "Python.h"), "Python.h"),
    (ValueError(""), "ValueError"),
])  # fmt: skip
@pytest.mark.parametrize("kernel", ["qkv", "draw_token"])
def test_kernels_that_fail_are_tried_once(pair, recwarn, monkeypatch, kernel, error, shown):
    wanted = drawn(pair, "off")
    assert drawn(pair, "on") == (wanted[0], "kernels")
    tried = []

    def fails(*given):
        tried.append(kernel)
        raise error

    monkeypatch.setattr(kernel_reference, kernel, fails)
    assert [drawn(pair, "on") for _ in range(3)] == [wanted] * 3
    assert len(tried) == 1
    (line,) = said(recwarn)
    assert shown in line
    assert "more" not in line


def test_an_error_beside_the_kernels_is_raised_as_it_is(pair, recwarn, monkeypatch):
    drawn(pair, "on")
    monkeypatch.setattr(NativeEngine, "_pad", lambda *given: {}["prompts"])
    with pytest.raises(KeyError, match="prompts"):
        drawn(pair, "on")
    assert not said(recwarn)


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
])  # fmt: skip
def test_out_of_memory_is_no_reason_to_change(pair, monkeypatch, recwarn, error):
    def fails(*given):
        raise error

    monkeypatch.setattr(kernel_reference, "gate_up", fails)
    with pytest.warns(UserWarning, match="memory"), pytest.raises(RunFailedError, match="memory"):
        drawn(pair, "on")
    assert not said(recwarn)


@pytest.mark.parametrize(("changes", "kernels"), [
    ({"head_dim": 256}, True), ({"head_dim": 258}, False),
    ({"num_attention_heads": 16, "num_key_value_heads": 1}, True),
    ({"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 8}, False),
])  # fmt: skip
def test_bounds(on_card, recwarn, changes, kernels):
    slots = tiny.population(tiny.llama(**changes))
    on_card(slots)
    assert opened(slots, "auto") == ("kernels" if kernels else "torch")
    assert kernels or "they serve heads of up to 256" in said(recwarn)[0]


def test_ranks_past_the_bound(pair, on_card, recwarn, monkeypatch):
    on_card(pair)
    monkeypatch.setattr(choice, "MOST_RANK", 3)
    assert opened(pair, "auto") == "torch"
    assert "ranks of up to 3, got 4" in said(recwarn)[0]
