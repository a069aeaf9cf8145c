"""An engine that samples a part of the prompts on each process, and gives all of them all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from evo_grpo.rollout.engine import RolloutEngine, RolloutRequest
from evo_grpo.team.team import Team
from evo_grpo.types import CompletionGroup
from evo_grpo.zero.turns import check_alike


@final
class DividedSampling:
    """Samples every so many-th prompt of each agent on this process; see `RolloutEngine`.

    Args:
        engine: What samples here.
        team: The processes, which all give it the same requests.
    """

    def __init__(self, engine: RolloutEngine, team: Team) -> None:
        """Keep the pieces."""
        self.engine, self.team = engine, team

    @property
    def exact(self) -> bool:
        """Whether the recorded log-probs are the trainer's own, within rounding."""
        return self.engine.exact

    def rollout(self, requests: Sequence[RolloutRequest]) -> list[list[CompletionGroup]]:
        """Sample the completions of every request; see `RolloutEngine`."""
        check_alike(self.team, _digest(requests), "rollout")
        parts = self.team.gather(lambda: self._mine(requests))
        groups: list[list[CompletionGroup]] = []
        for number, request in enumerate(requests):
            found: list[CompletionGroup | None] = [None] * len(request.prompts)
            for rank, part in enumerate(parts):
                found[self._first(number, rank) :: self.team.size] = part[number]
            groups.append([group for group in found if group is not None])
        return groups

    def publish(self, versions: Mapping[str, int]) -> None:
        """See `RolloutEngine`."""
        self.engine.publish(versions)

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
        """Return the first prompt of a request for a rank; other ranks begin with other agents."""
        return (rank + number) % self.team.size

    def _mine(self, requests: Sequence[RolloutRequest]) -> list[list[CompletionGroup]]:
        mine: list[list[CompletionGroup]] = [[] for _ in requests]
        asked: list[tuple[int, RolloutRequest]] = []
        for number, request in enumerate(requests):
            own = slice(self._first(number, self.team.rank), None, self.team.size)
            # A prompt's draws stay those of its place among all.
            keys = request.keys or range(len(request.prompts))
            part = replace(request, prompts=request.prompts[own], keys=list(keys)[own])
            if part.prompts:
                asked.append((number, part))
        sampled = self.engine.rollout([request for _, request in asked])
        for (number, _), groups in zip(asked, sampled, strict=True):
            mine[number] = groups
        return mine


def _digest(requests: Sequence[RolloutRequest]) -> str:
    told = hashlib.sha256()
    for request in requests:
        prompts = [(prompt.token_ids, prompt.index) for prompt in request.prompts]
        told.update(repr((replace(request, prompts=()), prompts)).encode())
    return told.hexdigest()
