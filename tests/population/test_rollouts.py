"""Dynamic sampling against a search through the prompts one after another."""

from itertools import pairwise

import numpy as np
import pytest
from played_rounds import train_round
from small_run import outcome, small, stopped_and_resumed

from evo_grpo import run
from evo_grpo.envs.protocol import Experience
from evo_grpo.learn.objective.advantages import zero_variance_groups
from evo_grpo.population.rollouts import joined, starts_from
from evo_grpo.population.stats import Stopwatch, Tally
from evo_grpo.population.steps import train_step
from evo_grpo.record.folder import read_rounds
from evo_grpo.training.assemble import prepare

LONGEST = 4  # tokens of an answer in the task


def scripted(prepared, live, monkeypatch):
    """Rewards of a group that differ only if `live(slot, prompt)`; and all groups that were scored.

    A group is live or dead whatever is sampled, so that the order of sampling cannot matter.
    """
    scored = []

    def judge(groups):
        rewards = []
        for group in groups:
            scored.append(group)
            size = len(group.completions)
            alive = live(group.agent, group.prompt.text)
            rewards += [float(alive and number == 0) for number in range(size)]
        return np.array(rewards)[:, None], [False] * len(groups), {}

    monkeypatch.setattr(prepared.env, "judge", judge)
    return scored


def one_after_another(prompts, count, live, budget, cost):
    """The prompts learned from, and the number used: a dead group's place goes to the next live."""
    places, used = list(prompts[:count]), count
    dead = [place for place, prompt in enumerate(places) if not live(prompt)]
    while dead and budget >= cost(prompts[used]):
        prompt = prompts[used]
        budget, used = budget - cost(prompt), used + 1
        if live(prompt):
            places[dead.pop(0)] = prompt
    return places, used


def alive(slot, text):
    """A third of the prompts is live, for each agent another one."""
    return (sum(map(ord, text)) + slot) % 3 == 0


@pytest.mark.parametrize("groups", [0, 2, 100])
def test_a_dead_group_makes_room_for_the_next_live_one(groups, monkeypatch):
    # Every completion has the same length, so that the tokens allow a number of groups.
    prepared = prepare(small(algorithm__min_output_tokens=LONGEST - 1, algorithm__temperature=0.1))
    cohort, env = prepared.cohort, prepared.env
    sizes = [cohort.agents[slot].hparams.group_size for slot in prepared.slots]
    budget = groups * LONGEST * max(sizes) + 1
    algorithm = cohort.settings.algorithm.replace(dynamic_sampling_tokens=budget)
    monkeypatch.setattr(cohort, "settings", cohort.settings.replace(algorithm=algorithm))
    scored, batches = scripted(prepared, alive, monkeypatch), []
    learn = cohort.learn

    def spy(given, *, stream):
        batches.extend(given)
        return learn(given, stream=stream)

    monkeypatch.setattr(cohort, "learn", spy)
    tallies, counts, first = [Tally() for _ in prepared.slots], (4, 2, 3), 6
    used = train_step(
        cohort, env, prepared.slots, starts_from(env, first, 4),
        stream=(0, 0), watch=Stopwatch(), tallies=tallies, prompts_per_agent=counts, first=first,
    )  # fmt: skip
    sequence = [prompt for step in range(first // 2, 60) for prompt in env.batch(step, 2)]
    most = 0
    for slot, size, count, batch, tally in zip(
        prepared.slots, sizes, counts, batches, tallies, strict=True
    ):
        mine = [group for group in scored if group.agent == slot]
        tokens = {g.prompt.text: sum(len(c.token_ids) for c in g.completions) for g in mine}
        assert set(tokens.values()) == {LONGEST * size}
        places, reached = one_after_another(
            sequence, count, lambda prompt, slot=slot: alive(slot, prompt.text), budget,
            lambda prompt, size=size: LONGEST * size,
        )  # fmt: skip
        most = max(most, reached)
        # All agents go through one sequence, in its order.
        assert [group.prompt for group in mine] == sequence[:reached]
        learned = [tuple(row.token_ids[~row.mask]) for row in batch.rows[::size]]
        assert learned == [prompt.token_ids for prompt in places]
        expected = [1.0, *[0.0] * (size - 1)]
        scale = np.std(expected, ddof=1) + 1e-4
        for place, prompt in enumerate(places):
            group = [row.advantage for row in batch.rows[place * size : (place + 1) * size]]
            wanted = (np.array(expected) - np.mean(expected)) / scale
            wanted = wanted * alive(slot, prompt.text)
            assert group == pytest.approx(wanted.tolist())
        spent = tally.metrics[0]
        assert tally.tokens == spent["tokens"] == LONGEST * size * reached
        assert tally.tokens - LONGEST * size * count <= budget
        assert (spent["resampled"], spent["rows"]) == (reached - count, size * count)
        dead = [not alive(slot, prompt.text) for prompt in sequence[:reached]]
        assert spent["zero_variance"] == pytest.approx(np.mean(dead))
        before = sum(alive(slot, prompt.text) for prompt in sequence[:count])
        after = sum(alive(slot, prompt.text) for prompt in places)
        assert spent["replaced"] == after - before
    assert used == most
    assert groups < 100 or all(tally.metrics[0]["replaced"] for tally in tallies)


@pytest.mark.parametrize("shards", [None, 3])
def test_the_next_step_begins_where_the_agent_that_read_most_has_stopped(shards, monkeypatch):
    config = small(
        algorithm__dynamic_sampling_tokens=10_000,
        engine__shards=shards,
        population__steps_per_round=2,
    )
    prepared = prepare(config)
    scored = scripted(prepared, alive, monkeypatch)
    tallies, starts = train_round(prepared)
    sequence = prepared.env.batch(0, starts)
    at = {
        slot: [sequence.index(group.prompt) for group in scored if group.agent == slot]
        for slot in prepared.slots
    }
    assert starts == 1 + max(place for places in at.values() for place in places)
    for slot, places in at.items():
        count = sum(m["resampled"] for m in tallies[slot].metrics)
        assert count > 0
        assert places == sorted(set(places))
    # Both steps: from 0 on, and from the same place for every agent.
    gaps = [[b for a, b in pairwise(p) if b > a + 1] for p in at.values()]
    seconds = {gap[0] for gap in gaps if gap}
    assert len(seconds) == 1


def test_prompts_that_are_all_dead_end_with_the_tokens(monkeypatch):
    prepared = prepare(small(algorithm__dynamic_sampling_tokens=200))
    scripted(prepared, lambda slot, text: False, monkeypatch)
    tallies = [Tally() for _ in prepared.slots]
    counts = [2] * len(tallies)
    train_step(
        prepared.cohort, prepared.env, prepared.slots, prepared.env.batch(0, 2),
        stream=(0, 0), watch=Stopwatch(), tallies=tallies, prompts_per_agent=counts,
    )  # fmt: skip
    for slot, tally in zip(prepared.slots, tallies, strict=True):
        metrics, size = tally.metrics[0], prepared.cohort.agents[slot].hparams.group_size
        assert metrics["replaced"] == 0
        assert metrics["zero_variance"] == 1
        assert metrics["rows"] == 2 * size
        assert 200 - 2 * size * LONGEST < metrics["resampled"] * size * LONGEST
        assert prepared.cohort.agents[slot].dead_steps == 1


@pytest.mark.slow
def test_a_resumed_run_replaces_the_same_groups(tmp_path):
    config = small(algorithm__dynamic_sampling_tokens=300, population__rounds=2)
    resumed = stopped_and_resumed(config, tmp_path / "resumed", ("evaluate", 1))
    straight = run(config, out=tmp_path / "straight")
    assert outcome(resumed) == outcome(straight)
    metrics = [agent.metrics for record in read_rounds(straight) for agent in record.agents]
    assert sum(one["replaced"] for one in metrics) > 0
    assert all(one["resampled"] >= one["replaced"] for one in metrics)


def test_experiences_are_joined_as_the_vocabulary_says():
    parts = [
        Experience((None,) * 2, np.array([[1.0], [2.0]]), {"set_aside": 1.0, "turns": 2.0}),
        Experience((None,) * 6, np.arange(6.0)[:, None], {"set_aside": 2.0, "turns": 4.0}),
    ]
    one = joined(parts)
    assert one.metrics == {"set_aside": 3.0, "turns": 3.5}
    assert len(one.trajectories) == 8
    assert one.rewards[:, 0].tolist() == [1.0, 2.0, *range(6)]
    assert zero_variance_groups(one.rewards, 2).tolist() == [False] * 4
