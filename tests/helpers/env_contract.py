"""What every multi-turn environment keeps, whoever wrote it. An adapter supplies `make`, and how to
act, and inherits the tests.
"""

import itertools
import math
import random

import numpy as np


class EnvContract:
    """Subclass as `Test...`, give a fixture `make` (a factory) and, where it matters, `act`."""

    turns = 30  # an episode that is played by `act` ends within these

    def act(self, seen, draw):
        """The next action, from all that was seen so far and a `random.Random`."""
        return "[4]"

    def play(self, env, seed, mine=7):
        """An episode as a list: what reset returned, then what each step returned."""
        return list(self.steps(env, seed, mine))

    def steps(self, env, seed, mine=7):
        draw = random.Random(mine)
        begun = env.reset(seed=seed)
        seen = begun[0]
        yield begun
        for _ in range(self.turns):
            step = env.step(self.act(seen, draw))
            seen = f"{seen}\n{step[0]}"
            yield step
            if step[2] or step[3]:
                return

    def test_reset_follows_from_the_seed(self, make):
        env = make()
        first = env.reset(seed=3)
        assert isinstance(first[0], str)
        assert first[0]
        assert isinstance(first[1], dict)
        env.reset(seed=4)
        assert env.reset(seed=3) == first
        other = make()
        assert other.reset(seed=3) == first
        env.close()
        other.close()

    def test_an_episode_follows_from_the_seed_and_the_actions(self, make):
        env = make()
        first = self.play(env, 5)
        self.play(env, 6)
        assert self.play(env, 5) == first
        random.seed(1)
        other = make()
        assert self.play(other, 5) == first
        env.close()
        other.close()

    def test_seeds_make_different_episodes(self, make):
        env = make()
        episodes = {str(self.play(env, seed)) for seed in range(12)}
        assert len(episodes) > 1
        env.close()

    def test_a_seed_may_be_large_or_missing(self, make):
        env = make()
        assert env.reset(seed=2**62 + 1)[0]
        assert env.reset()[0]
        assert env.reset(seed=None)[0]
        env.close()

    def test_a_step_has_the_five_types(self, make):
        env = make()
        for text, reward, terminated, truncated, info in self.play(env, 0)[1:]:
            assert type(text) is str
            assert type(reward) is float
            assert math.isfinite(reward)
            assert type(terminated) is bool
            assert type(truncated) is bool
            assert type(info) is dict
        env.close()

    def test_an_episode_ends(self, make):
        env = make()
        for seed in range(5):
            *_, (_, _, terminated, truncated, _) = self.play(env, seed)
            assert terminated or truncated
        env.close()

    def test_two_instances_do_not_know_each_other(self, make):
        one, two = make(), make()
        alone = self.play(one, 1), self.play(two, 2, mine=8)
        together = list(itertools.zip_longest(self.steps(one, 1), self.steps(two, 2, mine=8)))
        for episode, side in zip(alone, zip(*together, strict=True), strict=True):
            assert [step for step in side if step is not None] == episode
        one.close()
        two.close()

    def test_the_global_generators_stay_as_they_were(self, make):
        def state():
            return random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

        before = state()
        env = make()
        assert state() == before
        self.play(env, 2)
        assert state() == before
        env.close()
        assert state() == before

    def test_close_may_come_early_and_twice(self, make):
        make().close()
        env = make()
        env.reset(seed=0)
        env.close()
        env.close()
