"""What `evo-grpo check` does, whichever way its words were read."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType


def check(file: str | Path, settings: Sequence[str] = ()) -> None:
    """Validate a configuration and print the plan.

    Raises:
        EvoGrpoError: Whatever is wrong with it.
    """
    _search_no_plugins()
    file = Path(file)  # as typer gives it, which tidies what is shown
    from evo_grpo import settings as config
    from evo_grpo.cli.plan import make_plan
    from evo_grpo.cli.plan.text import plain_lines
    from evo_grpo.cli.terminal.output import fits_as_it_is, show, standard_output

    plan = make_plan(config.load(file, settings))
    lines = plain_lines(plan, str(file))
    if fits_as_it_is(lines):
        print("\n".join(lines), flush=True)
        return
    from evo_grpo.cli.plan.show import show_plan

    show(standard_output(), show_plan(plan, str(file)))


class _NoPlugins(ModuleType):
    """Stands in for pydantic's module that searches; asked for anything else, gives way to it."""

    get_plugins = tuple

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        sys.modules.pop(self.__name__, None)
        return getattr(import_module(self.__name__), name)


def _search_no_plugins() -> None:
    """Keep pydantic from searching all installed packages for plugins: a plan has no use for them.

    The search takes a tenth of the time of this command, most of it to load importlib.metadata, and
    with that email, socket and zipfile. pydantic's own switch comes too late for those imports.
    With that switch set, pydantic has its way.
    """
    if "PYDANTIC_DISABLE_PLUGINS" not in os.environ:
        nothing = _NoPlugins("pydantic.plugin._loader")
        sys.modules.setdefault(nothing.__name__, nothing)
