"""A population in Python: trains together, evolves by the classes a user passes, and records."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from peft import LoraConfig
from small_run import study_of
from tiny_cohort import assert_same_agents, fresh, make_rows, moments, same, weights

from evo_grpo import (
    GRPO,
    GSPO,
    HyperparameterConfig,
    Population,
    RLParameter,
    leaderboard,
    resume,
)
from evo_grpo.analysis.export.export import export
from evo_grpo.api.agilerl.evolution import Mutations, TournamentSelection
from evo_grpo.errors import CheckpointError, ConfigError, RunDirError, ShapeError
from evo_grpo.evolve.explore.mutate import Mutations as Strategy
from evo_grpo.evolve.protocols import Offspring, rank
from evo_grpo.evolve.select.halving import NoSelection
from evo_grpo.learn.rows import AgentBatch
from evo_grpo.training.assemble import environment_for
from evo_grpo.types import Score

TINY = {
    "model": "tiny-sums",
    "lora": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "group_size": 4,
    "prompts_per_step": 2,
    "init": "same",
    "device": "cpu",
}
ROUND = {
    "steps_per_round": 1,
    "fitness": {"prompts": 6, "test_prompts": 4, "test_samples": 1},
    "progress": False,
}


def make(size=3, **given):
    return GRPO.population(size=size, **{**TINY, **given})


def score(mean):
    return Score(mean, 0.1, 4)


def give_scores(population, means):
    for agent, mean in zip(population, means, strict=True):
        agent.state.history = [score(mean)]


def teach(population):
    """Unlike weights and moments for everyone."""
    for seed in (1, 2):
        population.learn([AgentBatch(a.slot, fresh(make_rows(seed + a.slot))) for a in population])


def test_learning_from_no_token_is_refused():
    population = make()
    rows = [replace(row, mask=np.zeros_like(row.mask)) for row in make_rows(1)]
    with pytest.raises(ShapeError, match=r"^learn: expected at least one generated token, got 8"):
        population.learn([AgentBatch(population[0].slot, rows)])
    # Beside others too: it would count as an update that was none.
    others = AgentBatch(population[1].slot, make_rows(2))
    with pytest.raises(ShapeError, match=r"^learn: expected at least one generated token, got 8"):
        population.learn([others, AgentBatch(population[0].slot, rows)])
    assert [agent.state.steps for agent in population] == [0, 0, 0]


def test_training_plays_rounds_and_ranks_all_agents():
    population = make()
    records = population.train("sums", rounds=2, **ROUND)
    assert [r.round for r in records] == [0, 1]
    table = population.leaderboard()
    assert sorted(table["agent"]) == [0, 1, 2]
    assert list(table["rank"]) == [1, 2, 3]
    assert table["fitness"].is_monotonic_decreasing
    assert (table["tokens"] > 0).all()
    assert table["checkpoint"].isna().all()
    assert [scores[-1] for scores in population.histories()] == [
        a.score for a in records[-1].agents
    ]


def test_a_single_agent_trains_without_selection():
    population = make(1)
    records = population.train("sums", rounds=2, **ROUND)
    assert [m.agent for r in records for m in r.members] == [0, 0]
    assert len(population.leaderboard()) == 1


def test_select_copies_the_winner_over_the_loser():
    population = make()
    teach(population)
    give_scores(population, [0.1, 0.9, 0.2])
    population[1].hparams = population[1].hparams.replace(lr=7e-3)
    best = weights(population.cohort, 1)
    elite, returned = TournamentSelection(3, True, 3).select(population)
    assert returned is population
    assert elite is population[1]
    assert population.elite == 1
    for agent in population:
        assert same(weights(population.cohort, agent.slot), best)
        assert agent.hparams.lr == 7e-3
        for key, value in moments(population.cohort, 1).items():
            assert value.equal(moments(population.cohort, agent.slot)[key])
    members = [agent.state.member for agent in population]
    assert members[1].id == 1
    assert [m.parent for m in members] == [1, None, 1]
    assert [m.mutation.op for m in members] == ["clone", "init", "clone"]
    assert len({m.id for m in members}) == 3
    assert population[1].fitness == [0.9]
    assert population[0].fitness == []


def test_mutation_spares_the_elite_and_begins_new_members():
    population = make()
    population.elite = 2
    before = [weights(population.cohort, a.slot) for a in population]
    assert Mutations(no_mutation=0, rl_hp=1).mutation(population) is population
    for agent, old in zip(population, before, strict=True):
        assert same(weights(population.cohort, agent.slot), old)
        (rate,) = [g["lr"] for g in agent.state.optimizer.param_groups]
        assert rate == agent.hparams.lr
        assert (rate != 1e-3) == (agent.index != 2)
    members = [agent.state.member for agent in population]
    assert [m.parent for m in members] == [0, 1, None]
    assert members[0].mutation.changes["lr"] == (1e-3, population[0].hparams.lr)


@pytest.mark.slow
def test_tests_share_their_draws():
    population = make(2)
    env = environment_for(population.cohort, "sums")
    first, second = population.test(env)
    assert first == second  # equal agents, equal draws
    assert first.n == len(env.prompts("test", None))
    assert population.test(env)[0] != first
    single = population[0].test(env, 2)
    assert single.shape == (2 * first.n,)
    assert population[0].fitness == [pytest.approx(single.mean())]


def test_a_folder_records_rounds_trials_and_checkpoints(tmp_path):
    population = make()
    population.train("sums", rounds=2, out=tmp_path / "run", selection=NoSelection(), **ROUND)
    table = leaderboard(tmp_path / "run")
    pd.testing.assert_frame_equal(table, population.leaderboard())
    assert table["checkpoint"].notna().all()
    assert len(study_of(tmp_path / "run").trials) == 6
    best = int(table["agent"][0])
    other = make(1)
    other[0].load_checkpoint(tmp_path / "run" / table["checkpoint"][0], load_optimizer=True)
    assert same(weights(other.cohort, 0), weights(population.cohort, best))
    with pytest.raises(ConfigError, match=r"^GSPO.load: .* is of GRPO, .* use GRPO.load"):
        GSPO.load(tmp_path / "run" / table["checkpoint"][0])
    export(tmp_path / "run", tmp_path / "best")
    card = (tmp_path / "best" / "README.md").read_text()
    assert "A LoRA adapter over `tiny-sums`" in card
    assert "trained on `sums`" in card


@pytest.mark.slow
def test_a_folder_is_given_at_the_first_call_and_is_no_run_to_resume(tmp_path):
    population = make(2)
    population.train("sums", rounds=1, out=tmp_path / "a", **ROUND)
    with pytest.raises(ConfigError, match=r"out=.*has played 1; give out= at the first call"):
        population.train("sums", rounds=1, out=tmp_path / "b", **ROUND)
    assert not (tmp_path / "b").exists()
    with pytest.raises(RunDirError, match="found a"):
        make(2).train("sums", rounds=1, out=tmp_path / "a", **ROUND)
    (tmp_path / "a" / "summary.json").unlink()  # as if it had been stopped
    with pytest.raises(RunDirError, match="recorded from Python with lora, which no file can name"):
        resume(tmp_path / "a")


@pytest.mark.parametrize("init", ["same", "sample", "latin_hypercube"])
def test_a_run_of_names_alone_is_resumed(tmp_path, init):
    population = make(2, lora={"r": 2}, init=init)
    population.train("sums", rounds=1, out=tmp_path / "a", **ROUND)
    assert f"init: {init}" in (tmp_path / "a" / "population.yaml").read_text()
    assert population.summary is not None
    assert resume(tmp_path / "a") == tmp_path / "a"


def test_a_population_is_saved_and_loaded(tmp_path):
    population = make(2)
    population.cohort.base.set_padding(5)
    population.train("sums", rounds=2, **ROUND)
    population.save(tmp_path / "p")
    loaded = Population.load(tmp_path / "p", device="cpu")
    assert loaded.cohort.settings == population.cohort.settings
    assert loaded.cohort.base.padding == (5, None)
    assert loaded.rounds == population.rounds
    assert_same_agents(population, loaded)
    assert [a.state.member for a in loaded] == [a.state.member for a in population]
    assert repr(loaded) == repr(population)
    with pytest.raises(CheckpointError, match=r"Population.save, but population.json is missing"):
        Population.load(tmp_path)


@pytest.mark.parametrize(
    ("agents", "why"),
    [
        ([0, 1_000_000], r"agents\[1\]: expected a number < 10000, got 1000000"),
        ([], "agents: expected"),
        ([0, 7], "agent-07"),
    ],
)
def test_a_saved_population_of_agents_that_are_not_there_is_refused(tmp_path, agents, why):
    make(1).save(tmp_path)
    file = tmp_path / "population.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "agents": agents}))
    with pytest.raises(CheckpointError, match=why):
        Population.load(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rounds": 0}, "rounds: expected an integer >= 1, got 0"),
        ({"steps_per_round": 0}, "steps_per_round: expected an integer >= 1"),
        ({"fitness": {"prompts": 0}}, "fitness.prompts: expected an integer >= 1"),
        ({"eval_prompts": 6}, "train: unknown argument 'eval_prompts'"),
    ],
)
def test_what_train_cannot_take_is_named(given, message):
    population = make(1)
    with pytest.raises(ConfigError, match=f"^{message}"):
        population.train("sums", **{**ROUND, **given})
    with pytest.raises(ConfigError, match=r"^loop: expected an integer >= 1"):
        population.test("sums", loop=0)


class TheBest:
    """A selection that keeps the best agent alone."""

    def plan(self, histories, places, rng):
        best = rank(histories)[0]
        return (Offspring(best, best, elite=True),)


def test_agents_that_leave_are_no_longer_in_the_population():
    population = make(3)
    records = population.train("sums", rounds=2, archive=True, selection=TheBest(), **ROUND)
    (agent,) = population
    assert [a.agent for a in records[1].agents] == population.slots == [agent.slot]
    spare = population.cohort.archive.slot
    assert list(population.cohort.agents) == [agent.slot, spare]
    assert sorted(population.leaderboard()["agent"]) == [0, 1, 2]
    assert population.histories() == [agent.state.history]
    assert population[0] is agent


def test_members_are_known_by_the_numbers_of_their_agents(tmp_path):
    """A population of clones, whose slots are not their positions."""
    whole = make(3)
    population = Population(whole.cohort, [whole[0], whole[2]])
    fitness = {**ROUND["fitness"], "final_samples": 0}  # no mean, which is no agent
    given = {**ROUND, "archive": False, "significance": None, "fitness": fitness}
    population.train("sums", rounds=2, out=tmp_path / "run", selection=Both(), **given)
    for record in population.rounds:
        assert [a.agent for a in record.agents] == [0, 2]
        assert [m.agent for m in record.members] == [0, 2]
    assert {m.slot: m.state.member.agent for m in population} == {0: 0, 2: 2}
    table = leaderboard(tmp_path / "run")
    assert sorted(table["agent"]) == [0, 2]
    for agent, name in zip(table["agent"], table["checkpoint"], strict=True):
        assert name == f"checkpoints/round-0001/agent-{agent:02d}"
    parents = {a.agent: a.parent for a in population.rounds[1].agents}
    assert parents[2] == population.rounds[0].agents[0].member
    population.set_hparams(1, population[1].hparams.replace(lr=2e-3), {"lr": (1e-3, 2e-3)})
    assert population[1].state.member.agent == 2


class Both:
    """A selection that copies the first agent over the second."""

    def plan(self, histories, places, rng):
        return Offspring(0, 0, elite=True), Offspring(1, 0)


@pytest.mark.slow
def test_what_cannot_mutate_warns():
    population = make(1, hyperparameters={})
    with pytest.warns(UserWarning, match="no hyperparameters to mutate, so nothing"):
        population.train("sums", rounds=1, exploration=Strategy(rl_hp=0.5), **ROUND)
    with pytest.warns(UserWarning, match="no hyperparameters to mutate, so nothing"):
        Mutations(rl_hp=1.0).mutation(population)
    clip = HyperparameterConfig(clip_coef=RLParameter(min=0.1, max=0.3))
    population = make(1, hyperparameters=clip, update_epochs=1)
    with pytest.warns(
        UserWarning, match="hyperparameters.clip_coef cannot act: with update_epochs 1"
    ):
        population.train("sums", rounds=1, **ROUND)
