"""Rollout engines: prompts in, completions out, for many agents in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evo_grpo.errors import PromptTooLongError, ShapeError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.seeding import derive
from evo_grpo.settings import AgentSettings, EngineConfig
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

    def check(self, context: int) -> None:
        """Check that the request can be sampled in a context of `context` tokens.

        Raises:
            ShapeError: A prompt without tokens, no sample or no token.
            PromptTooLongError: A prompt leaves no room for a completion.
        """
        if self.samples < 1 or self.sampling.max_output_tokens < 1:
            raise ShapeError(
                f"rollout: samples and max_output_tokens must be >= 1, got {self.samples} and "
                f"{self.sampling.max_output_tokens}"
            )
        for position, prompt in enumerate(self.prompts):
            if not prompt.token_ids:
                raise ShapeError(
                    f"rollout: prompt {position} ({prompt.text!r}) has no tokens; expected at "
                    "least one"
                )
            if len(prompt.token_ids) >= context:
                raise PromptTooLongError(
                    f"prompt {prompt.index} has {len(prompt.token_ids)} tokens, which leaves no "
                    f"room in the context of {context} tokens: shorten or drop it "
                    f"({prompt.text[:60]!r}...)"
                )

    def part(self, places: Sequence[int]) -> RolloutRequest:
        """Return the request for some of its prompts, whose draws stay those of their places."""
        keys = places if self.keys is None else [self.keys[place] for place in places]
        return replace(self, prompts=[self.prompts[place] for place in places], keys=keys)

    def row_keys(self) -> list[int]:
        """Return what the draws of each completion follow from, in [0, 2**63): by prompt first."""
        keys = range(len(self.prompts)) if self.keys is None else self.keys
        return [derive(self.seed, key, g) for key in keys for g in range(self.samples)]


class RolloutEngine:
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

    exact: bool

    @classmethod
    def check(cls, engine: EngineConfig, *, ranks: bool) -> None:
        """Check that the engine can be used, before a model is loaded or a file is written.

        Args:
            engine: The settings that select it.
            ranks: Whether this process was started as one of several.

        Raises:
            ConfigError: The engine cannot run in a process that is one of several.
            EngineUnavailable: A package that it needs is not installed.
        """

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
        raise NotImplementedError

    def sleep(self) -> None:
        """Free what only sampling needs, for instance device memory, until `wake`.

        Called before agents learn. Sleeping twice is sleeping once.
        """

    def wake(self) -> None:
        """Prepare for rollouts again after `sleep`; without one, do nothing."""

    def close(self) -> None:
        """Free everything; the engine is not used again. Closing twice is allowed."""


def decoded(base: SharedBase, ids: Sequence[Sequence[int]]) -> list[str]:
    """Return completions as text without special tokens; empty where there is no tokenizer."""
    if base.tokenizer is None:
        return [""] * len(ids)
    return base.tokenizer.batch_decode(ids, skip_special_tokens=True)


EngineFactory = Callable[[AdapterSlots, AgentSettings], RolloutEngine]
"""Makes an engine that samples from adapters as they are at each rollout.

`AdapterSlots.versions` says which of them changed: a version is never used twice, not even by
another adapter of the same name. Engines read `settings.engine`, and the context from
`settings.algorithm.max_model_len`. A factory raises ModelError where the engine cannot run the base
model, and EngineUnavailable where a package it needs is not installed.
"""
