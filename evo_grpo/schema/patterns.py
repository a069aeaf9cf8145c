r"""Regular expressions of the user's, by which PEFT finds modules: they compile, and they end.

Python tries the ways to match one after the other, and a repetition within a repetition, such as
`(a+)+!`, has 2^n of them on n letters. Whether a pattern does that on the names at hand is not to
be read off it: `(\w+\.)*q_proj` has the same form and is harmless. So all are tried, in a process
of their own that the system stops.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from evo_grpo.errors import ConfigError

ALL = "all-linear"
"""What is no pattern in place of one."""
LONGEST = 10_000
"""Most characters of a pattern."""
SECONDS = 0.5
"""Computing time in which all patterns have to be through with all names: a thousand times what
they take. It is not that of the clock, which runs on while a loaded machine does something else."""

#: Beyond any load of a machine, should the system not count computing time.
_WAIT_SECONDS = 60
# The timer's signal ends the process, which has no handler for it. The number of each pattern is
# printed before it is tried: the last one did not end.
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
    """Return setting -> pattern as PEFT matches it with whole names; a list of names is none."""
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
    """Return the pattern that a key of `rank_pattern` stands for: names that end with it."""
    return rf"(.*\.)?({key})$"


def why_no_pattern(text: str) -> str | None:
    """Return why a string is no regular expression, None where it is one."""
    if len(text) > LONGEST:
        return f"at most {LONGEST:,} characters, not {len(text):,}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets that a later Python may read otherwise
            re.compile(text)
    except RecursionError:
        return "nested too deep"
    except (re.error, OverflowError, ValueError) as error:
        return str(error)
    return None


def check_patterns(patterns: Mapping[str, str], names: Iterable[str], model: str) -> None:
    """Refuse a pattern that is none, or that does not come to an end on the names of modules."""
    for setting, pattern in patterns.items():
        if why := why_no_pattern(pattern):
            raise ConfigError(
                f"lora.{setting}: expected a regular expression, got {pattern[:60]!r} ({why})"
            )
    endless = _first_endless(tuple(patterns.values()), tuple(names))
    if endless is not None:
        setting = list(patterns)[endless]
        raise ConfigError(
            f"lora.{setting}: expected a regular expression that is through with the modules of "
            f"{model} within {SECONDS} s, got {patterns[setting][:60]!r}, which tries ever more "
            "ways to match; do not repeat what repeats already, as (a+)+ does, or list the names"
        )


@lru_cache(maxsize=8)
def _first_endless(patterns: tuple[str, ...], names: tuple[str, ...]) -> int | None:
    """Return the number of the first pattern that does not end; None where all do.

    The checkpoints of all agents ask the same.
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
    # One that printed nothing never got as far as a pattern: nothing is known then.
    return int(begun.split()[-1]) if code and begun else None
