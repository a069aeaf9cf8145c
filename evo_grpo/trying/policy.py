"""An adapter over its base, ready to answer: what a run has in N slots, in one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_grpo import settings as configuration
from evo_grpo.assemble import add_agents, build_cohort, build_parts
from evo_grpo.cohort.cohort import Cohort
from evo_grpo.envs.protocol import Environment
from evo_grpo.errors import CheckpointError
from evo_grpo.record.choice import Choice
from evo_grpo.record.digests import check_digests
from evo_grpo.record.folder import refuse_objects
from evo_grpo.record.names import CONFIG
from evo_grpo.record.plain import inside
from evo_grpo.settings import RunConfig
from evo_grpo.settings.model import LoraSettings
from evo_grpo.types import Slot


@dataclass(frozen=True)
class Policy:
    """An adapter over its base.

    Attributes:
        cohort: One agent, whose adapter it is.
        env: Its task, None where it is not needed.
        slot: That of the agent.
    """

    cohort: Cohort
    env: Environment[Any] | None
    slot: Slot


@contextmanager
def loaded(
    config: RunConfig, adapter: Path, *, with_env: bool, max_output_tokens: int | None = None
) -> Generator[Policy]:
    """Load the base of a configuration, an adapter over it and, if asked, its task.

    Args:
        config: Names base, engine and task; its `lora` does not count, since the adapter has its
            own.
        adapter: A PEFT folder.
        with_env: Whether to build the task; its data and reward functions are loaded then.
        max_output_tokens: Longest answer, where the configuration says nothing; None leaves it to
            the task.

    Yields:
        The adapter, ready to answer.

    Raises:
        ConfigError: It does not fit the base.
        CheckpointError: It is no PEFT folder.
        EvoGrpoError: The base or the task cannot be loaded.
    """
    algorithm = config.algorithm
    if algorithm.max_output_tokens is None and max_output_tokens is not None:
        algorithm = algorithm.replace(max_output_tokens=max_output_tokens)
    agents = config.agents().replace(
        model=config.model.replace(lora=LoraSettings(), adapter=str(adapter)),
        algorithm=algorithm.replace(separate_reference=False),
        # One process answers, and nothing is trained.
        engine=config.engine.replace(zero=None),
    )
    env: Environment[Any] | None = None
    if with_env:
        cohort, env, start = build_parts(config, agents)
    else:
        cohort, start = build_cohort(agents)
    (slot,) = add_agents(cohort, 1, "same", start)
    cohort.keeper.open()
    try:
        yield Policy(cohort, env, slot)
    finally:
        cohort.keeper.close()


def config_of(choice: Choice, so: str) -> RunConfig:
    """Return the settings of a run, where a file can name all of it.

    Args:
        choice: An agent of the run.
        so: What follows where it cannot, and what to do instead.

    Raises:
        RunDirError: The run was recorded with objects that no file can name.
        ConfigError: Its settings were damaged.
    """
    refuse_objects(choice.run, so)
    return configuration.load(choice.run / CONFIG)


def adapter_of(choice: Choice) -> Path:
    """Return the PEFT folder of an agent of a run, whose files are those that were recorded.

    Raises:
        CheckpointError: One is missing or was changed.
        RunDirError: It lies behind a link.
    """
    folder = inside(choice.run, choice.checkpoint or ".")
    files = {n: d for n, d in choice.files.items() if n.startswith("actor/")}
    if not choice.checkpoint or not files:
        raise CheckpointError(
            f"{choice.run}: its records name no checkpoint of {choice.name}; put rounds.jsonl and "
            "summary.json back as they were"
        )
    check_digests(folder, files, "the run recorded")
    return folder / "actor"
