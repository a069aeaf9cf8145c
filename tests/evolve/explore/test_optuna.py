"""Optuna's samplers propose within the ranges, from trials, and equally for equal streams."""

import math

import numpy as np
import optuna
import pytest
from explorer_contract import INSIDE

from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.evolve.explore.optuna import OptunaExploration
from evo_grpo.evolve.protocols import Candidate, Trial
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.settings import from_dict

LR = HyperparameterConfig(lr=RLParameter(1e-6, 1e-2))


def trials(count, best=1e-4, round=0):
    """Trials over the whole range; the nearer lr is to the best one, the fitter."""
    values = np.logspace(-6, -2, count)
    return [
        Trial(INSIDE.replace(lr=float(lr)), -abs(math.log10(lr / best)), round) for lr in values
    ]


def propose(explorer, known, seed, config=LR, hparams=INSIDE):
    candidate = Candidate(hparams, copied=True, trials=known)
    return explorer.explore(candidate, config, np.random.default_rng(seed))


def test_it_learns_from_the_trials():
    for best in (1e-5, 1e-3):
        known = trials(40, best)
        values = [propose(OptunaExploration(), known, seed).lr for seed in range(20)]
        assert np.median(np.log10(values)) == pytest.approx(math.log10(best), abs=0.4)
    values = [propose(OptunaExploration(), (), seed).lr for seed in range(40)]
    assert np.ptp(np.log10(values)) > 3, "without trials it knows nothing"


def test_a_trial_counts_beside_those_of_its_own_round():
    # Everyone is fitter in round 1, where nobody has a good lr.
    early = trials(20, 1e-5)
    late = [Trial(t.hparams, 10 + t.fitness, 1) for t in trials(20, 1e-5) if t.hparams.lr > 1e-4]
    values = [propose(OptunaExploration(), early + late, seed).lr for seed in range(20)]
    assert np.median(values) < 1e-4


def test_failed_trials_and_trials_outside_of_the_ranges_do_no_harm():
    odd = [
        Trial(INSIDE, math.nan, 0),
        Trial(INSIDE.replace(lr=1.0, batch_size=None, clip_coef=(0.1, 1.9)), 0.5, 0),
    ]
    config = HyperparameterConfig(
        lr=RLParameter(1e-6, 1e-2),
        batch_size=RLParameter(4, 64),
        clip_coef=RLParameter(0.05, 0.5),
        group_size=RLParameter(2, 2),
    )
    for start in (INSIDE, INSIDE.replace(clip_coef=(0.8, 1.28))):
        hparams = propose(OptunaExploration(), odd * 8, 0, config, start)
        assert 1e-6 <= hparams.lr <= 1e-2
        assert type(hparams.batch_size) is int
        assert hparams.group_size == 2


def test_a_pair_that_is_proposed_out_of_order_stays_as_it_was():
    config = HyperparameterConfig(clip_low=RLParameter(0.5, 1.3), clip_high=RLParameter(0.6, 1.4))
    start = INSIDE.replace(clip_coef=(0.8, 1.28))
    kept = 0
    for seed in range(40):
        hparams = propose(OptunaExploration(), (), seed, config, start)
        low, high = hparams.clip_bounds
        assert low < high
        kept += hparams == start
    assert 0 < kept < 40


@pytest.mark.parametrize("sampler", ["RandomSampler", "NSGAIISampler", "NSGAIIISampler"])
def test_any_sampler_proposes(sampler):
    hparams = propose(OptunaExploration(sampler=sampler), trials(12), 0)
    assert 1e-6 <= hparams.lr <= 1e-2


def test_its_arguments_reach_the_sampler():
    known = trials(20, 1e-5)
    late = OptunaExploration(args={"n_startup_trials": 100})
    values = [propose(late, known, seed).lr for seed in range(40)]
    assert np.ptp(np.log10(values)) > 3, "as many trials as these are still left to chance"


def test_every_sampler_of_the_installed_optuna_is_known():
    for name in optuna.samplers.__all__:
        if name.endswith("Sampler") and name not in ("BaseSampler", "BaseGASampler"):
            assert OptunaExploration(sampler=name).sampler == name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sampler": "TPESampeler"}, r"^sampler: expected 'Brute.*; did you mean 'TPESampler'"),
        ({"args": {"seed": 1}}, r"^args: expected no seed, because it follows from"),
    ],
)
def test_what_is_no_sampler_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        OptunaExploration(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"args": {"n_startup": 1}}, r"^evolve.exploration.args: TPESampler refuses .*'n_startup'"),
        (
            {"sampler": "GridSampler"},
            r"^evolve.exploration.args: GridSampler refuses .*search_space",
        ),
        ({"sampler": "BruteForceSampler"}, r"BruteForceSampler cannot propose lr: ValueError"),
    ],
)
def test_what_a_sampler_refuses_shows_before_the_run(given, message):
    with pytest.raises(ConfigError, match=message):
        OptunaExploration(**given).check(INSIDE, LR)
    OptunaExploration().check(INSIDE, LR)
    OptunaExploration().check(INSIDE, HyperparameterConfig())


def test_a_package_that_a_sampler_lacks_is_named(monkeypatch):
    def lacking(*_):
        raise ModuleNotFoundError("No module named 'scipy'")

    monkeypatch.setattr(optuna.samplers.TPESampler, "before_trial", lacking)
    with pytest.raises(EngineUnavailable, match=r"sampler: TPESampler needs .*'scipy'; install it"):
        OptunaExploration().check(INSIDE, LR)


def test_yaml_names_it_and_its_log_stays_silent(capfd):
    exploration = {"kind": "optuna", "sampler": "RandomSampler"}
    config = from_dict({"model": "m", "env": "e", "evolve": {"exploration": exploration}})
    assert config.evolve.exploration == OptunaExploration(sampler="RandomSampler")
    level = optuna.logging.get_verbosity()
    propose(config.evolve.exploration, (), 0)
    assert optuna.logging.get_verbosity() == level
    assert capfd.readouterr().err == ""


def test_choices_are_proposed_as_categories():
    config = HyperparameterConfig(group_size=RLParameter(choices=[4, 8, 16]))
    known = [
        Trial(INSIDE.replace(group_size=size), float(size == 16), 0) for size in (4, 8, 16) * 10
    ]
    odd = [Trial(INSIDE.replace(group_size=5), 9.0, 0)]
    start = INSIDE.replace(group_size=4)
    found = [
        propose(OptunaExploration(), known + odd, seed, config, start).group_size
        for seed in range(20)
    ]
    assert set(found) <= {4, 8, 16}
    assert found.count(16) > 10
