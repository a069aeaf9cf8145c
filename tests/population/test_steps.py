"""A step: who gets which prompts, what each samples and learns, and what is measured where."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from played_rounds import adapters, train_round
from slow_step import slow_step
from small_run import small

from evo_grpo.errors import ConfigError
from evo_grpo.learn.rows import Row
from evo_grpo.population.rollouts import starts_from
from evo_grpo.population.stats import Stopwatch, Tally
from evo_grpo.population.steps import train_step
from evo_grpo.training.assemble import prepare


def step(prepared, prompts_per_agent=None, number=0):
    tallies, watch = [Tally() for _ in prepared.slots], Stopwatch()
    train_step(
        prepared.cohort,
        prepared.env,
        prepared.slots,
        prepared.env.batch(number, 4),
        stream=(0, number),
        watch=watch,
        tallies=tallies,
        prompts_per_agent=prompts_per_agent,
    )
    return tallies, watch


def test_agents_take_the_first_prompts_of_the_common_list(monkeypatch):
    prepared, counts, sizes = prepare(small(seed=2)), (4, 1, 3), (2, 3, 5)
    cohort, asked, learned = prepared.cohort, [], []
    for slot, size in zip(prepared.slots, sizes, strict=True):
        cohort.set_hparams(slot, cohort.agents[slot].hparams.replace(group_size=size))
    rollout, learn = cohort.engine.rollout, cohort.learn

    def spy_rollout(requests):
        asked.append([r.prompts for r in requests])
        return rollout(requests)

    def spy_learn(batches, *, stream):
        learned.extend(batches)
        return learn(batches, stream=stream)

    monkeypatch.setattr(cohort.engine, "rollout", spy_rollout)
    monkeypatch.setattr(cohort, "learn", spy_learn)
    common = prepared.env.batch(0, 4)
    tallies, _ = step(prepared, counts)
    # One generation call for all.
    assert asked == [[common[:count] for count in counts]]
    for tally, batch, count, size in zip(tallies, learned, counts, sizes, strict=True):
        assert len(batch.rows) == tally.completions == count * size
        assert tally.metrics[0]["rows"] == count * size
        assert tally.tokens == sum(row.generated for row in batch.rows)
        # Sample completions are the group of the first prompt.
        assert [t.prompt for t, _ in tally.samples] == [common[0].text] * size
        assert tally.metrics[0]["reward"] <= 1.0
        # Every group's advantages are centred: groups were cut where they belong.
        advantages = np.array([row.advantage for row in batch.rows]).reshape(count, size)
        assert np.allclose(advantages.sum(axis=1), 0.0, atol=1e-6)
        prompts = [tuple(row.token_ids[~row.mask]) for row in batch.rows[::size]]
        assert prompts == [prompt.token_ids for prompt in common[:count]]


def test_each_stage_of_a_step_is_measured_where_it_happens(monkeypatch):
    class Phases(Stopwatch):
        now = None

        @contextmanager
        def phase(self, name):
            assert self.now is None
            self.now = name
            with super().phase(name):
                yield
            self.now = None

    prepared, watch, seen = prepare(small()), Phases(), []

    def noting(what, fn):
        def wrapped(*args, **kwargs):
            seen.append((what, watch.now))
            return fn(*args, **kwargs)

        return wrapped

    cohort, env = prepared.cohort, prepared.env
    monkeypatch.setattr(cohort.engine, "rollout", noting("rollout", cohort.engine.rollout))
    monkeypatch.setattr(env, "judge", noting("score", env.judge))
    monkeypatch.setattr(cohort, "learn", noting("learn", cohort.learn))
    tallies = [Tally() for _ in prepared.slots]
    prompts = env.batch(0, 2)
    train_step(cohort, env, prepared.slots, prompts, stream=(0, 0), watch=watch, tallies=tallies)
    assert seen == [("rollout", "generate"), ("score", "reward"), ("learn", "learn")]
    assert set(watch.seconds) == {"generate", "reward", "learn"}
    assert all(seconds > 0 for seconds in watch.seconds.values())


def test_each_shard_is_a_batch_of_its_own(monkeypatch):
    prepared = prepare(small(engine__shards=2))
    cohort, batches = prepared.cohort, []
    learn = cohort.learn

    def spy(given, *, stream):
        batches.append([batch.agent for batch in given])
        return learn(given, stream=stream)

    monkeypatch.setattr(cohort, "learn", spy)
    played = train_round(prepared)
    tallies, starts = played
    assert batches == [[0, 1], [2]]
    sizes = [cohort.agents[slot].hparams.group_size for slot in prepared.slots]
    counts = prepared.round_settings.prompts_of(sizes)[0]
    assert [t.completions for t in tallies.values()] == [
        g * p for g, p in zip(sizes, counts, strict=True)
    ]
    assert starts == max(counts)


def test_starts_are_handed_out_without_gaps():
    env = prepare(small()).env
    assert starts_from(env, 0, 2) + starts_from(env, 2, 3) == starts_from(env, 0, 5)


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        ("grpo", {}),
        ("dapo", {"mask_truncated_completions": True}),
        ("grpo", {"overlong_buffer": 2, "overlong_penalty": 0.7}),
        ("dapo", {"mask_truncated_completions": True, "overlong_buffer": 3}),
    ],
    ids=["off", "truncated", "overlong", "both"],
)
def test_a_step_that_shapes_long_completions_equals_one_on_paper(loss, given, monkeypatch):
    algorithm = {"max_output_tokens": 5, "temperature": 5.0, "update_epochs": 1, **given}
    changes = {f"algorithm__{name}": value for name, value in algorithm.items()}
    alone = {"population__size": 1, "evolve__selection": "none", "population__sizes": None}
    config = small(algorithm__loss_type=loss, **alone, **changes)
    prepared, on_paper = prepare(config), prepare(config)
    experiences, begin = [], prepared.cohort.begin

    def judge(groups):
        texts = [one.text for group in groups for one in group.completions]
        scores = [[sum(map(ord, text)) % 7 / 7] for text in texts]
        return np.array(scores), [False] * len(groups), {}

    monkeypatch.setattr(prepared.env, "judge", judge)

    def spy(*args):
        play = begin(*args)
        ended = play.experiences
        play.experiences = lambda: experiences.append(ended()) or experiences[-1]
        return play

    monkeypatch.setattr(prepared.cohort, "begin", spy)
    ((tally,), _) = step(prepared)
    ((experience,),) = experiences
    ended = [t.ended for t in experience.trajectories]
    assert 0 < sum(ended) < len(ended), "some completions are cut off, and some are not"

    rewards = experience.rewards[:, 0].copy()
    if "overlong_buffer" in given:
        buffer, most = given["overlong_buffer"], given.get("overlong_penalty", 1.0)
        for number, one in enumerate(experience.trajectories):
            rewards[number] -= most * min(1, max(0, one.sampled - (5 - buffer)) / buffer)
    groups = [group - group.mean() for group in rewards.reshape(4, -1)]
    advantages = np.concatenate([group / (group.std(ddof=1) + 1e-4) for group in groups])
    rows = [
        Row(np.array(t.token_ids), np.array(t.mask), float(advantage))
        for t, advantage in zip(experience.trajectories, advantages, strict=True)
        if t.ended or "mask_truncated_completions" not in given
    ]
    cohort = on_paper.cohort
    settings = cohort.settings.algorithm
    expected, means = slow_step(cohort, rows, settings.hparams(), settings.loss(5))
    for mine, theirs in zip(adapters(prepared.cohort)[0], expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)
    metrics = tally.metrics[0]
    assert [metrics["loss"], metrics["grad_norm"]] == pytest.approx(means, rel=1e-4, abs=1e-6)
    assert metrics["rows"] == len(rows)
    assert metrics["reward"] == pytest.approx(experience.rewards.mean())
    assert ("overlong_penalty" in metrics) == ("overlong_buffer" in given)


def test_a_buffer_longer_than_the_completions_of_the_task_is_refused():
    assert prepare(small(algorithm__overlong_buffer=4))  # the longest completion of the task
    with pytest.raises(ConfigError, match=r"overlong_buffer: expected at most the 4 .*, got 5"):
        prepare(small(algorithm__overlong_buffer=5))
    with pytest.raises(ConfigError, match=r"algorithm.overlong_buffer: expected at most max_out"):
        small(algorithm__max_output_tokens=9, algorithm__overlong_buffer=10)
