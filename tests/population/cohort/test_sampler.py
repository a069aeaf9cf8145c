"""Agents in episodes of several turns, with a real model: what is played, what is trained."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from text_agents import Count, Flaky, agents, gym
from text_games import play

from evo_grpo.envs.episodes.gym import MAX_FAILED_SEEDS
from evo_grpo.envs.protocol import Ask
from evo_grpo.errors import RunFailedError
from evo_grpo.learn.rows import rows_from_trajectories
from evo_grpo.population.cohort.sampler import PopulationSampler
from evo_grpo.population.stats import Stopwatch, Tally, completion_rows
from evo_grpo.population.steps import train_step
from evo_grpo.record.observer import Observer
from evo_grpo.settings import RecordConfig
from evo_grpo.types import Prompt

STREAM = ("sample", 0, 0)


def played(population, env, slots=None, seeds=(1, 2), stream=STREAM):
    slots = population.slots if slots is None else slots
    sampler = PopulationSampler.in_training(population.cohort, slots, stream=stream)
    return play(env, sampler, seeds)


def step(population, env, seeds=(1, 2, 3), number=0):
    tallies = [Tally() for _ in population.slots]
    train_step(
        population.cohort,
        env,
        population.slots,
        list(seeds),
        stream=(0, number),
        watch=Stopwatch(),
        tallies=tallies,
    )
    return tallies


def weights(population, slot):
    cohort = population.cohort
    return [p.detach().clone() for p in cohort.slots.parameters(cohort.agents[slot].adapter)]


@pytest.fixture(scope="module")
def trio():
    """Three agents that are only sampled from."""
    return agents(3)


def test_an_agents_episodes_are_the_same_alone_and_among_others(trio):
    env = gym(trio, lambda: Count(4))
    together = played(trio, env)
    # Lengths differ, so that some end while others go on.
    assert len({t.turns for e in together for t in e.trajectories}) > 1
    for slot, mine in zip(trio.slots, together, strict=True):
        (alone,) = played(trio, env, [slot])
        assert [t.token_ids for t in alone.trajectories] == [t.token_ids for t in mine.trajectories]
        assert alone.rewards.tolist() == mine.rewards.tolist()


def test_an_agent_without_live_episodes_is_left_out_of_the_call(trio, monkeypatch):
    calls = []
    rollout = trio.cohort.engine.rollout

    def counted(requests):
        calls.append([r.agent for r in requests])
        return rollout(requests)

    monkeypatch.setattr(trio.cohort.engine, "rollout", counted)
    sampler = PopulationSampler.in_training(trio.cohort, trio.slots, stream=STREAM)
    prompt = Prompt(0, "12+01=", tuple(trio.cohort.base.tokenizer("12+01=")["input_ids"]))
    ask = Ask([[prompt], [], [prompt, prompt]], [2, 2, 1], turn=1, keys=[[0], [], [3, 4]])
    groups = sampler.sample(ask)
    assert [[len(g.completions) for g in mine] for mine in groups] == [[2], [], [1, 1]]
    assert calls == [[trio.slots[0], trio.slots[2]]]
    # Nobody else's presence, and no other prompt, changes an agent's draws.
    alone = PopulationSampler.in_training(trio.cohort, [trio.slots[2]], stream=STREAM)
    ((again,),) = alone.sample(Ask([[prompt]], [1], turn=1, keys=[[4]]))
    assert again.completions[0].token_ids == groups[2][1].completions[0].token_ids


def test_turns_have_draws_of_their_own(trio):
    sampler = PopulationSampler.in_training(trio.cohort, trio.slots[:1], stream=STREAM)
    prompt = Prompt(0, "12+01=", tuple(trio.cohort.base.tokenizer("12+01=")["input_ids"]))
    turns = [sampler.sample(Ask([[prompt]], [16], turn=turn)) for turn in (None, 0, 1, 1)]
    assert turns[2] == turns[3]
    assert turns[0] != turns[1] != turns[2] != turns[0]


def test_log_probs_of_all_turns_are_what_the_learner_computes():
    population = agents(2)
    # A first update sees the unchanged policy, so sampler and learner differ by rounding alone.
    for tally in step(population, gym(population, lambda: Count(3, strict=False))):
        assert tally.metrics[0]["sampler_gap"] < 1e-5
        assert tally.metrics[0]["ratio_max"] == 1.0


@pytest.mark.parametrize("pad", [None, "eos"])
def test_prompts_the_environment_and_padding_are_never_trained_end_tokens_are(pad):
    population = agents(1)
    if pad is not None:
        population.cohort.base.set_padding(1, "<eos>")
    tokenizer = population.cohort.base.tokenizer
    (mine,) = played(population, gym(population, lambda: Count(3, strict=False)))
    rows = rows_from_trajectories(mine.trajectories, np.ones(len(mine.trajectories)))
    assert len(rows) == 8
    for row, trajectory in zip(rows, mine.trajectories, strict=True):
        trained = tokenizer.decode(row.token_ids[row.mask].tolist())
        rest = tokenizer.decode(row.token_ids[~row.mask].tolist())
        first = int(trajectory.prompt[:2])
        assert rest == "".join(f"{first + turn:02d}+01=" for turn in range(3))
        assert "=" not in trained.replace("<eos>", "")
        assert row.mask[-1]
        assert row.generated == len(row.sampler_logprobs)
    ended = [t for t in mine.trajectories if t.ended]
    assert ended
    assert all(t.token_ids[-1] == tokenizer.eos_token_id and t.mask[-1] for t in ended)


def test_advantages_come_from_the_returns_of_the_group(monkeypatch):
    population = agents(2)
    env = gym(population)
    learned = {}
    whole = population.cohort.learn

    def seen(batches, *, stream):
        learned.update({b.agent: [row.advantage for row in b.rows] for b in batches})
        return whole(batches, stream=stream)

    monkeypatch.setattr(population.cohort, "learn", seen)
    before = played(population, env, seeds=(1, 2, 3))
    step(population, env)
    for slot, mine in zip(population.slots, before, strict=True):
        returns = mine.rewards[:, 0].reshape(3, 4)
        expected = returns - returns.mean(axis=1, keepdims=True)
        spread = returns.std(axis=1, ddof=1, keepdims=True)
        expected = np.where(spread > 0, expected / (spread + 1e-4), 0.0).reshape(-1)
        assert np.allclose(learned[slot], expected)


def test_dropped_episodes_leave_rows_and_baseline_and_are_counted():
    population = agents(2)
    env = gym(population, lambda: Flaky(3, strict=False))
    tallies = step(population, env, seeds=(0, 1, 2, 3))
    for tally in tallies:
        (metrics,) = tally.metrics
        assert metrics["dropped"] == 8.0
        assert metrics["rows"] == 8.0
        assert np.isfinite(metrics["reward"])
    assert tallies[0].means()["dropped"] == 8.0
    shown = completion_rows(0, dict(enumerate(tallies)), RecordConfig(completions=1))[0]
    assert (shown["end"], shown["error"]) == ("error", "ConnectionError: gone")
    assert np.isnan(shown["reward"])


def test_a_step_of_dropped_episodes_is_skipped_and_counted():
    population = agents(2, beta=0.1)
    env = gym(population, lambda: Flaky(3, strict=False))
    before = weights(population, 0)
    tallies = step(population, env, seeds=(0, 2))
    for tally in tallies:
        assert tally.means()["empty_steps"] == 1.0
        assert tally.means()["dropped"] == 8.0
        assert tally.means()["updates"] == 0.0
        assert not tally.failed
    assert all(torch.equal(a, b) for a, b in zip(before, weights(population, 0), strict=True))
    # The means of a round are those of the steps that had episodes.
    tallies[0].metrics += step(population, env, seeds=(1, 3))[0].metrics
    assert np.isfinite(tallies[0].means()["reward"])
    assert tallies[0].means()["dropped"] == 8.0


def test_seed_after_seed_without_an_episode_ends_the_run():
    population = agents(2)
    env = gym(population, lambda: Flaky(3, strict=False))
    for _ in range(3):
        for seed in (0, 2, 4, 6, 8):
            step(population, env, seeds=(seed,))
        step(population, env, seeds=(1,))  # one that is kept begins the count anew
    for _ in range(MAX_FAILED_SEEDS // 2 - 1):
        step(population, env, seeds=(0, 2))
    with pytest.raises(
        RunFailedError,
        match=r"all 16 episodes were dropped, .* last 16 seeds.*ConnectionError: gone",
    ):
        step(population, env, seeds=(0, 2))


def test_an_agent_that_lost_all_its_episodes_learns_nothing_and_the_round_goes_on(monkeypatch):
    population = agents(2)
    env = gym(population)
    begin = env.begin

    class FirstAgentLosesAll:
        def __init__(self, starts, group_sizes):
            self.play = begin(starts, group_sizes)
            self.ask, self.tell = self.play.ask, self.play.tell

        def experiences(self):
            unlucky, *others = self.play.experiences()
            gone = [replace(t, error="OSError: gone", token_ids=()) for t in unlucky.trajectories]
            return [replace(unlucky, trajectories=gone, rewards=unlucky.rewards * np.nan), *others]

    monkeypatch.setattr(env, "begin", FirstAgentLosesAll)
    before = weights(population, 0)
    first, second = step(population, env)
    assert first.metrics[0]["rows"] == 0.0
    assert np.isnan(first.metrics[0]["reward"])
    assert not first.failed
    assert second.metrics[0]["rows"] == 12.0
    assert all(torch.equal(a, b) for a, b in zip(before, weights(population, 0), strict=True))


def test_a_population_plays_rounds_of_a_multi_turn_game_and_repeats_to_the_bit():
    def rounds():
        population = agents(2, warm=False)
        records = population.train(
            gym(population),
            rounds=2,
            steps_per_round=1,
            fitness={"prompts": 4},
            observer=Observer(),
        )
        return [(a.score, a.metrics["reward"], a.tokens) for r in records for a in r.agents]

    first = rounds()
    assert first == rounds()
    assert len(first) == 4
