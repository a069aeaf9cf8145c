"""Reward functions: the user's, called per row or per batch, and `Scorer`s, which use a model.

A function may be sync or async. Each has a name and a weight.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import Parameter, isclass, signature
from typing import Any, Literal, Protocol

from evo_grpo.envs.messages import listed, nearest
from evo_grpo.envs.thinking import COLUMN
from evo_grpo.errors import ConfigError, RewardError
from evo_grpo.schema.validation import LARGEST_REWARD as LARGEST

# A dataset column with one of these names does not reach a reward function.
ROW_NAMES = ("completion", "prompt")
BATCH_NAMES = ("completions", "prompts")

PASSED = (
    *("completion_ids", "completions", "prompts"),
    *("log_extra", "log_metric", "trainer_state"),
)
"""Names of the arguments that TRL passes beside the columns of the rows."""

_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

PAGE = "docs/from_trl.md"
_BY_STYLE = "TRL passes it, and so does env.reward_style: trl"
FOREIGN = {
    **dict.fromkeys(("completion_ids", "trainer_state", "log_metric", "log_extra"), _BY_STYLE),
    "environments": "TRL passes it; there is none here",
    "solution_str": "verl passes the completion so; name the parameter completion",
}
"""Parameters of reward functions that other trainers pass, each with its counterpart here."""


class UnusableRewardError(RewardError):
    """A reward is NaN, infinite or too large, or a judge's answer has no score.

    The limit `env.reward_failures` applies to it, whatever `env.reward_errors` is.
    """


class Board(Protocol):
    """A mapping from names to short texts that the processes of a run share."""

    def swap(self, name: str, old: str, new: str) -> str:
        """Set the text of `name` to `new` if it is `old` ("" if unset); return the final text."""
        ...

    def write(self, texts: Mapping[str, str]) -> None:
        """Set the text of each name in `texts`."""
        ...

    def read(self, names: Sequence[str]) -> Sequence[str]:
        """Return the texts of names; each name must have one."""
        ...


class Scorer(ABC):
    """A reward function of this package, which scores completions with a model.

    It is called once per batch, in the process of the run, and several threads may call it at once.
    `env.reward_timeout` and `env.isolate` do not apply to it, but only to functions of the user.

    Attributes:
        templates: The `prompts.Template`s of the model's prompt.
        columns: Names of the columns in the templates, without "completion" and "prompt".
    """

    __name__: str = "scorer"

    def __init__(self, templates: Sequence[Any]) -> None:
        self.templates = templates
        names = [name for template in templates for name in template.columns()]
        self.columns = [name for name in names if name not in ("completion", "prompt")]

    def fill(self, row: Mapping[str, Any]) -> None:
        """Fill in the templates with a row, its completion and its prompt, to find errors early."""
        for template in self.templates:
            template.plain(row)

    @abstractmethod
    def prepare(self, device: str) -> None:
        """Load and check what scoring needs on the run's device; repeated calls do nothing.

        Raises ConfigError if something is missing.
        """

    @abstractmethod
    def __call__(
        self, *, completions: Sequence[str], prompts: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | RewardError]:
        """Return for each of B completions a reward, or a RewardError if there is no usable reward.

        `prompts` are the B texts that the agents were given; each of `columns` has B values.
        """


def template_rows(
    completions: Sequence[str], prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> Iterator[dict[str, Any]]:
    """Yield, for each of B completions, the values of its columns, `completion` and `prompt`."""
    for number, (completion, prompt) in enumerate(zip(completions, prompts, strict=True)):
        row = {name: values[number] for name, values in columns.items()}
        yield {**row, "completion": completion, "prompt": prompt}


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its name and weight.

    Attributes:
        name: Name in messages and records.
        fn: `fn(completion=..., **columns) -> float | None`, called per row with the columns that
            its parameters name; with **kwargs, it gets all columns and "prompt". With a parameter
            `completions` it is a batch function: `fn(completions=[...], prompts=[...], **columns)
            -> list[float | None]`, whose columns are lists. Both kinds may be async. A function
            abstains by returning None. Keywords that a `functools.partial` binds keep their values.
        weight: Factor of the reward in the sum, from -1e15 to 1e15.
        style: "trl" if `fn` is called as TRL calls it; see `scoring.Samples`.

    Raises:
        ConfigError: `fn` is not callable or takes no completion, or the weight is out of range.
    """

    name: str
    fn: Callable[..., Any]
    weight: float = 1.0
    style: Literal["trl"] | None = None

    def __post_init__(self) -> None:
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
        """Whether the function is called once per batch, with lists."""
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
        """Return each column that a call needs -> a phrase for messages that names the function."""
        if isinstance(self.fn, Scorer):
            return dict.fromkeys(self.fn.columns, f"the templates of the reward {self.name!r}")
        passed = PASSED if self.style == "trl" else BATCH_NAMES if self.is_batch else ROW_NAMES
        return {
            p.name: f"the reward function {self.name!r}{_foreign(p.name)}"
            for p in self._parameters().values()
            if p.kind in _BY_NAME and p.default is Parameter.empty and p.name not in passed
        }

    def names(self) -> set[str]:
        """Return the names of the parameters that can be passed by name and are not bound."""
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


def required_columns(rewards: Sequence[RewardFunction], thinking: object) -> dict[str, str]:
    """Return each column that reward functions need -> a phrase that names the function.

    If there are `thinking` tags, the parameter `thinking` of a function does not count as a column.
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
    """Return what `FOREIGN` says of a parameter, in parentheses, or "" if it says nothing."""
    return f" ({FOREIGN[parameter]}: see {PAGE})" if parameter in FOREIGN else ""


def hint(error: BaseException) -> str:
    """Return a remedy if `error` seems due to a reward function for another trainer, or ""."""
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
