"""Finds out how a base can be decoded, by a probe with two short prompts.

Prompts of several lengths in one batch need a model that takes positions and a mask as arguments.
Some models count the columns of the cache instead, including padding (MPT, the decoders of Bart and
related models), and would sample from a wrong distribution without an error. So the probe compares
rows decoded token by token with one forward pass over the whole row, in float32 for any dtype,
because in half precision an error of a few positions looks like rounding.
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from evo_grpo.errors import ModelError
from evo_grpo.model import probing
from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.fused import population_forward
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.llama.departures import can_join_layers, departures_of, find_departures
from evo_grpo.model.llama.weights import is_llama_family
from evo_grpo.model.out_of_memory import is_out_of_memory
from evo_grpo.rollout.native.decoder import ModuleDecoder, attention_of

_KEPT = "mixes lengths"
#: Endings of the config fields that hold the reach of local attention.
_REACH = ("window", "window_size", "attention_chunk_size", "local_attention")
#: Model types whose window applies to the cache but not to a forward pass.
_WINDOW_OF_CACHE = ("moshi",)
#: Prompt lengths of the probe, tokens decoded after them, and the step at which a row is removed.
_LONGEST, _SHORT, _STEPS, _LEAVES_AT = 5, 2, 4, 2
#: Longest prompt of the probe for a model whose code differs from that of its type.
_LATE = 160
#: Largest ratio of the error with padded prompts to the error without padding.
_MUCH = 8


def mixes_lengths(base: SharedBase, adapted: dict[str, LoraLayer]) -> bool:
    """Return whether a base can decode prompts of several lengths in one batch.

    A base that cannot decode prompts of one length either raises ModelError. A probe, if any, omits
    adapters.
    """
    if can_join_layers(base, adapted):
        return True
    family, departures, key = is_llama_family(base), (), None
    if base.specialized:
        key = departures = departures_of(base, adapted) if family else ()
    elif family and base.gathered is nullcontext:
        departures = find_departures(base)
    # A base that is, or will be, divided among processes has no key: it cannot be probed again.
    kept: dict[object, bool] = base.derived.setdefault(_KEPT, {})
    if key not in kept:
        plain = family and not departures
        kept[key] = plain or _probed(base, adapted, altered=bool(departures))
    return kept[key]


def window_of(base: SharedBase) -> int:
    """Return a model's smallest window of local attention in tokens; 0 if it has none.

    In rows of at most that many tokens, local attention equals global attention.
    """
    config = _text_config(base)
    windows = [
        value
        for name, value in vars(config).items()
        if isinstance(value, int)
        and not isinstance(value, bool)
        and value > 0
        and name.endswith(_REACH)
    ]
    if not getattr(config, "use_sliding_window", True):
        return 0
    kinds = set(getattr(config, "layer_types", None) or ())
    return 0 if kinds == {"full_attention"} else min(windows, default=0)


def _text_config(base: SharedBase) -> Any:  # noqa: ANN401 -- of any architecture
    config = base.model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _probed(base: SharedBase, adapted: dict[str, LoraLayer], *, altered: bool) -> bool:
    subject = f"model {base.name!r} ({type(base.model).__name__})"
    reason = _known_problem(base)
    ways, longest = [False, True], _LONGEST  # whether prompts have equal lengths
    if altered:
        # The decoder's mask would replace the model's own, and either may act on late tokens only.
        ways = [True]
        longest = max(longest, min(_LATE, (base.context_length or _LATE) - _STEPS))
    special = (base.pad_id, *base.eos_ids)
    ids = probing.probe_ids(base.vocabulary, 2, longest + _STEPS, special).to(base.device)
    base_alone = population_forward(adapted, RowLayout((None,), (1,)), frozen=True)
    problems: list[str] = []
    with probing.own_generator(base.device), base_alone:
        if altered and not reason:
            prefixes = [base.hidden(ids[:1, :n]) for n in (longest // 4, longest // 2)]
            probing.check_causal(
                subject, base.trunk, base.hidden, ids[:1], base.hidden(ids[:1]), prefixes
            )
        for equal in () if reason else ways:
            problem = _problem(base, ids, equal=equal)
            if problem is None:
                return not equal
            problems.append(problem)
    reason = reason or (
        "token by token with a key/value cache does not give what one forward gives "
        f"({'; of one length: '.join(problems)})"
    )
    raise ModelError(
        f"{subject}: the native engine cannot decode it: {reason}; use another model, or "
        "engine.rollout: vllm"
    )


def _known_problem(base: SharedBase) -> str:
    """Return why decoding a model gives wrong results that a probe may not show, or ""."""
    for path, module in base.trunk.named_modules():
        # State-space layers of Zamba2 and Nemotron-H of transformers 5 clamp in a forward alone.
        bounds: Any = getattr(module, "time_step_limit", None)
        if isinstance(bounds, tuple | list) and len(bounds) == 2:  # pyright: ignore[reportUnknownArgumentType] -- as below
            low, high = (float(end) for end in bounds)  # pyright: ignore[reportUnknownVariableType] -- numbers in every config
            if low > 0 or high < math.inf:
                return (
                    f"{path} clamps its time steps to [{low:g}, {high:g}] in a forward pass, but "
                    "transformers does not when it decodes token by token"
                )
    window = window_of(base) if _text_config(base).model_type in _WINDOW_OF_CACHE else 0
    if 0 < window < (base.context_length or math.inf):
        return (
            f"its cache keeps {window} tokens, but its forward attends to all of a context of "
            f"{base.context_length}; set model.config: {{max_position_embeddings: {window}}}"
        )
    return ""


def _problem(base: SharedBase, ids: Tensor, *, equal: bool) -> str | None:
    """Return how far decoding deviates from one forward, or why it fails; None if they agree."""
    try:
        try:
            # The rounding of half precision hides wrong positions.
            with probing.in_float32(base.trunk):
                error, allowed = _gap(base, ids, equal=equal)
                if not equal and probing.EXACT < error <= allowed:
                    # Tensor cores may round float32 by up to percents, with prompts of one length
                    # too; wrong positions differ by much more than that.
                    noise, _ = _gap(base, ids, equal=True)
                    allowed = max(probing.EXACT, _MUCH * noise)
        except (*probing.CANNOT_RUN, ModelError):
            if not equal or base.dtype not in probing.HALF:
                raise
            # A layer for half precision alone; with one length no position can be wrong.
            error, allowed = _gap(base, ids, equal=equal)
    except (*probing.CANNOT_RUN, ModelError) as problem:
        if is_out_of_memory(problem):
            raise
        return f"{type(problem).__name__}: {problem}"[:200]
    return None if error <= allowed else f"{error:.2g} of the size of the hidden states off"


def _gap(base: SharedBase, ids: Tensor, *, equal: bool) -> tuple[float, float]:
    """Return the relative error of decoded hidden states (max over rows), and the tolerated error.

    Two prompts are decoded, the first of them in two rows, one of which is removed half way. Unless
    `equal`, the second prompt is shorter.
    """
    longest = ids.shape[1] - _STEPS
    if not equal and attention_of(base) not in ("sdpa", "eager"):
        raise ModelError("no mask per row with this attention")
    decoder, lengths = ModuleDecoder(base, equal=equal), (longest, longest if equal else _SHORT)
    whole = [base.hidden(row[None, : n + _STEPS])[0] for row, n in zip(ids, lengths, strict=True)]
    ends = torch.tensor(lengths, device=ids.device)
    column = torch.arange(ids.shape[1], device=ids.device)
    prompts = ids.masked_fill(column >= ends[:, None], base.pad_id)[:, :longest]
    owners = torch.tensor([0, 0, 1], device=ids.device)
    live = torch.arange(3, device=ids.device)
    decoded: list[list[Tensor]] = [[], [], []]

    def note(states: Tensor) -> None:
        for row, state in zip(live.tolist(), states, strict=True):
            decoded[row].append(state)

    hidden = decoder.prefill(prompts, ends)
    starts = ends[owners]
    mask = (column < starts[:, None]) | (column >= longest)
    decoder.expand(owners, ids.shape[1], mask[:, None, None, :])
    note(hidden[owners])
    for step in range(_STEPS):
        if step == _LEAVES_AT:
            decoder.keep(live[1:])
            live = live[1:]
        rows = owners[live]
        decoder.reserve(longest + step + 1)
        note(decoder.step(ids[rows, ends[rows] + step], ends[rows] + step))
    errors = [
        probing.relative_error(
            torch.stack(states), whole[owner][lengths[owner] - 1 :][: len(states)]
        )
        for owner, states in zip(owners.tolist(), decoded, strict=True)
    ]
    return max(errors), probing.tolerance(whole[0])
