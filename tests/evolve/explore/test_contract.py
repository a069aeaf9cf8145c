"""What every exploration keeps, for each strategy that settings can name."""

from typing import get_args

import pytest
from explorer_contract import ExplorerContract
from hypothesis import strategies as st

from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.none import NoExploration
from evo_grpo.evolve.explore.on_copy import LowerLROnCopy
from evo_grpo.evolve.explore.optuna import OptunaExploration
from evo_grpo.evolve.explore.resample import Resample
from evo_grpo.evolve.explore.schedule import ScheduleExploration
from evo_grpo.evolve.kinds import Exploration, OwnStrategy

#: Many explorations of each kind. A new strategy has a line here, and passes.
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
BEYOND = {LowerLROnCopy: frozenset({"lr"})}


def test_every_exploration_of_the_registry_is_here():
    kinds = {get_args(kind)[0] for kind in get_args(get_args(Exploration)[0])}
    assert kinds - {OwnStrategy} == set(EXPLORATIONS)


@pytest.mark.parametrize("kind", EXPLORATIONS, ids=lambda kind: kind.__name__)
class TestContract(ExplorerContract):
    @pytest.fixture(autouse=True)
    def _explorers(self, kind):
        self.explorers, self.beyond = EXPLORATIONS[kind], BEYOND.get(kind, frozenset())
        self.survivors_vary = kind is ScheduleExploration
