"""What a replay found, as a section of the model card."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from evo_grpo.record.replay import BUDGETS, read_replay

if TYPE_CHECKING:
    from evo_grpo.types import Score


def replay_section(run: Path) -> str:
    """Return the section between two others, an empty string where the run has no replay.

    Args:
        run: The run folder.

    Raises:
        CheckpointError: replay.json is damaged.
        RunDirError: Another version of this library wrote it.
    """
    found = read_replay(run)
    if found is None:
        return ""
    schedule = found.schedule
    whose = "of the first of the two" if schedule.kind == "mean" else "above"
    prompts = ", ".join(f"{schedule.prompts_per_step(one):.3g}" for one in schedule.rounds)
    lines = [
        "",
        "## Is it the schedule?",
        "",
        f"After the run, agents were trained from scratch with the schedule {whose}, and others "
        "with its last values, at two budgets. Prompts per step of the schedule by round: "
        f"{prompts}.",
        "",
        "| trained with | budget | tokens | test |",
        "|---|---|---:|---:|",
    ]
    for one in found.trained:
        values = "schedule" if one.values == "schedule" else "its last values"
        lines.append(f"| {values} | {BUDGETS[one.budget]} | {one.tokens:,} | {_mean(one.test)} |")
    own = f"{schedule.tokens:,}"
    lines += [
        f"| the winner, in its population | its own | {own} | {_mean(found.winner)} |",
        "",
        *(f"- {found.verdict(budget)}" for budget in BUDGETS),
        "",
        found.caveat(),
        "",
    ]
    return "\n".join(lines)


def _mean(score: Score) -> str:
    error = "" if math.isnan(score.se) else f" ± {score.se:.4f}"
    return f"{score.mean:.4f}{error}"
