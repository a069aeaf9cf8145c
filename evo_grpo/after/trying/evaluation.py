"""evaluate_adapter(adapter, config): mean reward of an adapter, and of its base model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from evo_grpo.after.trying.policy import adapter_of, check_answers, config_of, loaded
from evo_grpo.errors import CheckpointError, ConfigError, RunFailedError
from evo_grpo.evolve.compare import compare
from evo_grpo.evolve.intervals import LEVEL, interval
from evo_grpo.model.lora.configs import read_config
from evo_grpo.model.lora.files import CONFIG as ADAPTER_CONFIG
from evo_grpo.population.checkpoints.manifest import refuse_foreign_files
from evo_grpo.population.evaluate import Evaluation, evaluate
from evo_grpo.record.choice import choose_of
from evo_grpo.record.files import plain_value
from evo_grpo.record.folder import is_run
from evo_grpo.schema.validation import whole
from evo_grpo.settings import RunConfig
from evo_grpo.training.run import as_config
from evo_grpo.types import Score

JudgedOn = Literal["validation", "test"]


@dataclass(frozen=True)
class Result:
    """A mean reward over the prompts of a split.

    Attributes:
        mean: The mean reward.
        se: Its standard error over prompts, NaN from a single sample.
        n: Number of prompts.
    """

    mean: float
    se: float
    n: int

    @classmethod
    def of(cls, score: Score) -> Result:
        """Return a score without the rewards of single prompts."""
        return cls(score.mean, score.se, score.n)


@dataclass(frozen=True)
class Judged:
    """The result of an adapter on a split of a task.

    Attributes:
        adapter: Folder of the adapter, or the agent of a run in words.
        task: Name of the task.
        split: Split of the prompts.
        samples: Completions, or episodes, per prompt.
        temperature: Sampling temperature.
        own: Mean reward of the adapter.
        base: Mean reward of the base with the same draws, None if it was not evaluated.
        gain: Adapter minus base, over the prompts that both answered.
        gain_se: Paired standard error of the gain, NaN from fewer than two prompts.
        interval: Interval of the gain with probability `LEVEL`, by Student's t over prompts.
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
        """Return the result as JSON values; numbers that are not finite are None."""
        return {"level": LEVEL, **plain_value(asdict(self))}


def evaluate_adapter(
    adapter: str | Path,
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    split: JudgedOn = "test",
    prompts: int | None = None,
    base: bool = True,
    allow: Sequence[str] = (),
    env: object = None,
) -> Judged:
    """Evaluate an adapter on a task as a run evaluates its winner: same prompts, samples and draws.

    Args:
        adapter: A PEFT folder over the base of the configuration, such as an export; or a run
            folder, whose winner is evaluated.
        config: Configuration with base and task: a `RunConfig`, the path of a YAML file, or a
            mapping as in such a file. None takes the configuration of the run.
        split: "test" repeats the test at the end of a run, "validation" the comparison of its
            finalists.
        prompts: Number of prompts; None takes as many as the run does.
        base: Whether the base is evaluated too, with the same draws.
        allow: Without a `config`, your files that may differ from those of the run, by their
            names in the error that a difference raises.
        env: The environment, in place of the task of `config`; for a run without a `config`, as
            it was given to `Population.train`, if it was an object.

    Raises:
        CheckpointError: `adapter` is neither a PEFT folder nor a run with a finished round, or a
            file was changed.
        ConfigError: The adapter does not fit the base, there is no configuration, or the settings
            or the files of the run have changed.
        RunFailedError: The adapter, or the base, has log-probabilities that are not finite, or no
            reward.
        EvoGrpoError: The base or the task cannot be loaded.
    """
    if split not in ("validation", "test"):
        raise ConfigError(f"split: expected validation or test, got {split!r}")
    if prompts is not None:
        whole(1).check("prompts", prompts)
    name, folder, run = _found(Path(adapter), config, allow, env)
    fitness = run.evolve.fitness
    # Validation repeats the draws of the final comparison, and its samples where it has any.
    samples = fitness.test_samples if split == "test" else fitness.final_samples or fitness.samples
    count = prompts or (fitness.test_prompts if split == "test" else fitness.prompts)
    with loaded(run, folder, with_env=True, env=env) as policy:
        assert policy.env is not None, "loaded with with_env=True"
        # Base first, as at the end of a run: the same batch gives the same bits.
        found = evaluate(
            policy.cohort,
            policy.env,
            [*([None] if base else []), policy.slot],
            policy.env.prompts(split, count),
            samples=samples,
            temperature=fitness.temperature,
            stream=("test",) if split == "test" else ("final",),
        )
        for who, one in zip(["the base", name] if base else [name], found, strict=True):
            _check_finite(who, one)
        *bases, own = (one.score for one in found)
        task = policy.env.name
    judged = Judged(name, task, split, samples, fitness.temperature, Result.of(own))
    if not bases:
        return judged
    (other,) = bases
    ahead = compare(own, other)
    # Where both answered all prompts, the gain is rounded as in summary.json.
    whole_split = ahead.prompts == own.n == other.n
    gain = own.mean - other.mean if whole_split else ahead.difference
    if not math.isfinite(gain):
        raise RunFailedError(
            f"{name}: expected prompts that both the adapter and the base answered, got none; give "
            "more prompts, or leave out the base"
        )
    return replace(
        judged,
        base=Result.of(other),
        gain=gain,
        gain_se=ahead.error,
        interval=interval(gain, ahead.error, ahead.prompts),
    )


def _check_finite(who: str, found: Evaluation) -> None:
    """Refuse log-probabilities or a mean reward that is not finite."""
    check_answers(who, (one.logprobs for one in found.experience.trajectories))
    if not math.isfinite(found.score.mean):
        raise RunFailedError(
            f"{who}: expected a mean reward, got none: every reward function abstained on every "
            "answer; give reward functions that score this task, or another split"
        )


def _found(
    adapter: Path,
    config: RunConfig | str | Path | Mapping[str, Any] | None,
    allow: Sequence[str],
    env: object,
) -> tuple[str, Path, RunConfig]:
    """Return the name of an adapter, its PEFT folder, and the configuration of its task."""
    given = None if config is None else as_config(config)
    if is_run(adapter):
        choice = choose_of(adapter)
        call = f"evo_grpo.evaluate_adapter({str(adapter)!r}, env=...)"
        run = given or config_of(choice, f"evaluate {adapter}", allow, env=env, call=call)
        return f"{choice.title} of {adapter}", adapter_of(choice), run
    refuse_foreign_files(adapter)
    if not (adapter / ADAPTER_CONFIG).is_file():
        merged = (adapter / "config.json").is_file()
        raise CheckpointError(
            f"{adapter}: expected a PEFT folder with {ADAPTER_CONFIG}, or a run folder, "
            + (
                "got a whole model, such as a merged export; name it as `model` in a configuration"
                if merged
                else "got neither; give the folder that evo-grpo export wrote"
            )
        )
    if given is None:
        raise ConfigError(
            f"{adapter}: expected a configuration with the base and the task of the PEFT folder, "
            f"got none: evo-grpo evaluate {adapter} population.yaml"
        )
    named = str(read_config(adapter).base_model_name_or_path or "")
    # An export with its base names it by a relative path. Other paths differ between machines.
    if named and not named.startswith("./") and Path(named).name != Path(given.model.name).name:
        warnings.warn(
            f"{adapter}: its base is {named!r}, but the base of the configuration is "
            f"{given.model.name!r}: an adapter only works with its own base",
            UserWarning,
            stacklevel=3,
        )
    return str(adapter), adapter, given
