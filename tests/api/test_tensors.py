"""Between tensors and rows: what get_action hands out, learn takes back without a loss."""

import numpy as np
import pytest
import torch
from tiny_cohort import group

from evo_grpo.api.tensors import to_prompts, to_rows, to_tensors
from evo_grpo.errors import ShapeError
from evo_grpo.types import Prompt


def tokenizer(text, verbose=True):
    return {"input_ids": [ord(c) - 90 for c in text]}


def test_prompts_come_from_prompts_texts_and_ids():
    prompt = Prompt(7, "x", (3, 4))
    mapping = {
        "input_ids": torch.tensor([[0, 5, 6]]),
        "attention_mask": torch.tensor([[0, 1, 1]]),
        "text": "y",
        "answer": 3,
    }
    got = to_prompts([prompt, "ab", mapping, {"input_ids": [8, 9]}], tokenizer)
    assert got[0] is prompt
    assert [p.token_ids for p in got] == [(3, 4), (7, 8), (5, 6), (8, 9)]
    assert got[2].text == "y"
    assert got[2].columns == {"answer": 3}


@pytest.mark.parametrize("one", [Prompt(0, "", (7, 8)), "ab", {"input_ids": np.array([7, 8])}])
def test_one_observation_is_a_batch_of_one(one):
    assert [p.token_ids for p in to_prompts(one, tokenizer)] == [(7, 8)]


def test_observations_that_are_none_are_refused():
    with pytest.raises(ShapeError, match=r"one prompt, \(T,\) or \(1, T\), got \(2, 3\)"):
        to_prompts({"input_ids": torch.ones(2, 3)}, tokenizer)
    with pytest.raises(ShapeError, match="observation 0 is a string, but the agent has no"):
        to_prompts("a", None)


@pytest.mark.parametrize("pad", [0, 1])
def test_tensors_turn_back_into_the_rows_they_came_from(pad):
    groups = [group((3, 4), (5, 1), (6,), (1,)), group((7,), (8, 9, 1), (1, 1, 1))]
    ids, masks = to_tensors(groups, pad)
    assert [tuple(t.shape) for t in ids] == [(3, 4), (2, 4)]
    assert [tuple(t.shape) for t in masks] == [(3, 3), (2, 3)]
    rows = to_rows(ids, masks, np.arange(5.0))
    assert [r.token_ids.tolist() for r in rows] == [
        [3, 4, 5, 1],
        [3, 4, 6],
        [3, 4, 1],
        [7, 8, 9, 1],
        [7, 1, 1, 1],
    ]
    assert [r.generated for r in rows] == [2, 1, 1, 3, 3]
    assert [r.advantage for r in rows] == [0, 1, 2, 3, 4]


def test_masks_may_be_numbers_and_have_holes():
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    (row,) = to_rows([ids], [torch.tensor([[1, 0, 1, 0]])], np.ones(1))
    assert row.token_ids.tolist() == [3, 4, 5, 6]
    assert row.mask.tolist() == [False, True, False, True]


def test_a_row_without_a_generated_token_is_a_row_of_none():
    ids = torch.tensor([[3, 4], [3, 5]])
    rows = to_rows([ids], [torch.tensor([[0], [1]])], np.ones(2))
    assert [r.generated for r in rows] == [0, 1]


def test_a_group_of_several_prompts_is_refused():
    ids = torch.tensor([[3, 4, 5], [3, 6, 5]])
    mask = torch.tensor([[0, 1], [0, 1]])
    with pytest.raises(ShapeError, match="group 0: expected completions of one prompt, got 2"):
        to_rows([ids], [mask], np.ones(2))
