"""An agent of a class, built from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from evo_grpo.assemble import Objects
from evo_grpo.checkpoints.manifest import read_attributes
from evo_grpo.checkpoints.read import load_agent
from evo_grpo.checkpoints.rebuild import recipe
from evo_grpo.cohort.cohort import Cohort
from evo_grpo.settings import AgentSettings


class HasAgent(Protocol):
    """A handle on an agent."""

    cohort: Cohort
    slot: int


AgentT = TypeVar("AgentT", bound=HasAgent)


def rebuilt(
    kind: str,
    build: Callable[[AgentSettings, Objects], AgentT],
    path: str | Path,
    device: str,
    *,
    trust_remote_code: bool,
    zero: int | None = None,
    accelerator: object = None,
) -> AgentT:
    """Build an agent from a checkpoint, over a base of its own; see `Agent.load`.

    Args:
        kind: Its algorithm: grpo, gspo or cispo.
        build: Builds an agent of the class over a base of its own.
        path: The checkpoint.
        device: Where the base goes.
        trust_remote_code: Run Python code that comes with the base.
        zero: The stage of DeepSpeed that trains it on, None for stock AdamW.
        accelerator: The user's own with that stage; None makes one.

    Raises:
        CheckpointError: The folder is no checkpoint, or lacks a file.
        ConfigError: It is a checkpoint of another class.
        ModelError: The base cannot be loaded by its name.
    """
    folder = Path(path)
    attributes = read_attributes(folder)
    made = recipe(folder, attributes, kind, device, trust_remote_code=trust_remote_code, zero=zero)
    objects = Objects(made.model, lora=made.lora, padding=made.padding, accelerator=accelerator)
    agent = build(made.settings, objects)
    load_agent(agent.cohort, agent.slot, folder, load_optimizer=bool(attributes["has_optimizer"]))
    return agent
