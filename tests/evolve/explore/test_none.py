"""No exploration: nothing changes, and nothing is drawn."""

import numpy as np
from explorer_contract import INSIDE, RANGES

from evo_grpo.evolve.explore.none import NoExploration
from evo_grpo.evolve.protocols import Candidate
from evo_grpo.schema.search_space import HyperparameterConfig


def test_copies_keep_the_hyperparameters_of_their_parent():
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    candidate = Candidate(INSIDE, copied=True)
    found = NoExploration().explore(candidate, HyperparameterConfig(**RANGES), rng)
    assert found == (INSIDE, {})
    assert rng.bit_generator.state == before
