"""Computes token log-probs from hidden states in blocks, without a (B, T, V) tensor.

    lp_i = z_i[y_i] - logsumexp(z_i),   z_i = head(h_i) / temperature_i

Blocks are cut along rows and vocabulary, so that on a CPU a block stays in the cache while it is
normalized; the maximum and the sums are carried from block to block (Milakov and Gimelshein 2018,
arXiv:1805.02867). The head W is frozen, so the backward needs only the derivatives in h, called
slopes. With p = softmax(z) and its entropy H:

    d lp / d z = onehot(y) - p        d H / d z = -p (log p + H)

Both are multiplied by the incoming gradient, one number per token, so their products with W are
already computed in the forward, where the logits are available. The target's part is computed
separately, since 1 - p[y] may be the difference of close numbers. The slope of H is computed only
where a backward may need it.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from evo_grpo.model.llama.cuda import operators

#: Logits held at once, in fp32 elements: 2 MiB on a CPU, about its second cache; 128 MiB elsewhere.
CPU_ELEMENTS = 1 << 19
DEVICE_ELEMENTS = 1 << 25
#: Bytes of the logits and slopes that kernels hold at once: three fp32 tensors of DEVICE_ELEMENTS.
KERNEL_BYTES = 3 << 27
#: Logits held at once, on any device, of a head that is called as a module.
CALLED_ELEMENTS = 1 << 24
#: Columns of a block on a CPU: wide enough for an efficient matmul, with enough rows left.
CPU_COLUMNS = 1 << 11
#: exp() of a lower log-prob is 0 in float32, and 0 times -inf would be NaN.
LEAST_LOGPROB = -200.0
#: Stands for a logit of -inf, whose differences and products with 0 would be NaN.
LEAST_LOGIT = -1e30


class _Head(NamedTuple):
    """A head: weight (V, H), bias (V,) or None, and the tanh cap of its logits (0 if uncapped).

    `kernels` says whether to use the kernels of `llama.cuda`.
    """

    weight: Tensor
    bias: Tensor | None
    cap: float
    kernels: bool


class _LinearLogprobs(torch.autograd.Function):
    """Autograd function of the log-probs, computed in blocks."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- autograd's own, to which any attribute may be added
        hidden: Tensor,
        head: _Head,
        targets: Tensor,
        inverse: Tensor,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies (M,) fp32; save slopes of the first `count` of the two.

        `count` is an argument because `needs_input_grad` is true in `no_grad` too.
        """
        ctx.set_materialize_grads(False)
        # The loss scale of float16 comes with the gradient, too late for slopes rounded here.
        slope_dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        rows, columns = _block(head)
        parts: list[list[Tensor]] = []
        for part in _slices(max(1, len(hidden)), rows):
            inputs = hidden[part], head, targets[part], inverse[part]
            values, slopes = (
                _of_whole_rows(*inputs, count)
                if _whole_rows(head)
                else _by_columns(*inputs, count, columns)
            )
            parts.append([*values, *(slope.to(slope_dtype) for slope in slopes)])
        logprobs, entropies, *slopes = (
            xs[0] if len(xs) == 1 else torch.cat(xs) for xs in zip(*parts, strict=True)
        )
        if count < 2:
            ctx.mark_non_differentiable(entropies)
        ctx.dtype = hidden.dtype
        ctx.save_for_backward(*slopes)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] -- by the decorator
        ctx: Any,  # noqa: ANN401 -- as in forward
        *grads: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Multiply the slopes by the incoming gradients; only the hidden states get a gradient."""
        by_logprob, by_entropy = grads
        grad: Tensor | None = None
        if by_logprob is not None:
            grad = by_logprob[:, None] * ctx.saved_tensors[0]
        if by_entropy is not None:
            entropy_grad = by_entropy[:, None] * ctx.saved_tensors[1]
            # 0 times NaN would be NaN, in rows whose loss does not read their entropy.
            entropy_grad = entropy_grad.masked_fill_(by_entropy[:, None] == 0, 0.0)
            grad = entropy_grad if grad is None else grad.add_(entropy_grad)
        return None if grad is None else grad.to(ctx.dtype), None, None, None, None


def _whole_rows(head: _Head) -> bool:
    """Return whether blocks are whole rows: without bias or cap, on a GPU or with kernels."""
    plain = head.bias is None and not head.cap
    return plain and (head.kernels or head.weight.device.type != "cpu")


def _of_whole_rows(
    hidden: Tensor, head: _Head, targets: Tensor, inverse: Tensor, count: int
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Return log-probs and entropies (M,), and slopes (M, H) of the first `count` of the two."""
    if head.kernels:
        return _by_kernel(hidden, head.weight, targets, inverse, count)
    weight, column = head.weight, targets[:, None]
    table = _table(hidden, weight, inverse)
    picked = table.gather(1, column)
    probs = table.exp()
    slopes: list[Tensor] = []
    if count:
        target_probs = picked.exp()
        other_rows = _product(probs.scatter_(1, column, 0.0), weight)
        probs.scatter_(1, column, target_probs)
        slopes.append(inverse[:, None] * (-torch.expm1(picked) * weight[targets] - other_rows))
    if count < 2:  # without a further block: blocks are the peak of memory
        return (picked[:, 0], probs.mul_(table).sum(-1).neg_()), slopes
    entropies = (probs * table).sum(-1).neg_()
    above = table.clamp_(min=LEAST_LOGPROB).add_(entropies[:, None]).mul_(probs)
    slopes.append(-inverse[:, None] * _product(above, weight))
    return (picked[:, 0], entropies), slopes


def _by_kernel(
    hidden: Tensor, weight: Tensor, targets: Tensor, inverse: Tensor, count: int
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Compute `_of_whole_rows` by a kernel, in half precision, reading the logits only twice.

    Probabilities are relative to that of the likeliest token other than the target, so that float16
    can represent those of unlikely tokens.
    """
    logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight)
    above = torch.empty_like(logits) if count > 1 else logits
    results = inverse.new_empty(len(logits), 4)
    operators.head_slopes(targets, inverse, count, logits, above, results)
    logprobs, entropies = results[:, 0], results[:, 1]
    slopes: list[Tensor] = []
    if count:
        logprob, share, row = logprobs[:, None], results[:, 2:3], weight[targets]
        other_rows = (logits @ weight).float().mul_(share)
        slopes.append(inverse[:, None] * (-torch.expm1(logprob) * row - other_rows))
        if count > 1:
            coefficient = logprob.exp() * (logprob.clamp(min=LEAST_LOGPROB) + entropies[:, None])
            above_rows = (above @ weight).float() * share * results[:, 3:]
            slopes.append(-inverse[:, None] * (above_rows + coefficient * row))
    return (logprobs.contiguous(), entropies.contiguous()), slopes


def _table(hidden: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """Return the log-probs (M, V) fp32 of the whole vocabulary."""
    logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight)
    return torch.log_softmax(logits.float().mul_(inverse[:, None]), dim=-1)


def _by_columns(
    hidden: Tensor, head: _Head, targets: Tensor, inverse: Tensor, count: int, columns: int
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Compute `_of_whole_rows`, one block of the vocabulary at a time.

    Sums over the vocabulary exclude the targets, and are relative to the greatest logit so far.
    """
    weight, cap, per_row = head.weight, head.cap, inverse[:, None]
    logit, logit_slope = torch.zeros_like(per_row), torch.ones_like(per_row)
    top: Tensor | None = None
    # `plain` sums exp(z), and its products with the weight; `timed` sums exp(z) z in the same way.
    plain, timed = list[Tensor](), list[Tensor]()
    for span in _slices(weight.shape[0], columns):
        z = _logits(hidden, head, span)
        inside, column = _places(targets, span)
        slope = 1 - (z / cap) ** 2 if cap and count else None
        if slope is not None:
            logit_slope = torch.where(inside, slope.gather(1, column), logit_slope)
        z.mul_(per_row)
        if head.bias is not None:
            z.clamp_(min=LEAST_LOGIT)  # a bias of -inf keeps a token from being sampled
        logit = torch.where(inside, z.gather(1, column), logit)
        block_top = z.amax(-1, keepdim=True)
        higher = block_top if top is None else torch.maximum(top, block_top)
        e = z.sub_(higher).exp()
        e.scatter_(1, column, torch.where(inside, 0.0, e.gather(1, column)))
        before = plain, timed
        plain = [e.sum(-1, keepdim=True), *_products(e, slope, weight[span], count > 0)]
        e.mul_(z)
        timed = [e.sum(-1, keepdim=True), *_products(e, slope, weight[span], count > 1)]
        if top is not None:
            shift = top - higher  # the sums so far are relative to a lower maximum
            scale = shift.exp()
            for sums, old in zip(plain, before[0], strict=True):
                sums.add_(scale * old)
            for sums, old, old_plain in zip(timed, before[1], before[0], strict=False):
                sums.add_(scale * (old + shift * old_plain))
        top = higher
    assert top is not None, "a vocabulary has tokens"
    logit = logit - top
    term = logit.exp()
    total = plain[0] + term
    logarithm, mean = total.log(), (timed[0] + term * logit) / total
    slopes: list[Tensor] = []
    if count:
        row, scale = weight[targets].float(), per_row / total
        other_rows = plain[1] if count == 1 else plain[1].clone()
        slopes.append(other_rows.mul_(-scale).addcmul_(row, logit_slope * plain[0] * scale))
        if count > 1:
            above = plain[1].mul_(mean).sub_(timed[1]).mul_(scale)
            slopes.append(above.addcmul_(row, logit_slope * term * (mean - logit) * scale))
    # H = log sum exp(z - top) - sum softmax(z) (z - top).
    return ((logit - logarithm)[:, 0], (logarithm - mean)[:, 0]), slopes


def _products(e: Tensor, slope: Tensor | None, weight: Tensor, wanted: bool) -> list[Tensor]:
    """Return [the product (M, H) fp32 of a block (M, V) and the head] if `wanted`, else []."""
    return [_product(e if slope is None else e * slope, weight)] if wanted else []


def _product(block: Tensor, weight: Tensor) -> Tensor:
    """Return the product (M, H) fp32 of a block (M, V) fp32 with the head (V, H)."""
    if weight.dtype != torch.float16:
        return (block.to(weight.dtype) @ weight).float()
    # The parts of unlikely tokens are below the least number of float16.
    most = block.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return ((block / most).half() @ weight).float().mul_(most)


def linear_logprobs(  # noqa: PLR0913 -- what a head does to its logits
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    of_entropies: bool = True,
    kernels: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies of target tokens straight from hidden states.

    Args:
        hidden: (M, H) final hidden states, any float dtype.
        weight: (V, H) frozen output embedding.
        targets: (M,) int64 token ids in [0, V).
        temperature: (M,) sampling temperature per token, > 0.
        bias: (V,) or None.
        scale: Factor by which the model multiplies its logits (Granite, Cohere); 1 for most models.
        softcap: Bound to which the model limits its logits by tanh (Gemma); 0 for no bound.
        of_entropies: Make the entropies differentiable too, which costs another product with the
            head.
        kernels: Use kernels of `llama.cuda` if there is neither bias nor cap.

    Returns:
        (M,) fp32 log-probs of the targets and (M,) fp32 entropies over the whole vocabulary, both
        in nats and at the temperature; differentiable in `hidden`.
    """
    scaled = hidden if scale == 1.0 else hidden * scale
    inverse = temperature.float().reciprocal()
    learned = torch.is_grad_enabled() and scaled.requires_grad
    count = 1 + of_entropies if learned else 0
    head = _Head(weight, bias, softcap, kernels and bias is None and not softcap)
    return cast(
        "tuple[Tensor, Tensor]",
        _LinearLogprobs.apply(scaled, head, targets, inverse, count),
    )


class _Entropies(torch.autograd.Function):
    """Autograd function of the entropies of whole rows; log-probs may be -inf."""

    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:  # noqa: ANN401 -- as in _LinearLogprobs
        """Return entropies (M,), nats, of log-probs (M, V)."""
        ctx.save_for_backward(table)
        return torch.special.entr(table.exp()).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ANN401 -- as in _LinearLogprobs
        """Return the gradient (M, V) of the log-probs."""
        (table,) = ctx.saved_tensors
        return -grads[0][:, None] * table.exp() * (table.clamp(min=LEAST_LOGPROB) + 1)


def module_logprobs(
    logits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    """Compute `linear_logprobs` for a head of any kind, one block of rows at a time.

    `logits` maps hidden states (M, H) to logits (M, vocabulary) fp32; the backward calls it again.
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
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _block(head: _Head) -> tuple[int, int]:
    """Return the numbers of rows and columns of one block of logits."""
    vocabulary = head.weight.shape[0]
    if head.kernels:
        return max(1, KERNEL_BYTES // (2 * head.weight.itemsize * vocabulary)), vocabulary
    if head.weight.device.type == "cpu":
        columns = min(vocabulary, CPU_COLUMNS)
        return max(1, CPU_ELEMENTS // columns), columns
    return max(1, DEVICE_ELEMENTS // vocabulary), vocabulary


def _slices(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _places(targets: Tensor, span: slice) -> tuple[Tensor, Tensor]:
    """Return whether targets (M,) lie in a span of the vocabulary, and their columns in the span.

    Both are (M, 1).
    """
    column = targets[:, None] - span.start
    inside = (column >= 0) & (column < span.stop - span.start)
    return inside, column.clamp_(0, span.stop - span.start - 1)


def _logits(hidden: Tensor, head: _Head, span: slice) -> Tensor:
    part = None if head.bias is None else head.bias[span]
    weight, cap = head.weight[span], head.cap
    logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight, part).float()
    return cap * torch.tanh(logits / cap) if cap else logits
