"""The order of agents: by mean fitness, without those that failed."""

import math

from selector_contract import history

from evo_grpo.evolve.protocols import rank


def test_all_scores_given_are_averaged():
    histories = [history(1.0, 0.4, 0.4), history(0.0, 0.2, 0.5)]
    assert rank(histories) == [0, 1]
    assert rank([one[-1:] for one in histories]) == [1, 0]
    assert rank([history(0.4), history(0.0, 0.9)]) == [1, 0]


def test_equal_fitness_ranks_the_lower_position_first():
    assert rank([history(0.5), history(0.7), history(0.5), history(0.7)]) == [1, 3, 0, 2]


def test_a_fitness_that_is_not_finite_counts_as_failed():
    assert rank([history(math.nan), history(0.1), history(math.inf), []]) == [1]
