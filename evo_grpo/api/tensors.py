"""Converts prompts, groups and rows to the tensors of `get_action` and `learn`, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evo_grpo.envs.episodes.multi_turn import Observation as Turn
from evo_grpo.errors import ShapeError
from evo_grpo.learn.objective.advantages import (
    Scale,
    as_floats,
    group_advantages,
    zero_variance_fraction,
)
from evo_grpo.learn.rows import Row
from evo_grpo.model.ends import StopRules
from evo_grpo.types import CompletionGroup, Prompt

Observation = Prompt | Mapping[str, Any] | str


def to_prompts(
    observations: Observation | Sequence[Observation],
    tokenizer: Any,  # noqa: ANN401 -- slow or fast, which share no typed base
    vocabulary: int | None = None,
) -> list[Prompt]:
    """Convert each observation into a prompt.

    Args:
        observations: One or more of: a `Prompt`; a mapping with `input_ids` (T,) or (1, T) and
            optionally `attention_mask`; or a string.
        tokenizer: Tokenizer for strings.
        vocabulary: Number of token ids of the base; None allows all ids >= 0.
    """
    prompts = [_to_prompt(i, item, tokenizer) for i, item in enumerate(_listed(observations))]
    for i, prompt in enumerate(prompts):
        invalid_ids = [t for t in prompt.token_ids if t < 0 or (vocabulary and t >= vocabulary)]
        if invalid_ids:
            raise ShapeError(
                f"get_action: observation {i} holds the token id {invalid_ids[0]}, but the base "
                f"model's vocabulary is 0..{(vocabulary or 0) - 1}; tokenize with the tokenizer of "
                "the base model"
            )
    return prompts


def _listed(observations: Observation | Sequence[Observation]) -> Sequence[Observation]:
    if isinstance(observations, Prompt | Mapping | str):
        return [observations]
    return observations


def _to_prompt(
    index: int,
    item: Observation,
    tokenizer: Any,  # noqa: ANN401 -- as for to_prompts
) -> Prompt:
    if isinstance(item, Prompt):
        return item
    if isinstance(item, str) and tokenizer is not None:
        return Prompt(index, item, tuple(tokenizer(item, verbose=False)["input_ids"]))
    if isinstance(item, str):
        problem = (
            " is a string, but the agent has no tokenizer; pass input_ids, or build the agent with "
            "the name of a model"
        )
    elif not isinstance(item, Mapping) or "input_ids" not in item:  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are untyped
        problem = f" must be a Prompt, a string, or a mapping with input_ids, got {type(item)}"
    else:
        table = torch.as_tensor(item["input_ids"])
        if table.dim() == 1 or (table.dim() == 2 and len(table) == 1):
            return _of_ids(index, item, table.reshape(-1))
        problem = (
            f": expected input_ids of one prompt, (T,) or (1, T), got {tuple(table.shape)}; give a "
            "list with one mapping per prompt"
        )
    raise ShapeError(f"get_action: observation {index}{problem}")


def _of_ids(index: int, item: Mapping[str, Any], ids: Tensor) -> Prompt:
    """Return the prompt of a mapping with `input_ids`, without ids whose `attention_mask` is 0."""
    if item.get("attention_mask") is not None:
        ids = ids[torch.as_tensor(item["attention_mask"]).reshape(-1).bool()]
    columns = {k: v for k, v in item.items() if k not in ("input_ids", "attention_mask", "text")}
    return Prompt(index, str(item.get("text", "")), tuple(int(i) for i in ids), columns)


def close_turns_with(
    observations: Observation | Sequence[Observation], ends: StopRules, pad_id: int
) -> None:
    """For observations that are turns, tell their episodes which tokens end and pad completions."""
    for turn in _listed(observations):
        if isinstance(turn, Turn):
            turn.episode.answered_by(ends, pad_id)


def to_tensors(groups: Sequence[CompletionGroup], pad_id: int) -> tuple[list[Tensor], list[Tensor]]:
    """Convert groups into one tensor of ids (G, T) and one of masks (G, T - 1) per prompt.

    `pad_id` fills the right end of shorter rows. It may be the end token, because the masks come
    from lengths.
    """
    ids: list[Tensor] = []
    masks: list[Tensor] = []
    for group in groups:
        start = len(group.prompt.token_ids)
        width = start + max(len(c.token_ids) for c in group.completions)
        rows = torch.full((len(group.completions), width), pad_id, dtype=torch.long)
        mask = torch.zeros(len(group.completions), width - 1, dtype=torch.bool)
        for i, completion in enumerate(group.completions):
            row = group.prompt.token_ids + completion.token_ids
            rows[i, : len(row)] = torch.tensor(row)
            # Column t of the mask is the prediction of token t + 1.
            mask[i, start - 1 : len(row) - 1] = True
        ids.append(rows)
        masks.append(mask)
    return ids, masks


def to_batch(
    experiences: tuple[Sequence[Tensor], Sequence[Tensor], Any],
    scale: Scale,
    vocabulary: int,
) -> tuple[list[Row], float]:
    """Convert the experiences of `learn` into rows with advantages.

    Returns:
        The rows, and the share of groups whose rewards are all equal.
    """
    ids, masks, rewards = experiences
    values = as_floats(rewards, "learn: rewards").reshape(-1)
    groups = enumerate(zip(ids, masks, strict=False))
    sizes = [_size(number, group, mask, vocabulary) for number, (group, mask) in groups]
    if len(ids) != len(masks) or len(values) != sum(sizes):
        raise ShapeError(
            f"learn: expected one mask per group and one reward per completion, {sum(sizes)} for "
            f"groups of {sizes}, got {len(ids)} ids, {len(masks)} masks and {len(values)} rewards"
        )
    size = sizes[0] if len(set(sizes)) == 1 else sizes
    rows = to_rows(ids, masks, group_advantages(values, size, scale=scale))
    check_generated(rows)
    return rows, zero_variance_fraction(values, size)


def _size(number: int, ids: Tensor, mask: Tensor, vocabulary: int) -> int:
    """Check the ids and the mask of a group, and return its number of completions."""
    shapes = [tuple(getattr(part, "shape", ())) for part in (ids, mask)]
    problem = ""
    if len(shapes[0]) != 2 or shapes[1] != (shapes[0][0], shapes[0][1] - 1):
        problem = (
            ": expected tensors of ids (G, T) and action masks (G, T - 1), got "
            f"{shapes[0]} and {shapes[1]}"
        )
    elif ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        problem = (
            f" holds token ids from {int(ids.min())} to {int(ids.max())}, but the base model's "
            f"vocabulary is 0..{vocabulary - 1}; pass the ids that get_action returned"
        )
    if problem:
        raise ShapeError(f"learn: group {number}{problem}")
    return len(ids)


def check_generated(rows: Sequence[Row]) -> None:
    """Raise ShapeError unless at least one token of the rows was generated."""
    if not any(row.generated for row in rows):
        raise ShapeError(
            f"learn: expected at least one generated token, got {len(rows)} rows whose action "
            "masks are all False; a mask must be True where the predicted token was sampled, as in "
            "the masks of get_action"
        )


def to_rows(ids: Sequence[Tensor], masks: Sequence[Tensor], advantages: np.ndarray) -> list[Row]:
    """Convert the tensors of `learn` into rows, each cut after its last generated token.

    A group of several prompts is refused, because its rewards have no common baseline.
    """
    rows: list[Row] = []
    for number, (group, mask) in enumerate(zip(ids, masks, strict=True)):
        for row, sampled in zip(group.cpu().numpy(), mask.cpu().numpy().astype(bool), strict=True):
            full = np.concatenate([[False], sampled])
            end = int(np.flatnonzero(full).max(initial=0)) + 1
            rows.append(
                Row(row[:end].astype(np.int64), full[:end], advantage=float(advantages[len(rows)]))
            )
        prompts = {_prompt_of(row) for row in rows[len(rows) - len(group) :] if row.generated}
        if len(prompts) > 1:
            raise ShapeError(
                f"learn: group {number}: expected completions of one prompt, got {len(prompts)} "
                "prompts; advantages compare completions of the same prompt, so pass one group per "
                "prompt"
            )
    return rows


def _prompt_of(row: Row) -> tuple[int, ...]:
    return tuple(row.token_ids[: int(row.mask.argmax())].tolist())
