"""Builds messages for pydantic's errors: path, expectation, value, and nearest valid name."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import date
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from evo_grpo.schema.problems import MOST_PROBLEMS, Path, Problem, Problems, dotted, nearest
from evo_grpo.schema.validation import shown as excerpt

REMEDY = "remedy"
"""Key of a declaration's remedy."""

SHOWN_CHARACTERS = 60
"""Longest excerpt of a given value."""

OTHER_NAMES: dict[str, str] = {
    "learning_rate": "algorithm.lr",
    "num_generations": "algorithm.group_size",
    "per_device_train_batch_size": "algorithm.prompts_per_step",
    "epsilon": "algorithm.clip_coef",
    "cliprange": "algorithm.clip_coef",
    "clip_range": "algorithm.clip_coef",
    "kl_coef": "algorithm.beta",
    "init_kl_coef": "algorithm.beta",
    "max_new_tokens": "algorithm.max_output_tokens",
    "max_completion_length": "algorithm.max_output_tokens",
    "num_iterations": "algorithm.update_epochs",
    "ppo_epochs": "algorithm.update_epochs",
    "scale_rewards": "algorithm.adv_norm",
    "use_separate_reference_adapter": "algorithm.separate_reference",
    "use_kl_advantage_shaping": "algorithm.kl_shaping",
    "cosine_lr_schedule_config": "algorithm.lr_schedule",
    "warmup_ratio": "algorithm.lr_schedule.warmup_proportion",
    "reward_funcs": "env.reward",
    "reward_fn": "env.reward",
    "train_dataset": "env.train",
    "eval_dataset": "env.validation",
    "model_name": "model",
    "model_name_or_path": "model",
    "actor_network": "model",
    "lora_config": "model.lora",
    "peft_config": "model.lora",
    "hp_config": "evolve.hyperparameters",
    "mutations": "evolve.exploration",
    "mutation": "evolve.exploration",
    "tournament": "evolve.selection",
    "use_vllm": "engine.rollout",
    "bf16": "engine.dtype",
    "micro_batch_size_per_gpu": "engine.max_rows_per_microbatch",
    "hf_generate_chunk_size": "engine.max_decode_prompts",
    "population_size": "population.size",
    "pop_size": "population.size",
}
"""Name of a setting in another library -> its path in population.yaml."""

_NOUNS: dict[str, str] = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "invalid_key": "a string as key",
    "list_type": "a list",
    "mapping_type": "a mapping",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
    "string_too_short": "a string that is not empty",
    "string_type": "a string",
    "string_unicode": "a string that UTF-8 can hold",
    "tuple_type": "a list",
}
_PATTERNS = {
    "kind": 'a module and a class in it, for instance "my_module:MyClass"',
    "device": "auto, cpu, mps, cuda or cuda:N",
    "tag": "a letter, followed by letters, digits, underscores and dashes",
    "memory": "a number with its unit, MB, MiB, GB or GiB, for instance 24GB",
    "name": "letters, digits, dots, dashes and underscores: it names the folder of the run",
}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_LOW, _HIGH = ("gt", "ge"), ("lt", "le")
_NUMERIC = frozenset(
    {
        "finite_number",
        "float_type",
        "greater_than",
        "greater_than_equal",
        "int_from_float",
        "int_type",
        "less_than",
        "less_than_equal",
    }
)


def describe(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """Return the problems that pydantic found in a group, with paths below the group."""
    errors = error.errors(include_url=False)[: MOST_PROBLEMS + 1]
    return [problem for details in errors for problem in _problems(details, root)]


def shown(value: object) -> str:
    """Return an excerpt of a given value, with its kind where the excerpt does not show it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return f"a mapping ({_short(dict(value))})"
    if isinstance(value, list):
        return f"a list ({_short(value)})"
    if isinstance(value, date):
        return f"the date {value}"
    return f"the string {_short(value)}" if isinstance(value, str) else _short(value)


def group_at(root: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """Return the group of settings at a path, or None for a plain value."""
    return _resolved(root, (*path, ""))[1]


def unknown_key(root: type[BaseModel], group: type[BaseModel] | None, path: Path) -> str:
    """Return the message for an unknown key, with a similar key or other groups with the key."""
    names = list(group.model_fields) if group is not None else []
    key = str(path[-1])
    elsewhere = dict.fromkeys(p for p in leaves(root) if p[-1] == key)
    if (name_here := other_name(key, names)) is not None:
        return f"unknown key; here it is {name_here}."
    if near := nearest(key, names):
        hint = f"did you mean {near!r}?"
    elif elsewhere:
        hint = f"did you mean {' or '.join(map(dotted, elsewhere))}?"
    else:
        hint = ""
    return f"unknown key; {f'{hint} Expected' if hint else 'expected'} one of: {', '.join(names)}"


def other_name(key: str, names: Collection[str]) -> str | None:
    """Translate the name of a setting of another library; None if the name is unknown.

    The translation is a name if it is among `names`, the keys of the same group, else a path.
    """
    path = OTHER_NAMES.get(key)
    if path is None:
        return None
    name = path.rpartition(".")[2]
    return name if name in names else path


def groups_in(annotation: object, *, values: bool = True) -> Iterator[type[BaseModel]]:
    """Yield the groups in an annotation; with `values`, those in its mappings and lists too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    if values or get_origin(annotation) not in (dict, list, tuple):
        for argument in get_args(annotation):
            yield from groups_in(argument, values=values)


def leaves(group: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every plain setting below a group, and below each member of a union."""
    for name, field in group.model_fields.items():
        groups = list(groups_in(field.annotation, values=False))
        if not groups:
            yield (*path, name)
        for member in groups:
            yield from leaves(member, (*path, name))


def _problems(details: ErrorDetails, root: type[BaseModel]) -> Iterator[Problem]:
    kind: str = details["type"]
    path, group = _resolved(root, tuple(part for part in details["loc"] if part != "[key]"))
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, Problems):
        yield from cause.below(*path).problems
    elif kind == "extra_forbidden":
        yield Problem(path, unknown_key(root, group, path))
    elif kind == "missing":
        yield Problem(path, _missing(group, path))
    elif kind == "union_tag_not_found":
        yield Problem((*path, "kind"), f"missing; expected one of {_tags(details)}")
    elif kind == "union_tag_invalid":
        tag = details.get("ctx", {})["tag"]
        near = nearest(str(tag), re.findall("'([^']*)'", _tags(details)))
        hint = f"; did you mean {near!r}?" if near else ""
        yield Problem((*path, "kind"), f"expected one of {_tags(details)}, got {shown(tag)}{hint}")
    else:
        field = None if group is None or not path else group.model_fields.get(str(path[-1]))
        expected = str(cause) if cause is not None else _expected(kind, details, field)
        remedy = _hint(kind, details, field) or _remedy(field)
        yield Problem(path, f"expected {expected}, got {shown(details['input'])}{remedy}")


def _resolved(root: type[BaseModel], path: Path) -> tuple[Path, type[BaseModel] | None]:
    """Return a path without the tags of unions, and the group that has the path's last key."""
    keys: list[str | int] = []
    group: type[BaseModel] | None = root
    above = group
    inside_mapping = False
    for part in path:
        tagged = [member for member in _members(above, keys) if _tag_of(member) == part]
        if tagged:
            group = tagged[0]
            continue
        keys.append(part)
        above = group
        if inside_mapping or isinstance(part, int):
            inside_mapping = False
        elif group is not None and part in group.model_fields:
            annotation = group.model_fields[part].annotation
            inside_mapping = getattr(annotation, "__origin__", None) is dict
            group = next(groups_in(annotation), None)
        else:
            group = None
    return tuple(keys), above


def _members(above: type[BaseModel] | None, kept: list[str | int]) -> list[type[BaseModel]]:
    """Return the groups of the union that the last part of a path names; empty if it names none."""
    if above is None or not kept or not isinstance(kept[-1], str):
        return []
    field = above.model_fields.get(kept[-1])
    members = [] if field is None else list(groups_in(field.annotation))
    return members if len(members) > 1 else []


def _tag_of(group: type[BaseModel]) -> object:
    tag = getattr(group, "tag", None)
    if tag is not None:
        return tag
    field = group.model_fields.get("kind")
    return None if field is None else field.default


def _tags(details: ErrorDetails) -> str:
    context: Mapping[str, Any] = details.get("ctx", {})
    return str(context.get("expected_tags", "")) or "the names in the docs"


def _hint(kind: str, details: ErrorDetails, field: FieldInfo | None) -> str:
    value = details["input"]
    if kind == "literal_error":
        listed = str(details.get("ctx", {})["expected"])
        near = nearest(str(value), re.findall("'([^']*)'", listed))
        return f"; did you mean {near!r}?" if near else ""
    if kind in _NUMERIC and isinstance(value, str) and _is_number(value):
        return f"; write it without quotes: {value.strip()}"
    # YAML reads 2026-01-01 as a date, 012 as 10 and yes as true.
    annotation = None if field is None else field.annotation
    choices = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    strings = str in choices or _shorthand(field) is not None or kind == "string_type"
    if strings and isinstance(value, bool | int | float | date):
        return "; put a string in quotes"
    return ""


def _shorthand(field: FieldInfo | None) -> str | None:
    return None if field is None else getattr(field.annotation, "shorthand", None)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _expected(kind: str, details: ErrorDetails, field: FieldInfo | None) -> str:
    if kind in _NUMERIC:
        return _number_expected(kind, details, field)
    if kind in _NOUNS:
        shorthand = _shorthand(field)
        return _NOUNS[kind] if shorthand is None else f"a {shorthand} or {_NOUNS[kind]}"
    context: Mapping[str, Any] = details.get("ctx", {})
    table: dict[str, Callable[[], str]] = {
        "literal_error": lambda: str(context["expected"]),
        "string_too_long": lambda: f"a string of at most {context['max_length']} characters",
        "too_short": lambda: f"at least {context['min_length']} entries",
        "string_pattern_mismatch": lambda: _PATTERNS[str(details["loc"][-1])],
    }
    # Other kinds keep the message of pydantic.
    return table.get(kind, lambda: str(details["msg"]))()


def _number_expected(kind: str, details: ErrorDetails, field: FieldInfo | None) -> str:
    """Return the full expectation for a number, even if only a part of it is violated."""
    parts = () if field is None else get_args(field.annotation) or (field.annotation,)
    integer = int in parts if parts else kind.startswith("int")
    noun = "an integer" if integer else "a finite number" if _not_finite(details) else "a number"
    bounds = dict(details.get("ctx", {}))
    for entry in () if field is None else field.metadata:
        bounds |= {key: end for key in _SIGNS if (end := getattr(entry, key, None)) is not None}
    low, high = (next((key for key in keys if key in bounds), "") for keys in (_LOW, _HIGH))
    end = ", or null" if type(None) in parts else ""
    if low and high:
        opening, closing = "(" if low == "gt" else "[", ")" if high == "lt" else "]"
        return f"{noun} in {opening}{bounds[low]:g}, {bounds[high]:g}{closing}{end}"
    limit = f" {_SIGNS[low or high]} {bounds[low or high]:g}" if low or high else ""
    return f"{noun}{limit}{end}"


def _not_finite(details: ErrorDetails) -> bool:
    return isinstance(details["input"], float) and not math.isfinite(details["input"])


def _remedy(field: FieldInfo | None) -> str:
    extra = None if field is None else field.json_schema_extra
    return f"; {extra[REMEDY]}" if isinstance(extra, dict) and REMEDY in extra else ""


def _missing(group: type[BaseModel] | None, path: Path) -> str:
    field = group.model_fields.get(str(path[-1])) if group is not None else None
    meaning = (field.description or "").rstrip(".") if field is not None else ""
    return f"missing; expected {meaning[:1].lower()}{meaning[1:]}" if meaning else "missing"


def _short(value: object) -> str:
    return excerpt(value, SHOWN_CHARACTERS)
