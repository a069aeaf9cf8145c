"""Each function against the plain operations it stands for, values and gradients."""

from functools import partial

import pytest
import tiny
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from evo_grpo.model.forward.stacks import make_chunks
from evo_grpo.model.llama.adapter_views import JoinedAdapters, Part
from evo_grpo.model.llama.functions import Glu, LoraLinear, RmsNorm, Rotate, Span


def one_part(a, b, scale=None):
    """The adapters of a single layer: A (N, R, in), B (N, out, R)."""
    part = Part("layer", slice(0, a.shape[1]), slice(0, b.shape[1]))
    scale = torch.ones(a.shape[:2]) if scale is None else scale
    return JoinedAdapters(a, (b,), scale, (part,), b.shape[1])


CPU = torch.device("cpu")
NO_TABLE = torch.zeros(1, 1)


def compare(fast, plain, *inputs, dtype=torch.float32, tolerance=2e-6):
    """Both functions take the inputs; outputs and all gradients must agree."""
    results = []
    for function in (fast, plain):
        own = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        out = function(*own)
        out = out if isinstance(out, tuple) else (out,)
        sum((o.float() * tiny.noise(o.shape, i)).sum() for i, o in enumerate(out)).backward()
        results.append([*out, *(x.grad for x in own)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance * 5, rtol=tolerance * 5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
def test_rms_norm_equals_the_models(dtype, tolerance):
    module = LlamaRMSNorm(24, eps=1e-5).requires_grad_(False)
    module.weight.copy_(tiny.noise((24,), 1))
    module = module.to(dtype)
    compare(
        lambda x: RmsNorm.apply(x, module.weight, 1e-5),
        module,
        tiny.noise((3, 5, 24), 2) * 3,
        dtype=dtype,
        tolerance=tolerance,
    )


def test_rms_norm_of_a_zero_row_is_zero_and_has_a_finite_gradient():
    x = torch.zeros(2, 8, requires_grad=True)
    y = RmsNorm.apply(x, torch.ones(8), 1e-6)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 8))
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("gelu", [False, True])
def test_glu(gelu):
    active = partial(functional.gelu, approximate="tanh") if gelu else functional.silu
    compare(
        lambda both: Glu.apply(both, gelu),
        lambda both: active(both[..., :6]) * both[..., 6:],
        tiny.noise((2, 3, 12), 3),
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
def test_rotate_equals_the_models(heads, kv_heads):
    columns, size = 7, 8
    angles = torch.arange(columns)[:, None] * 10000.0 ** -(torch.arange(4) / 4)
    cos, sin = (f(angles).repeat(1, 2) for f in (torch.cos, torch.sin))
    signed = torch.cat([-sin[:, :4], sin[:, 4:]], dim=-1)

    def plain(joined):
        parts = joined.unflatten(-1, (-1, size)).transpose(1, 2)
        q, k, v = parts.split((heads, kv_heads, kv_heads), dim=1)
        return *apply_rotary_pos_emb(q, k, cos[None], sin[None]), v

    span = Span(0, 3, columns, make_chunks((3,), columns, 0, CPU), cos, signed)
    compare(
        lambda joined: Rotate.apply(joined.flatten(0, 1), heads, kv_heads, (span,)),
        plain,
        tiny.noise((3, columns, (heads + 2 * kv_heads) * size), 4),
    )


@pytest.mark.parametrize(
    ("counts", "bias", "residual"),
    [
        *((counts, True, True) for counts in [(4,), (2, 2, 2), (2, 4, 6), (3, 1, 5), (0, 3, 2)]),
        *(((3, 1, 5), *flags) for flags in [(False, False), (False, True), (True, False)]),
    ],
)
def test_lora_linear(counts, bias, residual):
    agents, rows, columns = len(counts), sum(counts), 5
    weight = tiny.noise((10, 6), 5)
    shift = tiny.noise((10,), 6) if bias else None
    span = Span(0, rows, columns, make_chunks(counts, columns, 16, CPU), NO_TABLE, NO_TABLE)
    owner = torch.arange(agents).repeat_interleave(torch.tensor(counts))
    scale = tiny.noise((agents, 3), 11)

    def plain(x, a, b, old):
        low = torch.bmm(x, a[owner].transpose(1, 2)) * scale[owner][:, None]
        delta = torch.bmm(low, b[owner].transpose(1, 2))
        return (old if residual else 0 * old) + functional.linear(x, weight, shift) + delta

    def fast(x, a, b, old):
        kept = old.flatten(0, 1) if residual else None
        adapters = one_part(a, b, scale)
        out = LoraLinear.apply(x.flatten(0, 1), kept, weight, shift, (span,), adapters, a, b)
        out = out.view(old.shape)
        return out if residual else out + 0 * old

    compare(
        fast,
        plain,
        tiny.noise((rows, columns, 6), 7),
        tiny.noise((agents, 3, 6), 8),
        tiny.noise((agents, 10, 3), 9),
        tiny.noise((rows, columns, 10), 10),
        tolerance=1e-5,
    )


def test_lora_linear_leaves_out_the_gradient_nobody_wants():
    spans = (Span(0, 4, 3, make_chunks((2, 2), 3, 16, CPU), NO_TABLE, NO_TABLE),)
    x, weight = tiny.noise((12, 6), 1), tiny.noise((5, 6), 2)
    a = tiny.noise((2, 2, 6), 3).requires_grad_()
    b = tiny.noise((2, 5, 2), 4).requires_grad_()
    LoraLinear.apply(x, None, weight, None, spans, one_part(a, b), a, b).sum().backward()
    assert x.grad is None
    assert a.grad is not None
    assert b.grad is not None
