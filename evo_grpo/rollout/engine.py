"""RolloutEngine: what turns prompts into completions for many agents at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from evo_grpo.rollout.sampling import Sampling
from evo_grpo.types import Group, Prompt


@dataclass(frozen=True)
class RolloutRequest:
    """What one agent wants sampled.

    Attributes:
        agent: Slot, copied into the groups.
        adapter: Adapter name, or None for the base alone.
        prompts: P prompts.
        samples: G completions per prompt, >= 1.
        sampling: How to sample.
        seed: Stream of this agent in this round and step; a row's draws are keyed by (seed, prompt
            position, completion, token step) and by nothing else.
        keys: One number per prompt that stands for its position in the draws, when prompts come
            and go (the turns of an episode); None numbers them 0, 1, ....
    """

    agent: int
    adapter: str | None
    prompts: Sequence[Prompt]
    samples: int
    sampling: Sampling
    seed: int
    keys: Sequence[int] | None = None


class RolloutEngine(Protocol):
    """Samples completions. Every engine passes the suite tests/helpers/engine_contract.py."""

    def rollout(self, requests: Sequence[RolloutRequest]) -> list[list[Group]]:
        """Return, per request, one group of `samples` completions per prompt in prompt order."""
        ...
