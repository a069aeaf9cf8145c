"""Defines the entries of `env.reward`: functions by name, reward models and judges."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, cast
from urllib.parse import urlsplit

from pydantic import BeforeValidator, model_validator

from evo_grpo.schema.group import Group, PlainMapping, contradictions, pair, setting
from evo_grpo.schema.messages import shown
from evo_grpo.schema.problems import Path, Problem, Problems, nearest, refuse
from evo_grpo.schema.validation import unwritable
from evo_grpo.settings.objects import PythonObject, is_function


class Message(Group):
    """One message of a conversation."""

    role: str = setting(
        meaning="`system`, `user` or `assistant`; `messages` where the column holds messages.",
        min_length=1,
    )
    content: str = setting(meaning="A template; `{column}` is replaced by the value of the row.")


Bounds = Annotated[
    tuple[float, float],
    pair(
        lambda low, high: -1e15 <= low < high <= 1e15,
        "two numbers, the lowest and the highest score, for instance [0, 10]",
    ),
]


def _variable(value: object) -> object:
    """Refuse a value that names no environment variable; do not show it, as it may be the key."""
    if value is None or (isinstance(value, str) and _VARIABLE.fullmatch(value)):
        return value
    raise Problems.one(
        "expected the name of an environment variable, such as OPENAI_API_KEY, got something else, "
        "which is not shown, since it may be the key; put the key into a variable and name it"
    )


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VariableName = Annotated[str, BeforeValidator(_variable)]


class ModelReward(Group):
    """A reward model: a sequence classifier of transformers, on the device of the run.

    Its templates may contain the columns of the row, `{prompt}` (the text that the agent was given)
    and `{completion}`.
    """

    kind: Literal["model"] = setting("model", "A reward model.")
    name: str = setting(
        meaning="Folder or hub id of a sequence classifier; its weights are read from safetensors.",
        min_length=1,
    )
    text: str | None = setting(
        None,
        "Template of the text that is scored; null: `{prompt}{completion}`, unless there is a "
        "`conversation`.",
        min_length=1,
    )
    text_pair: str | None = setting(
        None, "Template of a second text, for a classifier of pairs of texts.", min_length=1
    )
    conversation: list[Message] | None = setting(
        None,
        "Messages for the classifier's own chat template, instead of `text`; the last one usually "
        "is `{role: assistant, content: '{completion}'}`.",
        min_length=1,
    )
    label: str | None = setting(
        None,
        "Output that is the reward, by its label in config.json; required with several outputs.",
        min_length=1,
    )
    output: Literal["logit", "probability"] = setting(
        "logit",
        "`logit` takes the output itself as the reward, `probability` its softmax over the labels "
        "(its sigmoid if there is one).",
    )
    max_tokens: int | None = setting(
        None,
        "Longest input in tokens; longer ones lose their end, and the run warns once. null: the "
        "positions of the classifier.",
        ge=8,
    )
    batch_size: int = setting(16, "Texts of one forward pass.", ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "dtype of its weights; `auto` is as in `engine.dtype`."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        messages, other = self.conversation or (), self.conversation is not None
        parts = [message.content for message in messages] or [self.text or "{completion}"]
        scored = any(
            "{completion" in part for part in (*parts, "" if other else self.text_pair or "")
        )
        where, both = "conversation" if other else "text", "null beside conversation"
        rows = [
            (name, other and getattr(self, name) is not None, both, "remove one of them")
            for name in ("text", "text_pair")
        ]
        scores = (where, not scored, "{completion} in it", "add what is to be scored")
        refuse(contradictions(self, *rows, scores))
        return self


class JudgeReward(Group):
    """A judge: a language model behind an OpenAI-compatible API that scores each completion.

    Its templates may contain the columns of the row, `{prompt}` (the text that the agent was given)
    and `{completion}`. The reward is the score, scaled so that `range` becomes 0 to 1.
    """

    kind: Literal["judge"] = setting("judge", "A judge.")
    url: str = setting(
        meaning="Base URL of the API, without user, password or query: "
        "`https://api.openai.com/v1`, or `http://127.0.0.1:8000/v1` for a server of vLLM.",
        min_length=1,
    )
    model: str = setting(meaning="Name of the model in requests.", min_length=1)
    prompt: str = setting(
        meaning="Template of the user's message. It says how to judge, and in which form to answer."
    )
    system: str | None = setting(None, "Template of the system message.", min_length=1)
    score: Literal["tag", "logprob"] = setting(
        "tag",
        "`tag` reads the number in the last `<tag>...</tag>` of the answer. `logprob` asks for one "
        "token, and takes the mean of `answers` by their probabilities.",
    )
    tag: str = setting(
        "score", "Name of the tag; the prompt has to ask for it.", pattern=r"^[A-Za-z][\w-]*$"
    )
    range: Bounds = setting(
        (0.0, 10.0), "Lowest and highest score of `tag`; a score outside cannot be used."
    )
    answers: dict[str, float] = setting(
        meaning="Score from 0 to 1 of each answer of `logprob`, without regard to case. An answer "
        "is one token.",
        factory=lambda: {"yes": 1.0, "no": 0.0},
    )
    key_variable: VariableName | None = setting(
        None,
        "Environment variable with the key, such as `OPENAI_API_KEY`; null sends none. The key "
        "itself is neither printed nor recorded.",
    )
    max_tokens: int = setting(512, "Longest answer of `tag` in tokens.", ge=1)
    parameters: PlainMapping = setting(
        factory=dict[str, Any],
        meaning="Further fields of the request, such as `{reasoning_effort: low}`. They replace "
        "the fields that are sent otherwise (`temperature: 0`, `max_tokens`); null removes one.",
    )
    concurrency: int = setting(8, "Most requests at a time.", ge=1, le=1024)
    timeout: float = setting(60.0, "Most seconds of a request.", gt=0, le=1e5)
    retries: int = setting(
        5,
        "Further attempts after a time-out, a lost connection, or an answer with the status 408, "
        "409, 429 or 5xx, after 1, 2, 4, ... seconds, at most 30, or as long as the server says.",
        ge=0,
        le=100,
    )
    input_price: float = setting(
        0.0, "Price of a million tokens that the judge reads, in any currency.", ge=0, le=1e9
    )
    output_price: float = setting(
        0.0, "Price of a million tokens that the judge writes.", ge=0, le=1e9
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        texts, tag, (low, high) = self.prompt + (self.system or ""), f"<{self.tag}>", self.range
        end = f"add: End with your score from {low:g} to {high:g} as {tag}number</{self.tag}>"
        answers, rules = self.answers, [text for name in self.answers if (text := unwritable(name))]
        unfit = len(answers) < 2 or not all(0 <= score <= 1 for score in answers.values())
        alike = len({answer.strip().casefold() for answer in answers}) < len(answers)
        rows = contradictions(
            self,
            ("prompt", "{completion" not in texts, "{completion} in it", "add what is judged"),
            ("prompt", self.score == "tag" and tag not in texts, f"it to ask for {tag}", end),
            (
                "answers",
                unfit,
                "at least two answers with scores from 0 to 1",
                "add or change them",
            ),
            ("answers", rules, f"{' and '.join(rules)} in its answers", "change them"),
            ("answers", alike, "answers that differ in more than case", "remove one"),
        )
        refuse([*_wrong_url(self.url), *rows])
        return self


def _wrong_url(url: str) -> Iterator[Problem]:
    """Yield a problem if an API's base URL is malformed, or has a secret: it would be recorded."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        secret = "@" in parts.netloc or bool(parts.query or parts.fragment)
    except ValueError:  # a port that is no number
        valid, secret = False, "@" in url
    if secret:
        text = "expected a URL without user, password or query, which would be recorded; name the "
        yield Problem(("url",), f"{text}environment variable with the key in key_variable")
    elif not valid:
        yield Problem(("url",), f"expected https://HOST/v1 or http://HOST:PORT/v1, got {url!r}")


KINDS: Mapping[str, type[ModelReward] | type[JudgeReward]] = {
    "model": ModelReward,
    "judge": JudgeReward,
}
Reward = str | PythonObject | ModelReward | JudgeReward


def _rewards(value: object) -> object:
    """Accept functions, their names, mappings with a kind, and lists of these."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        items = cast("list[object]", list(value))
        if items:
            return [_reward(item, (number,)) for number, item in enumerate(items)]
    elif isinstance(value, PythonObject) or (isinstance(value, str) and value):
        return value
    elif is_function(value):
        return PythonObject(value)
    elif isinstance(value, Mapping | ModelReward | JudgeReward):
        return [_reward(value, ())]
    raise ValueError(_EXPECTED)


_EXPECTED = (
    "a function as a string, a mapping with kind model or judge, or a list of at least one of them"
)


def _reward(item: object, path: Path) -> Reward:
    if isinstance(item, str) and (expected := unwritable(item)):
        raise Problems.one(f"expected {expected}, got {shown(item)}", *path)
    if isinstance(item, PythonObject | ModelReward | JudgeReward) or (
        isinstance(item, str) and item
    ):
        return item
    if is_function(item):
        return PythonObject(item)
    if not isinstance(item, Mapping):
        raise Problems.one(f"expected {_EXPECTED}, got {shown(item)}", *path)
    settings: dict[str, Any] = {
        str(key): value for key, value in cast("Mapping[object, object]", item).items()
    }
    kind = settings.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        near = nearest(kind, KINDS) if isinstance(kind, str) else None
        text = f"expected one of {', '.join(map(repr, KINDS))}, got {shown(kind)}"
        hint = f"; did you mean {near!r}?" if near else ""
        raise Problems.one(f"{text}{hint}", *path, "kind")
    try:
        return KINDS[kind](**settings)
    except Problems as error:
        raise error.below(*path) from None


# The validator puts a single mapping into a list; the union is for the JSON Schema.
Rewards = Annotated[
    str | PythonObject | ModelReward | JudgeReward | list[Reward] | None, BeforeValidator(_rewards)
]
