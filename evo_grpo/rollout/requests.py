"""What every rollout engine asks of a request, and how it decodes what it sampled."""

from __future__ import annotations

from collections.abc import Sequence

from evo_grpo.errors import PromptTooLongError, ShapeError
from evo_grpo.model.base import SharedBase
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.seeding import derive


def check_request(request: RolloutRequest, context: int) -> None:
    """Refuse a request that cannot be sampled.

    Args:
        request: Of one agent.
        context: Tokens of the longest prompt and completion together.

    Raises:
        ShapeError: A prompt without tokens, no sample or no token.
        PromptTooLongError: A prompt leaves no room for a completion.
    """
    if request.samples < 1 or request.sampling.max_output_tokens < 1:
        raise ShapeError(
            f"rollout: samples and max_output_tokens must be >= 1, got {request.samples} and "
            f"{request.sampling.max_output_tokens}"
        )
    for position, prompt in enumerate(request.prompts):
        if not prompt.token_ids:
            raise ShapeError(
                f"rollout: prompt {position} ({prompt.text!r}) has no tokens; expected at least one"
            )
        if len(prompt.token_ids) >= context:
            raise PromptTooLongError(
                f"prompt {prompt.index} has {len(prompt.token_ids)} tokens, which leaves no "
                f"room in the context of {context} tokens: shorten or drop it "
                f"({prompt.text[:60]!r}...)"
            )


def decoded(base: SharedBase, ids: Sequence[Sequence[int]]) -> list[str]:
    """Return completions as text without special tokens; empty where there is no tokenizer."""
    if base.tokenizer is None:
        return [""] * len(ids)
    return base.tokenizer.batch_decode(ids, skip_special_tokens=True)


def row_keys(request: RolloutRequest, first: int = 0, count: int | None = None) -> list[int]:
    """Return what the draws of each completion follow from: by prompt, then completion.

    Args:
        request: Of one agent.
        first: Position of the first of the prompts in the request.
        count: How many prompts; None takes all that follow.

    Returns:
        One number in [0, 2**63) per row.
    """
    ends = len(request.prompts) if count is None else first + count
    return [
        derive(request.seed, p if request.keys is None else request.keys[p], g)
        for p in range(first, ends)
        for g in range(request.samples)
    ]
