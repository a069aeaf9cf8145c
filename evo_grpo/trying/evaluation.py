"""evaluate_adapter(adapter, config): the mean reward of an adapter, and of its base beside it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from evo_grpo import settings as configuration
from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.evaluate import evaluate
from evo_grpo.evolve.compare import compare
from evo_grpo.model.lora.configs import read_config
from evo_grpo.model.lora.files import CONFIG as ADAPTER_CONFIG
from evo_grpo.record.choice import choose_of
from evo_grpo.record.folder import is_run
from evo_grpo.settings import RunConfig
from evo_grpo.trying.policy import adapter_of, config_of, loaded
from evo_grpo.types import Score
from evo_grpo.validation import whole

LEVEL = 0.95
"""Of the interval."""
_OBJECTS = "so its task is not known here; give a configuration of it"
JudgedOn = Literal["validation", "test"]


@dataclass(frozen=True)
class Result:
    """A mean reward over the prompts of a split.

    Attributes:
        mean: It.
        se: Its standard error over prompts, NaN from a single sample.
        n: Prompts.
    """

    mean: float
    se: float
    n: int

    @classmethod
    def of(cls, score: Score) -> Result:
        """Return a score without its single prompts."""
        return cls(score.mean, score.se, score.n)


@dataclass(frozen=True)
class Judged:
    """An adapter on a split of a task.

    Attributes:
        adapter: Its folder, or the agent of a run in words.
        task: What it was judged in.
        split: On which prompts.
        samples: Completions, or episodes, of each.
        temperature: At which they were drawn.
        own: The adapter's mean reward.
        base: That of the base with the same draws, None where it was not asked for.
        gain: The first minus the second, over the prompts that both answered.
        gain_se: Paired standard error of it, NaN from fewer than two prompts.
        interval: Where it lies with a probability of `LEVEL`, by Student's t over prompts.
    """

    adapter: str
    task: str
    split: str
    samples: int
    temperature: float
    own: Result
    base: Result | None = None
    gain: float | None = None
    gain_se: float | None = None
    interval: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it: numbers that are not finite are None."""
        return {"level": LEVEL, **_finite(asdict(self))}


def evaluate_adapter(
    adapter: str | Path,
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    split: JudgedOn = "test",
    prompts: int | None = None,
    base: bool = True,
) -> Judged:
    """Judge an adapter on a task as a run judges its winner: same prompts, samples and draws.

    Args:
        adapter: A PEFT folder over the base of the configuration, such as an export; or a run
            folder, of which the winner is judged.
        config: What it is judged on: a `RunConfig`, the path of a YAML file, or a mapping as in
            such a file. None takes that of the run.
        split: "test" repeats what a run ends with, "validation" the comparison of its finalists.
        prompts: How many; None takes as many as the run does.
        base: Whether the base answers too, with the same draws.

    Raises:
        CheckpointError: It is neither a PEFT folder nor a run with a finished round, or a file was
            changed.
        ConfigError: The adapter does not fit the base, or there is no configuration.
        EvoGrpoError: The base or the task cannot be loaded.
    """
    if split not in ("validation", "test"):
        raise ConfigError(f"split: expected validation or test, got {split!r}")
    if prompts is not None:
        whole(1).check("prompts", prompts)
    name, folder, run = _found(Path(adapter), config)
    fitness = run.evolve.fitness
    # On validation the draws of the final comparison; its samples, where it has any.
    samples = fitness.test_samples if split == "test" else fitness.final_samples or fitness.samples
    count = prompts or (fitness.test_prompts if split == "test" else fitness.prompts)
    with loaded(run, folder, with_env=True) as policy:
        assert policy.env is not None, "it was asked for"
        # The base first, as at the end of a run: the same batch gives the same bits.
        *bases, own = (
            result.score
            for result in evaluate(
                policy.cohort,
                policy.env,
                [*([None] if base else []), policy.slot],
                policy.env.prompts(split, count),
                samples=samples,
                temperature=fitness.temperature,
                stream=("test",) if split == "test" else ("final",),
            )
        )
        task = policy.env.name
    judged = Judged(name, task, split, samples, fitness.temperature, Result.of(own))
    if not bases:
        return judged
    (other,) = bases
    ahead = compare(own, other)
    # As a run has it, where both answered all prompts: the same number, rounded otherwise.
    whole_split = ahead.prompts == own.n == other.n
    gain = own.mean - other.mean if whole_split else ahead.difference
    return replace(
        judged,
        base=Result.of(other),
        gain=gain,
        gain_se=ahead.error,
        interval=interval(gain, ahead.error, ahead.prompts),
    )


def interval(mean: float, error: float, count: int) -> tuple[float, float]:
    """Return where a mean lies with a probability of `LEVEL`, by Student's t.

    Args:
        mean: Of independent values.
        error: Its standard error.
        count: Number of values.

    Returns:
        Both ends; NaN from fewer than two values.
    """
    if count < 2:
        return math.nan, math.nan
    reach = error * student(0.5 + LEVEL / 2, count - 1)
    return mean - reach, mean + reach


def student(p: float, degrees: int) -> float:
    """Return the p-quantile of Student's t; to 0.2% from three degrees of freedom on at 0.975.

    Exact for one and two degrees, above by the expansion of Abramowitz and Stegun, 26.7.5.

    Args:
        p: In (0, 1).
        degrees: Of freedom, >= 1.
    """
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def _found(
    adapter: Path, config: RunConfig | str | Path | Mapping[str, Any] | None
) -> tuple[str, Path, RunConfig]:
    """Return what is judged in words, its PEFT folder, and what it is judged on."""
    given = None if config is None else _config(config)
    if is_run(adapter):
        choice = choose_of(adapter)
        run = config_of(choice, _OBJECTS) if given is None else given
        return f"{choice.title} of {adapter}", adapter_of(choice), run
    if not (adapter / ADAPTER_CONFIG).is_file():
        merged = (adapter / "config.json").is_file()
        raise CheckpointError(
            f"{adapter}: expected a PEFT folder with {ADAPTER_CONFIG}, or a run folder, "
            + (
                "got an ordinary model, such as a merged export; name it as `model` of a "
                "configuration"
                if merged
                else "got neither; give the folder that evo-grpo export wrote"
            )
        )
    if given is None:
        raise ConfigError(
            f"{adapter}: expected a configuration beside a PEFT folder, which names base and task, "
            f"got none: evo-grpo evaluate {adapter} population.yaml"
        )
    named = str(read_config(adapter).base_model_name_or_path or "")
    # An export names a base that lies in it by its place. Paths differ between machines.
    if named and not named.startswith("./") and Path(named).name != Path(given.model.name).name:
        warnings.warn(
            f"{adapter}: it says that its base is {named!r}, and the configuration's is "
            f"{given.model.name!r}: an adapter means nothing over another base",
            UserWarning,
            stacklevel=3,
        )
    return str(adapter), adapter, given


def _config(config: RunConfig | str | Path | Mapping[str, Any]) -> RunConfig:
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, Mapping):
        return configuration.from_dict(config)
    return configuration.load(config)


def _finite(value: Any) -> Any:  # noqa: ANN401 -- any JSON value
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, tuple):
        return [_finite(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    return None if isinstance(value, float) and not math.isfinite(value) else value
