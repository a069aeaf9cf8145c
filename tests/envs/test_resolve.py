"""The environment of a configuration, once its tokenizer is known."""

from evo_grpo.envs.resolve import environment_of
from evo_grpo.settings import EnvConfig

GAME = """
class Game:
    def reset(self, seed=None):
        return "?", {}

    def step(self, action):
        return "", 1.0, True, False, {}
"""


def test_episodes_are_played_as_the_configuration_says(write_module, tokenizer):
    write_module("resolved_game", GAME)
    config = EnvConfig(kind="python:resolved_game:Game", max_turns=3, reward_timeout=7.0)
    env = environment_of(config, 0, 2, 5)(tokenizer)
    assert (env.name, env.max_turns, env.reward_timeout) == (config.kind, 3, 7.0)
    assert (env.batch_size, env.max_output_tokens) == (2, 5)


def test_rows_are_scored_as_the_configuration_says(tokenizer):
    env = environment_of(EnvConfig(kind="sums", reward_timeout=7.0), 0, 2, 5)(tokenizer)
    assert (env.name, env.batch_size, env.task.calls.reward_timeout) == ("sums", 2, 7.0)
    assert env.batch(0) == environment_of(EnvConfig(kind="sums"), 0, 2, 5)(tokenizer).batch(0)
