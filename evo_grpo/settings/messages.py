"""pydantic's findings, one line each: YAML path, what was expected, what came, the nearest key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from evo_grpo.settings.group import Problem, Problems, nearest

Path = tuple[str | int, ...]

SHOWN_CHARACTERS = 60
"""Longest excerpt of what came."""

_NOUNS: dict[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "invalid_key": "a text as key",
    "string_too_short": "a text that is not empty",
}
_PATTERNS = {
    "device": "auto, cpu, mps, cuda or cuda:N",
    "name": "letters, digits, dots, dashes and underscores: it names the folder of the run",
}
_BOUNDS = {"greater_than": "> {gt:g}", "greater_than_equal": ">= {ge:g}", "less_than": "< {lt:g}"}
_BOUNDS["less_than_equal"] = "<= {le:g}"


def describe(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return one line per problem, each beginning with its YAML path."""
    lines = [
        f"{dotted(problem.path)}: {problem.text}"
        for found in error.errors(include_url=False)
        for problem in _problems(found, root)
    ]
    return list(dict.fromkeys(lines))


def dotted(path: Path) -> str:
    """Return a YAML path as in `evolve.selection.size` or `env.conversation[0].role`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the configuration"


def shown(value: object) -> str:
    """Return what came, short and with its kind where quotes alone do not say it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return f"a mapping ({_short(dict(value))})"
    if isinstance(value, list):
        return f"a list ({_short(value)})"
    return f"the text {_short(value)}" if isinstance(value, str) else _short(value)


def joined(lines: Sequence[str], source: str) -> str:
    """Return the whole message: the one problem, or a heading and one line for each."""
    if len(lines) == 1:
        return f"{source}: {lines[0]}"
    return "\n  ".join([f"{source}: {len(lines)} problems", *lines])


def group_at(root: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """Return the group of settings at a YAML path, or None where a plain value stands."""
    group: type[BaseModel] | None = root
    inside_mapping = False
    for part in path:
        if inside_mapping or isinstance(part, int):
            inside_mapping = False
            continue
        if group is None or part not in group.model_fields:
            return None
        annotation = group.model_fields[part].annotation
        inside_mapping = getattr(annotation, "__origin__", None) is dict
        group = next(_groups(annotation), None)
    return None if inside_mapping else group


def unknown_key(root: type[BaseModel], path: Path) -> str:
    """Say of a key that does not exist which one is near, or where it belongs."""
    group = group_at(root, path[:-1])
    names = list(group.model_fields) if group is not None else []
    key = str(path[-1])
    near = nearest(key, names)
    elsewhere = [dotted(p) for p in _leaves(root) if p[-1] == key]
    if near:
        hint = f"did you mean {near!r}?"
    elif elsewhere:
        hint = f"did you mean {' or '.join(elsewhere)}?"
    else:
        hint = ""
    return f"unknown key; {hint + ' ' if hint else ''}Expected one of: {', '.join(names)}"


def _problems(found: ErrorDetails, root: type[BaseModel]) -> Iterator[Problem]:
    kind: str = found["type"]
    path: Path = tuple(part for part in found["loc"] if part != "[key]")
    cause = found.get("ctx", {}).get("error")
    if isinstance(cause, Problems):
        yield from (Problem((*path, *problem.path), problem.text) for problem in cause.found)
    elif kind == "extra_forbidden":
        yield Problem(path, unknown_key(root, path))
    elif kind == "missing":
        yield Problem(path, _missing(root, path))
    else:
        expected = str(cause) if cause is not None else _expected(kind, found)
        hint = _nearest_choice(found) if kind == "literal_error" else ""
        yield Problem(path, f"expected {expected}, got {shown(found['input'])}{hint}")


def _expected(kind: str, found: ErrorDetails) -> str:
    if kind in _NOUNS:
        return _NOUNS[kind]
    context: Mapping[str, Any] = found.get("ctx", {})
    if kind in _BOUNDS:
        return f"a number {_BOUNDS[kind].format(**context)}"
    table: dict[str, Callable[[], str]] = {
        "literal_error": lambda: str(context["expected"]),
        "too_short": lambda: f"at least {context['min_length']} entries",
        "string_pattern_mismatch": lambda: _PATTERNS[str(found["loc"][-1])],
    }
    # Any other kind keeps pydantic's own words; they are plain enough.
    return table.get(kind, lambda: str(found["msg"]))()


def _nearest_choice(found: ErrorDetails) -> str:
    listed = str(found.get("ctx", {})["expected"])
    near = nearest(str(found["input"]), re.findall("'([^']*)'", listed))
    return f"; did you mean {near!r}?" if near else ""


def _missing(root: type[BaseModel], path: Path) -> str:
    if path == ("model",):
        return "missing; expected a model, for instance model: tiny-sums"
    if path == ("env",):
        return "missing; expected a task, for instance env: sums"
    group = group_at(root, path[:-1])
    field = group.model_fields.get(str(path[-1])) if group is not None else None
    meaning = (field.description or "").rstrip(".") if field is not None else ""
    return f"missing; expected {meaning[:1].lower()}{meaning[1:]}" if meaning else "missing"


def _groups(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the groups that an annotation such as `dict[str, Range]` or `Group | None` holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _groups(argument)


def _leaves(group: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in group.model_fields.items():
        inner = None
        if getattr(field.annotation, "__origin__", None) is None:
            inner = next(_groups(field.annotation), None)
        if inner is None:
            yield (*path, name)
        else:
            yield from _leaves(inner, (*path, name))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
