"""Tournament selection: the best agent stays; other places go to winners of tournaments."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, final

from evo_grpo.evolve.protocols import Offspring, rank
from evo_grpo.schema.group import Group, setting
from evo_grpo.types import Position, Score

if TYPE_CHECKING:
    import numpy as np

_SMALL = 1000  # largest number of agents for which each tournament is drawn separately


@final
class TournamentSelection(Group):
    """The best agent stays; every other place goes to the winner of a tournament.

    A tournament compares `size` different agents that have not failed, or all agents that have not
    failed if there are fewer. Each place has a separate tournament. An agent that wins survives;
    for each further tournament that it wins, a copy of it overwrites the lowest position of an
    agent that won none. With equal fitness the lower position wins.
    """

    by_lot: ClassVar[bool] = True
    kind: Literal["tournament"] = setting(
        "tournament", "Each place goes to the best of `size` agents drawn at random."
    )
    size: int = setting(4, "Agents in one tournament: more means more pressure.", ge=1)
    elitism: bool = setting(True, "The best agent stays, independently of the draws.")

    def plan(
        self, histories: Sequence[Sequence[Score]], places: int, rng: "np.random.Generator"
    ) -> tuple[Offspring, ...]:
        """Plan the next round; see `Selector`."""
        ranking = rank(histories)
        elite = ranking[0] if self.elitism else None
        size = min(self.size, len(ranking))
        survivors = set[Position]() if elite is None else {elite}
        copied: list[Position] = []  # winners of further places, in the order of the draws
        for rank_of_winner in _winners(len(ranking), size, places - len(survivors), rng):
            winner = ranking[rank_of_winner]
            if winner in survivors:
                copied.append(winner)
            survivors.add(winner)
        parents = {position: position for position in survivors}
        positions = map(Position, range(len(histories)))
        vacant = (position for position in positions if position not in survivors)
        # Fewer places than agents leave positions without a copy: those agents leave.
        parents.update(zip(vacant, copied, strict=False))
        return tuple(
            Offspring(position, parents[position], position == elite)
            for position in sorted(parents)
        )


def _winners(agents: int, size: int, places: int, rng: "np.random.Generator") -> list[int]:
    """Return, for each place, the rank of the best of `size` agents drawn at random; 0 is best."""
    if agents <= _SMALL:
        return [int(rng.choice(agents, size=size, replace=False).min()) for _ in range(places)]
    import numpy as np  # slow to import, and planning a run draws nothing

    # Draw the rank of the winner from its distribution: it is above r with probability
    # prod over m = 0..r of (agents - size - m) / (agents - m).
    ranks = np.arange(agents - size)
    above = np.exp(np.cumsum(np.log1p(-size / (agents - ranks))))
    return np.searchsorted(-above, rng.random(places) - 1.0, side="right").tolist()
