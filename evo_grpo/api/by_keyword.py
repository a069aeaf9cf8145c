"""A decorator for methods whose keywords are settings; it adds defaults, help and errors."""

import textwrap
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, cleandoc, signature
from typing import Any, TypeVar, get_args

from pydantic.fields import FieldInfo

from evo_grpo.errors import ConfigError
from evo_grpo.schema.group import Group
from evo_grpo.schema.problems import Path
from evo_grpo.settings import AgentSettings, RunConfig, keywords

MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def _declared(root: type[Group], path: Path) -> FieldInfo:
    """Return the declaration of the setting at `path` in the group of settings `root`."""
    group: Any = root
    for part in path[:-1]:
        annotation = group.model_fields[part].annotation
        kinds = (annotation, *get_args(annotation))
        group = next(a for a in kinds if isinstance(a, type) and issubclass(a, Group))
    return group.model_fields[path[-1]]


_agent = {name: _declared(AgentSettings, path) for name, path in keywords.AGENT_KEYWORDS.items()}
AGENT_FIELDS = {
    "model": FieldInfo(default=None, description=_agent.pop("model").description),
    "tokenizer": FieldInfo(
        default=None, description="A transformers tokenizer, instead of the model's own."
    ),
    **_agent,
}
"""The declaration of each keyword of the constructors."""
POPULATION_FIELDS = {
    **{name: _declared(RunConfig, path) for name, path in keywords.POPULATION_KEYWORDS.items()},
    **AGENT_FIELDS,
}
"""The declaration of each keyword of `population`."""
TRAIN_FIELDS = {name: _declared(RunConfig, path) for name, path in keywords.TRAIN_KEYWORDS.items()}
"""The declaration of each keyword of `Population.train` that is a setting."""


def by_keyword(fields: Mapping[str, FieldInfo], typed: type) -> Callable[[MethodT], MethodT]:
    """Return a decorator for a method whose `**settings` are of the type `typed`.

    The decorated method gets every setting; a setting that is missing in the call has the default
    in `fields`. The method's signature and docstring, which `help` shows, list all settings.
    Surplus positional arguments and unknown keywords raise ConfigError.
    """

    def decorate(method: MethodT) -> MethodT:
        header = signature(method)
        *declared, _ = header.parameters.values()
        limit = sum(p.kind is not Parameter.KEYWORD_ONLY for p in declared)
        settings = [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=field.get_default(call_default_factory=True),
                annotation=typed.__annotations__[name].__forward_arg__,
            )
            for name, field in fields.items()
        ]
        header = header.replace(parameters=[*declared[:limit], *settings, *declared[limit:]])
        names = dict.fromkeys(list(header.parameters)[1:])

        @wraps(method)
        def checked(*args: Any, **given: Any) -> Any:  # noqa: ANN401 -- what the method returns
            call = type(args[0]).__name__ if method.__name__ == "__init__" else method.__name__
            if len(args) > limit:
                raise ConfigError(
                    f"{call}: expected at most {limit - 1} arguments by position, got "
                    f"{len(args) - 1} by position; give the others by name. For the positions of "
                    "AgileRL, import it from evo_grpo.agilerl"
                )
            for name in given:
                if name not in names:
                    raise keywords.unknown_keyword(call, name, names)
            left_out = [name for name in fields if name not in given]
            defaults = {n: fields[n].get_default(call_default_factory=True) for n in left_out}
            return method(*args, **defaults, **given)

        vars(checked)["__signature__"] = header
        lines = [f"{name}: {field.description}" for name, field in fields.items()]
        fold = textwrap.TextWrapper(92, initial_indent=" " * 4, subsequent_indent=" " * 8)
        texts = map(fold.fill, lines)
        checked.__doc__ = "\n".join([cleandoc(method.__doc__ or ""), "", "Settings:", *texts])
        return checked  # pyright: ignore[reportReturnType] -- it takes what the method takes

    return decorate
