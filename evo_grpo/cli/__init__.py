"""The command `evo-grpo`. Exit codes: 0 done, 1 the run failed, 2 bad input, 130 stopped.

Commands import what they need when they are called: --help answers at once, and only run and resume
load torch. `check` in its usual form does without typer too, which takes a third of its time.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys


def main() -> None:
    """Run the command line."""
    # What imports make stays: to look through it for garbage, also at the exit, took a fifth of the
    # time of --help and check. A run collects again.
    gc.disable()
    atexit.register(gc.freeze)
    given = usual_check(sys.argv[1:])
    if given is None:
        from evo_grpo.cli.commands import app

        app(prog_name="evo-grpo")
        return
    from evo_grpo.cli.check import check
    from evo_grpo.cli.failures import told

    with told():
        check(*given)


def usual_check(words: list[str]) -> tuple[str, list[str]] | None:
    """Return FILE and the settings of `check FILE [--set A.B.C=VALUE]...`.

    None for all else, however little it differs: typer reads that, and words its refusal.
    """
    # typer is asked for completions by a variable, and expands wildcards itself on Windows.
    if words[:1] != ["check"] or "_EVO_GRPO_COMPLETE" in os.environ or os.name == "nt":
        return None
    files: list[str] = []
    settings: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        if word == "--set":
            settings.append(next(rest, ""))
        else:
            files.append(word)
    odd = len(files) != 1 or any(not word or word[0] == "-" for word in (*files, *settings))
    return None if odd else (files[0], settings)
