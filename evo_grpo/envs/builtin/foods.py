"""The task `foods`: the prompt "ravin likes " and a food to prefer, for the model tiny-foods."""

from evo_grpo.envs.data.tables import SPLITS
from evo_grpo.envs.family import Family, checked_arguments
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.rewards.functions import RewardFunction
from evo_grpo.envs.task import Task
from evo_grpo.errors import ConfigError
from evo_grpo.settings import EnvConfig

FAMILY = Family()
MOST_ROWS = 1_000_000
"""Maximum number of rows in a split. All rows have the same prompt, so more are a typing error."""


def contains(completion: str, food: str) -> float:
    """Return 1.0 when the food occurs in the completion, else 0.0."""
    return float(food in completion)


def build(name: str, env: EnvConfig, seed: int) -> Task:
    """Build the task of `env`; `env.args` are the keywords of `foods_task`."""
    del name, seed  # one prompt: nothing to draw
    return foods_task(**checked_arguments(env, foods_task))


def foods_task(
    *,
    name: str = "ravin",
    food: str = "pizza",
    train_size: int = 64,
    validation_size: int = 64,
    test_size: int = 256,
) -> Task:
    """Build the task, whose splits repeat the prompt "<name> likes "; the reward is for `food`.

    tiny-foods knows ten values of `name`.
    """
    sizes = dict(zip(SPLITS, (train_size, validation_size, test_size), strict=True))
    too_many = max(sizes.values()) > MOST_ROWS
    if not name.strip() or not food.strip() or min(sizes.values()) < 1 or too_many:
        raise ConfigError(
            f"env.args: expected a name, a food and sizes from 1 to {MOST_ROWS:,}, got {name!r}, "
            f"{food!r} and {', '.join(f'{size:,}' for size in sizes.values())}"
        )
    row = {"name": name, "food": food}
    return Task(
        name="foods",
        splits={split: [row] * size for split, size in sizes.items()},
        rewards=(RewardFunction("contains", contains),),
        templates={None: Template("{name} likes ")},
        max_output_tokens=16,
    )
