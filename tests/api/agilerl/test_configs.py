"""AgileRL's small configurations, and the names of the module."""

import numpy as np
import pytest

from evo_grpo import agilerl
from evo_grpo.agilerl import CosineLRScheduleConfig
from evo_grpo.errors import ConfigError
from evo_grpo.learn.objective.lr_schedule import lr_factor
from evo_grpo.settings import LRSchedule

NAMES = (
    *("GRPO", "GSPO", "CISPO", "ReasoningGym", "HuggingFaceGym", "MultiTurnGym"),
    *("TokenObservationWrapper", "HyperparameterConfig", "RLParameter", "TournamentSelection"),
    *("Mutations", "CosineLRScheduleConfig", "VLLMConfig", "finetune_llm_reasoning"),
    *("finetune_llm_multiturn", "save_llm_checkpoint"),
)


def test_every_name_of_the_pages_is_there():
    assert set(agilerl.__all__) == set(NAMES)
    assert all(getattr(agilerl, name) is not None for name in NAMES)


def test_a_schedule_is_that_of_the_settings():
    config = CosineLRScheduleConfig(num_epochs=np.int64(8), warmup_proportion=0.25)
    assert config.schedule() == LRSchedule(steps=8, warmup_proportion=0.25)
    factors = [config.factor(step) for step in range(9)]
    assert factors == [lr_factor(config.schedule(), step) for step in range(9)]
    assert factors[:2] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_epochs": 0}, r"^num_epochs: expected an integer >= 1, got 0"),
        ({"num_epochs": 2.5}, r"^num_epochs: expected an integer >= 1, got 2.5"),
        (
            {"num_epochs": 5, "warmup_proportion": 1.0},
            r"^warmup_proportion: expected a number in \[0, 1\), got 1.0",
        ),
    ],
)
def test_values_out_of_range_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        CosineLRScheduleConfig(**given)
