"""Reward functions: per row or per batch, sync or async, each with its name and weight."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import Parameter, isclass, signature
from pathlib import Path
from typing import Any, Literal, cast

from evo_grpo.envs.messages import listed, nearest
from evo_grpo.envs.rewards.scorer import Scorer
from evo_grpo.envs.rewards.trl_call import PASSED
from evo_grpo.envs.thinking import COLUMN
from evo_grpo.errors import ConfigError
from evo_grpo.schema.validation import LARGEST_REWARD as LARGEST

# A dataset column with one of these names does not reach a reward function.
ROW_NAMES = ("completion", "prompt")
BATCH_NAMES = ("completions", "prompts")

_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

PAGE = "docs/from_trl.md"
_BY_STYLE = "TRL passes it, and so does env.reward_style: trl"
FOREIGN = {
    **dict.fromkeys(("completion_ids", "trainer_state", "log_metric", "log_extra"), _BY_STYLE),
    "environments": "TRL passes it; there is none here",
    "solution_str": "verl passes the completion so; name the parameter completion",
}
"""Parameters of reward functions that other trainers pass, each with its counterpart here."""
_NOT_YOURS = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(__file__).parents[2], *map(sysconfig.get_path, ("stdlib", "purelib")))
)


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its name and weight.

    Attributes:
        name: Name in messages and records.
        fn: `fn(completion=..., **columns) -> float | None`, called per row with the columns that
            its parameters name; with **kwargs, it gets all columns and "prompt". With a parameter
            `completions` it is a batch function: `fn(completions=[...], prompts=[...], **columns)
            -> list[float | None]`, whose columns are lists. Either may be async. None abstains.
            Keywords that a `functools.partial` binds keep their values.
        weight: Factor of the reward in the sum, from -1e15 to 1e15.
        style: "trl" if `fn` is called as TRL calls it; see `trl_call`.

    Raises:
        ConfigError: `fn` is not callable or takes no completion, or the weight is out of range.
    """

    name: str
    fn: Callable[..., Any]
    weight: float = 1.0
    style: Literal["trl"] | None = None

    def __post_init__(self) -> None:
        """Check that `fn` can be called with a completion, and the range of the weight."""
        if (problem := next(self._problems(), None)) is not None:
            raise ConfigError(f"reward function {self.name!r}: {problem}")

    def _problems(self) -> Iterator[str]:
        if not callable(self.fn) or isclass(self.fn):
            hint = "; make an instance of it" if isclass(self.fn) else ""
            yield f"expected a function, got {self.fn!r}{hint}"
        if isinstance(self.weight, str) or not -LARGEST <= self.weight <= LARGEST:
            yield (
                f"expected a finite weight, got {self.weight!r}; give one from -{LARGEST:g} to "
                f"{LARGEST:g}"
            )
        parameters = self._parameters()
        unnamed = [p.name for p in parameters.values() if p.kind is Parameter.POSITIONAL_ONLY]
        if unnamed:
            yield (
                f"arguments are passed by name, and {listed(unnamed)} can only be passed by "
                "position; wrap it: lambda completion, answer: fn(completion, answer)"
            )
        needed = [name for name in self.required_columns() if name in ROW_NAMES]
        if self.style == "trl" and needed:
            yield (
                "expected parameters that TRL passes, such as prompts and completions, got "
                f"{listed(needed)}; leave env.reward_style out, or rename them"
            )
        if not self.is_batch and not self.takes_all and "completion" not in parameters:
            yield (
                "expected a parameter named completion (called per row) or completions (called "
                f"per batch), got ({', '.join(parameters)}){''.join(map(_foreign, parameters))}"
            )

    @cached_property  # scoring reads it once per row; reading a signature takes 15 us
    def is_batch(self) -> bool:
        """Whether the function is called with lists."""
        return self.style == "trl" or "completions" in self.names()

    @property
    def takes_all(self) -> bool:
        """Whether the function takes every column, by **kwargs."""
        return any(p.kind is Parameter.VAR_KEYWORD for p in self._parameters().values())

    @property
    def bound(self) -> Collection[str]:
        """Names of the keywords that a `functools.partial` binds; columns do not replace them."""
        return self.fn.keywords.keys() if isinstance(self.fn, partial) else ()

    def required_columns(self) -> dict[str, str]:
        """Return the columns without a default, each with the name of the function for messages."""
        if isinstance(self.fn, Scorer):
            return dict.fromkeys(self.fn.columns, f"the templates of the reward {self.name!r}")
        passed = PASSED if self.style == "trl" else BATCH_NAMES if self.is_batch else ROW_NAMES
        return {
            p.name: f"the reward function {self.name!r}{_foreign(p.name)}"
            for p in self._parameters().values()
            if p.kind in _BY_NAME and p.default is Parameter.empty and p.name not in passed
        }

    def names(self) -> set[str]:
        """Return the names of the parameters that a call passes."""
        return {p.name for p in self._parameters().values() if p.kind in _BY_NAME}

    def _parameters(self) -> Mapping[str, Parameter]:
        try:
            parameters = signature(self.fn).parameters
            return {name: parameters[name] for name in parameters if name not in self.bound}
        except (TypeError, ValueError) as error:  # some functions written in C
            raise ConfigError(
                f"reward function {self.name!r}: its parameters have no names; wrap it in a Python "
                "function"
            ) from error


def as_rewards(
    reward_fn: Callable[..., Any] | Sequence[Callable[..., Any] | RewardFunction] | RewardFunction,
    weights: Sequence[float] | Mapping[str, float] | None = None,
    style: Literal["trl"] | None = None,
) -> tuple[RewardFunction, ...]:
    """Wrap one reward function or several, at least one, with weights.

    `weights` has one weight per function, or some by name; other functions keep their weight (1 for
    a plain function). `style` is the `env.reward_style` of the user's functions.
    """
    one = isinstance(reward_fn, RewardFunction) or callable(reward_fn)
    reward_fns = cast("object", [reward_fn] if one else reward_fn)  # callers may pass anything
    if isinstance(reward_fns, str) or not isinstance(reward_fns, Sequence) or not reward_fns:
        raise ConfigError(
            f"reward_fn: expected a function or a list of at least one, got {reward_fns!r}; "
            'a name such as "module:function" is loaded with evo_grpo.envs.loading.load_function'
        )
    rewards: list[RewardFunction] = []
    for fn in reward_fns:
        inner = fn.fn if isinstance(fn, RewardFunction) else fn
        fn_style = None if isinstance(inner, Scorer) else style
        is_wrapped = isinstance(fn, RewardFunction)
        reward = fn if is_wrapped else RewardFunction(_name_of(fn), fn, style=fn_style)
        twins = sum(other.name.split("#")[0] == reward.name for other in rewards)
        name = f"{reward.name}#{twins + 1}" if twins else reward.name  # distinguishes two lambdas
        rewards.append(replace(reward, name=name, style=reward.style or fn_style))
    names = [reward.name for reward in rewards]
    by_name = weights if isinstance(weights, Mapping) else {}
    row = [by_name.get(reward.name, reward.weight) for reward in rewards]
    if weights is not None and not isinstance(weights, Mapping):
        row = list(weights)
    problem = ""
    if unknown := [name for name in by_name if name not in names]:
        problem = unknown_reward(unknown[0], names)
    elif len(row) != len(names):
        problem = f"expected one per reward function, that is {len(names)}, got {len(row)}"
    elif not any(row):
        problem = f"expected one that is not 0, got 0 for each of {listed(names)}"
    if problem:
        raise ConfigError(f"reward_weights: {problem}")
    return tuple(
        replace(reward, weight=weight) for reward, weight in zip(rewards, row, strict=True)
    )


def required_columns(rewards: Sequence[RewardFunction], thinking: object) -> dict[str, str]:
    """Return the columns that reward functions need, each with the function that needs it.

    With `thinking` tags, the parameter `thinking` is no column.
    """
    needs = {name: who for reward in rewards for name, who in reward.required_columns().items()}
    if thinking is not None:
        needs.pop(COLUMN, None)
    return needs


def unknown_reward(name: str, names: Sequence[str]) -> str:
    """Return a message about a reward function that is not among `names`."""
    if not names:
        return f"expected an environment with named reward functions, got {name!r} for one without"
    listing = listed(names)
    return f"expected a reward function of the task, {listing}, got {name!r}.{nearest(name, names)}"


def _foreign(parameter: str) -> str:
    """Return the entry of `FOREIGN` for a parameter, in parentheses, or ""."""
    return f" ({FOREIGN[parameter]}: see {PAGE})" if parameter in FOREIGN else ""


def _name_of(fn: object) -> str:
    inner = getattr(fn, "func", fn)  # of functools.partial
    return getattr(inner, "__name__", type(inner).__name__)


def place_in_code(error: BaseException) -> str:
    """Return file, line and function of the user's code that raised an exception, or "".

    It is the innermost call outside this package and all installed ones.
    """
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith((*_NOT_YOURS, "<frozen"))]
    if not of_user:
        return ""
    file = Path(of_user[-1].filename)
    with suppress(ValueError, OSError):  # it lies elsewhere, or the working folder is gone
        file = file.relative_to(Path.cwd())
    names = [frame.name for frame in of_user if not frame.name.startswith("<")]  # no comprehension
    return f" in {file}, line {of_user[-1].lineno}, {(names or ['a lambda'])[-1]}"


def hint(error: BaseException) -> str:
    """Return what to change in a function that was written for another trainer, or ""."""
    # Neither str nor isinstance: both may call methods that a user's object defines.
    args: tuple[object, ...] = vars(BaseException)["args"].__get__(error)
    message = args[0] if args and type(args[0]) is str else ""
    if issubclass(type(error), KeyError) and message in FOREIGN:
        return f"; {FOREIGN[message]}: see {PAGE}"
    text_mistakes = ("string indices must be", "'str' object has no attribute 'get'")
    if issubclass(type(error), TypeError | AttributeError) and message.startswith(text_mistakes):
        return (
            "; completions and prompts are strings here, where TRL has messages in conversations: "
            "set env.reward_style: trl and ask by messages, or write completion in place of "
            f"completion[0]['content'], see {PAGE}"
        )
    return ""
