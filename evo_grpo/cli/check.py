"""What `evo-grpo check` does, whichever way its words were read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def check(file: str | Path, settings: Sequence[str] = ()) -> None:
    """Validate a configuration and print the plan.

    Raises:
        EvoGrpoError: Whatever is wrong with it.
    """
    from evo_grpo import config
    from evo_grpo.plan import make_plan
    from evo_grpo.plan.text import plain_lines
    from evo_grpo.progress.output import fits_as_it_is, show, standard_output

    plan = make_plan(config.load(file, settings))
    lines = plain_lines(plan, str(file))
    if fits_as_it_is(lines):
        print("\n".join(lines), flush=True)
        return
    from evo_grpo.plan.show import show_plan

    show(standard_output(), show_plan(plan, str(file)))
