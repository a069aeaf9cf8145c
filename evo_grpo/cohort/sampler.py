"""Policies: agents of a cohort, or the bare base, as an environment sees them while it plays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from evo_grpo.cohort.cohort import Cohort
from evo_grpo.rollout.engine import RolloutEngine, RolloutRequest
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.seeding import derive
from evo_grpo.types import Completion, Group, Prompt


class Policies:
    """Samples for N policies in one generation call; the `Sampler` that environments are handed.

    Args:
        engine: What samples.
        requests: One per policy, without prompts: adapter, G, sampling and random stream.

    Attributes:
        seconds: Wall seconds spent in generation so far.
    """

    def __init__(self, engine: RolloutEngine, requests: Sequence[RolloutRequest]) -> None:
        self.engine = engine
        self.requests = list(requests)
        self.seconds = 0.0

    @classmethod
    def in_training(
        cls, cohort: Cohort, slots: Sequence[int], *, stream: Sequence[str | int]
    ) -> Policies:
        """Return agents as they train: each its own group size, sampling and draws.

        Args:
            cohort: The agents.
            slots: Which.
            stream: Path of the random stream; the slot is appended.
        """
        states = [cohort.agents[slot] for slot in slots]
        return cls(
            cohort.engine,
            [
                RolloutRequest(
                    state.slot,
                    state.adapter,
                    (),
                    state.hparams.group_size,
                    cohort.sampling(state.hparams),
                    derive(cohort.seed, *stream, state.slot),
                )
                for state in states
            ],
        )

    @classmethod
    def compared(
        cls,
        cohort: Cohort,
        slots: Sequence[int | None],
        *,
        samples: int,
        temperature: float,
        stream: Sequence[str | int],
    ) -> Policies:
        """Return policies under equal conditions: one sampling and the same draws for all.

        Args:
            cohort: The agents.
            slots: Which; None is the base model without an adapter.
            samples: G, for all.
            temperature: For all; no top-k or top-p.
            stream: Path of the random stream that all share.
        """
        sampling = Sampling(
            temperature=temperature,
            max_output_tokens=cohort.max_output_tokens,
            min_output_tokens=cohort.settings.algorithm.min_output_tokens,
        )
        seed = derive(cohort.seed, *stream)
        return cls(
            cohort.engine,
            [
                RolloutRequest(
                    -1 if slot is None else slot,
                    None if slot is None else cohort.agents[slot].adapter,
                    (),
                    samples,
                    sampling,
                    seed,
                )
                for slot in slots
            ],
        )

    @property
    def sizes(self) -> list[int]:
        """G of each policy."""
        return [request.samples for request in self.requests]

    def groups(self, prompts: Sequence[Prompt]) -> list[list[Group]]:
        """See `Sampler`."""
        return self._rollout([replace(request, prompts=prompts) for request in self.requests])

    def turn(
        self,
        number: int,
        prompts: Sequence[Sequence[Prompt]],
        keys: Sequence[Sequence[int]],
    ) -> list[list[Completion]]:
        """See `Sampler`."""
        requests = [
            replace(
                request,
                prompts=mine,
                samples=1,
                seed=derive(request.seed, "turn", number),
                keys=numbers,
            )
            for request, mine, numbers in zip(self.requests, prompts, keys, strict=True)
        ]
        # Whose episodes are all over asks for nothing, and costs nothing.
        asking = [i for i, request in enumerate(requests) if request.prompts]
        said: list[list[Completion]] = [[] for _ in requests]
        for i, groups in zip(asking, self._rollout([requests[i] for i in asking]), strict=True):
            said[i] = [group.completions[0] for group in groups]
        return said

    def _rollout(self, requests: Sequence[RolloutRequest]) -> list[list[Group]]:
        start = time.perf_counter()
        groups = self.engine.rollout(requests)
        self.seconds += time.perf_counter() - start
        return groups
