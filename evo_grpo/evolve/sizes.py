"""How many agents each round has places for, and how many rows each of them may sample."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from evo_grpo.printable import cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Sizes = list[int] | Literal["constant"] | None
"""Places by round: null halves them, a list names them, "constant" keeps them all."""


def places_by_round(size: int, sizes: Sizes, *, selects: bool = True) -> tuple[int, ...]:
    """Return the places of the rounds, `size` in the first; the last number repeats.

    None halves the places after every round, rounding up, down to 2; "constant", and without a
    selection None too, keeps them; a list is taken as it is.
    """
    if sizes == "constant" or (sizes is None and not selects):
        return (size,)
    if sizes is not None:
        return tuple(sizes)
    places = [size]
    while places[-1] > 2:
        places.append((places[-1] + 1) // 2)
    return tuple(places)


def wrong_sizes(size: int, sizes: Sizes, *, archive: bool) -> Iterator[str]:
    """Yield what is wrong with the places of a run, one sentence each.

    With `archive` the best agent ever is kept, from which a lone agent can be restored.
    """
    if not isinstance(sizes, list):
        return
    shown = cut(", ".join(map(str, sizes)))
    if not sizes or min(sizes) < 1:
        yield (
            f"expected at least one number, each >= 1, got [{shown}]; no more agents can leave "
            "than there are"
        )
        return
    if sizes[0] != size:
        yield f"expected population.size ({size}) as the first number, got [{shown}]"
    if any(later > earlier for earlier, later in pairwise(sizes)):
        yield (
            f"expected no number above the one before it, got [{shown}]; an agent that has left "
            "does not come back"
        )
    elif len(sizes) > 1 and 2 * sizes[1] < sizes[0]:
        yield (
            f"expected at least half of the agents after the first round, got [{shown}]: those "
            "that lead so early are often those with too high a learning rate; give "
            f"{(sizes[0] + 1) // 2} or more as the second number"
        )
    if min(sizes) == 1 and size > 1 and not archive:
        yield (
            f"expected at least 2 agents in every round without evolve.archive, got [{shown}]: "
            "from one agent that fails there is no way back; set evolve.archive: true"
        )


def prompts_of_agents(
    rows: int, steps: int, group_sizes: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Deal the rows that all agents sample together in a step out to them: equal, in whole groups.

    What rounding to whole groups leaves over is passed on from agent to agent, those with the
    smallest groups last, so that all agents together are at most half of the smallest group off.

    Returns:
        For each step P_i of each agent, >= 1: agent i takes the first P_i prompts of the list that
        all share. Over the round, the sum of P_i * G_i is `rows * steps`, up to the rounding.
    """
    counts = _groups_of_agents(rows * steps, steps, group_sizes)
    return tuple(
        tuple((step + 1) * count // steps - step * count // steps for count in counts)
        for step in range(steps)
    )


def planned_rows(rows: int, steps: int, group_sizes: Sequence[int]) -> int:
    """Return the rows of a round whose prompts `prompts_of_agents` deals out; takes the same."""
    counts = _groups_of_agents(rows * steps, steps, group_sizes)
    return sum(count * size for count, size in zip(counts, group_sizes, strict=True))


def _groups_of_agents(rows: int, steps: int, group_sizes: Sequence[int]) -> list[int]:
    """Return how many groups each agent samples in a round of so many rows, at least one a step."""
    agents = len(group_sizes)
    carry = 0.0
    groups = [0] * agents
    for agent in sorted(range(agents), key=lambda i: (-group_sizes[i], i)):
        wanted = rows / agents + carry
        groups[agent] = max(steps, round(wanted / group_sizes[agent]))
        carry = wanted - groups[agent] * group_sizes[agent]
    return groups
