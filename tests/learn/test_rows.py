"""Groups to rows to micro-batches: nothing lost, nothing padded in, nothing over the budget."""

import numpy as np
import pytest
import torch
from tiny_cohort import group, make_rows, rows_of

from evo_grpo.learn.packing import collate
from evo_grpo.learn.rows import Row, StepTotals, assign_minibatches, rows_from_trajectories
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Trajectory

CPU = torch.device("cpu")


def row(length, generated):
    mask = np.zeros(length, bool)
    mask[length - generated :] = True
    return Row(np.arange(length) + 2, mask)


def test_rows_hold_prompt_and_completion_and_mask_the_completion():
    rows = rows_of(
        [group((3, 4), (5, 1), (6,)), group((7,), (8, 9, 1), (1,))], np.array([1.0, -1, 2, -2])
    )
    assert [r.token_ids.tolist() for r in rows] == [[3, 4, 5, 1], [3, 4, 6], [7, 8, 9, 1], [7, 1]]
    assert [r.mask.tolist() for r in rows] == [
        [False, False, True, True],
        [False, False, True],
        [False, True, True, True],
        [False, True],
    ]
    assert [r.advantage for r in rows] == [1, -1, 2, -2]
    assert [r.generated for r in rows] == [2, 1, 3, 1]
    assert [len(r.sampler_logprobs) for r in rows] == [2, 1, 3, 1]


def test_a_dropped_episode_gives_no_row():
    played = Trajectory("p", "x", (3, 4, 5), (False, True, True), (-1.0, -2.0), True)
    dropped = Trajectory("p", "", (), (), (), False, end="error", error="it raised")
    (only,) = rows_from_trajectories([dropped, played], np.array([9.0, 2.0]))
    assert (only.token_ids.tolist(), only.advantage) == ([3, 4, 5], 2.0)
    assert only.sampler_logprobs.tolist() == [-1.0, -2.0]


def test_collate_points_at_what_predicts_each_generated_token():
    rows = [(0, row(5, 2)), (2, row(3, 1)), (2, row(4, 3))]
    batch = collate(rows, 0, CPU)
    assert batch.present == (0, 2)
    assert batch.counts == (1, 2)
    # The last token of the longest row predicts nothing, and is left out.
    assert batch.input_ids.tolist() == [[2, 3, 4, 5], [2, 3, 4, 0], [2, 3, 4, 5]]
    # Here every token is one more than what stands before it.
    assert torch.equal(batch.input_ids.flatten()[batch.where] + 1, batch.targets)
    assert batch.targets.tolist() == [5, 6, 4, 3, 4, 5]
    assert batch.mask.tolist() == [[True, True, False], [True, False, False], [True, True, True]]


def test_nothing_predicts_the_first_token():
    batch = collate([(0, Row(np.array([5, 6]), np.array([True, True])))], 0, CPU)
    assert batch.targets.tolist() == [6]


def test_values_of_an_environments_turn_stay_out():
    mask = np.array([False, True, False, False, True])
    batch = collate([(0, Row(np.array([2, 3, 4, 5, 6]), mask))], 0, CPU)
    assert batch.targets.tolist() == [3, 6]
    assert batch.where.tolist() == [0, 3]


def test_pad_gather_and_scatter_are_each_others_inverse():
    rows = make_rows(3)
    batch = collate([(0, r) for r in rows], 0, CPU)
    values = torch.randn(int(batch.mask.sum()), generator=torch.Generator().manual_seed(1))
    batch.scatter("old", values)
    assert torch.equal(batch.gather("old"), batch.pad(values))
    chosen = [i % 2 == 0 for i in range(len(rows))]
    for row in rows[1::2]:
        row.old = None
    table = batch.gather("old")
    expected = torch.where(torch.tensor(chosen)[:, None], batch.pad(values), 0)
    assert torch.equal(table, expected)
    assert torch.equal(batch.pad(values)[batch.mask], values)


def test_minibatches_divide_the_rows_and_the_denominators():
    rows = make_rows(3, groups=3)
    assign_minibatches(rows, Hparams(batch_size=5), seed=1)
    sizes = [sum(r.minibatch == m for r in rows) for m in range(3)]
    assert sizes == [5, 5, 2]
    totals = StepTotals.of(rows)
    assert totals.rows == (5, 5, 2)
    assert sum(totals.tokens) == sum(r.generated for r in rows)
    first = [r.minibatch for r in rows]
    assign_minibatches(rows, Hparams(batch_size=5), seed=1)
    assert [r.minibatch for r in rows] == first
    assign_minibatches(rows, Hparams(batch_size=5), seed=2)
    assert [r.minibatch for r in rows] != first


@pytest.mark.parametrize(
    ("size", "minibatches", "rows"),
    [(None, 1, (12,)), (None, 2, (6, 6)), (None, 5, (3, 3, 3, 3)), (None, 3, (4, 4, 4)),
     (5, 3, (5, 5, 2)), (12, 3, (12,))],
)  # fmt: skip
def test_an_agent_without_a_batch_size_learns_in_as_many_minibatches_as_asked(
    size, minibatches, rows
):
    made = make_rows(3, groups=3)
    assign_minibatches(made, Hparams(batch_size=size), 1, minibatches)
    assert StepTotals.of(made).rows == rows
