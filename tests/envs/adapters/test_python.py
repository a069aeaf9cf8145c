import pytest
from env_contract import EnvContract

from evo_grpo.envs.registry import build_multi_turn
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.settings import EnvConfig

GAME = """
import random


class Higher:
    def __init__(self, high=9):
        self.high = high

    def reset(self, seed=None):
        draw = random.Random(seed)
        self.number = draw.randint(1, self.high)
        return f"A number from 1 to {self.high}?", {}

    def step(self, action):
        right = action == str(self.number)
        return ("" if right else "no"), float(right), right, False, {}

    def close(self):
        pass


def factory(high):
    return Higher(high)


def broken():
    class Broken(Higher):
        def reset(self, seed=None):
            raise OSError("no such board")
    return Broken()


def nothing():
    return 3
"""


def build(name="factory", **args):
    return build_multi_turn(EnvConfig(kind=f"python:games:{name}", args=args), 0)


@pytest.fixture(autouse=True)
def folder(write_module):
    write_module("games", GAME)


class TestPythonFactory(EnvContract):
    turns = 200

    @pytest.fixture
    def make(self):
        return build(high=4)

    def act(self, seen, draw):
        return str(draw.randint(1, 4))


def test_a_class_is_a_factory():
    assert build("Higher")().reset(seed=0)[0] == "A number from 1 to 9?"


@pytest.mark.parametrize(
    ("name", "args", "error", "message"),
    [
        ("", {}, ConfigError, 'env.kind: expected "module:function", .* is "my_game:Game"'),
        ("factory", {}, ConfigError, "is not called with none: missing a required arg.*'high'"),
        ("nothing", {}, ConfigError, "got int without reset and step"),
        ("broken", {}, EngineUnavailable, "does not begin an episode here: OSError: no such board"),
    ],
)
def test_what_is_no_environment_is_named(name, args, error, message):
    with pytest.raises(error, match=message):
        build(name, **args)
