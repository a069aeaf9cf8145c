"""Policies for deleting old checkpoints. Those for a resume, the best ever and the front stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from evo_grpo.record.family import best_agent, front

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evo_grpo.record.records import RoundRecord

Retention = Literal["all", "last", "best"] | int
"""Checkpoints to keep: of all rounds ("all"); of the last round ("last"); of the last round and of
each earlier round's best agent ("best"); of the last n rounds (n)."""


def kept_checkpoints(rounds: Sequence[RoundRecord], policy: Retention) -> set[str]:
    """Return the recorded paths of the checkpoints that a policy keeps."""
    count = len(rounds) if policy == "all" else policy if isinstance(policy, int) else 1
    kept = {a.checkpoint for record in rounds[-count:] for a in record.agents}
    kept |= {agent.checkpoint for agent in front(rounds)}
    if policy == "best":
        kept |= {best.checkpoint for record in rounds if (best := best_agent(record)) is not None}
    return {path for path in kept if path is not None}


def kept_throughout(
    rounds: Sequence[RoundRecord], policies: Sequence[tuple[int, Retention]]
) -> set[str]:
    """Return the paths of the checkpoints that remain after several policies, one after another.

    Each policy comes with the number of rounds that were finished when it was last applied. A
    checkpoint that a policy deleted stays deleted.
    """
    there = kept_checkpoints(rounds, "all")
    for until, policy in policies:
        played = rounds[:until]
        there -= kept_checkpoints(played, "all") - kept_checkpoints(played, policy)
    return there
