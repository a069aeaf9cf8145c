"""One agent's sampling in the words of vLLM, and what its log-probs mean then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings.vllm import VLLMSettings

LEAST_TEMPERATURE = 0.01
"""Below it vLLM samples at it; here it takes the likeliest token then, as good as always."""


def means_policy(sampling: Sampling, vocabulary: int, settings: VLLMSettings) -> bool:
    """Return whether vLLM's log-probs are `log_softmax(logits / temperature)`.

    Its numbers are those of the distribution that it draws from, so a filter or a penalty moves
    them: top_p 0.9 by 0.1 nats, a repetition penalty of 1.3 by 1.4, a shortest length by 8.
    """
    return (
        sampling.temperature >= LEAST_TEMPERATURE
        and sampling.top_p >= 1
        and not 0 < sampling.top_k < vocabulary
        and sampling.min_p <= 0
        and sampling.repetition_penalty == 1
        and sampling.min_output_tokens <= 0
        and not settings.shapes_draws
    )


def sampling_keywords(
    sampling: Sampling, eos_ids: Sequence[int], settings: VLLMSettings
) -> dict[str, Any]:
    """Return the keywords of `vllm.SamplingParams` that hold for all rows of an agent.

    Args:
        sampling: The agent's.
        eos_ids: What ends a completion.
        settings: Strings that end one too, and penalties of vLLM's own.
    """
    keywords: dict[str, Any] = {
        "n": 1,
        "temperature": sampling.temperature if sampling.temperature >= LEAST_TEMPERATURE else 0.0,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
        "min_tokens": sampling.min_output_tokens,
        "stop_token_ids": list(eos_ids),
        "detokenize": bool(settings.stop_sequences),
        # Always, for what is not finite shows there.
        "logprobs": 0,
    }
    if sampling.top_k > 0:
        keywords["top_k"] = sampling.top_k
    if settings.stop_sequences:
        keywords["stop"] = settings.stop_sequences
    return keywords
