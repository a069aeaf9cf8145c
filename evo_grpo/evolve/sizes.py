"""Computes after which rounds a run decides, how many agents play, and on how many prompts."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

from evo_grpo.escaping import shorten

Sizes = list[int] | Literal["constant"] | None
"""Places by round: None halves them at decisions, a list gives them, "constant" keeps them."""
LEAST = 2
"""Number of agents at which a population is no longer halved."""
SHARES = 4
"""Least number of equal shares of a run; a run decides after each."""


def halvings(size: int) -> int:
    """Return the number of halvings, rounded up, from `size` agents to `LEAST`."""
    count = 0
    while size > LEAST:
        size, count = (size + 1) // 2, count + 1
    return count


def decisions_by_share(rounds: int, size: int) -> list[int]:
    """Return the rounds after which a run decides, as ascending numbers of finished rounds.

    A run decides after each of equal shares of its rounds. The number of shares is the number of
    halvings from `size` agents to `LEAST`, plus two, for which the remaining agents train after the
    last halving; it is at least `SHARES`. A run of fewer rounds than shares decides after each.
    """
    shares = max(SHARES, halvings(size) + 2)
    return sorted({max(1, round(rounds * share / shares)) for share in range(1, shares + 1)})


def decides_after(finished: int, decisions: Sequence[int]) -> bool:
    """Return whether a run decides after `finished` rounds.

    In an extended run, the distance between the last two of `decisions` repeats.
    """
    end = decisions[-1]
    if finished <= end:
        return finished in decisions
    return (finished - end) % (end - (decisions[-2] if len(decisions) > 1 else 0)) == 0


def places_by_round(size: int, sizes: Sizes, decisions: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the maximum number of agents of each round; the last number holds for later rounds.

    With `sizes` None, the number begins as `size` and is halved at `decisions`, rounding up, down
    to `LEAST`; if there are enough decisions, the last halving is at the third last decision.
    "constant" keeps `size`; a list is returned as it is.
    """
    if sizes is not None and sizes != "constant":
        return tuple(sizes)
    places = [size]
    if sizes is None and decisions:
        halving = decisions[max(0, len(decisions) - 2 - halvings(size)) : -1]
        for finished in range(1, decisions[-1]):
            current = places[-1]
            halves = finished in halving and current > LEAST
            places.append((current + 1) // 2 if halves else current)
    return tuple(places)


def wrong_sizes(size: int, sizes: Sizes, *, archive: bool) -> Iterator[str]:
    """Yield each problem of the setting `population.sizes` as a sentence.

    `archive` says whether the best agent ever is kept, so that a single agent that fails can be
    replaced.
    """
    if not isinstance(sizes, list):
        return
    got = f"got [{shorten(', '.join(map(str, sizes)))}]"
    if not sizes or min(sizes) < 1:
        yield f"expected at least one number >= 1, {got}; no more agents can leave than there are"
        return
    if sizes[0] != size:
        yield f"expected population.size ({size}) as the first number, {got}"
    if any(later > earlier for earlier, later in pairwise(sizes)):
        yield f"expected no number above the one before it, {got}; who has left does not come back"
    elif len(sizes) > 1 and 2 * sizes[1] < sizes[0]:
        yield (
            f"expected {(sizes[0] + 1) // 2} agents or more after the first round, {got}: those "
            "that lead so early often have too high a learning rate"
        )
    if min(sizes) == 1 and size > 1 and not archive:
        yield (
            f"expected at least 2 agents in every round without evolve.archive, {got}: from one "
            "agent that fails there is no way back; set evolve.archive: true"
        )


def prompts_of_agents(
    rows: int, steps: int, group_sizes: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Divide the `rows` of each step among the agents; return their numbers of prompts by step.

    A round has `steps` steps. All agents get equal numbers of rows in a round, rounded to whole
    groups, and at least one prompt per step. The agents with the largest of `group_sizes` are
    first, and what rounding adds for one agent is taken from the next. So the rows of a round
    differ from `rows` * `steps` by at most half of the smallest group.
    """
    counts = _groups_of_agents(rows * steps, steps, group_sizes)
    return tuple(
        tuple((step + 1) * count // steps - step * count // steps for count in counts)
        for step in range(steps)
    )


def _groups_of_agents(rows: int, steps: int, group_sizes: Sequence[int]) -> list[int]:
    """Return how many groups each agent samples in a round of `rows`, at least one per step."""
    agents = len(group_sizes)
    carry = 0.0
    groups = [0] * agents
    for agent in sorted(range(agents), key=lambda i: (-group_sizes[i], i)):
        target = rows / agents + carry
        groups[agent] = max(steps, round(target / group_sizes[agent]))
        carry = target - groups[agent] * group_sizes[agent]
    return groups
