"""The protocol of rollout engines: prompts in, completions out, for many agents in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings
from evo_grpo.types import CompletionGroup, Prompt


@dataclass(frozen=True)
class RolloutRequest:
    """The completions to sample for one agent.

    Attributes:
        agent: Slot, copied into the groups.
        adapter: Adapter name, or None for the base model alone.
        prompts: P prompts.
        samples: G completions per prompt, >= 1.
        sampling: Temperature, filters and length limits.
        seed: Random stream of this agent in this round and step. A row's draws are keyed by (seed,
            prompt position, completion, token step) and by nothing else.
        keys: One number per prompt that replaces its position in the draws, for prompts that come
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
    """Samples completions for many agents at once; tests/helpers/engine_contract.py tests it.

    Log-probs. `Completion.logprobs` holds one number per sampled token, the end token included:
    `log_softmax(logits / temperature)[token]`, in nats, computed in float32, under the weights that
    sampled the token. It is taken before anything else shapes the draw: repetition penalty,
    min_output_tokens, top_k, top_p and min_p change which tokens are drawn, not what is recorded.
    So with one of them in force it is not the probability of the draw, but the log-prob of the
    policy that the loss differentiates. An engine whose own numbers mean something else there
    reports None, and the learner takes such a row for one of the policy itself. Rows of an agent
    whose weights are not finite hold NaN.

    Attributes:
        exact: True when the recorded log-probs are those of the trainer's own forward on the same
            weights, within the rounding of its dtype and without LoRA dropout. False for an engine
            with kernels, precision or weights of its own: the learner then corrects for the
            difference, see `LossConfig.sampler_correction`.
    """

    @property
    def exact(self) -> bool:
        """Whether the recorded log-probs are the trainer's own, within rounding."""
        ...

    def rollout(self, requests: Sequence[RolloutRequest]) -> list[list[CompletionGroup]]:
        """Sample the completions of every request in one call.

        Args:
            requests: One per agent; a request without prompts gives no groups.

        Returns:
            Per request, in order, one group of `samples` completions per prompt in prompt order.

        Raises:
            ShapeError: A request has a prompt without tokens, or asks for no sample or no token.
            PromptTooLongError: A prompt leaves no room for a completion.
        """
        ...

    def publish(self, versions: Mapping[str, int]) -> None:
        """Learn which adapters changed; called after the change and before the next rollout.

        Args:
            versions: Adapter name -> version, of new and changed adapters alone. A version is never
                used twice, not even by another adapter of the same name. Publishing a version
                again changes nothing. Removed adapters are not announced: no request names them.
        """
        ...

    def sleep(self) -> None:
        """Free what only sampling needs, for instance device memory, until `wake`.

        Called before agents learn. Sleeping twice is sleeping once.
        """
        ...

    def wake(self) -> None:
        """Prepare for rollouts again after `sleep`; without one, do nothing.

        Called before `publish` and `rollout`, so that adapters are still those of before.
        """
        ...

    def close(self) -> None:
        """Free everything; the engine is not used again. Closing twice is allowed."""
        ...


class EngineFactory(Protocol):
    """Makes an engine; `Cohort` takes one in place of the native engine's."""

    def __call__(self, slots: AdapterSlots, settings: AgentSettings, /) -> RolloutEngine:
        """Return an engine that samples from these adapters.

        Args:
            slots: The adapters, and the base that they are over.
            settings: What the agents are made of; engines read `settings.engine`, and the context
                from `settings.algorithm.max_model_len`.

        Raises:
            ModelError: The engine cannot run the base model.
            EngineUnavailable: A package it needs is not installed.
        """
        ...
