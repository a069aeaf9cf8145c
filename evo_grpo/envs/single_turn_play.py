"""A play of one turn: the completions of each agent become trajectories with rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from evo_grpo.envs.protocol import Ask, Experience, Floats
from evo_grpo.envs.rewards.scoring import reward_of_each
from evo_grpo.record.vocabulary import LOGGED
from evo_grpo.types import CompletionGroup, Prompt, Trajectory

ANSWERS = ("answer", "solution", "ground_truth", "target", "label")
"""Usual names of the column with the right answer, which sample completions are recorded with."""


class Judged(NamedTuple):
    """The rewards of some groups.

    Attributes:
        rewards: (B, K) without weights, NaN in groups that are set aside.
        aside: For each group whether it is set aside.
        logged: What functions in TRL's style logged, by name.
    """

    rewards: Floats
    aside: list[bool]
    logged: Mapping[str, float]


@final
class SingleTurnPlay:
    """A play of one turn: asks once, and scores the completions of all agents together.

    Args:
        prompts: The prompts of each agent.
        group_sizes: G of each agent, completions per prompt.
        judge: Scores groups.
        names: Names of the K reward functions, for the mean of each; empty for no such metrics.
        apart: Score the completions of each agent by a separate call, as single-agent trainers do.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[Prompt]],
        group_sizes: Sequence[int],
        judge: Callable[[Sequence[CompletionGroup]], Judged],
        names: Sequence[str] = (),
        *,
        apart: bool = False,
    ) -> None:
        self._request = Ask(prompts, group_sizes)
        self._apart = apart
        self._judge = judge
        self._names = names
        self._groups: Sequence[Sequence[CompletionGroup]] | None = None

    def ask(self) -> Ask | None:
        """Return the prompts of all agents, or None after `tell`."""
        return self._request if self._groups is None else None

    def tell(self, groups: Sequence[Sequence[CompletionGroup]]) -> None:
        """Keep the completions for `experiences`."""
        self._groups = groups

    def experiences(self) -> list[Experience]:
        """Score the completions of all agents."""
        groups = self._groups or []
        judged = map(self._judge, groups) if self._apart else self._together(groups)
        return [
            Experience(
                tuple(t for group in mine for t in _trajectories(group)),
                scores,
                {
                    "set_aside": float(sum(aside)),
                    **reward_of_each(self._names, scores),
                    **{f"{LOGGED}{name}": value for name, value in logged.items()},
                },
            )
            for mine, (scores, aside, logged) in zip(groups, judged, strict=True)
        ]

    def _together(self, groups: Sequence[Sequence[CompletionGroup]]) -> list[Judged]:
        """Score the completions of all agents by one call; return the part of each agent."""
        rewards, aside, logged = self._judge([group for mine in groups for group in mine])
        ends = np.cumsum([sum(len(g.completions) for g in mine) for mine in groups])[:-1]
        flags = iter(aside)
        return [
            Judged(scores, [next(flags) for _ in mine], logged)
            for mine, scores in zip(groups, np.split(rewards, ends), strict=True)
        ]


def _trajectories(group: CompletionGroup) -> list[Trajectory]:
    prompt = group.prompt
    answer = right_answer(prompt.columns)
    return [
        Trajectory(
            prompt=prompt.text,
            text=completion.text,
            token_ids=prompt.token_ids + completion.token_ids,
            mask=(False,) * len(prompt.token_ids) + (True,) * len(completion.token_ids),
            logprobs=completion.logprobs,
            ended=completion.ended,
            answer=answer,
            row=prompt.columns,
        )
        for completion in group.completions
    ]


def right_answer(columns: Mapping[str, Any]) -> str:
    """Return the right answer of a dataset row, the first of `ANSWERS` that it has, else ""."""
    found = next((columns[name] for name in ANSWERS if name in columns), None)
    return str(found) if isinstance(found, str | int | float) else ""
