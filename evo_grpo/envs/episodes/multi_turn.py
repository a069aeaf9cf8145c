"""Defines the protocol of environments of many turns, and plays an episode as token ids."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from evo_grpo.envs.episodes.dialogue import Dialogue
from evo_grpo.envs.messages import excerpt
from evo_grpo.envs.prompts import Messages, Tokenizer
from evo_grpo.errors import ConfigError, DataError, PromptTooLongError, RewardError, ShapeError
from evo_grpo.escaping import error_text
from evo_grpo.model.ends import StopRules
from evo_grpo.schema.validation import LARGEST_REWARD as LARGEST
from evo_grpo.schema.validation import shown
from evo_grpo.types import Completion, Prompt, Trajectory

LONGEST_MESSAGE = 1_000_000
"""Maximum number of characters in an environment's message; longer ones exceed any context."""


class Observation(dict[str, Any]):
    """The argument of `agent.get_action` in a turn: `input_ids`, `attention_mask` and `text`.

    The agent passes its end tokens to the episode by `TokenObservationWrapper.answered_by`.
    """

    def __init__(self, values: Mapping[str, Any], episode: TokenObservationWrapper) -> None:
        super().__init__(values)
        self.episode = episode


Step = tuple[str, float, bool, bool, dict[str, Any]]


@runtime_checkable
class MultiTurnEnv(Protocol):
    """Protocol of an environment: Gymnasium's reset and step on text; `close()` is optional.

    The same seed gives the same episode, regardless of earlier episodes.
    """

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; return the first text for the policy, and info."""
        ...

    def step(self, action: str) -> Step:
        """Take the policy's completion; return text, reward, terminated, truncated and info."""
        ...


def close(env: object) -> None:
    """Close an environment that has a `close()`."""
    close_env = getattr(env, "close", None)
    if callable(close_env):
        close_env()


class TokenObservationWrapper:
    """Plays episodes of a text environment as token ids, one after another.

    The prompt of a turn is the whole episode so far: the tokens that the policy sampled, unchanged,
    and the environment's messages through the tokenizer's chat template. Call `reset` and `step`
    yourself, or let `MultiTurnGym` play many episodes at once.

    Args:
        env: The environment.
        tokenizer: The base model's transformers tokenizer.
        max_turns: Completions after which an episode ends, >= 1.
        pad_id: Token that `step` drops from the end of completions; None takes the padding token of
            the agent.
        max_model_len: Tokens of an episode; None is the model's context. An episode ends when the
            environment's message leaves no room for `max_output_tokens`.
        max_output_tokens: Tokens of one completion, for which a prompt leaves room; None leaves
            room for one token.
        apply_chat_template: False joins the texts as they are.
        conversation_template: Opening messages or raw text with {observation} in it; None is one
            user message.
        chat_template_kwargs: Keyword arguments of the chat template.
        end_ids: Further tokens that end a completion, besides the tokenizer's. `get_action` adds
            its model's end tokens when it gets the observation.

    Raises:
        ConfigError: A number is out of range, or the tokenizer has no chat template to use.

    Attributes:
        token_ids: The ids of the episode so far.
        mask: For each id, whether the policy sampled it.
        logprobs: Log-probs, one per sampled id; None once those of a turn are unknown, as after
            `step`.
        total_reward: Cumulative reward.
        turns: Completions so far.
        end: Why the episode ended: terminated, truncated, max_turns, context or error. Empty while
            it runs, "closed" before the first `reset`.
        error: The exception that the environment raised, or empty.
    """

    def __init__(  # noqa: PLR0913 -- all but the first three have defaults
        self,
        env: MultiTurnEnv,
        tokenizer: Tokenizer,
        max_turns: int,
        pad_id: int | None = None,
        max_model_len: int | None = None,
        max_output_tokens: int | None = None,
        *,
        apply_chat_template: bool = True,
        conversation_template: str | Messages | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        end_ids: Collection[int] = (),
    ) -> None:
        if max_turns < 1 or (max_output_tokens is not None and max_output_tokens < 1):
            raise ConfigError(
                "max_turns and max_output_tokens: expected >= 1, got "
                f"{max_turns!r} and {max_output_tokens!r}"
            )
        if conversation_template is None and not apply_chat_template:
            conversation_template = "{observation}"
        self.env = env
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.pad_id = pad_id
        eos_id: Any = tokenizer.eos_token_id  # typed as for any token; may be None
        self.end_ids = frozenset(end_ids) | (frozenset() if eos_id is None else {eos_id})
        self._ends: StopRules | None = None
        self.max_output_tokens = max_output_tokens
        self.max_model_len: int | None = None
        self._own_limit: int | None = None
        self._dialogue = Dialogue(tokenizer, conversation_template, chat_template_kwargs)
        if max_model_len is not None:
            self.limit_context(max_model_len)
            self._own_limit = max_model_len
        self._clear()
        self.end = "closed"

    def limit_context(self, max_context_length: int) -> None:
        """Set `max_model_len` to a model's context, or raise ConfigError if that is too short."""
        room = self.max_output_tokens or 1
        if max_context_length <= room:
            raise ConfigError(
                f"max_model_len: expected more than max_output_tokens={room}, so that a prompt "
                f"fits before a completion, got {max_context_length}"
            )
        self.max_model_len = min(max_context_length, self._own_limit or max_context_length)

    def answered_by(self, ends: StopRules, pad_id: int) -> None:
        """Set the end tokens and the padding token of the agent that plays."""
        self.end_ids |= ends.ids
        self._ends = ends
        if self.pad_id is None:
            self.pad_id = pad_id

    def reset(self, seed: int | None = None) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode; None as `seed` leaves the seed to the environment.

        Returns:
            The observation for `agent.get_action`, and the environment's info. `input_ids` and
            `attention_mask` are numpy arrays (1, T) of int64.

        Raises:
            PromptTooLongError: The first prompt leaves no room for a completion.
            DataError: The environment does not return text and info.
        """
        self._clear()
        returned = self.env.reset() if seed is None else self.env.reset(seed=seed)
        text, info = check_reset(self.name, returned)
        self.prompt_text, self.token_ids = self._dialogue.open(text)
        self.mask = [False] * len(self.token_ids)
        if self._overflows(len(self.token_ids)):
            raise PromptTooLongError(
                f"{self.name}.reset: its first prompt has {len(self.token_ids)} tokens, which "
                f"leaves no room for {self.max_output_tokens or 1} more in a context of "
                f"{self.max_model_len}: {excerpt(self.prompt_text)}; shorten it, or raise "
                "max_model_len where the model allows it"
            )
        return self.observation, info

    def step(
        self,
        full_completion_ids: Any,  # noqa: ANN401 -- a tensor of any kind, or nested lists
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Play a turn with the return value of `agent.get_action`.

        Args:
            full_completion_ids: (1, T) or (T,) ids of the prompt and its completion. Tokens after
                the first end token, and `pad_id` at the end, are dropped.

        Returns:
            Observation (empty when the episode is over), reward, terminated, truncated (by the
            environment, by max_turns or by the context: see `end`), info.

        Raises:
            ShapeError: The ids do not begin with the observation's, or add none.
            ConfigError: The episode is over.
        """
        host_ids = full_completion_ids
        host_ids = host_ids.cpu() if hasattr(host_ids, "cpu") else host_ids
        ids = [int(i) for i in np.asarray(host_ids, dtype=np.int64).reshape(-1)]
        start = len(self.token_ids)
        new = self._completed(ids[start:])
        if ids[:start] != self.token_ids or not new:
            raise ShapeError(
                f"{self.name}.step: expected the {start} ids of the observation and a completion "
                f"behind them, got {len(ids)} ids that "
                f"{'add none' if ids[:start] == self.token_ids else 'begin otherwise'}"
            )
        if self._ends is None:
            text, ended = str(self.tokenizer.decode(new, skip_special_tokens=True)), False
        else:
            ((text, ended),) = self._ends.texts([new])
        ended = ended or new[-1] in self.end_ids
        reward, info = self.take_turn(Completion(tuple(new), text, None, ended))
        terminated = self.end == "terminated"
        truncated = bool(self.end) and not terminated
        return {} if self.end else self.observation, reward, terminated, truncated, info

    def take_turn(self, completion: Completion) -> tuple[float, dict[str, Any]]:
        """Give a completion to the environment; return the reward of the turn, and info.

        Errors of the environment are not caught; `MultiTurnGym` then calls `drop`.
        """
        if self.end:
            raise ConfigError(
                f"{self.name}: the episode is over ({self.end}); call reset() before the next step"
            )
        self.token_ids += completion.token_ids
        self.mask += [True] * len(completion.token_ids)
        if completion.logprobs is None or self.logprobs is None:
            self.logprobs = None
        else:
            self.logprobs += completion.logprobs
        self.turns += 1
        self.ended = completion.ended
        text, reward, terminated, truncated, info = check_step(
            self.name, self.env.step(completion.text)
        )
        self.total_reward += reward
        self._transcript += [completion.text, str(text or "")]
        if terminated:
            self.end = "terminated"
        elif truncated:
            self.end = "truncated"
        elif self.turns >= self.max_turns:
            self.end = "max_turns"
        else:
            closed = completion.token_ids[-1] if completion.ended else None
            between = self._dialogue.reply(check_text(f"{self.name}.step", text), closed)
            # An episode ends with a sampled token, so the last message is not appended.
            if self._overflows(len(self.token_ids) + len(between)):
                self.end = "context"
            else:
                self.token_ids += between
                self.mask += [False] * len(between)
        return reward, info

    def drop(self, error: BaseException) -> None:
        """End the episode because the environment raised `error`; the episode has no reward."""
        self.end, self.error = "error", error_text(error)

    def close(self) -> None:
        """Close the environment."""
        close(self.env)

    @property
    def name(self) -> str:
        """Name of the environment's class."""
        return type(self.env).__name__

    @property
    def prompt(self) -> Prompt:
        """The prompt of this turn."""
        return Prompt(self.turns, self.prompt_text, tuple(self.token_ids))

    @property
    def observation(self) -> Observation:
        """The argument of `agent.get_action` in this turn."""
        ids = np.asarray([self.token_ids], dtype=np.int64)
        text = str(self.tokenizer.decode(self.token_ids, skip_special_tokens=True))
        values = {"input_ids": ids, "attention_mask": np.ones_like(ids), "text": text}
        return Observation(values, self)

    @property
    def trajectory(self) -> Trajectory:
        """The episode so far; without token ids if it was dropped."""
        span = slice(0 if self.error else None)
        # The environment's lines are marked, so that a reader can tell them from completions.
        lines = [
            f"[environment] {line}" if n % 2 else line
            for n, line in enumerate(self._transcript)
            if line
        ]
        return Trajectory(
            prompt=self.prompt_text,
            text="\n".join(lines),
            token_ids=tuple(self.token_ids[span]),
            mask=tuple(self.mask[span]),
            logprobs=None if self.logprobs is None else tuple(self.logprobs[span]),
            ended=self.ended,
            turns=self.turns,
            end=self.end,
            error=self.error,
        )

    def _clear(self) -> None:
        self.token_ids: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] | None = []
        self.prompt_text = ""
        self.total_reward = 0.0
        self.turns = 0
        self.ended = False
        self.end = ""
        self.error = ""
        self._transcript: list[str] = []

    def _overflows(self, length: int) -> bool:
        limit = self.max_model_len
        return limit is not None and length + (self.max_output_tokens or 1) > limit

    def _completed(self, ids: list[int]) -> list[int]:
        """Remove the padding after a completion, but keep the first end token."""
        end = next((length for length, token in enumerate(ids, 1) if token in self.end_ids), None)
        if end is not None:
            return ids[:end]
        while ids and ids[-1] == self.pad_id:
            ids = ids[:-1]
        return ids


def check_reset(name: str, returned: object) -> tuple[str, dict[str, Any]]:
    """Check and return the result of `reset`: (text, info)."""
    text, info = _checked_parts(f"{name}.reset", returned, ("text", "info"))
    return check_text(f"{name}.reset", text), info


def check_step(name: str, returned: object) -> tuple[object, float, bool, bool, dict[str, Any]]:
    """Check and return the result of `step`: (text, reward, terminated, truncated, info).

    The text may be of any type.
    """
    place = f"{name}.step"
    text, reward, terminated, truncated, info = _checked_parts(
        place, returned, ("text", "reward", "terminated", "truncated", "info")
    )
    number = check_reward(place, reward)
    ends = check_flag(place, "terminated", terminated), check_flag(place, "truncated", truncated)
    return text, number, *ends, info


def check_reward(place: str, reward: Any) -> float:  # noqa: ANN401 -- whatever a game returned
    """Return the reward of a turn as a finite float, or raise RewardError."""
    try:
        # float() accepts strings too, which are refused here as for reward functions.
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except Exception:  # its __float__ may raise anything; the error below names it
        number = math.nan
    if not -LARGEST <= number <= LARGEST:  # NaN is not
        bound = f" from -{LARGEST:g} to {LARGEST:g}" if math.isfinite(number) else ""
        raise RewardError(f"{place}: expected a finite reward{bound}, got {shown(reward)}")
    return number


def check_text(place: str, value: object) -> str:
    """Return a message as a string of at most `LONGEST_MESSAGE` characters, or raise DataError."""
    text = cast("str", value) if issubclass(type(value), str) else None
    if text is None or len(text) > LONGEST_MESSAGE:
        got = shown(value) if text is None else f"{len(text):,}: {excerpt(text)}"
        raise DataError(
            f"{place}: expected a string for the policy, of at most {LONGEST_MESSAGE:,} "
            f"characters, got {got}"
        )
    return text


def check_flag(place: str, name: str, value: Any) -> bool:  # noqa: ANN401 -- whatever a game returned
    """Return a flag as a bool; a number or array of one element must equal True or False.

    None is False. Strings are refused, because bool("False") is True.
    """
    if value is None:
        return False
    cause: Exception | None = None
    try:
        for flag in (False, True):
            if value == flag:
                return flag
    except Exception as error:  # an array, or a value whose __eq__ raises
        cause = error
    raise DataError(
        f"{place}: expected {name} to be True or False, got {shown(value)}; return a bool"
    ) from cause


def _checked_parts(place: str, returned: object, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the parts called `names` of a result, which must be a tuple; info becomes a dict."""
    try:
        # By type(): a value may report another __class__, or raise.
        if not issubclass(type(returned), tuple) or len(cast("Any", returned)) != len(names):
            raise TypeError(type(returned))
        *parts, info = cast("tuple[Any, ...]", returned)
        return *parts, {} if info is None else dict(info)
    except Exception as error:  # info may be any object
        raise DataError(
            f"{place}: expected a tuple ({', '.join(names)}) with a dict as info, got "
            f"{shown(returned)}"
        ) from error
