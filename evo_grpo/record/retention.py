"""Which checkpoints a run keeps. What a resume needs, and the best agent ever, always stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from evo_grpo.record.family import best_agent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evo_grpo.record.records import RoundRecord

Retention = Literal["all", "last", "best"] | int
"""Of every round; of the last round; of the last round and each earlier one's best agent; of the
last so many rounds."""


def kept_checkpoints(rounds: Sequence[RoundRecord], policy: Retention) -> set[str]:
    """Return the checkpoints of finished rounds that a policy keeps, by their recorded paths."""
    count = len(rounds) if policy == "all" else policy if isinstance(policy, int) else 1
    kept = {a.checkpoint for record in rounds[-count:] for a in record.agents}
    if policy == "best":
        kept |= {best.checkpoint for record in rounds if (best := best_agent(record)) is not None}
    return {path for path in kept if path is not None}


def kept_throughout(
    rounds: Sequence[RoundRecord], policies: Sequence[tuple[int, Retention]]
) -> set[str]:
    """Return the checkpoints that are there after policies that followed one another.

    Each policy comes with how many rounds were finished when it last acted, in order; what one of
    them has dropped, no later one brings back.
    """
    there = kept_checkpoints(rounds, "all")
    for until, policy in policies:
        played = rounds[:until]
        there -= kept_checkpoints(played, "all") - kept_checkpoints(played, policy)
    return there
