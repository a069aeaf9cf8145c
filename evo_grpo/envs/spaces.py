"""What goes in and comes out of a language model, for scripts that ask for spaces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextSpace:
    """What goes in or comes out of a language model.

    Attributes:
        vocab_size: Different tokens.
        max_tokens: Longest text in tokens, or None without a limit.
    """

    vocab_size: int
    max_tokens: int | None
