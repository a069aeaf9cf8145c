"""Probes how a model can be decoded, with two short prompts, once per base.

Prompts of several lengths in one batch need a model that takes positions and a mask as arguments.
Some models count the columns of the cache instead, including padding (MPT, the decoders of Bart and
related models), and would sample from a wrong distribution without an error. So the probe decodes
rows token by token and compares them with one forward pass over the whole row. It computes in
float32 for any dtype of the weights: in half precision an error of a few positions looks like
rounding.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from enum import Enum
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from evo_grpo.errors import ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.fused import population_forward
from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.model.llama.choice import departure_of, takes_fast_path
from evo_grpo.model.llama.departures import Departure, find_departure
from evo_grpo.model.llama.weights import is_llama_family
from evo_grpo.model.out_of_memory import is_out_of_memory
from evo_grpo.model.probing import (
    CANNOT_RUN,
    EXACT,
    own_generator,
    probe_ids,
    relative_error,
    tolerance,
)
from evo_grpo.model.upcast import HALF, in_float32
from evo_grpo.rollout.native.decoder import (
    Decoder,
    EqualLengthDecoder,
    ModuleDecoder,
    attention_of,
)

_KEPT = "ability"
#: Endings of the config fields that hold the reach of local attention.
_REACH = ("window", "window_size", "attention_chunk_size", "local_attention")
#: Model types whose window applies to the cache but not to a forward pass.
_WINDOW_OF_CACHE = ("moshi",)
#: Prompt lengths of the probe, tokens decoded after them, and the step at which a row is removed.
_LENGTHS, _STEPS, _LEAVES_AT = (5, 2), 4, 2
#: Longest prompt of the probe for a model whose code differs from that of its type.
_LATE = 160

#: Largest ratio of the error with padded prompts to the error without padding.
_MUCH = 8


class Ability(Enum):
    """The batches for which decoding gives the same results as one forward pass."""

    ANY_LENGTHS = "any lengths"
    EQUAL_LENGTHS = "equal lengths"


def ability_of(base: SharedBase, adapted: dict[str, LoraLayer]) -> Ability:
    """Return how a base can be decoded; the probe bypasses the adapters of the LoRA layers.

    Raises:
        ModelError: The base cannot be decoded.
    """
    if takes_fast_path(base, adapted):
        return Ability.ANY_LENGTHS
    kept: dict[str, Ability] = base.derived.setdefault(_KEPT, {})
    departure: Departure | None = None
    key = ""
    if not base.specialized:
        # The base is, or will be, divided among processes; then it cannot be probed again.
        key = "modules"
        if key not in kept and is_llama_family(base):
            whole = base.gathered is nullcontext
            departure = find_departure(base) if whole else None
            if departure is None:
                kept[key] = Ability.ANY_LENGTHS
    elif is_llama_family(base):
        departure = departure_of(base, adapted)
        key = "" if departure is None else "\n".join((departure.what, *departure.others))
    if key not in kept:
        kept[key] = _probed(base, adapted, departure)
    return kept[key]


def window_of(base: SharedBase) -> int:
    """Return the reach of a model's shortest local attention in tokens; 0 if it has none.

    In shorter rows a local layer acts as a global one. Architectures name this field differently.
    """
    config = _text_config(base)
    found = [
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
    return 0 if kinds == {"full_attention"} else min(found, default=0)


def decoder_layers(base: SharedBase) -> int:
    """Return the number of layers with keys and values."""
    config = _text_config(base)
    layers = getattr(config, "num_hidden_layers", None) or getattr(config, "decoder_layers", 0)
    return int(layers or 0)


def _text_config(base: SharedBase) -> Any:  # noqa: ANN401 -- of any architecture
    config = base.model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _probed(
    base: SharedBase, adapted: dict[str, LoraLayer], departure: Departure | None
) -> Ability:
    _refuse_bounded_steps(base)
    _refuse_window_of_cache(base)
    errors: list[str] = []
    lengths = _LENGTHS if departure is None else _late_lengths(base)
    attempts = [
        (Ability.ANY_LENGTHS, lengths, lambda: _any_lengths(base)),
        (Ability.EQUAL_LENGTHS, (lengths[0], lengths[0]), lambda: EqualLengthDecoder(base)),
    ]
    if departure is not None and departure.masks:
        # The decoder's mask would replace the model's own mask, at any distance that it acts.
        del attempts[0]
    with own_generator(base.device), _base_alone(adapted):
        if departure is not None:
            _refuse_looking_ahead(base, lengths[0])
        for ability, lengths, make in attempts:
            try:
                error, allowed = _gap(base, make, lengths)
            except (*CANNOT_RUN, ModelError) as problem:
                if is_out_of_memory(problem):
                    raise
                errors.append(f"{type(problem).__name__}: {problem}"[:200])
                continue
            if error <= allowed and base.dtype in HALF:
                error, allowed = _gap_in_float32(base, ability, make, lengths)
            if ability is Ability.ANY_LENGTHS and EXACT < error <= allowed:
                allowed = max(EXACT, _MUCH * _noise(base))
            if error <= allowed:
                return ability
            errors.append(f"{error:.2g} of the size of the hidden states off")
    raise ModelError(
        f"model {base.name!r} ({type(base.model).__name__}): the native engine cannot decode it: "
        "token by token with a key/value cache does not give what one forward gives "
        f"({'; of one length: '.join(errors)}); use another model, or engine.rollout: vllm"
    )


def _refuse_bounded_steps(base: SharedBase) -> None:
    """Refuse a state-space layer that clamps its time steps in a forward but not in decoding.

    Zamba2 and Nemotron-H of transformers 5 do so. The tokens determine which steps exceed the
    bounds, so a probe of a few tokens cannot detect it.

    Raises:
        ModelError: The model has such a layer.
    """
    for path, module in base.trunk.named_modules():
        bounds: Any = getattr(module, "time_step_limit", None)
        if not isinstance(bounds, tuple | list) or len(bounds) != 2:  # pyright: ignore[reportUnknownArgumentType] -- as below
            continue
        low, high = (float(end) for end in bounds)  # pyright: ignore[reportUnknownVariableType] -- numbers in every config
        if low > 0 or high < math.inf:
            raise ModelError(
                f"model {base.name!r} ({type(base.model).__name__}): the native engine cannot "
                f"decode it: {path} clamps its time steps to [{low:g}, {high:g}] in a forward "
                "pass, but transformers does not when it decodes token by token; use another "
                "model, or engine.rollout: vllm"
            )


def _refuse_window_of_cache(base: SharedBase) -> None:
    """Refuse a model whose cache has a window shorter than its context, unlike its forward.

    Raises:
        ModelError: The context is longer than the window of the cache.
    """
    config = _text_config(base)
    if config.model_type not in _WINDOW_OF_CACHE:
        return
    window = window_of(base)
    if 0 < window < (base.context_length or math.inf):
        raise ModelError(
            f"model {base.name!r} ({type(base.model).__name__}): its cache keeps {window} tokens, "
            f"but its forward attends to all of a context of {base.context_length}, so decoding "
            "differs from training in longer rows; set model.config: "
            f"{{max_position_embeddings: {window}}}"
        )


def _late_lengths(base: SharedBase) -> tuple[int, int]:
    """Return prompt lengths of the probe for unknown code, which may act on late tokens only."""
    longest = min(_LATE, (base.context_length or _LATE) - _STEPS)
    return max(longest, _LENGTHS[0]), max(longest // 2, _LENGTHS[1])


def _refuse_looking_ahead(base: SharedBase, longest: int) -> None:
    """Refuse a model whose hidden states depend on the tokens that follow.

    Raises:
        ModelError: The first tokens of a row of `longest` tokens differ in a shorter row.
    """
    special = (base.pad_id, *base.eos_ids)
    ids = probe_ids(base.vocabulary, 1, longest, special).to(base.device)
    whole = base.hidden(ids)
    for part in (longest // 4, longest // 2):
        first = base.hidden(ids[:, : max(1, part)])
        error = relative_error(whole[:, : first.shape[1]], first)
        if error > tolerance(first):
            raise ModelError(
                f"model {base.name!r} ({type(base.model).__name__}): expected a causal model, "
                f"got one whose first {part} hidden states in a row of {longest} tokens differ "
                f"by {error:.2g} of their size from those in a row of {part}; use another model"
            )


def _any_lengths(base: SharedBase) -> Decoder:
    if attention_of(base) not in ("sdpa", "eager"):
        raise ModelError("no mask per row with this attention")
    return ModuleDecoder(base, decoder_layers(base))


def _base_alone(adapted: dict[str, LoraLayer]) -> Any:  # noqa: ANN401 -- a context manager
    """Return a context in which all rows bypass the adapters."""
    return population_forward(adapted, RowLayout((None,), (1,)), frozen=True)


def _gap_in_float32(
    base: SharedBase, ability: Ability, make: Callable[[], Decoder], lengths: tuple[int, int]
) -> tuple[float, float]:
    """Compute `_gap` without the rounding of half precision, which hides wrong positions.

    If a layer does not run in float32 or does not fit, batches of several lengths are rejected;
    one length at a time is slower but cannot be wrong.
    """
    try:
        with in_float32(base.trunk):
            return _gap(base, make, lengths)
    except (*CANNOT_RUN, ModelError) as problem:
        if ability is Ability.EQUAL_LENGTHS:
            return 0.0, 0.0
        warnings.warn(
            f"model {base.name!r} ({type(base.model).__name__}): prompts are decoded one length at "
            f"a time, because batches of several lengths cannot be verified in {base.dtype}, and "
            f"in float32 a layer did not run ({type(problem).__name__}: {str(problem)[:200]}); "
            "prompts of few lengths sample fastest",
            UserWarning,
            stacklevel=2,
        )
        return math.inf, 0.0


def _noise(base: SharedBase) -> float:
    """Return the error with prompts of one length, which is rounding in any model.

    Tensor cores may round float32 by up to percents. A model whose error with padded prompts is
    much larger than this one places them at wrong positions.
    """
    make = partial(EqualLengthDecoder, base)
    try:
        with in_float32(base.trunk):
            return _gap(base, make, (_LENGTHS[0], _LENGTHS[0]))[0]
    except (*CANNOT_RUN, ModelError) as problem:
        if is_out_of_memory(problem):
            raise
        return math.inf  # no bound is known


def _gap(
    base: SharedBase, make: Callable[[], Decoder], lengths: tuple[int, int]
) -> tuple[float, float]:
    """Return the error of decoding relative to the hidden states, and the tolerated error."""
    longest = max(lengths)
    special = (base.pad_id, *base.eos_ids)
    ids = probe_ids(base.vocabulary, 2, longest + _STEPS, special).to(base.device)
    rows = [row[: n + _STEPS] for row, n in zip(ids, lengths, strict=True)]
    whole = [base.hidden(row[None])[0] for row in rows]
    ours = list(_decoded(make(), rows, lengths, base.pad_id))
    gaps = [
        relative_error(torch.stack(states), whole[row][first : first + len(states)])
        for row, first, states in ours
    ]
    return max(gaps), tolerance(whole[0])


def _decoded(
    decoder: Decoder, rows: list[Tensor], lengths: tuple[int, int], pad: int
) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Yield (row, first position, hidden states (H,)) of prompts and their continuations.

    The first prompt is expanded twice, the second once; the first copy is removed half way.
    """
    longest = max(lengths)
    device = rows[0].device
    padded = torch.full((2, longest), pad, device=device)
    for line, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        padded[line, :length] = row[:length]
    hidden = decoder.prefill(padded, torch.tensor(lengths, device=device))
    source = torch.tensor([0, 0, 1], device=device)
    column = torch.arange(longest + _STEPS, device=device)
    starts = torch.tensor(lengths, device=device).index_select(0, source)
    mask = (column < starts[:, None]) | (column >= longest)
    decoder.expand(source, longest + _STEPS, mask[:, None, None, :])
    found: list[list[Tensor]] = [[state] for state in hidden.index_select(0, source)]
    live = [0, 1, 2]
    for step in range(_STEPS):
        if step == _LEAVES_AT:
            decoder.keep(torch.tensor([1, 2], device=device))
            live = [1, 2]
            starts = starts[1:]
        owners = [int(source[i]) for i in live]
        tokens = torch.stack([rows[o][lengths[o] + step] for o in owners])
        decoder.reserve(longest + step + 1)
        states = decoder.step(tokens, starts + step)
        for i, state in zip(live, states, strict=True):
            found[i].append(state)
    for i, states in enumerate(found):
        owner = int(source[i])
        yield owner, lengths[owner] - 1, states
