"""The interface of rollout engines, which sample completions for many agents in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name

from evo_grpo.errors import ModelError, PromptTooLongError, ShapeError
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.seeding import derive
from evo_grpo.settings import AgentSettings, EngineConfig
from evo_grpo.types import CompletionGroup, Prompt


@dataclass(frozen=True)
class RolloutRequest:
    """The completions to sample for one agent.

    Attributes:
        agent: The agent's slot, copied to the returned groups.
        adapter: Adapter name, or None for the base model alone.
        samples: Completions for each prompt, G >= 1.
        seed: Seed of this agent in this round and step. The draws of a row depend only on (seed,
            prompt position, completion, token step).
        keys: One number per prompt, used in the draws instead of its position, so that the draws of
            an episode stay the same when other episodes end; None means 0, 1, ....
    """

    agent: int
    adapter: str | None
    prompts: Sequence[Prompt]
    samples: int
    sampling: Sampling
    seed: int
    keys: Sequence[int] | None = None

    def check(self, context: int, vocabulary: int) -> None:
        """Check the request for a model with `vocabulary` embeddings and `context` tokens at most.

        Raises ShapeError if a prompt has no tokens, or if less than one sample or token is
        requested; PromptTooLongError if a prompt leaves no room for a completion; ModelError for a
        token without an embedding.
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
            if (token := max(prompt.token_ids)) >= vocabulary:
                raise ModelError(
                    f"prompt {prompt.index} has the token {token}, and the model has embeddings of "
                    f"{vocabulary} tokens: the tokenizer has more than the model; resize the "
                    f"model's embeddings, or take its own tokenizer ({prompt.text[:60]!r}...)"
                )

    def part(self, places: Sequence[int]) -> RolloutRequest:
        """Return the request for the prompts at `places` alone; their draws do not change."""
        keys = places if self.keys is None else [self.keys[place] for place in places]
        return replace(self, prompts=[self.prompts[place] for place in places], keys=keys)

    def row_keys(self) -> list[int]:
        """Return the key of each completion's draws, in [0, 2**63), ordered by prompt."""
        keys = range(len(self.prompts)) if self.keys is None else self.keys
        return [derive(self.seed, key, g) for key in keys for g in range(self.samples)]


class RolloutEngine:
    """Samples completions for many agents at once; see tests/helpers/engine_contract.py.

    An engine is constructed with (slots, settings); see `EngineFactory`.

    `Completion.logprobs` holds one log-prob per sampled token, including the end token:
    `log_softmax(logits / temperature)[token]`, in nats, computed in float32 under the weights that
    sampled the token; greedy decoding (temperature 0) counts as temperature 1. Repetition penalty,
    min_output_tokens, top_k, top_p and min_p change which tokens are drawn, but not the recorded
    log-prob, which is that of the policy in the loss. An engine that cannot report these log-probs
    reports None, and the learner computes them. The log-probs are NaN for an agent whose weights
    are not finite.

    Attributes:
        exact: True if the recorded log-probs equal those of the trainer's forward pass on the same
            weights, within the rounding of its dtype and without LoRA dropout. False for an engine
            with other kernels, another precision or a copy of the weights: the learner then
            corrects for the difference; see `LossConfig.sampler_correction`.
        decodes_by: Names of the implementations that rollouts have used: in the native engine,
            "kernels", "layers" (joined layers) or "modules" (those of the base); otherwise "vllm".
            Each round records and clears the names.
    """

    exact: bool
    decodes_by: set[str]

    @classmethod
    def check(cls, engine: EngineConfig) -> None:
        """Raise EngineUnavailable if a package that the engine needs is not installed."""

    def rollout(self, requests: Sequence[RolloutRequest]) -> list[list[CompletionGroup]]:
        """Sample the completions of all requests; raises the errors of `RolloutRequest.check`.

        Returns a list per request, with one group of `samples` completions per prompt, in the order
        of the requests and their prompts.
        """
        raise NotImplementedError

    def sleep(self) -> None:
        """Free resources that only sampling needs, for instance device memory, until `wake`.

        Called before agents learn. Calling it again while asleep does nothing.
        """

    def wake(self) -> None:
        """Prepare for rollouts after `sleep`; do nothing if the engine is awake."""

    def close(self) -> None:
        """Free all resources; the engine cannot be used again. Closing twice is allowed."""


EngineFactory = Callable[[AdapterSlots, AgentSettings], RolloutEngine]
"""Makes an engine that samples from the current weights of the adapters at each rollout.

`AdapterSlots.versions` changes whenever an adapter does; a version is never used twice, not even by
another adapter of the same name. Engines read `settings.engine`, and the context length from
`settings.algorithm.max_model_len`. A factory raises ModelError if the engine cannot run the base
model, and EngineUnavailable if a package that it needs is not installed.
"""


def engine_class(engine: EngineConfig) -> type[RolloutEngine]:
    """Import and return the class of the selected engine; some engines load large packages.

    `ENGINES` in `evo_grpo/settings/engine.py` is the table of engines.
    """
    return resolve_name(engine.rollout_settings.implementation)


def make_engine(slots: AdapterSlots, settings: AgentSettings) -> RolloutEngine:
    """Make the engine that `settings` select; this function is an `EngineFactory`."""
    factory: EngineFactory = resolve_name(settings.engine.rollout_settings.implementation)
    return factory(slots, settings)


def check_engine(engine: EngineConfig) -> None:
    """Check that the selected engine can be used; see `RolloutEngine.check`."""
    engine_class(engine).check(engine)
