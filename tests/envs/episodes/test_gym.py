import os
import time

import numpy as np
import pytest
from text_games import Broken, Echo, Endless, Says, play

from evo_grpo.envs.episodes.gym import MAX_FAILED_SEEDS, MultiTurnGym
from evo_grpo.envs.episodes.multi_turn import TokenObservationWrapper
from evo_grpo.errors import ConfigError, RewardAbortError, RunFailedError


@pytest.fixture
def gym_of(tokenizer):
    def make(factory=Echo, **settings):
        return MultiTurnGym(factory, tokenizer, **{"max_turns": 4, **settings})

    return make


def test_seeds_are_the_same_at_every_call_and_differ_between_splits(gym_of):
    gym, again = gym_of(seed=5), gym_of(seed=5)
    assert gym.batch(3, 4) == again.batch(3, 4)
    assert gym.batch(0, 4) + gym.batch(1, 4) == gym.batch(0, 8)
    assert gym.prompts("validation", 3) == gym.prompts("validation", 9)[:3]
    assert len(gym.prompts("test")) == 32
    seeds = [gym.batch(0, 50), gym.prompts("validation", 50), gym.prompts("test", 50)]
    assert len({seed for some in seeds for seed in some}) == 150
    assert all(0 <= seed < 2**31 for some in seeds for seed in some)
    assert gym_of(seed=6).batch(0, 4) != gym.batch(0, 4)


def test_episodes_of_all_policies_share_seeds_and_every_turn_is_one_call(gym_of, tokenizer):
    # Policy 1 gives up one turn early in its last episode.
    made = []

    class Watched(Echo):
        def __init__(self):
            super().__init__()
            made.append(self)

        def step(self, action):
            text, reward, terminated, truncated, info = super().step(action)
            return text, reward, terminated or action == "stop", truncated, info

    def words(policy, key, turn):
        return "stop" if (policy, key, turn) == (1, 3, 1) else "y" if key % 2 else "n"

    sampler = Says(tokenizer, [2, 2], words)
    first, second = play(gym_of(Watched), sampler, [11, 22])
    assert sampler.calls == [
        (0, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (1, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (2, [[0, 1, 2, 3], [0, 1, 2]]),
    ]
    assert sorted(env.seeds for env in made) == [[11]] * 4 + [[22]] * 4
    assert [t.prompt for t in first.trajectories] == [
        f"[user]{seed}?1[assistant]" for seed in (11, 11, 22, 22)
    ]
    assert first.rewards.tolist() == [[0.0], [3.0], [0.0], [3.0]]
    assert second.rewards.tolist() == [[0.0], [3.0], [0.0], [1.0]]
    assert [t.turns for t in second.trajectories] == [3, 3, 3, 2]
    assert first.metrics == {"dropped": 0.0, "turns": 3.0, "cut": 0.0}
    assert first.completions == 12
    assert first.tokens == sum(sum(t.mask) for t in first.trajectories)


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_an_episode_whose_environment_raises_is_dropped_and_the_rest_goes_on(
    gym_of, tokenizer, turn
):
    gym = gym_of(lambda: Broken(lambda seed: seed == 2, turn))
    mine, other = play(gym, Says(tokenizer, [2, 2]), [1, 2])
    for experience in (mine, other):
        assert [t.end for t in experience.trajectories] == ["terminated"] * 2 + ["error"] * 2
        assert experience.trajectories[2].error == "OSError: no socket"
        assert np.isnan(experience.rewards[:, 0]).tolist() == [False, False, True, True]
        assert experience.metrics["dropped"] == 2.0
        assert experience.metrics["turns"] == 3.0


def test_an_environment_that_raised_is_closed_and_not_used_again(gym_of, tokenizer):
    made = []

    def factory():
        made.append(Broken(lambda seed: seed == 2))
        return made[-1]

    gym = gym_of(factory)
    play(gym, Says(tokenizer, [1]), [1, 2])
    broken = [env for env in made if env.seeds == [2]]
    assert [env.closed for env in broken] == [1]
    play(gym, Says(tokenizer, [1]), [3, 4])
    assert broken[0].seeds == [2]
    gym.close()
    assert all(env.closed == 1 for env in made)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("__init__", r"env_factory: it left the working folder at .*; change it in a with"),
        ("reset", r"'Moves', episode of seed 7, turn 0, .*: it left the working folder at"),
        ("step", r"'Moves', episode of seed 7, turn 1, .*: it left the working folder at"),
    ],
)
def test_what_an_environment_leaves_changed_is_named_and_put_back(
    gym_of, tokenizer, tmp_path, method, message
):
    def moved(self, *args, **kwargs):
        os.chdir(tmp_path)
        return getattr(Echo, method)(self, *args, **kwargs)

    before = os.getcwd()
    moves = type("Moves", (Echo,), {method: moved})
    with pytest.raises(RewardAbortError, match=message):
        play(gym_of(moves), Says(tokenizer, [1]), [7])
    assert os.getcwd() == before


class Silent(Echo):
    def reset(self, seed=None):
        return "", {}


@pytest.mark.parametrize(
    ("env", "message"), [(Broken, ".*: OSError: no soc"), (Silent, ".*'' has no token")]
)
def test_all_episodes_dropped_is_a_failure_that_names_the_reason(gym_of, tokenizer, env, message):
    gym = gym_of(env, apply_chat_template=False)
    with pytest.raises(RunFailedError, match=f"{env.__name__!r}: all 32 episodes{message}"):
        play(gym, Says(tokenizer, [2]), range(MAX_FAILED_SEEDS))


def test_a_prompt_too_long_costs_its_episode_alone(gym_of, tokenizer):
    gym = gym_of(max_output_tokens=2)
    gym.limit_context(26)  # "[user]1000?1[assistant]" has 23 tokens, and ends after one turn
    (mine,) = play(gym, Says(tokenizer, [1]), [1000, 10**9])
    assert [t.end for t in mine.trajectories] == ["context", "error"]
    assert mine.trajectories[1].error.startswith("PromptTooLongError: Echo.reset")


@pytest.mark.parametrize("own", [None, 60])
def test_a_gym_of_two_models_ends_episodes_where_the_second_one_does(gym_of, tokenizer, own):
    gym = gym_of(max_output_tokens=2, max_model_len=own)
    gym.limit_context(26)
    play(gym, Says(tokenizer, [1]), [1000])
    gym.limit_context(1000)
    both = play(gym, Says(tokenizer, [1]), [1000, 1000])[0].trajectories  # one idle, one new
    assert both[0].turns == both[1].turns > 1
    assert {episode.max_model_len for episode in (gym.take(), gym.take())} == {own or 1000}


def test_few_environments_play_the_same_episodes_in_waves(gym_of, tokenizer):
    def words(policy, key, turn):
        return "y" if (policy + key + turn) % 3 else "no"

    made = []

    def counted():
        made.append(Echo())
        return made[-1]

    every = play(gym_of(), Says(tokenizer, [3, 2], words), [4, 5])
    waves = play(gym_of(counted, max_environments=2), Says(tokenizer, [3, 2], words), [4, 5])
    assert len(made) == 2
    for one, other in zip(every, waves, strict=True):
        assert one.trajectories == other.trajectories
        assert one.rewards.tolist() == other.rewards.tolist()


def test_one_wrapper_alone_plays_one_episode_after_the_other(tokenizer):
    env = Broken(lambda seed: seed == 6)
    gym = MultiTurnGym.of(TokenObservationWrapper(env, tokenizer, 4))
    (mine,) = play(gym, Says(tokenizer, [1]), [5, 6, 7])
    assert env.seeds == [5, 6, 7]
    assert [bool(t.error) for t in mine.trajectories] == [False, True, False]
    assert env.closed == 0


def test_settings_come_from_the_wrapper_and_max_turns_is_the_lower_of_two(tokenizer):
    def factory():
        return TokenObservationWrapper(Endless(), tokenizer, 5, max_output_tokens=7)

    gym = MultiTurnGym(factory)
    assert gym.tokenizer is tokenizer
    assert (gym.max_output_tokens, gym.max_turns, gym.name) == (7, 5, "Endless")
    assert MultiTurnGym(factory, max_turns=3).max_turns == 3
    assert MultiTurnGym(factory, max_turns=9).max_turns == 5


def raising():
    raise OSError("no licence")


def one_and_the_same(env=Echo()):  # noqa: B008 -- the mistake that is tested
    return env


@pytest.mark.parametrize(
    ("factory", "settings", "message"),
    [
        (raising, {}, "env_factory: it raised OSError: no licence"),
        (object, {}, r"an environment with reset\(seed\) and step\(action\), got object"),
        ("Echo", {}, "env_factory: it raised TypeError: 'str' object is not callable; expected an"),
        (Echo, {"max_turns": None}, "with tokenizer= and max_turns=, .* got Echo without"),
        (Echo, {"max_turns": 0}, "max_turns: expected an integer >= 1, got 0"),
        (Echo, {"batch_size": 0}, "batch_size: expected an integer >= 1, got 0"),
        (Echo, {"max_environments": 0}, "max_environments: expected an integer"),
    ],
)
def test_a_wrong_factory_or_setting_is_named(gym_of, factory, settings, message):
    with pytest.raises(ConfigError, match=message):
        gym_of(factory, **settings)


def test_a_factory_that_returns_the_same_environment_twice_is_refused(gym_of, tokenizer):
    with pytest.raises(ConfigError, match="expected step >= 0, size >= 1, got step -1, size 4"):
        gym_of().batch(-1)
    with pytest.raises(ConfigError, match="a new environment at each call, got the same Echo"):
        play(gym_of(one_and_the_same), Says(tokenizer, [2]), [1])


class Slow(Echo):
    def step(self, action):
        time.sleep(30)


def test_a_step_that_takes_too_long_is_named(gym_of, tokenizer):
    gym = gym_of(Slow, reward_timeout=0.3)
    with pytest.raises(RewardAbortError, match=r"environment 'Slow', episode of seed 11, turn 1, "):
        play(gym, Says(tokenizer, [2]), [11])


class Fatal(BaseException):
    def __str__(self):
        raise Fatal


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (Fatal(), "Fatal, whose __str__ raised Fatal"),
        (SystemExit(3), "SystemExit: 3"),
        (ValueError("m" * 10_000_000), "ValueError: mm"),
    ],
)
def test_whatever_an_environment_raises_loses_its_episode(gym_of, tokenizer, error, kept):
    def broken():
        made = Broken(lambda seed: seed == 11)
        made.error = error
        return made

    (experience,) = play(gym_of(broken), Says(tokenizer, [1]), [11, 22])
    first, second = experience.trajectories
    assert first.error.startswith(kept)
    assert len(first.error) <= 300
    assert not second.error
