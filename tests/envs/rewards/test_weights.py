"""Weights of reward functions that agents search, and the reward that fitness measures."""

import json
import math
from pathlib import Path

import numpy as np
import optuna
import pytest
from numpy.testing import assert_array_equal
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from small_run import Told, outcome, small, stopped_and_resumed

from evo_grpo import (
    GRPO,
    DatasetEnv,
    compare,
    evaluate_adapter,
    leaderboard,
    replay,
    resume,
    run,
    write_report,
)
from evo_grpo.envs.rewards.weights import fitness_rewards
from evo_grpo.errors import ConfigError
from evo_grpo.population.evaluate import weighted
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.steering import ask

TWO = {"kind": "sums", "args": {"high": 20}, "reward": ["two_rewards:exact", "two_rewards:last"]}
SEARCHED = {"reward_weights.last": {"min": 0.1, "max": 2.0}}
FITNESS = {
    "reward": "exact",
    **{"prompts": 6, "test_prompts": 6, "test_samples": 2, "final_samples": 0},
}


def two(**changes):
    return small(
        **{
            "env": TWO,
            "evolve__hyperparameters": SEARCHED,
            "evolve__fitness": FITNESS,
            **changes,
        }
    )


def digests(folder):
    return [agent.adapter_sha256 for record in read_rounds(folder) for agent in record.agents]


def test_an_agent_learns_from_its_own_weights_as_from_those_of_the_environment(tmp_path):
    alone = {"population__size": 1, "evolve__selection": "none", "evolve__exploration": "none"}
    start = [{"reward_weights.last": 0.3}]
    own = run(two(**alone, population__init=start), out=tmp_path / "own")
    fixed = {**TWO, "reward_weights": {"last": 0.3}}
    of_env = {"env": fixed, "evolve__hyperparameters": {}}
    other = run(two(**alone, **of_env), out=tmp_path / "fixed")
    without = run(two(**alone, evolve__hyperparameters={}), out=tmp_path / "ones")
    assert digests(own) == digests(other) != digests(without)
    rewards = [
        [agent.metrics["reward"] for record in read_rounds(folder) for agent in record.agents]
        for folder in (own, other)
    ]
    assert rewards[0] == rewards[1]


def test_the_first_agent_begins_with_the_weights_of_the_environment(tmp_path):
    folder = run(two(env={**TWO, "reward_weights": [1.0, 0.5]}), out=tmp_path / "run")
    table = leaderboard(folder)
    weights = read_rounds(folder)[0].agents
    first, *others = [agent.hparams.reward_weights["last"] for agent in weights]
    assert first == 0.5
    assert len({first, *others}) == 3
    assert all(0.1 <= weight <= 2.0 for weight in others)
    assert table["reward_weights.last"].notna().all()
    assert "reward_weights.last" in (folder / "leaderboard.csv").read_text()


def test_a_resumed_search_ends_as_one_that_was_not_stopped(tmp_path):
    config = two(evolve__exploration={"kind": "mutate", "no_mutation": 0})
    whole = run(config, out=tmp_path / "whole")
    stopped = stopped_and_resumed(config, tmp_path / "stopped", ("learn", 1))
    assert outcome(whole) == outcome(stopped)
    changed = [m.mutation.changes for record in read_rounds(whole) for m in record.members]
    assert any("reward_weights.last" in one for one in changed)


@pytest.mark.parametrize("exploration", ["resample", "optuna"])
def test_every_exploration_moves_weights_within_their_range(exploration, tmp_path):
    folder = run(two(evolve__exploration=exploration), out=tmp_path / "run")
    for record in read_rounds(folder):
        for hparams in record.next_hparams:
            assert 0.1 <= hparams.reward_weights["last"] <= 2.0


def test_fitness_and_the_test_measure_the_reward_that_they_name(tmp_path):
    folder = run(two(), out=tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    # Two completions per prompt, each right or wrong.
    assert all(0 <= value <= 1 for value in summary["base"]["per_prompt"])
    assert {value * 2 % 1 for value in summary["best"]["per_prompt"]} == {0.0}
    judged = evaluate_adapter(folder)
    assert judged.own.mean == summary["best"]["mean"]
    both = {**FITNESS, "reward": {"exact": 1.0, "last": 1.0}}
    more = run(two(evolve__fitness=both), out=tmp_path / "both")
    assert json.loads((more / "summary.json").read_text())["base"]["mean"] > summary["base"]["mean"]


class Named:
    reward_names = ("exact", "last")
    weights = np.array([1.0, 1.0])


def test_a_completion_whose_fitness_reward_abstains_counts_as_one_without_a_reward():
    rewards = np.array([[1.0, 0.5], [math.nan, 0.5], [0.0, math.nan]])
    assert_array_equal(weighted(*fitness_rewards(Named, rewards, "exact")), [1, math.nan, 0])
    found = weighted(*fitness_rewards(Named, rewards, {"last": 2.0, "exact": 1.0}))
    assert_array_equal(found, [2, 1, 0])
    assert_array_equal(weighted(*fitness_rewards(Named, rewards, None)), [1.5, 0.5, 0])


@pytest.mark.slow
def test_what_reads_a_run_and_trains_beside_it_takes_searched_weights(tmp_path):
    folder = run(two(), out=tmp_path / "run")
    name = "reward_weights.last"
    journal = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    study = optuna.load_study(study_name=None, storage=journal)
    assert all(name in trial.params for trial in study.trials)
    assert name in Path(write_report(folder, tmp_path / "report.html")).read_text()
    arms = compare(folder)["arms"]
    assert {arm["name"] for arm in arms} == {"guess", "random", "evolved"}
    assert all(0 <= arm["test"]["mean"] <= 1 for arm in arms)
    assert 0 <= replay(folder).training("schedule-run").test.mean <= 1


def test_an_agent_with_a_weight_is_not_trained_on_other_rewards(tmp_path):
    population = GRPO.population(size=2, model="tiny-sums", device="cpu")
    agent = population[0]
    agent.cohort.set_hparams(0, agent.hparams.with_value("reward_weights.last", 0.5))
    with pytest.raises(ConfigError, match=r"reward_weights\.last of an agent: expected a reward"):
        population.train("sums", rounds=1, steps_per_round=1, progress=False)


def test_a_population_from_python_searches_weights(tmp_path):
    rows = [{"question": f"{n:02d}+01=", "answer": f"{n + 1:03d}"} for n in range(30)]

    def exact(completion, answer):
        return float(completion == answer)

    def last(completion):
        return int(completion[-1]) / 9 if completion[-1:].isdigit() else 0.0

    env = DatasetEnv(rows, [exact, last], prompt="{question}", reward_weights={"last": 0.25})
    population = GRPO.population(
        size=3, model="tiny-sums", device="cpu", hyperparameters=SEARCHED, group_size=4
    )
    how = {"rounds": 1, "steps_per_round": 1, "progress": False}
    with pytest.raises(
        ConfigError, match=r"evolve\.fitness\.reward: .* reward_weights\.last, .*name the"
    ):
        population.train(env, **how)
    fitness = {"reward": "exact", "prompts": 4, "test_prompts": 3}
    population.train(env, **how, fitness=fitness, out=tmp_path / "run")
    (record,) = read_rounds(tmp_path / "run")
    assert record.agents[0].hparams.reward_weights == {"last": 0.25}
    assert not math.isnan(record.agents[0].score.mean)


def test_a_weight_is_set_by_hand(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(two(population__rounds=2), out=folder, observer=Told(("learn", 0)))
    for name, value in (("reward_weights.lst", 1.0), ("reward_weights.last", 3.0)):
        with pytest.raises(ConfigError, match=r"did you mean 'reward_weights|inside of its range"):
            ask(folder, "set", agent=0, values={name: value})
    ask(folder, "set", agent=0, values={"reward_weights.last": 1.5})
    resume(folder)
    first = read_rounds(folder)[1].agents[0]
    assert first.hparams.reward_weights == {"last": 1.5}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"evolve__hyperparameters": {"reward_weights.lst": {"min": 0, "max": 1}}},
            "reward_weights.lst: expected a reward function of the task, exact, last, got "
            "'lst'. Did you mean \"last\"?",
        ),
        (
            {"env": {**TWO, "reward_weights": [1, 5]}},
            "env.reward_weights: expected a value inside of its range [0.1, 2] as the weight of "
            "'last', got 5",
        ),
        (
            {"evolve__fitness": {**FITNESS, "reward": "exakt"}},
            "evolve.fitness.reward: expected a reward function of the task, exact, last, got "
            "'exakt'. Did you mean \"exact\"?",
        ),
        (
            {"evolve__fitness": {**FITNESS, "reward": None}},
            "evolve.fitness.reward: expected a measure that does not depend on reward_weights.last",
        ),
        (
            {"evolve__fitness": {**FITNESS, "reward": {"exact": 0}}},
            "evolve.fitness.reward: expected the name of a reward function, or a mapping of names",
        ),
        (
            {"env": {**TWO, "reward_weights": {"lst": 1}}},
            "reward_weights: expected a reward function of the task, exact, last, got 'lst'",
        ),
        (
            {"env": {**TWO, "reward_weights": [0, 0]}},
            "env.reward_weights: expected one number per reward function, not all of them 0",
        ),
        (
            {"env": {**TWO, "reward_weights": {"exact": 0, "last": 0.0}}},
            "reward_weights: expected one that is not 0, got 0 for each of exact, last",
        ),
        (
            {"evolve__hyperparameters": {"reward_weights.last": {"min": 0, "max": 1e300}}},
            "reward_weights.last.max: expected",
        ),
        (
            {"evolve__hyperparameters": {"reward_weights.": {"min": 0, "max": 1}}},
            "nothing of that name can mutate",
        ),
    ],
)
def test_a_wrong_weight_is_named_before_anything_is_loaded(changes, text, tmp_path, monkeypatch):
    monkeypatch.setattr("evo_grpo.training.assemble.build_cohort", None)
    with pytest.raises(ConfigError) as raised:
        run(two(**changes), out=tmp_path / "run")
    assert text in str(raised.value)
