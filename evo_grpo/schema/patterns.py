"""Matches names of modules by names and regular expressions, as PEFT does."""

import re
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

ALL = "all-linear"
"""Value of `target_modules` for all linear layers; not a pattern."""
LONGEST = 10_000
"""Largest number of characters of a pattern."""


def module_patterns(lora: Any) -> dict[str, str]:  # noqa: ANN401 -- LoraSettings, or PEFT's LoraConfig
    """Return, by LoRA setting, the regular expressions for full names of modules; no lists."""
    patterns = {
        name: value
        for name in ("target_modules", "exclude_modules")
        if isinstance(value := getattr(lora, name, None), str) and value != ALL
    }
    for name in ("rank_pattern", "alpha_pattern"):
        keys: Iterable[str] = getattr(lora, name, None) or ()
        patterns |= {f"{name}.{key}": ending(key) for key in keys}
    return patterns


def ending(key: str) -> str:
    """Return the pattern of a key of `rank_pattern`: it matches names that end with the key."""
    return rf"(.*\.)?({key})$"


def matches(layer: str, targets: str | Collection[str]) -> bool:
    """Return whether `targets`, a value of `target_modules`, select the layer with this full name.

    A string is `all-linear`, or a regular expression of full names; a list has ends of names.
    """
    if targets == ALL:
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, layer) is not None
    return any(layer == target or layer.endswith(f".{target}") for target in targets)


def union(sets: Sequence[str | list[str]]) -> str | list[str]:
    """Return the `target_modules` that match a layer if one of several sets matches the layer."""
    if ALL in sets:
        return ALL
    lists = [targets for targets in sets if not isinstance(targets, str)]
    if len(lists) == len(sets):
        return list(dict.fromkeys(name for targets in lists for name in targets))
    ends = (rf"(?:.*\.)?(?:{'|'.join(map(re.escape, targets))})" for targets in lists)
    return "|".join(
        f"(?:{pattern})"
        for pattern in (*(pattern for pattern in sets if isinstance(pattern, str)), *ends)
    )


def why_no_pattern(text: str) -> str | None:
    """Return why a string is not a valid regular expression; None if it is."""
    if len(text) > LONGEST:
        return f"at most {LONGEST:,} characters, not {len(text):,}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sets that a later Python may read differently
            re.compile(text)
    except RecursionError:
        return "nested too deep"
    except (re.error, OverflowError, ValueError) as error:
        return str(error)
    return None
