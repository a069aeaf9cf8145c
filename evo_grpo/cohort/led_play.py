"""A play that the first of several ranks plays for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from evo_grpo.envs.protocol import Ask, Experience, Play
from evo_grpo.team.team import Team
from evo_grpo.types import CompletionGroup


@final
class LedPlay:
    """Asks, rewards and experiences of the first rank, told to all; see `Play`.

    Rewards and environments of the user's own need not be the same twice, and ranks that train an
    agent together must not part ways.

    Args:
        begin: Begins the play; called on the first rank alone.
        team: The ranks, all of which make the same calls.
    """

    def __init__(self, begin: Callable[[], Play], team: Team) -> None:
        """Begin the play."""
        self._team = team
        self._plays: list[Play] = []
        team.lead(lambda: self._plays.append(begin()))

    def ask(self) -> Ask | None:
        """See `Play`."""
        return self._team.lead(lambda: self._plays[0].ask())

    def tell(self, groups: Sequence[Sequence[CompletionGroup]]) -> None:
        """See `Play`."""
        self._team.lead(lambda: self._plays[0].tell(groups))

    def experiences(self) -> list[Experience]:
        """See `Play`."""
        return self._team.lead(lambda: list(self._plays[0].experiences()))
