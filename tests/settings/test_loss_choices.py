"""Losses and scales of advantages that agents of one batch have of their own."""

import pytest
from small_run import outcome, small, stopped_and_resumed

from evo_grpo import GRPO, RLParameter, leaderboard, run
from evo_grpo.record.folder import read_rounds

CHOICES = {
    "loss_type": {"choices": ["grpo", "cispo", "dr_grpo"]},
    "adv_norm": {"choices": ["mean_std", "mean_only"]},
}


def searched(**changes):
    return small(**{"evolve__hyperparameters": CHOICES, **changes})


def digests(folder):
    return [agent.adapter_sha256 for record in read_rounds(folder) for agent in record.agents]


ALONE = {
    "population__size": 1,
    "population__rounds": 1,
    "evolve__selection": "none",
    "evolve__exploration": "none",
}
LR = {"lr": {"min": 1e-4, "max": 1e-2}}


@pytest.fixture(scope="module")
def default_digests(tmp_path_factory):
    folder = tmp_path_factory.mktemp("default") / "run"
    return digests(run(small(**ALONE, evolve__hyperparameters=LR), out=folder))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_type", "vespo"),
        ("importance_sampling_level", "sequence"),
        ("adv_norm", "batch_std"),
    ],
)
def test_an_agent_learns_with_its_own_value_as_with_that_of_all(
    name, value, default_digests, tmp_path
):
    ranges = {name: {"choices": [value]}}
    own = run(small(**ALONE, evolve__hyperparameters=ranges), out=tmp_path / "own")
    of_all = {f"algorithm__{name}": value, "evolve__hyperparameters": LR}
    other = run(small(**ALONE, **of_all), out=tmp_path / "all")
    assert digests(own) == digests(other) != default_digests


def test_agents_of_one_batch_with_other_losses_learn_as_beside_their_like(tmp_path):
    names = ["grpo", "cispo", "sapo"]
    loss = {"evolve__hyperparameters": {"loss_type": {"choices": names}}}
    fixed = {**ALONE, **loss, "population__size": 3}

    def learned(folder, losses):
        start = [{"loss_type": name} for name in losses]
        (record,) = read_rounds(run(small(**fixed, population__init=start), out=tmp_path / folder))
        return [[agent.metrics[name] for name in ("loss", "grad_norm")] for agent in record.agents]

    mixed = learned("mixed", names)
    for slot, name in enumerate(names):
        assert learned(name, [name] * 3)[slot] == pytest.approx(mixed[slot], rel=1e-4)
    assert len({loss for loss, _ in mixed}) == len(names)


def test_losses_have_columns_and_a_resumed_search_ends_as_one_that_was_not_stopped(tmp_path):
    config = searched(evolve__exploration={"kind": "mutate", "no_mutation": 0})
    whole = run(config, out=tmp_path / "whole")
    stopped = stopped_and_resumed(config, tmp_path / "stopped", ("learn", 1))
    assert outcome(whole) == outcome(stopped)
    agents = read_rounds(whole)[0].agents
    assert {agent.hparams.loss_type for agent in agents} == {"grpo", "cispo", "dr_grpo"}
    assert {"loss_type", "adv_norm"} <= set(leaderboard(whole).columns)
    members = [m for record in read_rounds(whole) for m in record.members]
    moved = {name for member in members for name in member.mutation.changes}
    assert moved <= {"loss_type", "adv_norm"}
    assert moved


def test_a_population_from_python_searches_losses(tmp_path):
    population = GRPO.population(
        size=3,
        model="tiny-sums",
        device="cpu",
        hyperparameters={"loss_type": RLParameter(choices=["gspo", "cispo"])},
        group_size=4,
    )
    how = {"rounds": 1, "steps_per_round": 1, "progress": False}
    fitness = {"prompts": 4, "test_prompts": 3}
    population.train("sums", **how, fitness=fitness, out=tmp_path / "run")
    (record,) = read_rounds(tmp_path / "run")
    found = sorted(agent.hparams.loss_type for agent in record.agents)
    assert found in (["cispo", "cispo", "gspo"], ["cispo", "gspo", "gspo"])


@pytest.mark.parametrize(
    ("given", "first"),
    [({}, "grpo"), ({"algorithm__loss_type": "cispo"}, "cispo")],
)
def test_the_first_agent_begins_with_the_loss_of_the_algorithm(given, first, tmp_path):
    choices = {"loss_type": {"choices": ["dapo", "cispo", "grpo"]}}
    one = {"population__rounds": 1, "evolve__hyperparameters": choices}
    agents = read_rounds(run(small(**one, **given), out=tmp_path / "run"))[0].agents
    assert agents[0].hparams.loss_type == first
    assert {agent.hparams.loss_type for agent in agents} == {"dapo", "cispo", "grpo"}
