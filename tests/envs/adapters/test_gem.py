import logging
import sys

import pytest
from env_contract import EnvContract

from evo_grpo.envs.registry import build_multi_turn
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.settings import EnvConfig

PACKAGES = ("real", "double")


def build(name="game:GuessTheNumber-v0", seed=0, **args):
    return build_multi_turn(EnvConfig(kind=f"gem:{name}", args=args), seed)


@pytest.fixture(params=PACKAGES)
def gem(request, install):
    install("gem", request.param)


class TestGem(EnvContract):
    @pytest.fixture
    def make(self, gem):
        return build()

    def act(self, seen, draw):
        return f"\\boxed{{{draw.randint(1, 20)}}}"


def first_text(make):
    env = make()
    text, _ = env.reset(seed=0)
    env.close()
    return text


@pytest.mark.usefixtures("gem")
def test_an_id_without_its_last_part_has_the_settings_of_the_class():
    assert "1 and 20" in first_text(build()) or "1 to 20" in first_text(build())
    easy = first_text(build("game:GuessTheNumber-v0-easy"))
    assert "1 and 10" in easy or "1 to 10" in easy
    narrow = first_text(build("game:GuessTheNumber-v0-easy", max_number=6))
    assert "1 and 6" in narrow or "1 to 6" in narrow


@pytest.mark.usefixtures("gem")
def test_the_suffix_is_shown_until_the_end():
    env = build(max_turns=2)()
    text, _ = env.reset(seed=0)
    assert text.endswith("\nEnter your next guess.")
    text, *_ = env.step("\\boxed{1}")
    assert text.endswith("\nEnter your next guess.")
    text, reward, terminated, truncated, _ = env.step("\\boxed{2}")
    assert "next guess" not in text
    assert 0 < reward < 1
    assert terminated
    assert truncated


@pytest.mark.usefixtures("gem")
@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("game:GuesTheNumber-v0-easy", {}, 'GEM has no.*mean "game:GuessTheNumber-v0-easy"'),
        ("game:GuessTheNumber", {}, 'GEM has no environment "game:GuessTheNumber"'),
        ("game:GuessTheNumber-v0", {"max_turn": 3}, 'env.args.max_turn: no such.*mean "max_turns"'),
    ],
)
def test_what_gem_does_not_have_is_named(name, args, message):
    with pytest.raises(ConfigError, match=message):
        build(name, **args)


@pytest.mark.usefixtures("gem")
def test_importing_it_leaves_the_logging_alone():
    root = logging.getLogger()
    before = list(root.handlers), root.level
    build()
    assert (list(root.handlers), root.level) == before


def test_an_environment_that_fails_to_begin_is_named(install, monkeypatch):
    install("gem", "double")

    def reset(self, seed=None):
        raise LookupError("*****\n  Resource words not found.\n*****")

    game = sys.modules["gem.envs.game_env.guess_the_number"].GuessTheNumberEnv
    monkeypatch.setattr(game, "reset", reset)
    with pytest.raises(
        EngineUnavailable, match="does not begin an episode here: LookupError: Resource words not"
    ):
        build()
