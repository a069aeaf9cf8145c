"""How a model can be decoded: found out with two short prompts, once per base.

Prompts of all lengths in one batch need a model that takes positions and a mask from outside. Some
count the columns of the cache instead, padding included (MPT, the decoders of Bart and its kin),
and would sample from a wrong distribution without an error. So rows are decoded token by token and
compared with one forward over the whole row. That is done in float32 whatever the dtype of the
weights: in half precision, being wrong by a few positions looks like rounding.
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
#: How the fields of a config end that say how far local attention reaches.
_REACH = ("window", "window_size", "attention_chunk_size", "local_attention")
#: Model types whose window is in the config for their cache alone.
_WINDOW_OF_CACHE = ("moshi",)
#: Prompt lengths of the probe, and tokens decoded after them: before and after a row leaves.
_LENGTHS, _STEPS, _LEAVES_AT = (5, 2), 4, 2
#: The longest prompt of the probe for a model whose code is not that of its type.
_LATE = 160

#: How many times the gap of padded prompts may be that of prompts without padding.
_MUCH = 8


class Ability(Enum):
    """In which batches a model decodes what one forward computes."""

    ANY_LENGTHS = "any lengths"
    EQUAL_LENGTHS = "equal lengths"


def ability_of(base: SharedBase, adapted: dict[str, LoraLayer]) -> Ability:
    """Return how a base can be decoded; the probe goes past the adapters of its LoRA layers.

    Raises:
        ModelError: In no way.
    """
    if takes_fast_path(base, adapted):
        return Ability.ANY_LENGTHS
    kept: dict[str, Ability] = base.derived.setdefault(_KEPT, {})
    departure: Departure | None = None
    key = ""
    if not base.specialized:
        # It is divided among processes, or will be, and cannot be asked again when it has been.
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
        kept[key] = _found_out(base, adapted, departure)
    return kept[key]


def window_of(base: SharedBase) -> int:
    """Return the tokens that the shortest local attention of a model reaches back; 0 for none.

    Within them a local layer is an ordinary one. Each architecture has a name of its own for it.
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
    """Return how many layers keep keys and values."""
    config = _text_config(base)
    layers = getattr(config, "num_hidden_layers", None) or getattr(config, "decoder_layers", 0)
    return int(layers or 0)


def _text_config(base: SharedBase) -> Any:  # noqa: ANN401 -- of any architecture
    config = base.model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _found_out(
    base: SharedBase, adapted: dict[str, LoraLayer], departure: Departure | None
) -> Ability:
    _refuse_bounded_steps(base)
    _refuse_window_of_cache(base)
    tried: list[str] = []
    lengths = _LENGTHS if departure is None else _late_lengths(base)
    ways = [
        (Ability.ANY_LENGTHS, lengths, lambda: _any_lengths(base)),
        (Ability.EQUAL_LENGTHS, (lengths[0], lengths[0]), lambda: EqualLengthDecoder(base)),
    ]
    if departure is not None and departure.masks:
        # A mask that is made here would take the place of its own, however late that acts.
        del ways[0]
    with own_generator(base.device), _base_alone(adapted):
        if departure is not None:
            _refuse_looking_ahead(base, lengths[0])
        for ability, lengths, make in ways:
            try:
                error, allowed = _gap(base, make, lengths)
            except (*CANNOT_RUN, ModelError) as problem:
                if is_out_of_memory(problem):
                    raise
                tried.append(f"{type(problem).__name__}: {problem}"[:200])
                continue
            if error <= allowed and base.dtype in HALF:
                error, allowed = _gap_in_float32(base, ability, make, lengths)
            if ability is Ability.ANY_LENGTHS and EXACT < error <= allowed:
                allowed = max(EXACT, _MUCH * _noise(base))
            if error <= allowed:
                return ability
            tried.append(f"{error:.2g} of the size of the hidden states off")
    raise ModelError(
        f"model {base.name!r} ({type(base.model).__name__}): the native engine cannot decode it: "
        "token by token with a key/value cache does not give what one forward gives "
        f"({'; of one length: '.join(tried)}); use another model, or engine.rollout: vllm"
    )


def _refuse_bounded_steps(base: SharedBase) -> None:
    """Refuse a state-space layer that bounds its time steps in a forward, and not in decoding.

    So do Zamba2 and Nemotron-H of transformers 5: which steps are beyond the bounds follows from
    the tokens, so that a probe of a few would say nothing.

    Raises:
        ModelError: It names the layer and its bounds.
    """
    for path, module in base.trunk.named_modules():
        bounds: Any = getattr(module, "time_step_limit", None)
        if not isinstance(bounds, tuple | list) or len(bounds) != 2:  # pyright: ignore[reportUnknownArgumentType] -- as below
            continue
        low, high = (float(end) for end in bounds)  # pyright: ignore[reportUnknownVariableType] -- numbers in every config
        if low > 0 or high < math.inf:
            raise ModelError(
                f"model {base.name!r} ({type(base.model).__name__}): the native engine cannot "
                f"decode it: {path} keeps its time steps within [{low:g}, {high:g}] in a forward, "
                "and transformers does not while it decodes token by token; use another model, or "
                "engine.rollout: vllm"
            )


def _refuse_window_of_cache(base: SharedBase) -> None:
    """Refuse rows beyond a window that a model's cache has, and its forward has not.

    Raises:
        ModelError: The context is longer than that window.
    """
    config = _text_config(base)
    if config.model_type not in _WINDOW_OF_CACHE:
        return
    window = window_of(base)
    if 0 < window < (base.context_length or math.inf):
        raise ModelError(
            f"model {base.name!r} ({type(base.model).__name__}): its cache reaches back "
            f"{window} tokens, its forward over all, and its context is {base.context_length}: "
            "beyond the window the two differ; give model.config: "
            f"{{max_position_embeddings: {window}}}"
        )


def _late_lengths(base: SharedBase) -> tuple[int, int]:
    """Return prompt lengths of the probe for code that is not known, which may act late."""
    longest = min(_LATE, (base.context_length or _LATE) - _STEPS)
    return max(longest, _LENGTHS[0]), max(longest // 2, _LENGTHS[1])


def _refuse_looking_ahead(base: SharedBase, longest: int) -> None:
    """Refuse a model whose tokens depend on how long their row is, as late as a probe can see.

    Raises:
        ModelError: They do.
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
                f"whose tokens see their own row up to themselves; in a row of {longest} tokens "
                f"the first {part} have hidden states that differ by {error:.2g} of their size "
                f"from those of a row of {part}; use another model"
            )


def _any_lengths(base: SharedBase) -> Decoder:
    if attention_of(base) not in ("sdpa", "eager"):
        raise ModelError("no mask per row with this attention")
    return ModuleDecoder(base, decoder_layers(base))


def _base_alone(adapted: dict[str, LoraLayer]) -> Any:  # noqa: ANN401 -- a context manager
    """Return a context in which every row goes past the adapters."""
    return population_forward(adapted, RowLayout((None,), (1,)), frozen=True)


def _gap_in_float32(
    base: SharedBase, ability: Ability, make: Callable[[], Decoder], lengths: tuple[int, int]
) -> tuple[float, float]:
    """Do as `_gap`, without the rounding of half precision, in which a wrong position hides.

    Where a layer does not run in float32, or does not fit, prompts of several lengths are not
    relied on: what no padding misleads is slower, and right.
    """
    try:
        with in_float32(base.trunk):
            return _gap(base, make, lengths)
    except (*CANNOT_RUN, ModelError) as problem:
        if ability is Ability.EQUAL_LENGTHS:
            return 0.0, 0.0
        warnings.warn(
            f"model {base.name!r} ({type(base.model).__name__}): prompts are decoded one length at "
            f"a time, since in {base.dtype} nothing shows whether those of several lengths would "
            f"be right, and in float32 a layer did not run ({type(problem).__name__}: "
            f"{str(problem)[:200]}); prompts of few lengths sample fastest",
            UserWarning,
            stacklevel=2,
        )
        return math.inf, 0.0


def _noise(base: SharedBase) -> float:
    """Return the gap of prompts of one length, which is one of rounding in any model.

    Tensor cores round float32 by up to percents where they may, and by next to nothing where not:
    a model whose gap is beyond this one's has its prompts in wrong places.
    """
    make = partial(EqualLengthDecoder, base)
    try:
        with in_float32(base.trunk):
            return _gap(base, make, (_LENGTHS[0], _LENGTHS[0]))[0]
    except (*CANNOT_RUN, ModelError) as problem:
        if is_out_of_memory(problem):
            raise
        return math.inf  # nothing to compare with


def _gap(
    base: SharedBase, make: Callable[[], Decoder], lengths: tuple[int, int]
) -> tuple[float, float]:
    """Return how far decoding is off one forward, relative to the hidden states, and may be."""
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
    """Yield (row, position of the first, hidden states (H,)) of prompts and their continuations.

    Both prompts are expanded, the first one twice, and the first copy leaves half way.
    """
    longest = max(lengths)
    device = rows[0].device
    padded = torch.full((2, longest), pad, device=device)
    for line, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        padded[line, :length] = row[:length]
    hidden = decoder.prefill(padded, torch.tensor(lengths, device=device))
    source = torch.tensor([0, 0, 1], device=device)
    decoder.expand(source, longest + _STEPS)
    found: list[list[Tensor]] = [[state] for state in hidden.index_select(0, source)]
    live = [0, 1, 2]
    for step in range(_STEPS):
        if step == _LEAVES_AT:
            decoder.keep(torch.tensor([1, 2], device=device))
            live = [1, 2]
        owners = [int(source[i]) for i in live]
        starts = torch.tensor([lengths[o] for o in owners], device=device)
        tokens = torch.stack([rows[o][lengths[o] + step] for o in owners])
        column = torch.arange(longest + step + 1, device=device)
        mask = (column < starts[:, None]) | (column >= longest)
        states = decoder.step(tokens, starts + step, mask[:, None, None, :])
        for i, state in zip(live, states, strict=True):
            found[i].append(state)
    for i, states in enumerate(found):
        owner = int(source[i])
        yield owner, lengths[owner] - 1, states
