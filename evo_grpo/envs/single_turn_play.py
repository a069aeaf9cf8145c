"""A play of one turn: the completions of each agent become trajectories with rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np

from evo_grpo.envs.protocol import Ask, Experience, Floats
from evo_grpo.envs.rewards.scoring import reward_of_each
from evo_grpo.types import CompletionGroup, Prompt, Trajectory

ANSWERS = ("answer", "solution", "ground_truth", "target", "label")
"""Usual names of the column with the right answer, which sample completions are recorded with."""


@final
class SingleTurnPlay:
    """A play of one turn: asks once, and scores the completions of all agents together.

    Args:
        prompts: The prompts of each agent.
        group_sizes: G of each agent, completions per prompt.
        judge: Groups in order -> (B, K) rewards, and for each group whether it is set aside.
        names: Names of the K reward functions, for the mean of each; empty for no such metrics.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[Prompt]],
        group_sizes: Sequence[int],
        judge: Callable[[Sequence[CompletionGroup]], tuple[Floats, list[bool]]],
        names: Sequence[str] = (),
    ) -> None:
        self._request = Ask(prompts, group_sizes)
        self._judge = judge
        self._names = names
        self._groups: Sequence[Sequence[CompletionGroup]] | None = None

    def ask(self) -> Ask | None:
        """See `Play`."""
        return self._request if self._groups is None else None

    def tell(self, groups: Sequence[Sequence[CompletionGroup]]) -> None:
        """See `Play`."""
        self._groups = groups

    def experiences(self) -> list[Experience]:
        """Score the completions of all agents; see `Play.experiences`."""
        groups = self._groups or []
        rewards, aside = self._judge([group for mine in groups for group in mine])
        ends = np.cumsum([sum(len(g.completions) for g in mine) for mine in groups])[:-1]
        flags = iter(aside)
        return [
            Experience(
                tuple(t for group in mine for t in _trajectories(group)),
                scores,
                {
                    "set_aside": float(sum(next(flags) for _ in mine)),
                    **reward_of_each(self._names, scores),
                },
            )
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
        )
        for completion in group.completions
    ]


def right_answer(columns: Mapping[str, Any]) -> str:
    """Return the right answer of a dataset row, the first of `ANSWERS` that it has, else ""."""
    found = next((columns[name] for name in ANSWERS if name in columns), None)
    return str(found) if isinstance(found, str | int | float) else ""
