"""Token log-probs from hidden states in blocks: no whole (B, T, V) tensor, in neither direction.

    lp_i = z_i[y_i] - logsumexp(z_i),   z_i = head(h_i) / temperature_i

Blocks are cut along rows and vocabulary, so that on a CPU one stays in the cache while it is
normalized; the maximum and the sums are carried from block to block (Milakov and Gimelshein 2018,
arXiv:1805.02867). The head is frozen, so its backward needs the slopes in z alone. With
p = softmax(z) and its entropy H:

    d lp / d z = onehot(y) - p        d H / d z = -p (log p + H)

Recomputing z block by block there costs one more head matmul and saves the logits. The slope of H
is computed only if a loss reads the entropies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: Logits held at once, in fp32 elements: 2 MiB on a CPU, about its second cache; 128 MiB elsewhere.
CPU_ELEMENTS = 1 << 19
DEVICE_ELEMENTS = 1 << 25
#: Logits held at once of a head that is called, on any device.
CALLED_ELEMENTS = 1 << 24
#: Columns of a block on a CPU: wide enough for an efficient matmul, with enough rows left.
CPU_COLUMNS = 1 << 11
#: exp() of a lower log-prob is 0 in float32, and 0 times -inf would be NaN.
LEAST_LOGPROB = -200.0
#: Stands for a logit of -inf, whose differences and products with 0 would be NaN.
LEAST_LOGIT = -1e30


class _LinearLogprobs(torch.autograd.Function):
    """Autograd of the log-probs in blocks; see the module docstring."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- autograd's own, to which any attribute may be added
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse: Tensor,
        cap: float,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs (M,) fp32 and entropies (M,) fp32."""
        ctx.cap = cap
        ctx.set_materialize_grads(False)
        if _whole_rows(weight, bias, cap):
            picked, entropies = _forward_of_whole_rows(hidden, weight, targets, inverse)
            ctx.save_for_backward(hidden, weight, bias, targets, inverse, picked, entropies)
            return picked, entropies
        norms = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        picked, entropies = torch.zeros_like(norms), torch.empty_like(norms)
        rows, columns = _block(weight)
        for part in _slices(hidden.shape[0], rows):
            top = total = mean = None
            for span in _slices(weight.shape[0], columns):
                z = _logits(hidden[part], weight, bias, span, cap).mul_(inverse[part, None])
                if bias is not None:
                    z.clamp_(min=LEAST_LOGIT)  # a bias of -inf keeps a token from being sampled
                inside, place = _places(targets[part], span)
                found = z.gather(1, place)[:, 0]
                picked[part] = torch.where(inside, found, picked[part])
                here = z.amax(-1)
                higher = here if top is None else torch.maximum(top, here)
                z.sub_(higher[:, None])
                weights = z.exp()
                share = weights.sum(-1)
                moment = weights.mul_(z).sum(-1)
                if top is not None and total is not None and mean is not None:
                    # Rescale the sums that are relative to a lower maximum.
                    shift = top - higher
                    scale = shift.exp()
                    moment += scale * (mean + shift * total)
                    share += scale * total
                top, total, mean = higher, share, moment
            assert top is not None
            assert total is not None
            assert mean is not None
            logarithm = total.log()
            norms[part] = top + logarithm
            # H = log sum exp(z - top) - sum softmax(z) (z - top).
            entropies[part] = logarithm - mean / total
        ctx.save_for_backward(hidden, weight, bias, targets, inverse, norms, entropies)
        return picked.sub_(norms), entropies

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 -- as in forward
        *grads: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Recompute the logits block by block; only the hidden states get a gradient."""
        hidden, weight, bias, targets, inverse, norms, entropies = ctx.saved_tensors
        out = torch.empty_like(hidden)
        by_logprob, by_entropy = grads
        grad = torch.zeros_like(norms) if by_logprob is None else by_logprob * inverse
        if by_entropy is not None:
            by_entropy = by_entropy * inverse
            # 0 times NaN would be NaN, in rows whose loss does not read their entropy.
            entropies = torch.where(by_entropy == 0, 0, entropies)
        if _whole_rows(weight, bias, ctx.cap):
            slopes = grad, by_entropy, entropies
            out = _backward_of_whole_rows(hidden, weight, targets, inverse, *slopes)
            return out, None, None, None, None, None
        rows, columns = _block(weight)
        for part in _slices(hidden.shape[0], rows):
            total: Tensor | None = None
            for span in _slices(weight.shape[0], columns):
                z = _logits(hidden[part], weight, bias, span, ctx.cap)
                slope = 1 - (z / ctx.cap) ** 2 if ctx.cap else None
                dz = z.mul_(inverse[part, None]).sub_(norms[part, None])
                factor = -grad[part, None]
                if by_entropy is not None:
                    above = dz.clamp(min=LEAST_LOGPROB).add_(entropies[part, None])
                    factor = above.mul_(-by_entropy[part, None]).add_(factor)
                dz.exp_().mul_(factor)
                inside, place = _places(targets[part], span)
                dz.scatter_add_(1, place, torch.where(inside, grad[part], 0.0)[:, None])
                if slope is not None:
                    dz.mul_(slope)
                if total is None:
                    total = (dz.to(weight.dtype) @ weight[span]).float()
                elif weight.dtype == torch.float32:
                    total.addmm_(dz, weight[span])
                else:
                    total += dz.to(weight.dtype) @ weight[span]
            assert total is not None
            out[part] = total.to(hidden.dtype)
        return out, None, None, None, None, None


def _whole_rows(weight: Tensor, bias: Tensor | None, cap: float) -> bool:
    """Return whether blocks are whole rows of plain logits, for which torch has fused kernels."""
    return weight.device.type != "cpu" and bias is None and not cap


def _forward_of_whole_rows(
    hidden: Tensor, weight: Tensor, targets: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probs (M,) and entropies (M,) with few passes over the logits."""
    picked = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    entropies = torch.empty_like(picked)
    for part in _slices(hidden.shape[0], _block(weight)[0]):
        table = _table(hidden[part], weight, inverse[part])
        picked[part] = table.gather(1, targets[part, None])[:, 0]
        entropies[part] = table.exp().mul_(table).sum(-1).neg_()
    return picked, entropies


def _backward_of_whole_rows(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inverse: Tensor,
    grad: Tensor,
    by_entropy: Tensor | None,
    entropies: Tensor,
) -> Tensor:
    """Return the gradient (M, H); the slopes (M,) are those in the tempered logits."""
    out = torch.empty_like(hidden)
    for part in _slices(hidden.shape[0], _block(weight)[0]):
        table = _table(hidden[part], weight, inverse[part])
        probs = table.exp()
        factor = -grad[part, None]
        if by_entropy is not None:
            above = table.clamp_(min=LEAST_LOGPROB).add_(entropies[part, None])
            factor = above.mul_(-by_entropy[part, None]).add_(factor)
        dz = torch.empty_like(probs, dtype=weight.dtype)
        place = targets[part, None]
        # The target's slope in the precision of the probabilities, before it is rounded.
        own = probs.gather(1, place).mul_(factor if by_entropy is None else factor.gather(1, place))
        torch.mul(probs, factor, out=dz)
        dz.scatter_(1, place, (own + grad[part, None]).to(dz.dtype))
        out[part] = dz @ weight
    return out


def _table(hidden: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """Return log-probs (M, V) fp32."""
    logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight)
    return torch.log_softmax(logits.float().mul_(inverse[:, None]), dim=-1)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies of target tokens straight from hidden states.

    Args:
        hidden: (M, H) final hidden states, any float dtype.
        weight: (V, H) frozen output embedding.
        targets: (M,) int64 token ids in [0, V).
        temperature: (M,) sampling temperature per token, > 0.
        bias: (V,) or None.
        scale: The model's own multiplier of its logits (Granite, Cohere), 1 for most.
        softcap: The model's own tanh cap of its logits (Gemma), 0 for none.

    Returns:
        (M,) fp32 log-probs in nats and (M,) fp32 entropies in nats, of the whole vocabulary at the
        temperature; both are differentiable in `hidden`.
    """
    scaled = hidden if scale == 1.0 else hidden * scale
    inverse = temperature.float().reciprocal()
    return cast(
        "tuple[Tensor, Tensor]",
        _LinearLogprobs.apply(scaled, weight, bias, targets, inverse, softcap),
    )


class _Entropies(torch.autograd.Function):
    """Autograd of the entropies of whole rows, where a log-prob may be -inf."""

    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:  # noqa: ANN401 -- as in _LinearLogprobs
        """Return entropies (M,), nats, of log-probs (M, V)."""
        ctx.save_for_backward(table)
        return torch.special.entr(table.exp()).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ANN401 -- as in _LinearLogprobs
        """Return the gradient (M, V)."""
        (table,) = ctx.saved_tensors
        return -grads[0][:, None] * table.exp() * (table.clamp(min=LEAST_LOGPROB) + 1)


def module_logprobs(
    logits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    """Compute what `linear_logprobs` does with a head of any kind, one block of rows at a time.

    `logits` takes hidden states (M, H) to logits (M, V) fp32, with V the vocabulary. The backward
    computes the logits again.
    """

    def block(states: Tensor, wanted: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.log_softmax(logits(states) * inverse[:, None], dim=-1)
        entropies = cast("Tensor", _Entropies.apply(table))
        return table.gather(1, wanted[:, None])[:, 0], entropies

    rows = max(1, CALLED_ELEMENTS // vocabulary)
    inverse = temperature.float().reciprocal()
    parts = [
        checkpoint(block, hidden[part], targets[part], inverse[part], use_reentrant=False)
        if torch.is_grad_enabled()
        else block(hidden[part], targets[part], inverse[part])
        for part in _slices(hidden.shape[0], rows)
    ]
    found, entropies = zip(*parts, strict=True)
    return torch.cat(found), torch.cat(entropies)


def _block(weight: Tensor) -> tuple[int, int]:
    """Return rows and columns of one block of logits."""
    vocabulary = weight.shape[0]
    if weight.device.type == "cpu":
        columns = min(vocabulary, CPU_COLUMNS)
        return max(1, CPU_ELEMENTS // columns), columns
    return max(1, DEVICE_ELEMENTS // vocabulary), vocabulary


def _slices(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _places(targets: Tensor, span: slice) -> tuple[Tensor, Tensor]:
    """Return whether targets (M,) lie in a span of the vocabulary, and their columns (M, 1)."""
    place = targets - span.start
    inside = (place >= 0) & (place < span.stop - span.start)
    return inside, place.clamp_(0, span.stop - span.start - 1)[:, None]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, span: slice, cap: float) -> Tensor:
    part = None if bias is None else bias[span]
    logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight[span], part).float()
    return cap * torch.tanh(logits / cap) if cap else logits
