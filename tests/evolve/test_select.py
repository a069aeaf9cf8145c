"""Selection: every plan can be carried out, the best stays, the better win, the draws repeat."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_grpo.errors import ConfigError, RunFailedError, ShapeError
from evo_grpo.evolve.select import NoSelection, Offspring, TournamentSelection, rank
from evo_grpo.types import Score

PROPERTY = settings(derandomize=True, deadline=None, max_examples=200)


def score(mean: float) -> Score:
    return Score(mean=mean, se=0.1, n=8)


def history(*means: float) -> list[Score]:
    return [score(mean) for mean in means]


@st.composite
def tournaments(draw):
    """A selection with a population in which at least one agent has not failed."""
    size = draw(st.integers(2, 12))
    one = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=3)
    means = draw(st.lists(one, min_size=size, max_size=size).filter(any))
    selection = TournamentSelection(
        tournament_size=draw(st.integers(1, size)),
        elitism=draw(st.booleans()),
        population_size=size,
        eval_loop=draw(st.integers(1, 3)),
    )
    return selection, [history(*one) for one in means], draw(st.integers(0, 2**32))


class Population:
    """The least that a selection needs."""

    def __init__(self, *means: float) -> None:
        self.agents = [f"agent {slot}" for slot in range(len(means))]
        self.means = means
        self.plans: list[tuple[Offspring, ...]] = []

    def __getitem__(self, slot: int) -> str:
        return self.agents[slot]

    def histories(self) -> list[list[Score]]:
        return [history(mean) for mean in self.means]

    def apply(self, plan: tuple[Offspring, ...]) -> None:
        self.plans.append(plan)
        for offspring in plan:
            self.agents[offspring.agent] = self.agents[offspring.parent]


@PROPERTY
@given(tournaments())
def test_a_plan_fills_every_slot_and_no_parent_is_overwritten(case):
    selection, histories, seed = case
    plan = selection.plan(histories, np.random.default_rng(seed))
    assert [offspring.agent for offspring in plan] == list(range(len(histories)))
    for offspring in plan:
        assert plan[offspring.parent].parent == offspring.parent, "the parent survives in its slot"


@PROPERTY
@given(tournaments())
def test_failed_agents_have_no_offspring_and_the_elite_stays(case):
    selection, histories, seed = case
    plan = selection.plan(histories, np.random.default_rng(seed))
    for offspring in plan:
        assert histories[offspring.parent], "a failed agent never wins"
    elites = [offspring.agent for offspring in plan if offspring.elite]
    best = rank(histories, selection.eval_loop)[0]
    assert elites == ([best] if selection.elitism else [])
    assert not selection.elitism or plan[best].parent == best


@PROPERTY
@given(tournaments())
def test_survivors_are_the_winners_of_the_tournaments(case):
    selection, histories, seed = case
    plan = selection.plan(histories, np.random.default_rng(seed))
    # The slow obvious implementation: the same draws, the winners as one list.
    order = rank(histories, selection.eval_loop)
    rng = np.random.default_rng(seed)
    winners = [order[0]] if selection.elitism else []
    while len(winners) < len(histories):
        size = min(selection.tournament_size, len(order))
        drawn = rng.choice(len(order), size=size, replace=False)
        winners.append(order[min(drawn)])
    assert sorted(offspring.parent for offspring in plan) == sorted(winners)
    copies = [offspring for offspring in plan if offspring.parent != offspring.agent]
    assert len(copies) == len(histories) - len(set(winners)), "no more copies than needed"


@PROPERTY
@given(tournaments())
def test_the_same_stream_gives_the_same_plan(case):
    selection, histories, seed = case
    first, second = (selection.plan(histories, np.random.default_rng(seed)) for _ in range(2))
    assert first == second


def test_a_full_tournament_leaves_only_the_best():
    selection = TournamentSelection(4, True, 4)
    plan = selection.plan([history(m) for m in (0.1, 0.9, 0.3, 0.2)], np.random.default_rng(0))
    assert plan == (
        Offspring(0, 1),
        Offspring(1, 1, elite=True),
        Offspring(2, 1),
        Offspring(3, 1),
    )


def test_pressure_grows_with_the_size_of_the_tournament():
    histories = [history(slot / 16) for slot in range(16)]
    kept = []
    for size in (1, 2, 4, 8):
        selection = TournamentSelection(size, True, 16)
        rng = np.random.default_rng(0)
        parents = [o.parent for _ in range(200) for o in selection.plan(histories, rng)]
        kept.append(np.mean(parents))
    assert kept == sorted(kept)
    assert kept[0] < 9 < 13 < kept[-1]


def test_equal_fitness_goes_to_the_lower_slot():
    selection = TournamentSelection(3, True, 3)
    plan = selection.plan([history(0.5)] * 3, np.random.default_rng(0))
    assert [offspring.parent for offspring in plan] == [0, 0, 0]


def test_the_latest_scores_are_averaged():
    histories = [history(1.0, 0.4, 0.4), history(0.0, 0.2, 0.5)]
    assert rank(histories, 1) == [1, 0]
    assert rank(histories, 2) == [0, 1]
    assert rank([history(0.4), history(0.0, 0.9)], 2) == [1, 0], "a short history counts as it is"


def test_a_fitness_that_is_not_finite_counts_as_failed():
    assert rank([history(math.nan), history(0.1), history(math.inf)]) == [1]


@pytest.mark.parametrize("selector", [TournamentSelection(2, True, 3), NoSelection()])
def test_a_population_that_failed_ends_the_run(selector):
    with pytest.raises(
        RunFailedError, match=r"at least one agent.*none of 3.*smaller range"
    ) as info:
        selector.plan([[], [], []], np.random.default_rng(0))
    assert info.value.exit_code == 1


def test_another_population_size_is_refused():
    with pytest.raises(ShapeError, match=r"population_size=4 agents, got 2.*population_size=2"):
        TournamentSelection(2, True, 4).plan([history(1.0)] * 2, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, True, 1), r"population_size must be >= 2, got 1; one agent alone"),
        ((0, True, 4), r"tournament_size must be >= 1, got 0"),
        ((2, True, 4, 0), r"eval_loop must be >= 1, got 0"),
        ((5, True, 4), r"tournament_size must not exceed population_size=4, got 5"),
    ],
)
def test_values_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        TournamentSelection(*arguments)


def test_no_selection_keeps_everyone():
    plan = NoSelection().plan([history(0.1), [], history(0.9)], np.random.default_rng(0))
    assert plan == (Offspring(0, 0), Offspring(1, 1), Offspring(2, 2))
    population = Population(0.1, 0.9)
    best, same = NoSelection().select(population)
    assert (best, same) == ("agent 1", population)


def test_select_applies_its_plan_and_returns_the_elite():
    population = Population(0.1, 0.9, 0.3, 0.2)
    selection = TournamentSelection(4, True, 4, rand_seed=7)
    elite, same = selection.select(population)
    assert elite == "agent 1"
    assert same is population
    assert population.agents == ["agent 1"] * 4


def test_select_without_elitism_returns_the_best_of_those_that_stay():
    for seed in range(30):
        population = Population(0.1, 0.9, 0.3, 0.2)
        best, _ = TournamentSelection(1, False, 4, rand_seed=seed).select(population)
        survivors = [o.agent for o in population.plans[0] if o.agent == o.parent]
        assert best == f"agent {max(survivors, key=population.means.__getitem__)}"


def test_select_draws_anew_at_every_call_and_repeats_with_its_seed():
    def plans(seed):
        selection, population = (
            TournamentSelection(2, True, 8, rand_seed=seed),
            Population(*range(8)),
        )
        for _ in range(5):
            selection.select(population)
        return population.plans

    assert plans(1) == plans(1)
    assert plans(1) != plans(2)
    assert len(set(plans(1))) > 1
    assert plans(None) == plans(None), "a run repeats unless it is asked not to"
