"""Defines PopulationSampler, which samples from all agents in one generation call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from evo_grpo.envs.protocol import Ask
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.seeding import derive
from evo_grpo.types import CompletionGroup


@final
class PopulationSampler:
    """Samples from N policies, with one request for each.

    A policy is an agent, or the base without an adapter.
    """

    def __init__(self, cohort: Cohort, requests: Sequence[RolloutRequest]) -> None:
        self._cohort = cohort
        self._requests = list(requests)

    @classmethod
    def in_training(
        cls, cohort: Cohort, slots: Sequence[int], *, stream: Sequence[str | int]
    ) -> PopulationSampler:
        """Return a sampler for training, with the group size, sampling and draws of each agent.

        The slot is appended to `stream`, the path of the random stream.
        """
        return cls(cohort, [cohort.request(slot, stream) for slot in slots])

    @classmethod
    def compared(
        cls,
        cohort: Cohort,
        slots: Sequence[int | None],
        *,
        samples: int,
        temperature: float,
        stream: Sequence[str | int],
    ) -> PopulationSampler:
        """Return a sampler for comparisons, in which all policies sample with the same draws.

        A slot of None is the base model without an adapter. Sampling uses no top-k or top-p. An
        agent's own limit of completion tokens applies to it; the run's limit applies to the base.
        """
        sampling = Sampling(
            temperature=temperature,
            max_output_tokens=cohort.max_output_tokens,
            min_output_tokens=cohort.settings.algorithm.min_output_tokens,
        )

        def under_own_limit(slot: int | None) -> Sampling:
            limit = None if slot is None else cohort.agents[slot].hparams.max_output_tokens
            return sampling if limit is None else replace(sampling, max_output_tokens=limit)

        seed = derive(cohort.seed, *stream)
        return cls(
            cohort,
            [
                RolloutRequest(
                    -1 if slot is None else slot,
                    None if slot is None else cohort.agents[slot].adapter,
                    (),
                    samples,
                    under_own_limit(slot),
                    seed,
                )
                for slot in slots
            ],
        )

    @property
    def group_sizes(self) -> list[int]:
        """Group size G of each policy, for `Environment.begin`."""
        return [request.samples for request in self._requests]

    def sample(self, ask: Ask) -> list[list[CompletionGroup]]:
        """Sample the completions that a play requests; return one group per prompt for each policy.

        All policies share one generation call; policies without prompts get no groups.
        """
        requests = [
            replace(
                request,
                prompts=prompts,
                samples=samples,
                seed=request.seed if ask.turn is None else derive(request.seed, "turn", ask.turn),
                keys=None if ask.keys is None else ask.keys[position],
            )
            for position, (request, prompts, samples) in enumerate(
                zip(self._requests, ask.prompts, ask.samples, strict=True)
            )
        ]
        asking = [position for position, request in enumerate(requests) if request.prompts]
        groups: list[list[CompletionGroup]] = [[] for _ in requests]
        sampled = self._cohort.rollout([requests[position] for position in asking])
        for position, policy_groups in zip(asking, sampled, strict=True):
            groups[position] = policy_groups
        return groups
