"""Finds the setting that an unknown option names: `run --rounds 3` means population.rounds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from evo_grpo.cli.completion import complete_setting

SET = "--set"


def option_as_setting(error: Any, arguments: Sequence[str]) -> str | None:  # noqa: ANN401 -- typer does not export its errors
    """Return the message for an unknown option that has the name of a setting; None for others.

    Args:
        error: The error of a command line, of any kind.
        arguments: The arguments of the command.
    """
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if not isinstance(option, str) or context is None or not hasattr(error, "possibilities"):
        return None  # another error
    takes = [name for parameter in context.command.params for name in parameter.opts]
    if SET not in takes or not option.startswith("--"):
        return None
    paths = _paths(option.removeprefix("--").replace("-", "_"))
    if not paths:
        return None
    value = _value(option, arguments)
    written = " or ".join(f"{SET} {path}={value}" for path in paths)
    return f"{context.info_name}: there is no option {option}, but a setting: {written}"


def _paths(name: str) -> list[str]:
    from evo_grpo.schema.messages import OTHER_NAMES
    from evo_grpo.settings import RunConfig

    if name in RunConfig.model_fields:
        return [name]
    if name in OTHER_NAMES:
        return [OTHER_NAMES[name]]
    found = [path for path in complete_setting("") if path.rpartition(".")[2] == name]
    return sorted(found, key=lambda path: path.count("."))


def _value(option: str, arguments: Sequence[str]) -> str:
    """Return the value that was given to an option, or VALUE."""
    for index, argument in enumerate(arguments):
        name, sign, value = argument.partition("=")
        if name == option and sign:
            return shlex.quote(value)
        if argument == option and index + 1 < len(arguments):
            return shlex.quote(arguments[index + 1])
    return "VALUE"
