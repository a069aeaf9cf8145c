"""From settings to agents that take turns on one engine."""

from __future__ import annotations

from typing import Any

import torch

from evo_grpo.errors import ConfigError
from evo_grpo.model.loading import pick_device
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.settings import AgentSettings
from evo_grpo.team.team import Team
from evo_grpo.zero.engine import ZeroEngine
from evo_grpo.zero.setup import own_accelerator
from evo_grpo.zero.turns import Turns


def make_turns(
    slots: AdapterSlots,
    settings: AgentSettings,
    team: Team,
    accelerator: Any = None,  # noqa: ANN401 -- accelerate is untyped
) -> Turns:
    """Build the engine of a cohort; all processes call it alike.

    Args:
        slots: Its adapters, at least one.
        settings: What its agents are made of; `engine.zero` is the stage.
        team: The processes.
        accelerator: The user's, with DeepSpeed's plugin for that stage; None makes one.

    Raises:
        EngineUnavailable: DeepSpeed is not installed, or does not run on the device.
        ConfigError: There is another accelerator already, or it knows of other processes; or the
            base is in float16.
    """
    stage, device = settings.engine.zero, pick_device(settings.engine.device)
    assert stage is not None, "engine.zero"
    if slots.base.dtype is torch.float16:
        raise ConfigError(
            f"engine.zero: expected a base in bfloat16 or float32, got {slots.base.name!r} in "
            "float16, whose gradients need a loss scale that DeepSpeed's engine is not told of; "
            "set engine.dtype to bfloat16, or engine.zero to null"
        )
    made = accelerator if accelerator is not None else own_accelerator(stage, device)
    if made.num_processes != team.size:
        raise ConfigError(
            f"engine.zero: expected an accelerator of {team.size} processes, as many as were "
            f"started, got one of {made.num_processes}; start all with one launcher: torchrun, "
            "accelerate launch or evo-grpo run --nproc"
        )
    if stage == 3:
        slots.base.specialized = False  # joined weights would be whole ones
    engine = ZeroEngine(slots, stage, made, device)
    if stage == 3 and team.size > 1:
        # Completions differ in length, so that one process decodes when another is done.
        slots.base.passes = team.in_lockstep(engine.idle_forward, _never)
    return Turns(engine, settings.algorithm, settings.engine, team)


def _never() -> None:
    raise AssertionError("backwards are DeepSpeed's, and all processes have equally many")
