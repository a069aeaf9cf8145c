r"""Checks that the patterns by which PEFT finds modules compile and finish matching.

Python tries the possible matches one by one, and a nested repetition such as `(a+)+!` has 2^n of
them on n letters. The form of a pattern does not show whether that happens on given names:
`(\w+\.)*q_proj` has the same form and is harmless. So every pattern is tried, in a separate
process with a limit on its processor time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from evo_grpo.errors import ConfigError

ALL = "all-linear"
"""Value of `target_modules` that is not a pattern."""
LONGEST = 10_000
"""Largest number of characters of a pattern."""
SECONDS = 0.5
"""Limit on the processor time for matching all names with all patterns, a thousand times the usual.
Processor time, unlike wall time, does not depend on the load of the machine."""

#: Limit on the wall time, for systems that do not count processor time.
_WAIT_SECONDS = 60
# The signal of the timer ends the process. The number of each pattern is printed before the pattern
# is tried, so the last printed number is that of the pattern that did not finish.
_TRY = f"""
import json, re, signal, sys, warnings
signal.setitimer(signal.ITIMER_PROF, {SECONDS})
warnings.simplefilter("ignore")
patterns, names = json.load(sys.stdin)
for number, pattern in enumerate(patterns):
    print(number, flush=True)
    match = re.compile(pattern).fullmatch
    for name in names:
        match(name)
"""


def module_patterns(lora: Any) -> dict[str, str]:  # noqa: ANN401 -- LoraSettings, or PEFT's LoraConfig
    """Return setting -> pattern that PEFT matches with whole names; lists of names are left out."""
    found = {
        name: value
        for name in ("target_modules", "exclude_modules")
        if isinstance(value := getattr(lora, name, None), str) and value != ALL
    }
    for name in ("rank_pattern", "alpha_pattern"):
        keys: Iterable[str] = getattr(lora, name, None) or ()
        found |= {f"{name}.{key}": ending(key) for key in keys}
    return found


def ending(key: str) -> str:
    """Return the pattern of a key of `rank_pattern`: it matches names that end with the key."""
    return rf"(.*\.)?({key})$"


def matches(layer: str, targets: str | Collection[str]) -> bool:
    """Return whether a layer's full name is among `target_modules`, as PEFT reads them.

    A string is `all-linear`, or a regular expression of full names; a list has ends of names.
    """
    if targets == ALL:
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, layer) is not None
    return any(layer == target or layer.endswith(f".{target}") for target in targets)


def union(sets: Sequence[str | list[str]]) -> str | list[str]:
    """Return `target_modules` that match what any of several does."""
    if ALL in sets:
        return ALL
    lists = [one for one in sets if not isinstance(one, str)]
    if len(lists) == len(sets):
        return list(dict.fromkeys(name for one in lists for name in one))
    ends = (rf"(?:.*\.)?(?:{'|'.join(map(re.escape, one))})" for one in lists)
    return "|".join(f"(?:{one})" for one in (*(one for one in sets if isinstance(one, str)), *ends))


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


def check_patterns(patterns: Mapping[str, str], names: Iterable[str], model: str) -> None:
    """Reject a pattern that does not compile, or does not finish on the names of modules."""
    for setting, pattern in patterns.items():
        if why := why_no_pattern(pattern):
            raise ConfigError(
                f"lora.{setting}: expected a regular expression, got {pattern[:60]!r} ({why})"
            )
    endless = _first_endless(tuple(patterns.values()), tuple(names))
    if endless is not None:
        setting = list(patterns)[endless]
        raise ConfigError(
            f"lora.{setting}: expected a regular expression that matches the modules of {model} "
            f"within {SECONDS} s, got {patterns[setting][:60]!r}, which takes longer; remove "
            "nested repetitions such as (a+)+, or list the names"
        )


@lru_cache(maxsize=8)
def _first_endless(patterns: tuple[str, ...], names: tuple[str, ...]) -> int | None:
    """Return the number of the first pattern that does not finish; None if all do.

    The result is cached, because the checkpoints of all agents have the same patterns.
    """
    if not patterns or not names:
        return None
    command = [sys.executable, "-I", "-S", "-c", _TRY]
    given = json.dumps([patterns, names]).encode()
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, timeout=_WAIT_SECONDS, check=False
        )
        code, begun = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, begun = 1, late.stdout or b""
    # A process that printed nothing failed before the first pattern.
    return int(begun.split()[-1]) if code and begun else None
