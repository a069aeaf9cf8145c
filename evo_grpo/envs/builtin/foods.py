"""The task `foods`: the prompt "ravin likes " and a food to prefer, for the model tiny-foods."""

from typing import Annotated

from evo_grpo.envs.data.tables import SPLITS
from evo_grpo.envs.family import Family, arguments
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.rewards.functions import RewardFunction
from evo_grpo.envs.task import Task
from evo_grpo.schema.group import Group, only, setting
from evo_grpo.settings import EnvConfig

FAMILY = Family()
Text = Annotated[
    str, only(lambda value: isinstance(value, str) and value.strip(), "a string that is not blank")
]
MOST_ROWS = 1_000_000
"""Maximum number of rows in a split. All rows have the same prompt, so more are a typing error."""


class Arguments(Group):
    """What `env.args` takes."""

    name: Text = setting("ravin", "Who likes the food; tiny-foods knows ten names.")
    food: Text = setting("pizza", "The food that is rewarded.")
    train_size: int = setting(64, "Rows to learn from.", ge=1, le=MOST_ROWS)
    validation_size: int = setting(64, "Rows for selection.", ge=1, le=MOST_ROWS)
    test_size: int = setting(256, "Rows of the final evaluation.", ge=1, le=MOST_ROWS)


def contains(completion: str, food: str) -> float:
    """Return 1.0 when the food occurs in the completion, else 0.0."""
    return float(food in completion)


def build(name: str, env: EnvConfig, seed: int) -> Task:
    """Build the task, whose splits repeat the prompt "<name> likes "; the reward is for `food`."""
    del name, seed  # one prompt: nothing to draw
    args = arguments(env.args, Arguments)
    row = {"name": args.name, "food": args.food}
    return Task(
        name="foods",
        splits={split: [row] * getattr(args, f"{split}_size") for split in SPLITS},
        rewards=(RewardFunction("contains", contains),),
        templates={None: Template("{name} likes ")},
        max_output_tokens=16,
    )
