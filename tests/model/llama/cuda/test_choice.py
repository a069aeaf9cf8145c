"""When kernels decode, and what is said where they do not."""

import logging
from types import SimpleNamespace

import pytest
import tiny
import torch

from evo_grpo.model.forward.fused import population_forward
from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.model.llama.cuda import choice
from evo_grpo.model.llama.cuda.decode import KernelDecoder
from evo_grpo.model.llama.decode import LlamaDecoder
from evo_grpo.model.llama.weights import LlamaWeights


@pytest.fixture
def on_card(monkeypatch):
    """Bases of the CPU that say that they are on a card with Triton."""

    def card(slots, dtype=torch.bfloat16, version=(9, 0), triton=True):
        monkeypatch.setattr(choice.torch.cuda, "get_device_capability", lambda device: version)
        monkeypatch.setattr(choice.torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(
            choice.importlib.util, "find_spec", lambda name: object() if triton else None
        )
        monkeypatch.setattr(KernelDecoder, "rehearse", lambda self: None)
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


def said(caplog):
    return [r.message for r in caplog.records if r.levelno == logging.WARNING]


def test_auto_takes_kernels_in_half_precision_on_cards_that_serve(pair, on_card, caplog):
    on_card(pair)
    assert opened(pair, "auto") == "kernels"
    assert opened(pair, "off") == "torch"
    on_card(pair, torch.float32)
    assert opened(pair, "auto") == "torch"
    assert opened(pair, "on") == "kernels"
    assert not said(caplog)


@pytest.mark.parametrize(("facts", "reason"), [
    ({"version": (7, 5)}, "compute capability 8.0"),
    ({"triton": False}, "Triton is not installed"),
])  # fmt: skip
def test_a_card_that_cannot_is_named_once(pair, on_card, caplog, facts, reason):
    on_card(pair, **facts)
    assert [opened(pair, "auto") for _ in range(2)] == ["torch", "torch"]
    (line,) = said(caplog)
    assert reason in line
    assert "engine.kernels" in line


def test_a_cpu_without_the_interpreter(pair, caplog, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert opened(pair, "auto") == "torch"
    assert not said(caplog)
    assert opened(pair, "on") == "torch"
    assert "TRITON_INTERPRET" in said(caplog)[0]


@pytest.mark.parametrize(("error", "shown"), [
    (RuntimeError("Failed to find C compiler. Please\nmore"), "Failed to find C compiler"),
    (FileNotFoundError(2, "Python.h"), "Python.h"),
    (ValueError(""), "ValueError"),
])  # fmt: skip
def test_kernels_that_fail_are_tried_once(pair, on_card, caplog, monkeypatch, error, shown):
    on_card(pair)
    tried = []

    def fails(self):
        tried.append(self)
        raise error

    monkeypatch.setattr(KernelDecoder, "rehearse", fails)
    assert [opened(pair, "auto") for _ in range(3)] == ["torch"] * 3
    assert len(tried) == 1
    (line,) = said(caplog)
    assert shown in line
    assert "more" not in line


def test_kernels_that_ran_are_not_rehearsed_again(pair, on_card, monkeypatch):
    on_card(pair)
    tried = []
    monkeypatch.setattr(KernelDecoder, "rehearse", lambda self: tried.append(self))
    assert [opened(pair, "auto") for _ in range(3)] == ["kernels"] * 3
    assert len(tried) == 1


def test_out_of_memory_is_no_reason_to_change(pair, on_card, monkeypatch):
    on_card(pair)

    def fails(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(KernelDecoder, "rehearse", fails)
    with pytest.raises(torch.OutOfMemoryError):
        opened(pair, "auto")


@pytest.mark.parametrize(("changes", "kernels"), [
    ({"head_dim": 256}, True), ({"head_dim": 258}, False),
    ({"num_attention_heads": 16, "num_key_value_heads": 1}, True),
    ({"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 8}, False),
])  # fmt: skip
def test_bounds(on_card, caplog, changes, kernels):
    slots = tiny.population(tiny.llama(**changes))
    on_card(slots)
    assert opened(slots, "auto") == ("kernels" if kernels else "torch")
    assert kernels or "they serve heads of up to 256" in said(caplog)[0]


def test_ranks_past_the_bound(pair, on_card, caplog, monkeypatch):
    on_card(pair)
    monkeypatch.setattr(choice, "MOST_RANK", 3)
    assert opened(pair, "auto") == "torch"
    assert "ranks of up to 3, got 4" in said(caplog)[0]
