"""A judge: a language model behind an OpenAI-compatible API that scores completions."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final
from uuid import uuid4

from evo_grpo.envs.messages import excerpt
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.rewards.judge_answers import Answer, Answers
from evo_grpo.envs.rewards.judge_client import NOT_ASKED, Body, Client
from evo_grpo.envs.rewards.scorer import Board, Scorer, UnusableRewardError, template_rows
from evo_grpo.envs.rewards.watch import check_not_stopped
from evo_grpo.envs.thinking import COLUMN
from evo_grpo.errors import RewardError
from evo_grpo.printable import redacted
from evo_grpo.settings.rewards import JudgeReward

LIKELIEST = 20
"""Number of the likeliest first tokens that `score: logprob` asks for; the API allows no more."""
CHARACTERS = 4
"""Characters of a token in an estimate of what a judge reads."""
LOOK_SECONDS = 0.05
"""Seconds between two looks for the answers to questions that others ask."""
LEAST_PROBABILITY = 0.5
"""Least probability of all `answers` together; below it, the judge answers something else."""


@final
class Judge(Scorer):
    """Scores completions with the model that `settings` name; see `JudgeReward`.

    A question is asked once: equal questions of a run, in any of its threads and processes, also of
    a run that was resumed, get the same answer. A failure of the API is not an answer and is not
    kept. Several threads may ask at once; together they send `concurrency` requests at a time.
    """

    __name__ = "judge"

    def __init__(self, settings: JudgeReward) -> None:
        self.settings = settings
        roles = {"system": settings.system, "user": settings.prompt}
        self._templates = {
            role: Template.of(text) for role, text in roles.items() if text is not None
        }
        super().__init__(list(self._templates.values()))
        self._answers = Answers()
        self._client = Client(settings)
        self._lock = threading.Lock()
        self._board: Board = _OwnBoard()

    def prepare(self, device: str) -> None:
        """Check that the environment has the key; see `Scorer.prepare`."""
        del device
        self._client.check_key()

    def record_in(self, folder: Path, name: str, *, counts: bool = True) -> None:
        """Keep answers in a file of a folder of the run, and use those in all its files.

        `counts` is whether this process counts what the earlier ones have cost: one of them does.
        """
        self._answers.record_in(folder, name, counts=counts)

    def share(self, board: Board, *, known: bool) -> None:
        """Ask no question that another process asks; `known`: tell them the answers so far too."""
        self._board = board
        if known:
            board.write({key: _told(answer) for key, answer in self._answers.items()})

    def unrecorded(self) -> Mapping[str, Answer]:
        """Return the answers to this process that no file has."""
        return self._answers.unrecorded

    def record(self, answers: Mapping[str, Any]) -> None:
        """Write the answers to another process, that has no file, into the file of this one."""
        if answers:
            self._answers.write(answers)
            self._answers.sync()

    def spent(self) -> Mapping[str, float]:
        """Return the number of answers, their tokens, and their cost by the prices given."""
        answers, settings = self._answers, self.settings
        cost = answers.input * settings.input_price + answers.output * settings.output_price
        return {
            "answers": float(answers.count),
            "input_tokens": float(answers.input),
            "output_tokens": float(answers.output),
            "cost": cost / 1e6,
        }

    def questions(self, rows: Sequence[Mapping[str, Any]], tokens: int) -> str:
        """Return a sentence on what questions will take, before they are asked.

        Args:
            rows: The columns of the row of each completion, its `prompt` included.
            tokens: Most tokens of a completion.
        """
        settings = self.settings
        characters = sum(
            len(template.plain({**row, "completion": "", COLUMN: ""}))
            for row in rows
            for template in self._templates.values()
        )
        read = characters / CHARACTERS + len(rows) * tokens
        own = settings.parameters
        longest = 1 if settings.score == "logprob" else settings.max_tokens
        longest = own.get("max_completion_tokens") or own.get("max_tokens") or longest
        write = len(rows) * longest
        cost = (read * settings.input_price + write * settings.output_price) / 1e6
        return (
            f"the judge {settings.model!r} is asked up to {len(rows):,} questions, about "
            f"{read:,.0f} tokens to read and at most {write:,} to write, which cost about "
            f"{cost:.2g} at most by its prices"
        )

    def __call__(
        self, *, completions: Sequence[str], prompts: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | RewardError]:
        """Ask the judge about completions, except for what it has answered; see `Scorer`.

        Raises:
            RewardError: The API refuses the key, or does not know the URL or the model.
            RunFailedError: An answer cannot be written.
        """
        bodies = [self._body(row) for row in template_rows(completions, prompts, columns)]
        keys = [self._key(body) for body in bodies]
        failed = self._ask(dict(zip(keys, bodies, strict=True)))
        return [
            self._reward(key, text, failed) for key, text in zip(keys, completions, strict=True)
        ]

    def _ask(self, questions: Mapping[str, Body]) -> dict[str, str]:
        """Send open questions, wait for those that others ask, and return why some failed."""
        board, claim = self._board, f"asked by {uuid4().hex}"
        missing = {key: body for key, body in questions.items() if key not in self._answers}
        mine = {key: body for key, body in missing.items() if _claimed(board, key, claim)}
        waiting, failed = missing.keys() - mine.keys(), dict[str, str]()
        try:
            if mine:
                failed = self._client.ask(mine, self._keep)
                self._answers.sync()
        finally:  # also after an error: the others wait
            # An answer is told again: the disk may have refused it before it was told.
            why = {key: json.dumps({"why": failed.get(key, NOT_ASKED)}) for key in mine}
            answered = {key: _told(self._answers[key]) for key in mine if key in self._answers}
            board.write(why | answered)
        while waiting:
            names = sorted(waiting)
            for key, text in zip(names, board.read(names), strict=True):
                if text.startswith("{"):
                    waiting.remove(key)
                    failed |= self._heard(key, json.loads(text))
            if waiting:
                time.sleep(LOOK_SECONDS)
                check_not_stopped()
        return failed

    def _heard(self, key: str, told: Mapping[str, Any]) -> dict[str, str]:
        """Keep what another thread or process tells of a question; return why it failed, if so."""
        if "why" in told:
            return {key: told["why"]}
        with self._lock:
            if key not in self._answers:
                self._answers.keep(key, Answer(told["score"], told["text"]), counts=False)
        return {}

    def _keep(self, key: str, reply: Mapping[str, Any]) -> None:
        """Keep the answer in a reply, also if it has no score: it has been paid for."""
        score, text = read_score(self.settings, reply)
        text = redacted(text, self._client.key())
        names = ("prompt_tokens", "completion_tokens")
        tokens = [_count(_within(reply, "usage", name)) for name in names]
        with self._lock:
            answer = self._answers.add(key, Answer(score, text, *tokens))
        self._board.write({key: _told(answer)})

    def _reward(self, key: str, completion: str, failed: Mapping[str, str]) -> float | RewardError:
        about = f"{self.__name__} {self.settings.model!r}, completion {excerpt(completion)}"
        if key in failed:
            return RewardError(f"{about}: {failed[key]}")
        answer = self._answers[key]
        if answer.score is not None:
            return answer.score
        return UnusableRewardError(
            f"{about}: expected {self._wanted()}, got {excerpt(answer.text)}; say in env.reward's "
            "prompt more clearly how to answer, or raise its max_tokens"
        )

    def _wanted(self) -> str:
        settings = self.settings
        if settings.score == "logprob":
            return f"one of {', '.join(settings.answers)} as the first token, with log-probs"
        low, high = settings.range
        return f"<{settings.tag}>number from {low:g} to {high:g}</{settings.tag}>"

    def _body(self, row: Mapping[str, Any]) -> dict[str, Any]:
        settings = self.settings
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": [
                {"role": role, "content": template.plain(row)}
                for role, template in self._templates.items()
            ],
            "temperature": 0,
            "max_tokens": settings.max_tokens,
        }
        if settings.score == "logprob":
            body |= {"max_tokens": 1, "logprobs": True, "top_logprobs": LIKELIEST}
        body |= settings.parameters
        return {name: value for name, value in body.items() if value is not None}

    def _key(self, body: Mapping[str, Any]) -> str:
        """Return the digest of a question, and of all that decides about its score."""
        settings = self.settings
        how = (settings.tag, settings.range) if settings.score == "tag" else settings.answers
        asked = json.dumps([settings.url, body, settings.score, how], sort_keys=True)
        return hashlib.sha256(asked.encode("utf-8", errors="replace")).hexdigest()


@final
class _OwnBoard:
    """The `Board` of a single process, which its threads share."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def swap(self, name: str, old: str, new: str) -> str:
        """See `Board`."""
        with self._lock:
            if self._texts.get(name, "") == old:
                self._texts[name] = new
            return self._texts[name]

    def write(self, texts: Mapping[str, str]) -> None:
        """See `Board`."""
        with self._lock:
            self._texts |= texts

    def read(self, names: Sequence[str]) -> Sequence[str]:
        """See `Board`."""
        return [self._texts[name] for name in names]


def _claimed(board: Board, key: str, claim: str) -> bool:
    """Return whether the owner of a claim is to ask a question: nobody else asks or has asked."""
    there = board.swap(key, "", claim)
    if there.startswith("{") and "why" in json.loads(there):  # it failed, some time ago
        there = board.swap(key, there, claim)
    return there == claim


def _told(answer: Answer) -> str:
    """Return what others need to know of an answer; the text is for messages alone."""
    text = answer.text if answer.score is None else ""
    return json.dumps({"score": answer.score, "text": text})


def read_score(settings: JudgeReward, reply: Mapping[str, Any]) -> tuple[float | None, str]:
    """Read the score in a reply of the API.

    Args:
        settings: Those of the judge.
        reply: The JSON of the reply, of any form.

    Returns:
        The score from 0 to 1, or None if there is none that can be used; and the answer's text.
    """
    content = _within(reply, "choices", 0, "message", "content")
    text = content if isinstance(content, str) else ""
    if settings.score == "tag":
        return _by_tag(settings, text), text
    likeliest = _within(reply, "choices", 0, "logprobs", "content", 0, "top_logprobs")
    return _by_logprob(settings, likeliest), text


def _by_tag(settings: JudgeReward, text: str) -> float | None:
    begin, end = f"<{settings.tag}>", f"</{settings.tag}>"
    last = text.rfind(end)
    first = text.rfind(begin, 0, max(last, 0))
    if first < 0:
        return None
    low, high = settings.range
    try:
        score = float(text[first + len(begin) : last].strip())
    except ValueError:
        return None
    return (score - low) / (high - low) if low <= score <= high else None


def _by_logprob(settings: JudgeReward, likeliest: object) -> float | None:
    """Return the mean score of the answers, by the probabilities of the first token."""
    scores = {answer.strip().casefold(): score for answer, score in settings.answers.items()}
    total = weighed = 0.0
    for token in cast("list[object]", likeliest) if isinstance(likeliest, list) else ():
        name, logprob = _within(token, "token"), _within(token, "logprob")
        if not isinstance(name, str) or not isinstance(logprob, int | float):
            continue
        score = scores.get(name.strip().casefold())
        if score is not None and logprob <= 0:  # NaN is not
            total += math.exp(logprob)
            weighed += math.exp(logprob) * score
    return weighed / total if total >= LEAST_PROBABILITY else None


def _within(value: Any, *path: str | int) -> Any:  # noqa: ANN401 -- JSON of any form
    """Return the value at a path of JSON, None where there is none."""
    try:
        for step in path:
            value = value[step]
    except (LookupError, TypeError):
        return None
    return value


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value <= 10**12 else 0
