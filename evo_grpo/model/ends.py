"""Where completions end: end tokens, and the strings and tokens of `algorithm.stop`.

A completion ends with the first token that makes its text contain a stop string. Its text ends
before the string; the tokens that spell it belong to the completion. Strings are searched in the
text, because one string has many spellings in tokens.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from evo_grpo.errors import ConfigError
from evo_grpo.schema.validation import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evo_grpo.model.base import SharedBase
    from evo_grpo.settings.algorithm import AlgorithmConfig

_MARGIN = 16
"""Characters to decode before the longest stop string: if decoding starts within a text, its first
characters may differ, because a leading space is dropped or a character lacks its first bytes."""


@final
class StopRules:
    """Decides where completions end, given `algorithm.stop` and `algorithm.min_output_tokens`.

    Attributes:
        ids: All tokens that end a completion.
        strings: The stop strings.
    """

    def __init__(self, base: SharedBase, algorithm: AlgorithmConfig) -> None:
        self._tokenizer: Any = base.tokenizer
        self._stop_ids = tuple(stop for stop in algorithm.stop if isinstance(stop, int))
        self.ids = frozenset((*base.eos_ids, *self._stop_ids))
        self.strings = tuple(stop for stop in algorithm.stop if isinstance(stop, str))
        self._least = algorithm.min_output_tokens
        for number, stop in enumerate(algorithm.stop):
            if problem := self._problem(stop, base.vocabulary):
                raise ConfigError(f"algorithm.stop[{number}]: {problem}")

    def _problem(self, stop: str | int, vocabulary: int) -> str:
        if isinstance(stop, int):
            is_token = stop < vocabulary
            return "" if is_token else f"expected a token below {vocabulary}, got {stop}"
        if self._tokenizer is None:
            return f"expected a base with a tokenizer for the string {shown(stop)}, got one without"
        special = next((t for t in self._special if t in stop), None)
        if special is None:
            return ""
        id = self._tokenizer.convert_tokens_to_ids(special)
        return (
            f"expected a string of the text, got {shown(stop)}: {special} is a special token, "
            f"which the text does not show; give its id {id} instead"
        )

    @cached_property
    def _special(self) -> frozenset[str]:
        added = self._tokenizer.added_tokens_decoder.values()
        return frozenset(
            {*self._tokenizer.all_special_tokens, *(t.content for t in added if t.special)} - {""}
        )

    def texts(self, rows: Sequence[Sequence[int]]) -> list[tuple[str, bool]]:
        """Return the text of each completion, and whether an end token or stop string ended it.

        The text has no special tokens and ends before a stop string; empty without a tokenizer.
        """
        trimmed = [row[:-1] if row and row[-1] in self._stop_ids else row for row in rows]
        texts: list[tuple[str, bool]] = []
        for row, text in zip(rows, self._decoded(trimmed), strict=True):
            start = self._place(row, text)
            ended = start >= 0 or (bool(row) and row[-1] in self.ids)
            texts.append((text if start < 0 else text[:start], ended))
        return texts

    def stops(self, row: Sequence[int]) -> bool:
        """Return whether a row has a stop string, given that it has none without its last token."""
        if len(row) <= self._least or not self._may_complete(row[-1]):
            return False
        # Decode only the end of the row, as long as it has no stop string.
        count, enough = 8, max(map(len, self.strings)) + _MARGIN
        while count < len(row):
            text, before = self._decoded([row[-count:], row[-count:-1]])
            if len(before) >= enough:  # a token may be longer than all strings
                if not any(stop in text for stop in self.strings):
                    return False
                break
            count *= 2
        return self._place(row, self._decoded([row])[0]) >= 0

    def cut(self, row: tuple[int, ...]) -> tuple[int, ...]:
        """Return a row up to the token that completes its first stop string, else the whole row.

        Engines that decode a character only after its last byte may have sampled further tokens.
        """
        while self.strings and len(row) > self._least + 1:
            if self._place(row[:-1], self._decoded([row[:-1]])[0]) < 0:
                break
            row = row[:-1]
        return row

    def _place(self, row: Sequence[int], text: str) -> int:
        """Return where the first stop string of a row's text begins, or -1.

        A stop string within the first `min_output_tokens` tokens is ignored.
        """
        if not any(stop in text for stop in self.strings):
            return -1
        ignored = 0
        if self._least:  # without a last character that lacks bytes
            ignored = len(self._decoded([row[: self._least]])[0].rstrip("\ufffd"))
        starts = (text.find(stop, max(0, ignored - len(stop) + 1)) for stop in self.strings)
        return min((start for start in starts if start >= 0), default=-1)

    def _may_complete(self, token: int) -> bool:
        """Return whether a token has a stop string's last character, or a part of a character."""
        if token not in self._completing:
            # Twice, since a space in front of a text is not shown by every tokenizer.
            (text,) = self._decoded([[token, token]])
            completes = any(stop[-1] in text for stop in self.strings)
            self._completing[token] = "\ufffd" in text or completes
        return self._completing[token]

    @cached_property
    def _completing(self) -> dict[int, bool]:
        return {}

    def _decoded(self, rows: Sequence[Sequence[int]]) -> list[str]:
        if self._tokenizer is None:
            return [""] * len(rows)
        return self._tokenizer.batch_decode(rows, skip_special_tokens=True)
