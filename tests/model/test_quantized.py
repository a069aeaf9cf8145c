"""A quantised base: weights within half a step, rows apart, gradients exact, a run that repeats."""

import sys

import pytest
import tiny
import torch
from fused_cases import assert_close, fused_gradients, inputs, one_at_a_time
from small_run import outcome, small, stopped_and_resumed

from evo_grpo import run
from evo_grpo.errors import EngineUnavailable, ModelError
from evo_grpo.model import quantized
from evo_grpo.model.base import SharedBase
from evo_grpo.model.digest import base_digest, comparable_digests
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.sources import Source, resolve

WIDE = {"hidden_size": 128, "intermediate_size": 192}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model whose widths both kinds take."""
    path = tmp_path_factory.mktemp("wide")
    tiny.llama(**WIDE).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plain(folder):
    return SharedBase.load(str(folder), device="cpu", tokenizer=object())


@pytest.fixture(scope="module", params=["int8", "nf4"])
def base(folder, request):
    return SharedBase.load(
        str(folder), device="cpu", tokenizer=object(), quantization=request.param
    )


def linears(base):
    return {n: m for n, m in base.model.named_modules() if quantized.is_quantized(m)}


def test_weights_are_within_half_a_step(base, plain):
    originals = dict(plain.model.named_modules())
    layers = linears(base)
    assert len(layers) == 2 * 7
    assert base.head.weight.dtype == torch.float32
    for name, layer in layers.items():
        original = originals[name].weight
        back = quantized.dequantized_weight(layer, torch.float32)
        if base.quantization == "int8":
            step = original.abs().amax(dim=1, keepdim=True) / 127
            # Half a step, and what bitsandbytes loses by rounding to float16 first.
            assert torch.all((back - original).abs() <= (0.5 + 127 / 2**11) * step)
            # 127 is the greatest magnitude of a row, and steps are even.
            assert torch.allclose((back / step).round(), back / step, atol=0.07)
        else:
            blocks = original.reshape(-1, quantized.NF4_BLOCK)
            greatest = blocks.abs().amax(dim=1, keepdim=True)
            error = (back.reshape_as(blocks) - blocks).abs() / greatest
            # The widest gap of NF4's sixteen values is between -1 and -0.696.
            assert error.max() <= 0.1525
            assert len(torch.unique((back.reshape_as(blocks) / greatest).round(decimals=3))) == 16


def test_logits_are_those_of_the_dequantised_weights(base, folder):
    slow = SharedBase.load(str(folder), device="cpu", tokenizer=object())
    for name, layer in linears(base).items():
        weight = slow.model.get_submodule(name).weight
        weight.data.copy_(quantized.dequantized_weight(layer, torch.float32))
    ids = tiny.ids(3, 6)
    with torch.no_grad():
        assert torch.equal(base.logits(base.hidden(ids)), slow.logits(slow.hidden(ids)))


def test_a_row_does_not_feel_the_others(base):
    layer = next(iter(linears(base).values()))
    x = torch.randn(20, 128, generator=torch.Generator().manual_seed(0))
    alone = layer(x)
    worse = x.clone()
    worse[7], worse[8] = 1e4, float("nan")
    others = [i for i in range(20) if i not in (7, 8)]
    assert torch.equal(layer(worse)[others], alone[others])


def test_the_gradient_is_that_of_a_linear_layer(base):
    layer = next(iter(linears(base).values()))
    weight = quantized.dequantized_weight(layer, torch.float32)
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layer(x).sin().sum().backward()
    own, x.grad = x.grad, None
    torch.nn.functional.linear(x, weight).sin().sum().backward()
    assert torch.allclose(own, x.grad, atol=1e-6)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_population_forward_is_that_of_peft_one_at_a_time(folder, kind):
    base = SharedBase.load(str(folder), device="cpu", tokenizer=object(), quantization=kind)
    slots = tiny.population(base, (4, 2))
    assert all(p.dtype == torch.float32 for name in slots.names for p in slots.parameters(name))
    layout = RowLayout(("a0", "a1"), (2, 3))
    input_ids, weights = inputs(layout.rows)
    hidden, gradients = fused_gradients(slots, layout, input_ids, weights)
    expected, apart = one_at_a_time(slots, layout, input_ids, weights)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
    assert_close(gradients, apart, atol=1e-4)


def test_its_digest_is_not_compared_and_packing_does_not_change_the_micro_batch(base, plain):
    digest = base_digest(base)
    assert digest.startswith(f"{base.quantization}:")
    assert not comparable_digests(digest, base_digest(plain))
    assert base.micro_batch_tokens == plain.micro_batch_tokens


def test_it_is_not_written(base, tmp_path):
    with pytest.raises(ModelError, match=r"quantised to .* save adapters alone \(lora_only=True\)"):
        base.save(tmp_path / "base")
    assert not (tmp_path / "base").exists()


def test_nf4_refuses_a_width_that_64_does_not_divide():
    with pytest.raises(ModelError, match=r"expected widths that 64 divides for nf4, got 96 in"):
        SharedBase.load("tiny-sums", device="cpu", quantization="nf4")


def test_a_missing_package_a_gguf_file_and_another_device_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    gguf = Source(name="model.gguf", path=".", gguf_file="model.gguf", local=True)
    for source, device, error, message in (
        (gguf, "cpu", ModelError, "the GGUF file 'model.gguf', which is quantised as it is"),
        (resolve("tiny-sums"), "mps", ModelError, "expected a device cpu or cuda, got 'mps'"),
        (resolve("tiny-sums"), "cpu", EngineUnavailable, r'pip install "evo-grpo\[bitsandbytes\]"'),
    ):
        with pytest.raises(error, match=message):
            quantized.quantization_keywords("int8", source, torch.float32, torch.device(device))


@pytest.mark.slow
def test_a_run_repeats_and_resumes_to_the_bit(tmp_path):
    config = small(engine__quantization="int8")
    whole = run(config, out=tmp_path / "whole")
    stopped = stopped_and_resumed(config, tmp_path / "stopped", ("done", 0))
    assert outcome(whole) == outcome(stopped)
    floats = run(small(), out=tmp_path / "floats")
    assert outcome(whole) != outcome(floats)
