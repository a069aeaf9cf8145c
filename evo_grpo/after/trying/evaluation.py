"""evaluate_adapter(adapter, config): the mean reward of an adapter, and of its base beside it."""

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
        return {"level": LEVEL, **plain_value(asdict(self))}


def evaluate_adapter(
    adapter: str | Path,
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    split: JudgedOn = "test",
    prompts: int | None = None,
    base: bool = True,
    allow: Sequence[str] = (),
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
        allow: Files of yours that may be others than those of the run, by the names that the error
            gives which such a file raises without this. Without a `config`.

    Raises:
        CheckpointError: It is neither a PEFT folder nor a run with a finished round, or a file was
            changed.
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
    name, folder, run = _found(Path(adapter), config, allow)
    fitness = run.evolve.fitness
    # On validation the draws of the final comparison; its samples, where it has any.
    samples = fitness.test_samples if split == "test" else fitness.final_samples or fitness.samples
    count = prompts or (fitness.test_prompts if split == "test" else fitness.prompts)
    with loaded(run, folder, with_env=True) as policy:
        assert policy.env is not None, "it was asked for"
        # The base first, as at the end of a run: the same batch gives the same bits.
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
    # As a run has it, where both answered all prompts: the same number, rounded otherwise.
    whole_split = ahead.prompts == own.n == other.n
    gain = own.mean - other.mean if whole_split else ahead.difference
    if not math.isfinite(gain):
        raise RunFailedError(
            f"{name}: expected prompts that it and the base both answered, got none; ask more "
            "prompts, or leave the base out"
        )
    return replace(
        judged,
        base=Result.of(other),
        gain=gain,
        gain_se=ahead.error,
        interval=interval(gain, ahead.error, ahead.prompts),
    )


def _check_finite(who: str, found: Evaluation) -> None:
    """Refuse a mean reward that is none."""
    check_answers(who, (one.logprobs for one in found.experience.trajectories))
    if not math.isfinite(found.score.mean):
        raise RunFailedError(
            f"{who}: expected a mean reward, got none: every reward function abstained on every "
            "answer; give rewards that score this task, or another split"
        )


def _found(
    adapter: Path,
    config: RunConfig | str | Path | Mapping[str, Any] | None,
    allow: Sequence[str],
) -> tuple[str, Path, RunConfig]:
    """Return what is judged in words, its PEFT folder, and what it is judged on."""
    given = None if config is None else as_config(config)
    if is_run(adapter):
        choice = choose_of(adapter)
        run = given or config_of(choice, _OBJECTS, f"evaluate {adapter}", allow)
        return f"{choice.title} of {adapter}", adapter_of(choice), run
    refuse_foreign_files(adapter)
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
