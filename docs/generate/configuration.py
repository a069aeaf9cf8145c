"""docs/configuration.md: every key of population.yaml, from the declarations."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from evo_grpo.schema.group import MUTATES, Group
from evo_grpo.settings import RunConfig
from evo_grpo.settings.objects import PythonObject

NOUNS = {int: "integer", float: "number", str: "string", bool: "true or false"}
SIGNS = {"gt": "> {}", "ge": "≥ {}", "lt": "< {}", "le": "≤ {}"}
INTRODUCTION = """# Configuration

<!-- Written by docs/generate from the declarations in evo_grpo/schema, settings and evolve. -->

A run is one YAML file. `evo-grpo init` writes a commented one, `evo-grpo check FILE` validates it
and prints what it will do, and `evo-grpo run FILE` runs it. `model` and `env` are required;
everything else has a default. An unknown key, a value of the wrong type or out of range, and
settings that contradict each other are errors; all errors are listed at once. A number is also out
of range if float32, in which agents compute, would turn it into 0, infinity or NaN: a temperature
of 1e-40, an lr of 1e308.

Settings can be overridden on the command line, any number of times, with values in YAML:

```sh
evo-grpo init
evo-grpo check --set evolve.selection.size=3 --set algorithm.lr=3e-4
```

The run folder has a copy of the file with every default filled in.

A file has at most 1 MiB, 60 levels of lists and mappings, and integers of 20 digits. YAML reads
`2026-01-01` as a date, `012` as 10 and `yes` as true: put such names in quotes.

In Python, the settings are keyword arguments, named after the last part of their path here; see
[classes and functions](api.md). Editors that support YAML schemas can complete and check the file:
`evo-grpo init` writes `population.schema.json` next to it, and `evo-grpo schema` prints it.

**The learning rate follows the model.** Without `algorithm.lr` and `evolve.hyperparameters`, the
embedded models start at 1e-3 and search [1e-4, 1e-2]; all others, `smollm2`, folders, files and
hub ids, start at 2e-5 and search [1e-6, 3e-4]. An lr of yours is searched within a factor of ten
either way, unless you give a range too; a range of yours without an lr moves the default into it.
The copy in the run folder has the values that were chosen. `check`, `run` and Python warn of an
lr, or an end of its range, that is far from usual: more than ten times above the end of that
range, or below 1e-7.

Printed output counts rounds from 1 (`round 2/6`). Records count from 0: the column `round`, the
names of checkpoints, the family tree.
"""


def page() -> str:
    """Return the whole page."""
    sections = [_section(RunConfig, ())]
    places: dict[type[Group], list[tuple[str, ...]]] = {}
    for path, group in _groups(RunConfig, ()):
        places.setdefault(group, []).append(path)
    sections += [_section(group, *paths) for group, paths in places.items()]
    return "\n".join([INTRODUCTION, *sections])


def _groups(
    group: type[Group], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], type[Group]]]:
    for name, field in group.model_fields.items():
        for inner, suffix in _inner(field.annotation):
            here = (*path, name + suffix)
            yield here, inner
            yield from _groups(inner, here)


def _inner(annotation: object) -> Iterator[tuple[type[Group], str]]:
    """Yield the groups below an annotation and what stands for their place in the path."""
    if isinstance(annotation, type) and issubclass(annotation, Group):
        kind = annotation.model_fields.get("kind")
        tagged = kind is not None and get_origin(kind.annotation) is Literal
        single = tagged and len(get_args(kind.annotation)) == 1
        tag = kind.default if single else getattr(annotation, "tag", None)
        yield annotation, f" (kind: {tag})" if tag else ""
    origin = get_origin(annotation)
    for argument in get_args(annotation):
        for inner, suffix in _inner(argument):
            place = {dict: ".NAME", list: "[N]"}.get(origin, "") if isinstance(origin, type) else ""
            yield inner, place + suffix


def _section(group: type[Group], *paths: tuple[str, ...]) -> str:
    named = ", ".join(f"`{'.'.join(path)}`" for path in paths)
    title = f"## {named}" if any(paths) else "## The top level"
    lines = [title, "", inspect.getdoc(group).split("\n\n")[0].replace("\n", " "), ""]
    lines += ["| key | type | default | meaning | mutates |", "|---|---|---|---|---|"]
    for name, field in group.model_fields.items():
        meaning = field.description or ""
        cells = (f"`{name}`", _type(field), _default(field), meaning, _mutates(field))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, ""])


def _mutates(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return "yes" if isinstance(extra, dict) and extra.get(MUTATES) else ""


def _type(field: FieldInfo) -> str:
    nullable = NoneType in get_args(field.annotation)
    text = _noun(field.annotation)
    bounds = ", ".join(
        sign.format(f"{getattr(rule, name):g}")
        for name, sign in SIGNS.items()
        for rule in field.metadata
        if getattr(rule, name, None) is not None
    )
    return f"{text} {bounds}".strip() + (" or null" if nullable else "")


def _noun(annotation: object) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in NOUNS:
        return NOUNS[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Group):
        return (
            "mapping"
            if annotation.shorthand is None
            else f"mapping, or its `{annotation.shorthand}`"
        )
    if origin is Annotated:
        return _noun(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, UnionType):
        # Objects come from Python alone.
        kept = [argument for argument in arguments if argument not in (NoneType, PythonObject)]
        return " or ".join(dict.fromkeys(map(_noun, kept)))
    if origin is tuple and Ellipsis in arguments:
        return "list of numbers or of strings"
    if origin is tuple:
        return f"list of {len(arguments)} numbers"
    return f"list of {_noun(arguments[0])}s" if origin is list else "mapping"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Group):
        return "see below"
    if value is None or isinstance(value, bool):
        return f"`{ {None: 'null', True: 'true', False: 'false'}[value] }`"
    shown = str(value).replace("\n", "\\n")
    return f"`{shown}`"
