"""The answers of a judge: in memory, and in a file of the run folder, from which a resume reads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from evo_grpo.record.files import append, reading, seal, sync, unseal, writing
from evo_grpo.record.plain import MAX_LOG_BYTES, read_plain

TEXT_CHARACTERS = 500
"""Characters of an answer's text that are kept, for people to read."""
_SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Answer:
    """An answer that has been paid for.

    Attributes:
        score: From 0 to 1; None if the answer has no score that can be used.
        text: Its text, cut to its end.
        input: Tokens that the judge read.
        output: Tokens that it wrote.
    """

    score: float | None
    text: str
    input: int = 0
    output: int = 0


@final
class Answers:
    """Answers by the digest of their question.

    Each answer is appended to the file as it comes, in one write, so that a process that is killed
    loses none.

    Attributes:
        count: Number of answers to this process and, if it counts them, to the run before.
        input: Tokens that the judge has read for them.
        output: Tokens that it has written.
    """

    def __init__(self) -> None:
        self.count = self.input = self.output = 0
        self._known: dict[str, Answer] = {}
        self._path: Path | None = None
        self._unrecorded: dict[str, Answer] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Answer:
        return self._known[key]

    def known(self) -> Mapping[str, Answer]:
        """Return the answers by question."""
        return self._known

    def record_in(self, folder: Path, name: str, *, counts: bool = True) -> None:
        """Read the answers in all files of a folder, and append new ones to one of them.

        The folder, and a file that other ranks do not use, are created with the first answer. A
        line that a kill has cut off is removed then; a damaged one is warned of, and asked again.
        With `counts`, the answers of all processes to this judge count.
        """
        judge = name.rpartition("rank-")[0]
        # What an earlier run of this process has cost is in its own folder, or in the files below.
        self.count = self.input = self.output = 0
        damaged = 0
        with reading(folder):
            for file in answer_files(folder):
                found = read_answers(file)
                damaged += found.damaged
                for key, answer in found.answers:
                    self.keep(key, answer, counts=counts and file.name.startswith(judge))
        if damaged:
            warnings.warn(
                f"{folder}: {damaged} answers of the judge are damaged, and are asked again if "
                "they are needed",
                stacklevel=2,
            )
        self._path = folder / (name + _SUFFIX)

    def add(self, key: str, answer: Answer) -> Answer:
        """Keep an answer, in the file too, and return it with its text cut.

        Raises:
            RunFailedError: The file cannot be written.
        """
        answer = Answer(answer.score, answer.text[-TEXT_CHARACTERS:], answer.input, answer.output)
        self.keep(key, answer, counts=True)
        self.write({key: answer})
        return answer

    def unrecorded(self) -> Mapping[str, Answer]:
        """Return the answers that no file has, because this process sees no folder."""
        return self._unrecorded

    def write(self, answers: Mapping[str, Answer]) -> None:
        """Write answers into the file, also those of a process that sees no folder.

        Raises:
            RunFailedError: The file cannot be written.
        """
        if self._path is None:
            self._unrecorded |= answers
            return
        lines = "".join(_line(key, answer) for key, answer in answers.items())
        append(self._path, lines, durable=False)

    def sync(self) -> None:
        """Wait until the answers are on disk."""
        if self._path is not None and self._path.exists():
            with writing(self._path):
                sync(self._path)
                sync(self._path.parent)

    def keep(self, key: str, answer: Answer, *, counts: bool) -> None:
        """Keep an answer in memory, of another process or an earlier one; see `record_in`."""
        if counts:
            self.count += 1
            self.input += answer.input
            self.output += answer.output
        self._known[key] = answer


def _line(key: str, answer: Answer) -> str:
    data = {
        "question": key,
        "score": answer.score,
        "input_tokens": answer.input,
        "output_tokens": answer.output,
        "text": answer.text,
    }
    return seal(data)


class ReadAnswers(NamedTuple):
    """The content of a file: answers, the number of damaged lines, bytes that a kill cut off."""

    answers: list[tuple[str, Answer]]
    damaged: int
    cut_off: int


def answer_files(folder: Path) -> list[Path]:
    """Return the files of answers in a folder, which need not exist."""
    return sorted(folder.glob(f"*{_SUFFIX}"))


def read_answers(file: Path) -> ReadAnswers:
    """Read a file of answers, as far as its lines are whole."""
    *lines, last = read_plain(file, MAX_LOG_BYTES).split(b"\n")
    found = [answer for line in lines if (answer := _answer(line)) is not None]
    return ReadAnswers(found, len(lines) - len(found), len(last))


def _answer(line: bytes) -> tuple[str, Answer] | None:
    """Return the question and the answer of a line, None if it is damaged."""
    try:
        data = unseal(line)
        key, text = _typed(data, "question", str), _typed(data, "text", str)
        tokens = [_typed(data, name, int) for name in ("input_tokens", "output_tokens")]
        score = data.get("score")
        if score is not None and not (isinstance(score, int | float) and 0 <= score <= 1):
            raise ValueError("score")
    except ValueError:
        return None
    return key, Answer(None if score is None else float(score), text, *tokens)


def _typed(data: dict[str, Any], name: str, kind: type) -> Any:  # noqa: ANN401 -- of that type
    value = data.get(name)
    if type(value) is not kind:
        raise ValueError(name)
    return value
