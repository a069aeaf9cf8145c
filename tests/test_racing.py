"""Racing: only those near the border are looked at again, within the budget that was given."""

import numpy as np
import pytest
from small_run import small

from evo_grpo import racing
from evo_grpo.assemble import prepare
from evo_grpo.envs.protocol import Experience
from evo_grpo.evaluate import Evaluation, summarise

PROMPTS = 40


def evaluation(right):
    rewards = np.array([1.0] * right + [0.0] * (PROMPTS - right))
    return Evaluation(summarise(rewards, PROMPTS), Experience((), rewards[:, None]), rewards)


def test_who_is_near_the_border_is_undecided():
    results = {slot: evaluation(right) for slot, right in enumerate((39, 20, 19, 1))}
    assert racing.undecided(results, keep=2) == [1, 2]
    assert racing.undecided(results, keep=1) == [0, 1, 2], "the border runs between 39 and 20"
    assert racing.undecided(results, keep=4) == [0], "with room for all, who is the best counts"
    results[1] = evaluation(38)
    assert racing.undecided(results, keep=4) == [0, 1]
    broken = evaluation(0)
    results[0] = Evaluation(summarise(broken.rewards * np.nan, PROMPTS), broken.experience, broken)
    assert racing.undecided(results, keep=4) == [1]


def test_a_second_look_is_averaged_with_the_first_by_prompt():
    both = racing.merged(evaluation(20), evaluation(10), PROMPTS)
    expected = np.array([1.0] * 10 + [0.5] * 10 + [0.0] * 20)
    assert both.score.per_prompt == tuple(expected)
    assert both.score.mean == pytest.approx(expected.mean())
    assert both.score.se == pytest.approx(expected.std(ddof=1) / np.sqrt(PROMPTS))


@pytest.mark.parametrize(("extra", "looks"), [(0.0, []), (0.7, [2]), (2.0, [2, 2, 2])])
def test_looks_are_paid_from_the_budget(monkeypatch, extra, looks):
    prepared, seen = prepare(small()), []

    def spy(cohort, env, slots, prompts, *, samples, temperature, stream):
        seen.append((len(slots), stream))
        return [evaluation({0: 20, 1: 19, 2: 1}[slot]) for slot in slots]

    monkeypatch.setattr(racing, "evaluate", spy)
    monkeypatch.setattr(prepared.env, "prompts", lambda split, size: list(range(size)))
    results, tokens = racing.race(
        prepared.cohort,
        prepared.env,
        prepared.slots,
        prompts=PROMPTS,
        samples=1,
        temperature=1.0,
        extra=extra,
        keep=1,
        round=4,
    )
    assert len(results) == 3
    assert tokens == 0
    assert [n for n, _ in seen] == [3, *looks]
    assert len({stream for _, stream in seen}) == len(seen), "every look has draws of its own"
    assert seen[0][1] == ("evaluate", 4)


def test_tokens_of_all_looks_are_counted():
    prepared = prepare(small())
    one = racing.race(
        *(prepared.cohort, prepared.env, prepared.slots),
        **{"prompts": 6, "samples": 1, "temperature": 1.0, "keep": 1, "round": 0, "extra": 0.0},
    )
    # No agent has learned: all are equal, so all are looked at again.
    two = racing.race(
        *(prepared.cohort, prepared.env, prepared.slots),
        **{"prompts": 6, "samples": 1, "temperature": 1.0, "keep": 1, "round": 0, "extra": 1.0},
    )
    sampled = sum(result.experience.tokens for result in one[0])
    assert one[1] == sampled
    assert sampled < two[1] <= 3 * sampled
    assert all(len(result.rewards) == 12 for result in two[0])
