"""A schedule: all agents take given values from given rounds on."""

import numpy as np
import pytest
from small_run import small

from evo_grpo import run
from evo_grpo.errors import ConfigError
from evo_grpo.evolve.explore.schedule import ScheduleExploration
from evo_grpo.evolve.protocols import Candidate
from evo_grpo.record.folder import read_rounds
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.settings import from_dict

SPACE = {"lr": {"min": 1e-4, "max": 1e-2}, "clip_coef": {"min": 0.1, "max": 0.4}}


def configured(rounds, **more):
    evolve = {
        "selection": "none",
        "exploration": {"kind": "schedule", "rounds": rounds},
        "hyperparameters": SPACE,
        **more,
    }
    return from_dict({"model": "tiny-sums", "env": "sums", "evolve": evolve})


def test_an_agent_of_a_run_trains_with_the_values_of_each_round(tmp_path):
    rounds = [{"round": 2, "lr": 2e-3}, {"round": 4, "lr": 5e-4, "beta": 0.01}]
    config = small(
        population={"size": 1, "rounds": 5, "steps_per_round": 1},
        evolve__selection="none",
        evolve__exploration={"kind": "schedule", "rounds": rounds},
    )
    records = read_rounds(run(config, out=tmp_path / "run", progress=False))
    trained = [(r.agents[0].hparams.lr, r.agents[0].hparams.beta) for r in records]
    assert trained == [(1e-3, 0.0), (2e-3, 0.0), (2e-3, 0.0), (5e-4, 0.01), (5e-4, 0.01)]
    changes = [r.agents[0].mutation.changes for r in records]
    assert changes[3] == {"lr": (2e-3, 5e-4), "beta": (0.0, 0.01)}


def test_both_ends_of_a_clip_range_move_at_once():
    # Either end alone would pass the other one, where it is.
    space = HyperparameterConfig(clip_low=RLParameter(0.5, 2.0), clip_high=RLParameter(0.6, 2.0))
    schedule = ScheduleExploration(rounds=[{"round": 2, "clip_low": 1.3, "clip_high": 1.5}])
    candidate = Candidate(Hparams(clip_coef=(0.8, 1.2)), round=1)
    hparams = schedule.explore(candidate, space, np.random.default_rng(0))
    assert hparams.clip_coef == (1.3, 1.5)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([], "rounds: expected a list of mappings"),
        ([{"lr": 1e-3}], r"rounds\[0\].round: expected the second round or a later one.*got none"),
        ([{"round": 1, "lr": 1e-3}], r"round 1 has the values of `algorithm`, got 1"),
        ([{"round": 3, "lr": 1e-3}, {"round": 3, "lr": 2e-3}], r"\[1\].round: .* after 3.* got 3"),
        ([{"round": 3}], r"rounds\[0\]: expected a value beside the round"),
        ([{"round": 3, "lr": None}], r"\[0\].lr: expected a value, got null"),
        ([{"round": 3, "lr": 0.5}], r"\[0\].lr: expected a value inside of its range"),
        ([{"round": 3, "lr": -1}], r"\[0\].lr: expected"),
        ([{"round": 3, "beta": 0.1}], r"\[0\].beta: expected one of lr, clip_coef.*beta"),
        ([{"round": 3, "temprature": 1}], r"did you mean 'temperature'"),
    ],
)
def test_bad_entries_are_named_before_anything_trains(rounds, expected):
    with pytest.raises(ConfigError, match=rf"(?s)evolve\.exploration.*{expected}"):
        configured(rounds)
