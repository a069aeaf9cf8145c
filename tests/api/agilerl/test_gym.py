"""ReasoningGym as AgileRL's pages spell it: positions, spaces, parameters without effect."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

import evo_grpo
from evo_grpo.api.agilerl.gym import HuggingFaceGym, ReasoningGym
from evo_grpo.errors import ConfigError

ROWS = [{"question": f"{a:02d}+07=", "answer": f"{a + 7:03d}"} for a in range(40)]


def exact(completion, answer):
    return float(completion == answer)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(Path(evo_grpo.__file__).parent / "assets" / "tiny-sums")


def make(tokenizer, *args, **settings):
    return ReasoningGym(ROWS[:30], ROWS[30:], tokenizer, exact, "{question}", *args, **settings)


def test_positions_and_spaces(tokenizer):
    env = make(tokenizer, 3, max_context_length=64, max_output_tokens=5)
    assert env.batch_size == 3
    observation, action = env.observation_space, env.action_space
    assert (observation.vocab_size, observation.max_tokens) == (len(tokenizer), 64)
    assert (action.vocab_size, action.max_tokens) == (len(tokenizer), 5)
    assert HuggingFaceGym is ReasoningGym


def test_it_is_the_environment_of_evo_grpo(tokenizer):
    ours = evo_grpo.ReasoningGym(
        ROWS[:30], ROWS[30:], tokenizer, exact, "{question}", batch_size=4, seed=5
    )
    theirs = make(tokenizer, 4, seed=5)
    assert ours.batch(3) == theirs.batch(3)
    assert ours.task == theirs.task


def test_a_step_has_at_least_one_prompt(tokenizer):
    with pytest.raises(ConfigError, match="batch_size: expected >= 1 prompt per step, got 0"):
        make(tokenizer, 0)
