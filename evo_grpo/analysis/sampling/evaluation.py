"""Defines evaluate_adapter, which measures mean reward and pass@k of an adapter and its base."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from evo_grpo.analysis.export.contents import exported_values
from evo_grpo.analysis.sampling import answers
from evo_grpo.envs.resolve import named_task
from evo_grpo.errors import CheckpointError, ConfigError, RunFailedError
from evo_grpo.evolve.claims import TEST_LEVEL, claims
from evo_grpo.evolve.compare import compare
from evo_grpo.evolve.intervals import LEVEL, interval
from evo_grpo.model.lora.adapter_files import CONFIG as ADAPTER_CONFIG
from evo_grpo.model.lora.configs import read_config
from evo_grpo.places import searching
from evo_grpo.population.checkpoints.read import refuse_foreign_files
from evo_grpo.population.evaluate import Evaluation, evaluate
from evo_grpo.population.evaluate import pass_at as pass_at_k
from evo_grpo.readers.terminal.console import safe, say
from evo_grpo.record.choice import choose_of
from evo_grpo.record.files import plain_value
from evo_grpo.record.folder import beside, code_folder, is_run
from evo_grpo.record.wording import claim_text, count
from evo_grpo.record.wording import number as shown_number
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.validation import Rule, number, whole
from evo_grpo.settings import FitnessConfig, RunConfig
from evo_grpo.settings.yaml import as_config
from evo_grpo.training.strategies import task_of
from evo_grpo.types import Score

JudgedOn = Literal["validation", "test"]


@dataclass(frozen=True)
class Judged:
    """The mean reward of an adapter on a split of a task, or its pass@k.

    Attributes:
        adapter: Folder of the adapter, or the name of an agent and the folder of its run.
        samples: Completions, or episodes, per prompt.
        own: Mean reward of the adapter, or the probability that at least one of k completions of
            a prompt is correct.
        base: The same value for the base, with the same draws; None if it was not evaluated.
        gain: Adapter minus base, over the prompts that both answered.
        gain_se: Paired standard error of the gain, NaN with fewer than two prompts.
        interval: Confidence interval of the gain at level `LEVEL`, by Student's t over prompts.
        correct: The least reward of a correct completion, for `passes`.
        k: Completions of pass@k; None for the mean reward.
        passes: pass@k for each requested k.
        sign: 1 if the adapter is significantly ahead of the base on these prompts, -1 if behind,
            else 0, at a level of .05 (`evo_grpo.evolve.claims`); None if the base was not
            evaluated.
    """

    adapter: str
    task: str
    split: str
    samples: int
    temperature: float
    own: Score
    base: Score | None = None
    gain: float | None = None
    gain_se: float | None = None
    interval: tuple[float, float] | None = None
    correct: float = 1.0
    k: int | None = None
    passes: tuple[Judged, ...] = ()
    sign: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values; numbers that are not finite are None."""
        about = ("adapter", "task", "split", "samples", "temperature", "correct", "sign")
        fields = {name: getattr(self, name) for name in about} | self._measured()
        passes = [{"k": judged.k, **judged._measured()} for judged in self.passes]
        return {"level": LEVEL, **plain_value({**fields, "passes": passes})}

    def _measured(self) -> dict[str, Any]:
        scores = {"own": self.own, "base": self.base}
        means = {
            name: score and {"mean": score.mean, "se": score.se, "n": score.n}
            for name, score in scores.items()
        }
        return {**means, "gain": self.gain, "gain_se": self.gain_se, "interval": self.interval}


def evaluate_adapter(  # noqa: PLR0913 -- all but the first two have defaults
    adapter: str | Path,
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    split: JudgedOn = "test",
    prompts: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    pass_at: int | Sequence[int] = (),
    correct: float | None = None,
    base: bool = True,
    allow: Sequence[str] = (),
    code: str | Path | None = None,
    env: object = None,
) -> Judged:
    """Evaluate an adapter on a task, with the prompts, samples and draws of a run's final test.

    Args:
        adapter: A PEFT folder over the base of the configuration, such as an export; or a run
            folder, whose winner is evaluated.
        config: Configuration with base and task: a `RunConfig`, the path of a YAML file, or a
            mapping as in such a file. None takes the configuration of the run.
        split: "test" repeats the test at the end of a run, "validation" the comparison of its
            finalists.
        prompts: Number of prompts; None takes the run's number.
        samples: Completions per prompt; None takes the run's number, or more if `pass_at` needs
            more.
        temperature: Sampling temperature; 0 decodes greedily, with one completion per prompt. None
            takes the temperature of the run's evaluations.
        pass_at: One k or several, for which pass@k is estimated; see
            `evo_grpo.population.evaluate.pass_at`.
        correct: The least weighted sum of rewards of a completion that counts as correct in
            pass@k; None takes `evolve.fitness.correct`, or 1 if that is null.
        base: Whether to evaluate the base too, with the same draws.
        allow: Without a `config`, your files that may differ, named as in the error message.
        code: A further folder to search for files and modules of the task.
        env: The environment, in place of the task of `config`; for a run without a `config`, the
            object that was passed to `Population.train`.

    Raises:
        CheckpointError: `adapter` is neither a PEFT folder nor a run with a finished round, or a
            file was changed.
        ConfigError: The adapter does not fit the base, there is no configuration, a number is out
            of range, or the settings or the files of the run have changed.
        RunFailedError: The adapter, or the base, has log-probabilities that are not finite, or no
            reward.
    """
    Rule(lambda value: value in ("validation", "test"), "validation or test").check("split", split)
    passes = tuple(pass_at) if isinstance(pass_at, Sequence) else (pass_at,)
    numbers = [("prompts", prompts), ("samples", samples), *(("pass_at", k) for k in passes)]
    for argument, value in numbers:
        whole(1).or_none().check(argument, value)
    number(math.isfinite, "a finite number").or_none().check("correct", correct)
    with ExitStack() as stack:  # files and modules are found as in a run
        stack.enter_context(searching(code_folder(code), is_code=True))
        stack.enter_context(searching(beside(config)))
        name, folder, run, hparams = _adapter_and_task(Path(adapter), config, allow, env)
        if (task_settings := named_task(env)) is not None:
            run, env = run.replace(env=task_settings), None
        fitness = run.evolve.fitness
        if temperature is not None:
            fitness = fitness.replace(temperature=temperature)
        samples = _samples(fitness, split, samples, max(passes, default=1))
        if correct is None:
            correct = 1.0 if fitness.correct is None else fitness.correct
        task = task_of(run) if env is None else None
        policy = stack.enter_context(
            answers.loaded(run, folder, hparams, with_env=True, task=task, env=env)
        )
        assert policy.env is not None, "loaded with with_env=True"
        default_count = fitness.test_prompts if split == "test" else fitness.prompts
        # Base first, as at the end of a run: the same batch gives the same bits.
        evaluations = evaluate(
            policy.cohort,
            policy.env,
            [*([None] if base else []), policy.slot],
            policy.env.prompts(split, prompts or default_count),
            samples=samples,
            temperature=fitness.temperature,
            reward=fitness.counted,
            stream=("test",) if split == "test" else ("final",),
        )
        about = name, policy.env.name, split, samples, fitness.temperature
    return _judged(evaluations, about, passes, correct)


def _judged(
    evaluations: Sequence[Evaluation],
    about: tuple[str, str, str, int, float],
    passes: Sequence[int],
    correct: float,
) -> Judged:
    """Return the result of evaluations; if the base was evaluated, its evaluation is the first."""
    name, base = about[0], len(evaluations) > 1
    for who, result in zip(["the base", name] if base else [name], evaluations, strict=True):
        _check_finite(who, result)

    def judged(scores: Sequence[Score], **more: Any) -> Judged:
        gain = _gain(scores[1], scores[0]) if base else {}
        return Judged(*about, scores[-1], **gain, correct=correct, **more)

    scores = [result.score for result in evaluations]
    return judged(
        scores,
        sign=claims(scores[::-1], 0, TEST_LEVEL)[1] if base else None,
        passes=tuple(
            judged(
                [pass_at_k(result.rewards, result.units, k, correct) for result in evaluations], k=k
            )
            for k in passes
        ),
    )


def _samples(fitness: FitnessConfig, split: JudgedOn, samples: int | None, most: int) -> int:
    """Return the completions per prompt; refuse fewer than `most`, the largest k of pass@k."""
    # Validation repeats the draws of the final comparison, and its samples where it has any.
    default = fitness.test_samples if split == "test" else fitness.final_samples or fitness.samples
    per_prompt = fitness.per_prompt(samples or max(default, most))
    if most > per_prompt:
        greedy = " at temperature 0, where all of them are equal" if per_prompt == 1 else ""
        raise ConfigError(
            f"pass_at: expected at most {per_prompt}, the completions of a prompt{greedy}, got "
            f"{most}; "
            + ("give a temperature above 0" if greedy else "give as many samples, or leave k")
        )
    return per_prompt


def _gain(own: Score, base: Score) -> dict[str, Any]:
    """Return the fields of `Judged` about the base; the gain is NaN if no prompt is shared."""
    comparison = compare(own, base)
    # Where both answered all prompts, the gain is rounded as in summary.json.
    whole_split = comparison.prompts == own.n == base.n
    gain = own.mean - base.mean if whole_split else comparison.difference
    return {
        "base": base,
        "gain": gain,
        "gain_se": comparison.error,
        "interval": interval(gain, comparison.error, comparison.prompts),
    }


def _check_finite(who: str, evaluation: Evaluation) -> None:
    """Raise RunFailedError if log-probabilities or the mean reward are not finite."""
    answers.check_answers(
        who, (trajectory.logprobs for trajectory in evaluation.experience.trajectories)
    )
    if not math.isfinite(evaluation.score.mean):
        raise RunFailedError(
            f"{who}: expected a mean reward, got none: every reward function abstained on every "
            "answer; give reward functions that score this task, or another split"
        )


def _adapter_and_task(
    adapter: Path,
    config: RunConfig | str | Path | Mapping[str, Any] | None,
    allow: Sequence[str],
    env: object,
) -> tuple[str, Path, RunConfig, Hparams]:
    """Return an adapter's name and PEFT folder, the settings with its task, and its hparams."""
    settings = None if config is None else as_config(config)
    if is_run(adapter):
        choice = choose_of(adapter)
        call = f"evo_grpo.evaluate_adapter({str(adapter)!r}, env=...)"
        run = settings or answers.config_of(
            choice, f"evaluate {adapter}", allow, env=env, call=call
        )
        hparams = choice.agent.record.hparams
        return f"{choice.title} of {adapter}", answers.adapter_of(choice), run, hparams
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
    if settings is None:
        raise ConfigError(
            f"{adapter}: expected a configuration with the base and the task of the PEFT folder, "
            f"got none: evo-grpo evaluate {adapter} population.yaml"
        )
    base = str(read_config(adapter).base_model_name_or_path or "")
    # An export with its base inside has a relative path of it. Other paths differ between machines.
    if base and not base.startswith("./") and Path(base).name != Path(settings.model.name).name:
        warnings.warn(
            f"{adapter}: its base is {base!r}, but the base of the configuration is "
            f"{settings.model.name!r}: an adapter only works with its own base",
            UserWarning,
            stacklevel=3,
        )
    return str(adapter), adapter, settings, exported_values(adapter)


def show_judged(console: Console, judged: Judged) -> None:
    """Print the mean rewards of an adapter and of its base, and the difference."""
    samples = count(judged.samples, "sample")
    prompts = f"{count(judged.own.n, judged.split + ' prompt')} of {judged.task}"
    decoding = f"{samples} each at temperature {judged.temperature:g}"
    if not judged.temperature:
        decoding = "decoded greedily"
    say(console, f"{judged.adapter}: {_mean(judged.own)} on {prompts}, {decoding}", wrap=True)
    if judged.base is not None:
        say(console, f"base: {_mean(judged.base)}")
    _show_gain(console, judged)
    if judged.sign is not None:
        say(console, claim_text("adapter", judged.sign))
    for pass_k in judged.passes:
        base = "" if pass_k.base is None else f", base {_mean(pass_k.base)}"
        say(console, f"pass@{pass_k.k}: {_mean(pass_k.own)}{base}")
        _show_gain(console, pass_k)
    if judged.passes:
        say(console, f"correct: a reward of at least {judged.correct:g}", "dim")


def _show_gain(console: Console, judged: Judged) -> None:
    if judged.gain is None or judged.interval is None:
        return
    low, high = judged.interval
    error = shown_number(judged.gain_se, 4)
    between = "" if low != low else f", 95% interval {low:+.4f} to {high:+.4f}"
    say(console, safe(f"gain: {judged.gain:+.4f} ± {error}{between}", "bold"))


def _mean(result: Score) -> str:
    error = shown_number(result.se, 4)
    return shown_number(result.mean, 4) + ("" if error == "-" else f" ± {error}")
