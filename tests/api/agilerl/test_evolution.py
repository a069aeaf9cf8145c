"""AgileRL's TournamentSelection and Mutations: its calls, over this package's strategies."""

import math

import numpy as np
import pytest
from explorer_contract import INSIDE, RANGES, ExplorerContract
from hypothesis import strategies as st
from selector_contract import history

from evo_grpo.api.agilerl.evolution import Mutations, TournamentSelection
from evo_grpo.errors import ConfigError
from evo_grpo.evolve.explore.mutate import Mutations as Strategy
from evo_grpo.evolve.protocols import Candidate
from evo_grpo.evolve.select.tournament import TournamentSelection as Tournament
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter

WIDE = HyperparameterConfig(**RANGES)


class TestMutationsAreAnExplorer(ExplorerContract):
    explorers = st.builds(Mutations, mutate_elite=st.booleans())
    survivors_vary = True


class Selectable:
    """The least that `select` needs."""

    def __init__(self, *means):
        self.agents = [f"agent {slot}" for slot in range(len(means))]
        self.means = means
        self.plans = []

    def __getitem__(self, position):
        return self.agents[position]

    def histories(self):
        return [history(mean) for mean in self.means]

    def apply(self, plan):
        self.plans.append(plan)
        for offspring in plan:
            self.agents[offspring.position] = self.agents[offspring.parent]


def test_a_plan_is_that_of_the_strategy():
    histories = [history(mean) for mean in (0.3, 0.7, 0.1, 0.9, 0.5, 0.2)]
    for seed in range(20):
        ours, theirs = (
            selection.plan(histories, 6, np.random.default_rng(seed))
            for selection in (Tournament(size=2), TournamentSelection(2, True, 6))
        )
        assert ours == theirs


def test_the_latest_scores_are_averaged():
    falling = [history(1.0, 0.2), history(0.0, 0.5)]
    for loop, best in ((1, 1), (2, 0)):
        plan = TournamentSelection(2, True, 2, eval_loop=loop).plan(
            falling, 2, np.random.default_rng(0)
        )
        assert [offspring.parent for offspring in plan] == [best, best]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, True, 4), r"^tournament_size: expected an integer >= 1, got 0"),
        ((2, True, 0), r"^population_size: expected an integer >= 1, got 0"),
        ((2, True, 4, 0), r"^eval_loop: expected an integer >= 1, got 0"),
    ],
)
def test_tournament_values_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        TournamentSelection(*arguments)


def test_select_without_elitism_returns_the_best_of_those_that_stay():
    for seed in range(30):
        population = Selectable(0.1, 0.9, 0.3, 0.2)
        best, _ = TournamentSelection(1, False, 4, rand_seed=seed).select(population)
        survivors = [o.position for o in population.plans[0] if o.position == o.parent]
        assert best == f"agent {max(survivors, key=population.means.__getitem__)}"


def test_the_draws_of_a_seed_do_not_change():
    population = Selectable(0.3, 0.7, 0.1, 0.9, 0.5, 0.2)
    selection = TournamentSelection(2, True, 6, rand_seed=7)
    for _ in range(2):
        selection.select(population)
    plans = [[offspring.parent for offspring in plan] for plan in population.plans]
    assert plans == [[0, 1, 3, 3, 1, 3], [3, 3, 4, 3, 4, 5]]

    config = HyperparameterConfig(
        lr=RLParameter(1e-6, 1e-2), group_size=RLParameter(2, 16), clip_coef=RLParameter(0.05, 0.5)
    )
    start = INSIDE.with_value("clip_high", 1.28).with_value("clip_low", 0.8)
    start = start.with_value("group_size", 8)
    call = dict.fromkeys(("architecture", "new_layer_prob", "parameters", "activation"), 0)
    mutations, changes = Mutations(rand_seed=5, **call), []
    for _ in range(2):
        mutable = Mutable(4, 1)
        mutable.agents = [Agent(start) for _ in range(4)]
        mutable.hp_config = config
        mutations.mutation(mutable)
        changes.append(mutable.changes)
    assert changes == [
        {0: {"lr": (0.0001, 0.00012)}, 3: {"clip_high": (1.28, 1.336)}},
        {2: {"clip_high": (1.28, 1.336)}},
    ]


def test_exploration_is_that_of_the_strategy():
    for seed in range(20):
        ours, theirs = (
            mutations.explore(Candidate(INSIDE), WIDE, np.random.default_rng(seed))
            for mutations in (
                Strategy(no_mutation=0.2, rl_hp=0.5, step="factors"),
                Mutations(no_mutation=0.2, rl_hp=0.5),
            )
        )
        assert ours == theirs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"no_mutation": -0.1}, r"^no_mutation: expected a number >= 0, got -0.1"),
        ({"rl_hp": math.nan}, r"^rl_hp: expected a finite number >= 0, got nan"),
        ({"no_mutation": 0, "rl_hp": 0}, r"expected no_mutation or rl_hp above 0, got 0 for both"),
        ({"architecture": 0.2}, r"architecture must be 0, got 0.2: all agents share.*raise rl_hp"),
        ({"new_layer_prob": 0.2}, r"new_layer_prob must be 0"),
        ({"parameters": 0.2}, r"parameters must be 0"),
        ({"activation": 0.2}, r"activation must be 0"),
    ],
)
def test_weights_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Mutations(**arguments)


class Agent:
    def __init__(self, hparams):
        self.hparams = hparams


class Mutable:
    """The least that `mutation` needs."""

    def __init__(self, size, elite):
        self.agents = [Agent(INSIDE) for _ in range(size)]
        self.elite = elite
        self.hp_config = WIDE
        self.changes = {}

    def __len__(self):
        return len(self.agents)

    def __getitem__(self, position):
        return self.agents[position]

    def set_hparams(self, position, hparams, changes):
        self.agents[position].hparams = hparams
        self.changes[position] = changes
