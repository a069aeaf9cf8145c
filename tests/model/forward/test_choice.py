"""When kernels decode, and what is said where they do not."""

from types import SimpleNamespace

import kernel_reference
import pytest
import tiny
import torch
from engine_contract import ids_of, prompts_of

from evo_grpo.errors import RunFailedError
from evo_grpo.model.forward import choice
from evo_grpo.model.forward.fused import population_forward
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.llama.weights import LlamaWeights
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings

KERNELS, TORCH = "KernelDecoder", "LlamaDecoder"
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


def opened(slots, wanted="auto"):
    """The name of the decoder that is opened, in place of which nothing is built."""
    weights = LlamaWeights.of(slots.base, slots.layers)
    layout = RowLayout(tuple(slots.names), (1,) * len(slots.names))
    with (
        pytest.MonkeyPatch.context() as patch,
        population_forward(slots.layers, layout, frozen=True) as fused,
    ):
        for name in (KERNELS, TORCH):
            patch.setattr(choice, name, lambda *given, name=name: name)
        return choice.open_decoder(weights, fused, 9, wanted)


def warned(recwarn):
    return [str(one.message) for one in recwarn if "engine.kernels" in str(one.message)]


def test_auto_takes_kernels_in_half_precision_on_cards_that_serve(pair, on_card, recwarn):
    on_card(pair)
    assert [opened(pair, wanted) for wanted in ("auto", "off")] == [KERNELS, TORCH]
    on_card(pair, torch.float32)
    assert [opened(pair, wanted) for wanted in ("auto", "on")] == [TORCH, KERNELS]
    assert not warned(recwarn)


@pytest.mark.parametrize(("facts", "changes", "ranks", "reason"), [
    ({"version": (7, 5)}, {}, (4,), "compute capability 8.0"),
    ({"triton": False}, {}, (4,), "Triton is not installed"),
    ({}, {"head_dim": 256}, (4,), None),
    ({}, {"head_dim": 258}, (4,), "heads of up to 256"),
    ({}, {"num_attention_heads": 16, "num_key_value_heads": 1}, (4,), None),
    ({}, {"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 8}, (4,), "groups of"),
    ({}, {}, (4, 129), "ranks of up to 128, got 129"),
])  # fmt: skip
def test_what_kernels_do_not_serve_is_named_once(on_card, recwarn, facts, changes, ranks, reason):
    slots = tiny.population(tiny.llama(**changes), ranks)
    on_card(slots, **facts)
    expected = KERNELS if reason is None else TORCH
    assert [opened(slots) for _ in range(2)] == [expected, expected]
    lines = warned(recwarn)
    assert len(lines) == (reason is not None)
    assert all(reason in line for line in lines)


def test_a_cpu_without_the_interpreter(pair, recwarn, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert opened(pair) == TORCH
    assert not warned(recwarn)
    assert opened(pair, "on") == TORCH
    assert "TRITON_INTERPRET" in warned(recwarn)[0]


def drawn(slots, kernels):
    """Tokens by an engine that meets no refusal, whose kernels compute by torch."""
    engine = NativeEngine(slots, AgentSettings(engine={"kernels": kernels}))
    sampling = Sampling(max_output_tokens=4)
    requests = [
        RolloutRequest(i, name, prompts_of(3, 5), 2, sampling, i)
        for i, name in enumerate(slots.names)
    ]
    with pytest.MonkeyPatch.context() as patch, kernel_reference.instead():
        patch.setattr(choice, "_refusal", lambda base: None)
        ids = [ids_of(groups) for groups in engine.rollout(requests)]
    return ids, *engine.decodes_by


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
    (line,) = warned(recwarn)
    assert shown in line
    assert "more" not in line


def test_an_error_beside_the_kernels_is_raised_as_it_is(pair, recwarn, monkeypatch):
    drawn(pair, "on")
    monkeypatch.setattr(NativeEngine, "_pad", lambda *given: {}["prompts"])
    with pytest.raises(KeyError, match="prompts"):
        drawn(pair, "on")
    assert not warned(recwarn)


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
    assert not warned(recwarn)
