"""A step: who gets which prompts, what each samples and learns, and what is measured where."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from small_run import small

from evo_grpo.population.stats import Stopwatch, Tally
from evo_grpo.population.steps import RunWriter, starts_from, train, train_step
from evo_grpo.record.observer import Observer
from evo_grpo.training.assemble import prepare


def adapters(cohort):
    return {
        slot: [p.detach().clone() for p in cohort.slots.parameters(state.adapter)]
        for slot, state in cohort.agents.items()
    }


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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


@pytest.mark.parametrize("sizes", [(4, 4, 4), (2, 3, 5)])
def test_agents_take_the_first_prompts_of_the_common_list(sizes, monkeypatch):
    prepared, counts = prepare(small(seed=2)), (4, 1, 3)
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


def test_an_agent_with_fewer_prompts_samples_and_learns_as_if_alone():
    together, alone = prepare(small(seed=2)), prepare(small(seed=2))
    step(together, (4, 2, 3))
    tallies = [Tally()]
    train_step(
        alone.cohort,
        alone.env,
        alone.slots[1:2],
        alone.env.batch(0, 4)[:2],
        stream=(0, 0),
        watch=Stopwatch(),
        tallies=tallies,
    )
    mine, own = adapters(together.cohort)[1], adapters(alone.cohort)[1]
    # Other shapes round differently; the draws are the same.
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, own, strict=True))
    assert not equal(mine, adapters(prepare(small(seed=2)).cohort)[1])


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


@pytest.mark.parametrize("shards", [2, 3])
def test_each_shard_is_a_batch_of_its_own(shards, monkeypatch):
    prepared = prepare(small(engine__shards=shards))
    cohort, batches = prepared.cohort, []
    learn = cohort.learn

    def spy(given, *, stream):
        batches.append([batch.agent for batch in given])
        return learn(given, stream=stream)

    monkeypatch.setattr(cohort, "learn", spy)
    played = train(
        cohort, prepared.env, prepared.round_settings, prepared.slots, 0,
        watch=Stopwatch(), writer=RunWriter(), observer=Observer(), limit=None, past=(),
    )  # fmt: skip
    tallies, starts = played
    assert batches == {2: [[0, 1], [2]], 3: [[0], [1], [2]]}[shards]
    sizes = [cohort.agents[slot].hparams.group_size for slot in prepared.slots]
    counts = prepared.round_settings.prompts_of(sizes)[0]
    assert [t.completions for t in tallies.values()] == [
        g * p for g, p in zip(sizes, counts, strict=True)
    ]
    assert starts == max(counts)


def test_starts_are_handed_out_without_gaps():
    env = prepare(small()).env
    assert starts_from(env, 0, 2) + starts_from(env, 2, 3) == starts_from(env, 0, 5)
