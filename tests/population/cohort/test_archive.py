"""Of which agents of a cohort the mean can be taken."""

from types import SimpleNamespace

import pytest
from tiny_cohort import PLAIN, build_cohort

from evo_grpo.population.cohort.archive import may_mix

SETS = {"key": ["k_proj"], "up": ["up_proj"]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_agents_of_unequal_layers_have_no_mean_however_many_ranks_there_are(ranks):
    cohort = build_cohort(3, lora=None, target_sets=SETS)
    for slot, name in enumerate(["key", "up", "key"]):
        cohort.set_hparams(slot, PLAIN.replace(lora_target_modules=name))
    cohort.team = SimpleNamespace(size=ranks, rank=0)
    assert may_mix(cohort, 0, 2)
    assert not may_mix(cohort, 0, 1)
