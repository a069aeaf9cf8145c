import random

import numpy as np
import pytest
from env_contract import EnvContract

from evo_grpo.envs.adapters.textarena import random_opponent
from evo_grpo.envs.registry import build_multi_turn
from evo_grpo.errors import ConfigError
from evo_grpo.settings import EnvConfig

core = pytest.importorskip("textarena.core")
tictactoe = pytest.importorskip("textarena.envs.TicTacToe.env")


def build(name="TicTacToe-v0", seed=0, **args):
    return build_multi_turn(EnvConfig(kind=f"textarena:{name}", args=args), seed)


class TestTextArena(EnvContract):
    @pytest.fixture
    def make(self):
        return build()

    def act(self, seen, draw):
        return random_opponent(seen, np.random.default_rng(draw.randrange(2**32)))


class TestSecondSide(TestTextArena):
    @pytest.fixture
    def make(self):
        return build(player=1)


OPPONENTS = """
def lowest(seen, draw):
    line = [line for line in seen.splitlines() if "Available Moves" in line][-1]
    return line.split("'")[1]

def silent(seen, draw):
    return "I pass"
"""


def play(env, moves):
    env.reset(seed=0)
    for move in moves:
        step = env.step(move)
        if step[2] or step[3]:
            return step
    raise AssertionError("the game goes on")


def test_the_reward_is_the_games_own_and_comes_at_the_end(write_module):
    write_module("opponents", OPPONENTS)
    env = build(opponent="opponents:lowest")()
    # 3, 4 and 5 are three in a row on a board of three by three, and on a strip of nine.
    _, reward, terminated, truncated, info = play(env, ["[3]", "[4]", "[5]"])
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["rewards"] == {0: 1, 1: -1}


def test_an_observation_is_what_is_new(write_module):
    write_module("opponents", OPPONENTS)
    env = build(opponent="opponents:lowest")()
    text, info = env.reset(seed=0)
    assert "You are Player 0" in text
    assert info == {"player": 0, "players": 2}
    text, reward, *_ = env.step("[4]")
    assert reward == 0.0
    assert "You are Player 0" not in text
    assert "[Player 0] [4]" not in text
    assert "[Player 1] [0]" in text
    env.reset(seed=0)
    text, *_ = env.step("4")  # brackets that are missing are mended, as textarena does
    assert "[Player 1] [0]" in text


def test_the_agent_loses_by_a_move_that_is_not_allowed():
    env = build()()
    env.reset(seed=0)
    text, reward, terminated, truncated, _ = env.step("[99]")
    assert "invalid move" in text
    assert (reward, terminated, truncated) == (0.0, False, False)
    _, reward, terminated, _, info = env.step("[99]")
    assert (reward, terminated) == (-1.0, True)
    assert info["invalid_move"]


def test_an_opponent_that_breaks_the_rules_gives_the_agent_nothing(write_module):
    write_module("opponents", OPPONENTS)
    env = build(opponent="opponents:silent")()
    _, reward, terminated, truncated, info = play(env, ["[4]"])
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["opponents_failed"] == [1]


def test_what_a_game_keeps_over_a_reset_does_not_reach_the_next_episode(monkeypatch):
    class Kept(tictactoe.TicTacToeEnv):
        def __init__(self):
            super().__init__()
            self.deck = list(range(6))

        def reset(self, num_players, seed=None):
            super().reset(num_players, seed)
            random.shuffle(self.deck)  # in place, as KuhnPoker does
            dealt = f"Your cards: {self.deck}"
            self.state.add_observation(dealt, core.ObservationType.GAME_MESSAGE)

    monkeypatch.setattr(tictactoe, "TicTacToeEnv", Kept)
    before = random.getstate()
    env = build()()
    first = env.reset(seed=1)
    assert "Your cards" in first[0]
    assert env.reset(seed=1) == first
    assert random.getstate() == before


def test_the_random_opponent_takes_a_move_that_is_listed_last():
    draw = np.random.default_rng(0)
    seen = "[GAME] as in '[9]'\nAvailable Moves: '[1]', '[2]'\nAvailable Moves: '[2]', '[3]'"
    assert {random_opponent(seen, draw) for _ in range(50)} == {"[2]", "[3]"}
    assert random_opponent("[GAME] [Player 1] say [up]", draw) == "[up]"
    assert random_opponent("[GAME] anything", draw) == ""


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("TikTacToe-v0", {}, 'TextArena has no environment "TikTacToe-v0".*TicTacToe-v0"'),
        ("TicTacToe-v0", {"playr": 1}, 'env.args.playr: no such.*mean "player"'),
        ("TicTacToe-v0", {"player": 2}, "is played by 2, expected a side from 0 to 1, got 2"),
        ("TicTacToe-v0", {"player": -1}, "env.args.player: expected an integer >= 0"),
        ("TicTacToe-v0", {"players": 3}, "is not played by 3: The number of players has to be 2"),
        ("TicTacToe-v0", {"opponent": 3}, 'env.args.opponent: expected "module:function"'),
    ],
)
def test_what_does_not_fit_is_named(name, args, message):
    with pytest.raises(ConfigError, match=message):
        build(name, **args)
