"""Limits rows to lengths at which a model computes a prefix as it computes the whole row.

In longer rows, log-probs of sampling and training would differ, or depend on other agents' rows:

- Rotary embeddings of type `longrope` (Phi-3, Phi-4-mini) and `dynamic` choose the frequencies of a
  batch by its largest position, including padding. Here the frequencies are fixed for all rows: to
  those of short rows if no row is longer than the length at which they change, else to those of
  long rows, as in vLLM.
- Sparse attention with an index (DeepSeek-V3.2, GLM, A.X, Hunyuan, dots, DeepSeek-V4, MiniMax-M3)
  attends to the earlier tokens with the best scores. In transformers, a prefix selects other tokens
  than the whole row, so rows are limited to the length up to which all tokens are selected.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from evo_grpo.errors import ShapeError

#: Attribute of a rotary embedding that stores its type while the frequencies are fixed.
_ROPE_TYPE = "evo_grpo_rope_type"
#: A type without an update of frequencies.
_FIXED = "default"


class RowLimit:
    """The limit on a model's row length; `positions` is the number in its config, 0 if missing.

    Attributes:
        longest: Tokens of the longest row; 0 without a limit.
        selection: Row length up to which sparse attention selects all tokens; None for other
            attention.
        switch: Row length up to which the rotary frequencies are constant; None if they always are.
    """

    def __init__(self, trunk: nn.Module, name: str, positions: int) -> None:
        self.selection = selection_length(trunk)
        self.switch = switch_length(trunk)
        self._trunk, self._name = trunk, name
        self._positions = positions or math.inf
        self._most = positions
        if self.selection is not None:
            self._most = min(positions or self.selection, self.selection)
        self.longest = self._most
        self.hold(None)

    def hold(self, requested: int | None) -> None:
        """Fix the rotary frequencies for rows of the requested number of tokens.

        None takes the frequencies of short rows.
        """
        if self.switch is None:
            return
        is_long = requested is not None and requested > self.switch
        self.longest = self._most if is_long else min(self.switch, self._most or self.switch)
        hold_frequencies(self._trunk, self.longest)

    def settle(self, requested: int | None) -> None:
        """Call `hold`; warn if the limit is below `requested`, or below the model's positions."""
        self.hold(requested)
        is_short = requested is None and self.longest < self._most
        if is_short or (self.selection or math.inf) < (requested or self._positions):
            warnings.warn(
                f"model {self._name!r}: prompt and completion have up to {self.longest} tokens: "
                f"{self._reason()}",
                UserWarning,
                stacklevel=5,
            )

    def check(self, tokens: int) -> None:
        """Raise ShapeError if rows of `tokens` tokens are longer than the limit."""
        if (self.selection or self.switch) and tokens > self.longest:
            raise ShapeError(
                f"model {self._name!r}: expected rows of up to {self.longest} tokens, got "
                f"{tokens}: {self._reason()}"
            )

    def _reason(self) -> str:
        if self.selection is not None and self.selection <= (self.switch or self.selection):
            return (
                f"of more than {self.selection} tokens its sparse attention leaves some out, in "
                "transformers others in a prefix than in the whole row; set "
                f"algorithm.max_model_len to {self.selection} or less, or use a model without "
                "sparse attention"
            )
        return (
            "beyond them its rotary frequencies would change for all rows; set "
            f"algorithm.max_model_len above {self.switch} to take those of long rows for all"
        )


def selection_length(trunk: nn.Module) -> int | None:
    """Return the row length up to which sparse attention selects all tokens; None if not sparse."""
    lengths = [n for module in trunk.modules() if (n := _selected(module)) is not None]
    return min(lengths, default=None)


def _selected(module: Any) -> int | None:  # noqa: ANN401 -- a layer of any model
    """Return the number of tokens that a layer's sparse attention selects; None if not sparse."""
    names = ("index_topk", "compress_rate", "topk_blocks", "block_size")
    tokens, rate, blocks, size = (
        value if type(value := getattr(module, name, None)) is int else None for name in names
    )
    if tokens is not None:
        return tokens * (rate or 1)  # in DeepSeek-V4, an entry stands for several tokens
    # MiniMax-M3 selects whole blocks, including the block of the token itself.
    return None if blocks is None or size is None else blocks * size


def switch_length(trunk: nn.Module) -> int | None:
    """Return the row length up to which rotary frequencies are constant; None for any length."""
    lengths = [
        _switch(module, layer_type, rope_type)
        for module in _rotary(trunk)
        for layer_type, rope_type in _types(module).items()
        if _changes(rope_type)
    ]
    return min(lengths, default=None)


def _switch(module: Any, layer_type: str | None, rope_type: str) -> int:  # noqa: ANN401 -- a rotary embedding of any model
    parameters = module.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    longrope = rope_type == "longrope"
    original = parameters.get("original_max_position_embeddings") if longrope else None
    return int(original or module.original_max_seq_len)


@torch.no_grad()
def hold_frequencies(trunk: nn.Module, longest: int) -> None:
    """Fix the rotary frequencies at those for rows of `longest` tokens."""
    for module in _rotary(trunk):
        types = _types(module)
        if not any(map(_changes, types.values())):
            continue
        vars(module).setdefault(_ROPE_TYPE, module.rope_type)
        module.rope_type = vars(module)[_ROPE_TYPE]
        buffer = module.get_buffer(next(name for name, _ in module.named_buffers()))
        for layer_type, rope_type in types.items():
            if _changes(rope_type):
                arguments = {} if layer_type is None else {"layer_type": layer_type}
                # Run a short row first: only a short row resets the frequencies of a long row.
                for position in (0, longest - 1):
                    positions = torch.tensor([[position]], device=buffer.device)
                    module(buffer.view(1, 1, -1), position_ids=positions, **arguments)
        fixed = {name: _FIXED if _changes(kind) else kind for name, kind in types.items()}
        module.rope_type = fixed if isinstance(vars(module)[_ROPE_TYPE], dict) else _FIXED


def _rotary(trunk: nn.Module) -> Iterator[Any]:
    return (m for m in trunk.modules() if isinstance(getattr(m, "rope_type", None), str | dict))


def _types(module: Any) -> dict[str | None, str]:  # noqa: ANN401 -- as above
    """Return the rope types by layer type; the only key is None if all layers share a rope type."""
    types = vars(module).get(_ROPE_TYPE, module.rope_type)
    return dict(types) if isinstance(types, dict) else {None: types}


def _changes(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"
