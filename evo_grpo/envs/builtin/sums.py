"""The task `sums`: two-digit additions, "12+07=" -> "019", for the model tiny-sums."""

from functools import cache

from evo_grpo.envs.data.tables import DatasetRow, LazyRows
from evo_grpo.envs.family import Family, arguments
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.rewards.functions import RewardFunction
from evo_grpo.envs.task import Task
from evo_grpo.errors import ConfigError
from evo_grpo.schema.group import Group, setting
from evo_grpo.seeding import generator
from evo_grpo.settings import EnvConfig

FAMILY = Family()


class Arguments(Group):
    """What `env.args` takes."""

    low: int = setting(0, "Least summand.", ge=0, le=99)
    high: int = setting(99, "Greatest summand, >= low.", ge=0, le=99)
    train_size: int | None = setting(
        None, "Rows to learn from; null takes all that the other splits leave."
    )
    validation_size: int | None = setting(
        None, "Rows for selection; null takes 5% of the pairs, at least one."
    )
    test_size: int | None = setting(
        None, "Rows of the final evaluation; null as for validation_size."
    )


def exact(completion: str, answer: str) -> float:
    """Return 1.0 when the completion is exactly the answer, else 0.0."""
    return float(completion == answer)


def digits(completion: str, answer: str) -> float:
    """Return the share of the answer's digits that occur in the completion, in any order.

    It can be exploited: the right digits in the wrong order get the full reward.
    """
    unmatched = list(completion)
    matches = 0
    for digit in answer:
        if digit in unmatched:
            unmatched.remove(digit)
            matches += 1
    return matches / len(answer)


def build(name: str, env: EnvConfig, seed: int) -> Task:
    """Build the task: every pair of summands once, divided among the splits by a seeded shuffle."""
    del name
    args = arguments(env.args, Arguments)
    low, high = args.low, args.high
    if low > high:
        raise ConfigError(f"env.args: expected low <= high, got low {low}, high {high}")
    pairs = (high - low + 1) ** 2
    held_out = max(1, pairs // 20)
    validation = held_out if args.validation_size is None else args.validation_size
    test = held_out if args.test_size is None else args.test_size
    train = pairs - validation - test if args.train_size is None else args.train_size
    if min(train, validation, test) < 1 or train + validation + test > pairs:
        raise ConfigError(
            f"env.args: summands from {low} to {high} make {pairs} pairs, expected at least one "
            "for each split and "
            f"no more than that together, got train {train}, validation {validation}, test {test}"
        )

    @cache
    def shuffled() -> list[DatasetRow]:
        order = [int(n) for n in generator(seed, "sums", low, high).permutation(pairs)]
        return [_row(low + n // (high - low + 1), low + n % (high - low + 1)) for n in order]

    return Task(
        name="sums",
        splits={
            "test": LazyRows(test, lambda: shuffled()[:test]),
            "validation": LazyRows(validation, lambda: shuffled()[test : test + validation]),
            "train": LazyRows(train, lambda: shuffled()[test + validation :][:train]),
        },
        rewards=(RewardFunction("exact", exact),),
        templates={None: Template("{question}")},
        max_output_tokens=4,  # three digits and the end token
    )


def _row(a: int, b: int) -> DatasetRow:
    return {"question": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}", "a": a, "b": b}
