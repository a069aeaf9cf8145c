"""Load an adapter over its base as a cohort of one agent, ready to sample."""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_grpo.analysis.export.contents import checked_adapter
from evo_grpo.envs.protocol import Environment, Play
from evo_grpo.envs.task import Split, Task
from evo_grpo.errors import ConfigError, RunDirError, RunFailedError
from evo_grpo.population.checkpoints.manifest import refuse_foreign_files
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.sampler import PopulationSampler
from evo_grpo.record.choice import ChosenAgent
from evo_grpo.record.folder import read_config, recorded_objects
from evo_grpo.record.plain import inside
from evo_grpo.schema.hparams import LORA, Hparams
from evo_grpo.settings import RunConfig
from evo_grpo.settings.model import LoraSettings
from evo_grpo.training.assemble import add_agents, build_cohort, build_parts, environment_for
from evo_grpo.training.from_python import FromPython
from evo_grpo.training.recorded_inputs import read_inputs_of
from evo_grpo.training.resume_check import check_inputs
from evo_grpo.types import Slot


@dataclass(frozen=True)
class Policy:
    """A cohort of one agent, and the environment of its task, or None."""

    cohort: Cohort
    env: Environment[Any] | None
    slot: Slot


@contextmanager
def loaded(
    config: RunConfig,
    adapter: Path,
    *,
    with_env: bool,
    task: Task | None = None,
    env: object = None,
    max_output_tokens: int | None = None,
    own: Hparams | None = None,
) -> Generator[Policy]:
    """Load the base of a configuration, a PEFT folder over it and, `with_env`, its task.

    The adapter's LoRA settings replace those of the configuration. `task` is the single-turn task
    of the configuration, if it is already built; `env` replaces the task. `max_output_tokens` is
    used if the configuration has none; None takes that of the task. `own` are the hyperparameters
    of the agent, of which the longest completion and the prompt are used.
    """
    algorithm, own = config.algorithm, own or Hparams()
    longest = algorithm.longest_output(config.search_space())
    if longest is None and max_output_tokens is not None:
        algorithm = algorithm.replace(max_output_tokens=max_output_tokens)
    # The adapter has fixed settings, even if the run searched them.
    ranges = config.evolve.hyperparameters
    others = ranges and {name: one for name, one in ranges.items() if not name.startswith(LORA)}
    agents = config.agents().replace(
        model=config.model.replace(lora=LoraSettings(), adapter=str(adapter)),
        hyperparameters=others,
        algorithm=algorithm.replace(separate_reference=False),
        # One process samples, and nothing is trained.
        engine=config.engine.replace(zero=None),
    )
    made: Environment[Any] | None = None
    if with_env and env is None:
        cohort, made, start = build_parts(config, agents, task)
    else:
        cohort, start = build_cohort(agents)
        made = environment_for(cohort, env) if with_env else None
    (slot,) = add_agents(cohort, 1, "same", start)
    known: Sequence[str] = getattr(made, "prompt_names", ())
    prompt = own.prompt
    if prompt is not None and made is not None and prompt not in known:
        warnings.warn(
            f"the agent was trained with the prompt {prompt!r}, which env.prompts does not have: "
            "it is asked with the prompt of the task",
            UserWarning,
            stacklevel=3,
        )
    if prompt not in known:
        prompt = None
    hparams = cohort.agents[slot].hparams
    hparams = hparams.replace(prompt=prompt, max_output_tokens=own.max_output_tokens)
    cohort.set_hparams(slot, hparams)
    cohort.open_engine()
    try:
        yield Policy(cohort, made, slot)
    finally:
        cohort.close_engine()


def check_answers(who: str, logprobs: Iterable[Sequence[float] | None]) -> None:
    """Refuse answers whose log-probs (one sequence each) have a NaN: the tokens are arbitrary."""
    if any(math.isnan(value) for own in logprobs for value in own or ()):
        raise RunFailedError(
            f"{who}: expected finite log-probabilities, got NaN: its weights are not finite, or "
            "overflow in the dtype of the base, so that its answers are arbitrary; use another "
            "checkpoint, or engine.dtype: float32"
        )


def config_of(
    choice: ChosenAgent,
    command: str | None,
    allow: Iterable[str],
    *,
    env: object = None,
    call: str = "",
) -> RunConfig:
    """Return the settings of a run whose base can be built from them.

    A `command` that builds the task too needs the run's files unchanged, except those that `allow`
    names. `env` is the environment of a run that was given an object; `call` names the Python call.
    """
    recorded, given = recorded_objects(choice.run), FromPython(env)
    if base := [name for name in ("model", "tokenizer") if name in recorded]:
        raise RunDirError(
            f"{choice.run}: it was recorded by Population.train with {' and '.join(base)}, which "
            "no file can name, so its base cannot be built from the folder; in Python, "
            f"evo_grpo.Population.resume({str(choice.run)!r}, env, {base[0]}=...) returns its "
            "agents, which have the methods get_action and test"
        )
    config = read_config(choice.run)
    if command is not None:
        config = given.with_env(recorded, config, choice.run, call)
        parts: dict[str, str] | None = None
        if any(name.partition(".")[0] == "env" for name in recorded):
            # Only the environment is used again.
            then = read_inputs_of(choice.run).objects
            others = {name: value for name, value in then.items() if not name.startswith("env")}
            parts = others | given.parts(config.seed)
        check_inputs(choice.run, config, command=command, allow=allow, objects=parts)
    return config


def adapter_of(choice: ChosenAgent) -> Path:
    """Return the PEFT folder of an agent of a run, after checking its files."""
    refuse_foreign_files(inside(choice.run, choice.checkpoint or "."))
    return checked_adapter(choice)


def played_out(play: Play, sampler: PopulationSampler) -> Play:
    """Return a play after its last turn."""
    while (ask := play.ask()) is not None:
        play.tell(sampler.sample(ask))
    return play


def start_of(env: Any, split: Split, number: int) -> Any:  # noqa: ANN401 -- of any environment
    """Return a row of a task of one turn, or the seed of an episode."""
    splits = getattr(getattr(env, "task", None), "splits", None)
    count = None if splits is None else len(splits[split])
    if number < 0 or (count is not None and number >= count):
        expected = ">= 0" if count is None else f"from 0 to {count - 1}, of {count} in {split}"
        raise ConfigError(f"row: expected a number {expected}, got {number}")
    if count is None:
        return env.prompts(split, number + 1)[number]
    return env.row(split, number)
