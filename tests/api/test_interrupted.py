"""A call of `train` that is interrupted leaves the population as its last round left it."""

import pytest
from small_run import Told
from tiny_cohort import moments, same, weights

from evo_grpo import GRPO, leaderboard
from evo_grpo.learn.updates import OwnOptimizers

AGENTS = {
    "model": "tiny-sums",
    "lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
    "group_size": 4,
    "prompts_per_step": 2,
    "lr": 1e-2,
    "seed": 5,
    "device": "cpu",
    "hyperparameters": {"lr": {"min": 1e-4, "max": 1e-1}},
}
#: The weights move at every step, agents are copied, agents leave, and the archive is overwritten.
ROUND = {
    "steps_per_round": 2,
    "fitness": {"prompts": 6, "test_prompts": 4, "test_samples": 1},
    "sizes": [5, 3, 2],
    "significance": None,
    "progress": False,
}
SUMS = {"kind": "sums", "args": {"high": 20}}


def make():
    return GRPO.population(size=5, **AGENTS)


def timeless(population):
    table = population.leaderboard()
    return table.drop(columns=["wall_seconds", "checkpoint"]).to_dict("records")


def assert_equal(first, second):
    assert first.slots == second.slots
    for one, other in zip(first, second, strict=True):
        assert same(weights(first.cohort, one.slot), weights(second.cohort, other.slot))
        kept, found = moments(first.cohort, one.slot), moments(second.cohort, other.slot)
        assert kept.keys() == found.keys()
        assert all((kept[key] == found[key]).all() for key in kept)
        assert (one.hparams, one.steps, one.fitness) == (other.hparams, other.steps, other.fitness)
        assert one.state.member == other.state.member
    assert timeless(first) == timeless(second)


@pytest.fixture(scope="module")
def uninterrupted():
    """A population after each of three rounds, by the number of rounds."""
    made = {}
    for rounds in (1, 3):
        made[rounds] = make()
        made[rounds].train(SUMS, rounds=rounds, **ROUND)
    return made


@pytest.mark.parametrize("stop", [("learn", 0), ("done", 1), ("evaluate", 2)])
def test_the_next_call_gives_what_one_call_gives(stop, uninterrupted):
    population = make()
    with pytest.raises(KeyboardInterrupt):
        population.train(SUMS, rounds=3, observer=Told(stop), **ROUND)
    played = stop[1]
    assert len(population.rounds) == played
    assert [agent.steps for agent in population] == [2 * played] * len(population)
    assert len(population) == [5, 3, 2][played]
    population.train(SUMS, rounds=3 - played, **ROUND)
    assert_equal(population, uninterrupted[3])


def test_gradients_of_an_unfinished_step_are_dropped(uninterrupted, monkeypatch):
    population, calls = make(), []

    def interrupted(*_):
        calls.append(1)
        if len(calls) == 2:  # the second minibatch or step
            raise KeyboardInterrupt
        return step(*_)

    step = OwnOptimizers.step
    with monkeypatch.context() as patch:
        patch.setattr(OwnOptimizers, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            population.train(SUMS, rounds=1, **ROUND)
    assert population.rounds == []
    population.train(SUMS, rounds=1, **ROUND)
    assert_equal(population, uninterrupted[1])


def test_a_population_that_records_goes_on_in_memory(uninterrupted, tmp_path):
    population, out = make(), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        population.train(SUMS, rounds=3, out=out, observer=Told(("evaluate", 1)), **ROUND)
    assert len(population.rounds) == len(leaderboard(out)["round"].unique()) == 1
    population.train(SUMS, rounds=2, **ROUND)
    assert_equal(population, uninterrupted[3])


def test_an_interrupted_test_leaves_the_population_at_its_last_round(uninterrupted, tmp_path):
    population, out = make(), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        population.train(SUMS, rounds=1, out=out, observer=Told(("test", 0)), **ROUND)
    assert population.summary is None
    assert len(population.rounds) == 1
    population.train(SUMS, rounds=2, **ROUND)  # with the selection that the first call left out
    assert_equal(population, uninterrupted[3])
