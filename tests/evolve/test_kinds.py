"""The settings of strategies, and the contract that each strategy of the library keeps."""

import math
from typing import get_args

import numpy as np
import pytest
from explorer_contract import INSIDE, RANGES, ExplorerContract
from hypothesis import strategies as st
from selector_contract import SelectorContract, history

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.on_copy import LowerLROnCopy, NoExploration
from evo_grpo.evolve.explore.optuna import OptunaExploration
from evo_grpo.evolve.explore.resample import Resample
from evo_grpo.evolve.explore.schedule import ScheduleExploration
from evo_grpo.evolve.kinds import Exploration, Selection, UserStrategy
from evo_grpo.evolve.protocols import Candidate, rank
from evo_grpo.evolve.select.halving import HalvingSelection, NoSelection
from evo_grpo.evolve.select.pareto import ParetoSelection
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.evolve.select.truncation import TruncationSelection
from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.search_space import HyperparameterConfig

#: Many strategies of each kind. A new one has a line here, and passes.
SELECTIONS = {
    TournamentSelection: st.builds(
        TournamentSelection, size=st.integers(1, 14), elitism=st.booleans()
    ),
    TruncationSelection: st.builds(TruncationSelection, share=st.floats(0.01, 0.5)),
    HalvingSelection: st.just(HalvingSelection()),
    ParetoSelection: st.builds(ParetoSelection, size=st.integers(1, 14)),
    NoSelection: st.just(NoSelection()),
}
EXPLORATIONS = {
    Mutations: st.builds(
        Mutations,
        no_mutation=st.floats(0, 10),
        rl_hp=st.floats(0.01, 10),
        step=st.sampled_from(["between", "factors"]),
        mutate_elite=st.booleans(),
        copies_only=st.booleans(),
    ),
    LowerLROnCopy: st.builds(LowerLROnCopy, factor=st.floats(0.01, 0.99)),
    Resample: st.builds(Resample, probability=st.floats(0, 1)),
    OptunaExploration: st.builds(
        OptunaExploration,
        sampler=st.sampled_from(["TPESampler", "RandomSampler"]),
        args=st.just({}),
    ),
    NoExploration: st.just(NoExploration()),
    ScheduleExploration: st.builds(
        ScheduleExploration,
        rounds=st.lists(
            st.fixed_dictionaries(
                {"lr": st.floats(1e-6, 1e-2)},
                optional={
                    "beta": st.floats(0.0, 0.2),
                    "group_size": st.integers(2, 16),
                    "batch_size": st.integers(4, 64),
                },
            ),
            min_size=1,
            max_size=4,
        ).map(lambda values: [{"round": 2 + i, **one} for i, one in enumerate(values)]),
    ),
}


@pytest.mark.parametrize(
    ("setting", "strategies"), [(Selection, SELECTIONS), (Exploration, EXPLORATIONS)]
)
def test_every_strategy_that_settings_name_is_here(setting, strategies):
    kinds = {get_args(kind)[0] for kind in get_args(get_args(setting)[0])}
    assert kinds - {UserStrategy} == set(strategies)


@pytest.mark.parametrize("kind", SELECTIONS, ids=lambda kind: kind.__name__)
class TestSelection(SelectorContract):
    @pytest.fixture(autouse=True)
    def _selectors(self, kind):
        self.example, self.selectors = kind(), SELECTIONS[kind]


@pytest.mark.parametrize("kind", EXPLORATIONS, ids=lambda kind: kind.__name__)
class TestExploration(ExplorerContract):
    @pytest.fixture(autouse=True)
    def _explorers(self, kind):
        self.explorers = EXPLORATIONS[kind]
        self.beyond = frozenset({"lr"} if kind is LowerLROnCopy else ())
        self.survivors_vary = kind is ScheduleExploration


class Evolve(Group):
    selection: Selection = setting(TournamentSelection())
    exploration: Exploration = setting(Mutations())


TOURNAMENT = {"kind": "tournament", "size": 4, "elitism": False}


@pytest.mark.parametrize(
    ("name", "given", "made"),
    [
        ("selection", "none", NoSelection()),
        ("selection", "halving", HalvingSelection()),
        ("selection", "truncation", TruncationSelection()),
        ("selection", None, TournamentSelection()),
        ("selection", {}, TournamentSelection()),
        ("selection", {"size": 3}, TournamentSelection(size=3)),
        ("selection", TOURNAMENT, TournamentSelection(size=4, elitism=False)),
        ("selection", NoSelection(), NoSelection()),
        ("selection", "package.module:Outer.Mine", UserStrategy(kind="package.module:Outer.Mine")),
        ("selection", {"kind": "m:C", "args": {"a": 1}}, UserStrategy(kind="m:C", args={"a": 1})),
        ("exploration", "none", NoExploration()),
        ("exploration", "resample", Resample(probability=0.25)),
        ("exploration", None, Mutations()),
        ("exploration", {"rl_hp": 0.5}, Mutations(rl_hp=0.5)),
        ("exploration", {"kind": "on_copy", "factor": 0.8}, LowerLROnCopy(factor=0.8)),
        ("exploration", NoExploration(), NoExploration()),
        ("exploration", {"kind": "m:C", "args": {"a": 1}}, UserStrategy(kind="m:C", args={"a": 1})),
    ],
)
def test_a_setting_is_a_kind_or_settings_or_a_strategy(name, given, made):
    assert getattr(Evolve(**{name: given}), name) == made


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("selection", "turnament", r"\.kind: expected one of .*did you mean 'tournament'"),
        ("selection", {"sise": 3}, r"\.sise: unknown key; did you mean 'size'"),
        ("selection", {"size": 0}, r"\.size: expected .* >= 1, got 0"),
        ("selection", {"size": 2.5}, r"\.size: expected an integer"),
        ("selection", {"elitism": 1}, r"\.elitism: expected true or false, got 1"),
        ("selection", {"kind": "none", "size": 2}, r"\.size: unknown key"),
        ("selection", 3, r": expected a mapping, got 3"),
        *(
            ("selection", kind, r"\.kind: expected a module and a class in it")
            for kind in ("my_module:", ":Mine", "./mine.py:Mine", "my module:Mine", "a:b:c")
        ),
        ("exploration", "mutation", r"\.kind: expected one of .*did you mean 'mutate'"),
        ("exploration", {"rl_hq": 1}, r"\.rl_hq: unknown key; did you mean 'rl_hp'"),
        ("exploration", {"no_mutation": -0.1}, r"\.no_mutation: expected a number >= 0, got -0.1"),
        ("exploration", {"rl_hp": math.nan}, r"\.rl_hp: expected a finite number >= 0, got nan"),
        ("exploration", {"no_mutation": 0, "rl_hp": 0}, ": expected no_mutation or rl_hp above 0"),
        ("exploration", {"kind": "m:C", "arg": 1}, r"\.arg: unknown key; did you mean 'args'"),
        ("exploration", {"kind": "on_copy", "factor": 1}, r"\.factor: expected a number in \(0, 1"),
    ],
)
def test_anything_else_is_refused_with_its_path(name, given, message):
    with pytest.raises(ConfigError, match=name + message):
        Evolve(**{name: given})


def test_a_strategy_is_frozen_and_equal_by_its_settings():
    selection = TournamentSelection(size=3)
    with pytest.raises(ValueError, match="frozen"):
        selection.size = 4
    assert selection == TournamentSelection(size=3, elitism=True)
    assert repr(selection) == "TournamentSelection(kind='tournament', size=3, elitism=True)"


def test_without_an_exploration_copies_keep_the_hyperparameters_of_their_parent():
    candidate, rng = Candidate(INSIDE, copied=True), np.random.default_rng(0)
    found = NoExploration().explore(candidate, HyperparameterConfig(**RANGES), rng)
    assert found == INSIDE
    assert rng.bit_generator.state == np.random.default_rng(0).bit_generator.state


@pytest.mark.parametrize(
    ("histories", "order"),
    [
        ([history(1.0, 0.4, 0.4), history(0.0, 0.2, 0.5)], [0, 1]),  # all scores are averaged
        ([history(0.4), history(0.0, 0.9)], [1, 0]),
        ([history(0.5), history(0.7), history(0.5), history(0.7)], [1, 3, 0, 2]),
        ([history(math.nan), history(0.1), history(math.inf), []], [1]),
    ],
)
def test_agents_are_ranked_by_mean_fitness_without_those_that_failed(histories, order):
    assert rank(histories) == order
