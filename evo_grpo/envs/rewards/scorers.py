"""Rewards that a model computes: a reward model, and a judge.

A reward model is a sequence classifier of transformers; a judge is a language model behind an
OpenAI-compatible API.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, cast, final
from uuid import uuid4

from evo_grpo.envs.messages import excerpt
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.rewards.functions import Board, Scorer, UnusableRewardError, template_rows
from evo_grpo.envs.rewards.judge_client import Answer, Answers, Body, Client, Unanswered
from evo_grpo.envs.rewards.watch import check_not_stopped
from evo_grpo.errors import ConfigError, RewardError
from evo_grpo.escaping import redacted
from evo_grpo.settings.rewards import JudgeReward, ModelReward

if TYPE_CHECKING:
    from evo_grpo.model.classifier import Classifier  # for annotations only: it loads torch

DEFAULT_TEXT = "{prompt}{completion}"
"""Default template of the text that a reward model reads."""
LIKELIEST = 20
"""Number of the likeliest first tokens that `score: logprob` asks for; the API allows no more."""
WAIT_SECONDS = 0.5
"""Seconds between two checks of a waiting thread whether its result is still needed."""
LEAST_PROBABILITY = 0.5
"""Least probability of all `answers` together; below it, the judge answers something else."""


@final
class RewardModel(Scorer):
    """Scores completions with the classifier that `settings` name; see `ModelReward`."""

    __name__ = "model"

    def __init__(self, settings: ModelReward) -> None:
        self.settings = settings
        if settings.conversation is not None:
            messages = [message.model_dump() for message in settings.conversation]
            templates = [Template.of(messages)]
            if "prompt" in templates[0].conversations:
                raise ConfigError(
                    "env.reward: kind model, conversation: expected the role messages with "
                    "{messages}, the conversation of a row, got {prompt}, the text that the agent "
                    "was given"
                )
        else:
            texts = [settings.text or DEFAULT_TEXT, settings.text_pair]
            templates = [Template.of(text) for text in texts if text is not None]
        super().__init__(templates)
        self._classifier: Classifier | None = None
        self._warned = False
        #: The device computes for one thread at a time.
        self._serving = Lock()

    def prepare(self, device: str) -> None:
        """Load the classifier to a device."""
        if self._classifier is not None:
            return
        # Imported here: it loads torch, and `evo-grpo check` must answer at once.
        from evo_grpo.model.classifier import Classifier

        settings = self.settings
        self._classifier = Classifier.load(
            settings.name,
            device=device,
            dtype=settings.dtype,
            label=settings.label,
            max_tokens=settings.max_tokens,
        )

    def __call__(
        self, *, completions: Sequence[str], prompts: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | RewardError]:
        """Score completions in batches of `batch_size`."""
        with self._serving:
            rows = list(template_rows(completions, prompts, columns))
            return self._scores(rows)

    def _scores(self, rows: Sequence[Mapping[str, Any]]) -> list[float | RewardError]:
        self.prepare("auto")
        classifier, settings = self._classifier, self.settings
        assert classifier is not None, "it is prepared"
        if settings.conversation is not None:
            (template,) = self.templates
            texts = [classifier.chat(template.messages(row)) for row in rows]
            encoded = classifier.encode(texts, special_tokens=False)
        else:
            parts = [[template.plain(row) for row in rows] for template in self.templates]
            encoded = classifier.encode(*parts)
        if encoded.cut and not self._warned:
            self._warned = True
            warnings.warn(
                f"env.reward: kind model: {encoded.cut} of {len(rows)} texts are longer than the "
                f"{classifier.max_tokens} tokens that {settings.name!r} reads and lose their end, "
                "which is not scored; lower max_output_tokens, or choose another reward model",
                stacklevel=2,
            )
        scores = classifier.scores(
            encoded, batch_size=settings.batch_size, probability=settings.output == "probability"
        )
        return list(scores)


@final
class Judge(Scorer):
    """Scores completions with the model that `settings` name; see `JudgeReward`.

    Each question is asked once: equal questions get the same answer in all processes of a run, also
    after a resume. Failures of the API are not kept. Threads may ask at once; together they send at
    most `concurrency` requests at a time.
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
        #: Questions that some thread is asking, and the condition that wakes waiting threads.
        self._asked = set[str]()
        self._change = threading.Condition()
        self._board: Board | None = None
        self._claim = f"asked by {uuid4().hex}"

    def prepare(self, device: str) -> None:
        """Check the API key and the settings of the connection."""
        del device
        self._client.check_key()

    def record_in(self, folder: Path, name: str, *, counts: bool = True) -> None:
        """Append new answers to a file in a folder, and use all answers there; see `Answers`."""
        self._answers.record_in(folder, name, counts=counts)

    def share(self, board: Board, *, known: bool) -> None:
        """Share questions and answers with other processes on `board`.

        A question that another process has claimed is not asked. With `known`, the answers so far
        are posted.
        """
        self._board = board
        if known:
            board.write({key: _told(answer) for key, answer in self._answers.known.items()})

    def unrecorded(self) -> Mapping[str, Answer]:
        """Return the answers of this process that are in no file."""
        return self._answers.unrecorded

    def record(self, answers: Mapping[str, Any]) -> None:
        """Write the answers of another process, which has no file, into this process's file."""
        if answers:
            self._answers.write(answers)
            self._answers.sync()

    def spent(self) -> Mapping[str, float]:
        """Return the numbers of answers and tokens, and the cost by the prices in the settings."""
        answers = self._answers
        settings = self.settings
        cost = answers.input * settings.input_price + answers.output * settings.output_price
        return {
            "answers": float(answers.count),
            "input_tokens": float(answers.input),
            "output_tokens": float(answers.output),
            "cost": cost / 1e6,
        }

    def __call__(
        self, *, completions: Sequence[str], prompts: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | RewardError]:
        """Score completions, asking only the questions that have no answer yet.

        Raises RewardError if the API refuses the key, or does not know the URL or the model, and
        RunFailedError if an answer cannot be written.
        """
        rows = template_rows(completions, prompts, columns)
        bodies = [self._body(row) for row in rows]
        keys = [self._key(body) for body in bodies]
        failed = self._settle(dict(zip(keys, bodies, strict=True)))
        return [
            self._reward(key, text, failed) for key, text in zip(keys, completions, strict=True)
        ]

    def _settle(self, questions: Mapping[str, Body]) -> Mapping[str, Unanswered]:
        """Ask the questions that no other thread asks, await the rest; return those that failed."""
        failed: dict[str, Unanswered] = {}
        while True:
            with self._change:
                answers = self._answers.known
                missing = [key for key in questions if key not in answers and key not in failed]
                unasked = {key: questions[key] for key in missing if key not in self._asked}
                self._asked |= unasked.keys()
                if not missing:
                    return failed
                if not unasked:
                    self._change.wait(WAIT_SECONDS)
                    check_not_stopped()
                    continue
            try:
                failed |= self._ask(unasked)
                self._answers.sync()
            finally:
                with self._change:
                    self._asked -= unasked.keys()
                    self._change.notify_all()

    def _ask(self, questions: Mapping[str, Body]) -> Mapping[str, Unanswered]:
        """Send the questions that no other process claims, await the rest; return failures."""
        board = self._board
        if board is None:
            return self._client.ask(questions, self._keep)
        asked_elsewhere = {key for key in questions if not self._claimed(board, key)}
        claimed = {key: body for key, body in questions.items() if key not in asked_elsewhere}
        failed = dict[str, Unanswered]()
        try:
            if claimed:
                failed = self._client.ask(claimed, self._keep)
        finally:  # also after an error: other processes wait
            answers = self._answers.known
            reasons = {key: failed.get(key, Unanswered("it was not asked")).why for key in claimed}
            # Share each answer again: an error of the disk may have kept it from being shared.
            board.write(
                {
                    key: _told(answers[key])
                    if key in answers
                    else json.dumps({"why": reasons[key]})
                    for key in claimed
                }
            )
        while asked_elsewhere:
            names = sorted(asked_elsewhere)
            for key, text in zip(names, board.read(names), strict=True):
                if text.startswith("{"):
                    asked_elsewhere.remove(key)
                    failed |= self._keep_shared(key, json.loads(text))
            if asked_elsewhere:
                time.sleep(WAIT_SECONDS / 10)
                check_not_stopped()
        return failed

    def _claimed(self, board: Board, key: str) -> bool:
        """Claim a question on the board; return False if another process asks or answered it."""
        posted = board.swap(key, "", self._claim)
        if posted.startswith("{") and "why" in json.loads(posted):  # it failed, some time ago
            posted = board.swap(key, posted, self._claim)
        return posted == self._claim

    def _keep_shared(self, key: str, told: Mapping[str, Any]) -> dict[str, Unanswered]:
        """Keep the answer that another process posted, or return the failure that it posted."""
        if "why" in told:
            return {key: Unanswered(told["why"])}
        with self._change:
            self._answers.keep(key, Answer(told["score"], told["text"]), counts=False)
        return {}

    def _keep(self, key: str, reply: Mapping[str, Any]) -> None:
        """Keep the answer in a reply, even without a score, because it has been paid for."""
        score, text = read_score(self.settings, reply)
        text = redacted(text, self._client.key())
        usage = reply.get("usage")
        counts = cast("Mapping[str, object]", usage) if isinstance(usage, Mapping) else {}
        tokens = [_count(counts.get(name)) for name in ("prompt_tokens", "completion_tokens")]
        with self._change:
            answer = self._answers.add(key, Answer(score, text, *tokens))
        if self._board is not None:
            self._board.write({key: _told(answer)})

    def _reward(
        self, key: str, completion: str, failed: Mapping[str, Unanswered]
    ) -> float | RewardError:
        about = f"{self.__name__} {self.settings.model!r}, completion {excerpt(completion)}"
        if key in failed:
            return RewardError(f"{about}: {failed[key].why}")
        answer = self._answers.known[key]
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
        settings = self.settings
        scoring = (settings.tag, settings.range) if settings.score == "tag" else settings.answers
        question = json.dumps([settings.url, body, settings.score, scoring], sort_keys=True)
        return hashlib.sha256(question.encode("utf-8", errors="replace")).hexdigest()


def _told(answer: Answer) -> str:
    """Return an answer as JSON for other processes, with its text only if there is no score."""
    text = answer.text if answer.score is None else ""
    return json.dumps({"score": answer.score, "text": text})


def read_score(settings: JudgeReward, reply: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the score in a reply, from 0 to 1 or None, and the text of the judge's answer."""
    choice = _first(reply.get("choices"))
    message = choice.get("message")
    content = cast("Mapping[str, object]", message).get("content") if _maps(message) else None
    text = content if isinstance(content, str) else ""
    if settings.score == "logprob":
        return _by_logprob(settings, choice), text
    return _by_tag(settings, text), text


def _by_tag(settings: JudgeReward, text: str) -> float | None:
    begin, end = f"<{settings.tag}>", f"</{settings.tag}>"
    end_at = text.rfind(end)
    begin_at = text.rfind(begin, 0, max(end_at, 0))
    if begin_at < 0:
        return None
    low, high = settings.range
    try:
        score = float(text[begin_at + len(begin) : end_at].strip())
    except ValueError:
        return None
    return (score - low) / (high - low) if low <= score <= high else None


def _by_logprob(settings: JudgeReward, choice: Mapping[str, object]) -> float | None:
    """Return the mean score of `settings.answers`, weighted by their probabilities as first token.

    Returns None if the reply has no probabilities, or if those of the answers add up to less than
    `LEAST_PROBABILITY`.
    """
    logprobs = choice.get("logprobs")
    content = cast("Mapping[str, object]", logprobs).get("content") if _maps(logprobs) else None
    likeliest = _first(content).get("top_logprobs")
    if not isinstance(likeliest, list):
        return None
    scores = {answer.strip().casefold(): score for answer, score in settings.answers.items()}
    total = weighed = 0.0
    for token in cast("list[object]", likeliest):
        fields = cast("Mapping[str, object]", token) if _maps(token) else {}
        name, logprob = fields.get("token"), fields.get("logprob")
        if not isinstance(name, str) or not isinstance(logprob, int | float):
            continue
        score = scores.get(name.strip().casefold())
        if score is not None and logprob <= 0:  # NaN is not
            total += math.exp(logprob)
            weighed += math.exp(logprob) * score
    return weighed / total if total >= LEAST_PROBABILITY else None


def _maps(value: object) -> bool:
    return isinstance(value, Mapping)


def _first(values: object) -> Mapping[str, object]:
    items = cast("list[object]", values) if isinstance(values, list) else []
    return cast("Mapping[str, object]", items[0]) if items and _maps(items[0]) else {}


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value <= 10**12 else 0
