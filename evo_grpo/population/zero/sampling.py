"""Sampling and plays of processes that train each agent together.

Each process samples a part of the prompts and receives all completions; the first process runs the
environment and the rewards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, final

from evo_grpo.envs.protocol import Ask, Experience, Play
from evo_grpo.population.ranks.team import Team
from evo_grpo.population.zero.turns import check_equal
from evo_grpo.rollout.engine import RolloutEngine, RolloutRequest
from evo_grpo.types import CompletionGroup

T = TypeVar("T")


@final
class DividedSampling(RolloutEngine):
    """Samples every n-th prompt of each agent on this one of n processes; see `RolloutEngine`.

    All processes pass the same requests.
    """

    def __init__(self, engine: RolloutEngine, team: Team) -> None:
        self.engine, self.team, self.exact = engine, team, engine.exact
        self.decodes_by = engine.decodes_by

    def rollout(self, requests: Sequence[RolloutRequest]) -> list[list[CompletionGroup]]:
        """Sample the completions of every request; see `RolloutEngine`."""
        check_equal(self.team, _digest(requests), "rollout")
        parts = self.team.gather(self._mine(requests))
        groups: list[list[CompletionGroup]] = []
        for number, request in enumerate(requests):
            found: list[CompletionGroup | None] = [None] * len(request.prompts)
            for rank, part in enumerate(parts):
                found[self._first(number, rank) :: self.team.size] = part[number]
            groups.append([group for group in found if group is not None])
        return groups

    def sleep(self) -> None:
        """See `RolloutEngine`."""
        self.engine.sleep()

    def wake(self) -> None:
        """See `RolloutEngine`."""
        self.engine.wake()

    def close(self) -> None:
        """See `RolloutEngine`."""
        self.engine.close()

    def _first(self, number: int, rank: int) -> int:
        """Return the first prompt of a request that a rank samples; ranks take turns at 0."""
        return (rank + number) % self.team.size

    def _mine(self, requests: Sequence[RolloutRequest]) -> list[list[CompletionGroup]]:
        mine: list[list[CompletionGroup]] = [[] for _ in requests]
        asked: list[tuple[int, RolloutRequest]] = []
        for number, request in enumerate(requests):
            first = self._first(number, self.team.rank)
            part = request.part(range(first, len(request.prompts), self.team.size))
            if part.prompts:
                asked.append((number, part))
        sampled = self.engine.rollout([request for _, request in asked])
        for (number, _), groups in zip(asked, sampled, strict=True):
            mine[number] = groups
        return mine


@final
class LedPlay:
    """A play that runs on the first rank, which sends its requests and experiences; see `Play`.

    The user's rewards and environments may be nondeterministic, but ranks that train an agent
    together need equal results. All ranks make the same calls; `begin` is called on the first rank
    only.
    """

    def __init__(self, begin: Callable[[], Play], team: Team) -> None:
        self._team = team
        with team.sharing_errors():
            self._play = begin() if team.rank == 0 else None

    def ask(self) -> Ask | None:
        """See `Play`."""
        return self._on_first(lambda play: play.ask())

    def tell(self, groups: Sequence[Sequence[CompletionGroup]]) -> None:
        """See `Play`."""
        self._on_first(lambda play: play.tell(groups))

    def experiences(self) -> list[Experience]:
        """See `Play`."""
        return self._on_first(lambda play: list(play.experiences()))

    def _on_first(self, call: Callable[[Play], T]) -> T:
        def result(_: object) -> T:
            assert self._play is not None, "the first rank has the play"
            return call(self._play)

        return self._team.agree(None, result)


def _digest(requests: Sequence[RolloutRequest]) -> str:
    digest = hashlib.sha256()
    for request in requests:
        prompts = [(prompt.token_ids, prompt.index) for prompt in request.prompts]
        digest.update(repr((replace(request, prompts=()), prompts)).encode())
    return digest.hexdigest()
