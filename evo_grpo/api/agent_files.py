"""Checkpoints as methods of an agent."""

from __future__ import annotations

from abc import ABC
from pathlib import Path
from typing import Any

from evo_grpo.api.reference_api import ReferenceAPI
from evo_grpo.checkpoints.read import load_agent, save_agent
from evo_grpo.checkpoints.write import Origin
from evo_grpo.errors import ConfigError
from evo_grpo.validation import check_all, check_folder, flag

_RULES = {"lora_only": flag(), "save_optimizer": flag()}


class AgentFiles(ReferenceAPI, ABC):
    """Writes one agent to a folder and reads it back."""

    def save_checkpoint(
        self, path: str | Path, lora_only: bool = True, save_optimizer: bool = True
    ) -> None:
        """Write the agent to a folder; see `evo_grpo.checkpoints.read` for the layout.

        Args:
            path: The folder.
            lora_only: Leave out the base, which all agents share; False writes it to `base/`.
            save_optimizer: Write AdamW's moments too.

        Raises:
            CheckpointError: When there is a file in place of the folder.
            ConfigError: When the path is none, or a flag neither True nor False.
        """
        check_all(_RULES, locals())
        save_agent(
            self.cohort,
            self.slot,
            check_folder("save_checkpoint: path", path),
            lora_only=lora_only,
            save_optimizer=save_optimizer,
            origin=origin_of(self),
        )

    def load_checkpoint(
        self,
        path: str | Path,
        load_optimizer: bool = False,
        overwrite_reference_adapter: bool = False,
        overwrite_critic_adapter: bool | None = None,
        merge_lora_configs: bool = False,
    ) -> None:
        """Read weights and state into this agent; no other agent changes.

        Args:
            path: Folder written by `save_checkpoint`; or one written by PEFT, whose weights become
                the actor and the reference, where the agent keeps one.
            load_optimizer: Restore AdamW's moments as well.
            overwrite_reference_adapter: Take the checkpoint's actor as the reference even when it
                carries one.
            overwrite_critic_adapter: Refused: GRPO has no critic.
            merge_lora_configs: Reconcile a LoRA configuration that differs from the live one.

        Raises:
            CheckpointError: When files are missing, truncated, or belong to another base.
            ConfigError: For `overwrite_critic_adapter`.
        """
        if overwrite_critic_adapter is not None:
            raise ConfigError(
                "overwrite_critic_adapter: GRPO has no critic, advantages come from the group; "
                "leave it out"
            )
        load_agent(
            self.cohort,
            self.slot,
            path,
            load_optimizer=load_optimizer,
            overwrite_reference_adapter=overwrite_reference_adapter,
            merge_lora_configs=merge_lora_configs,
        )


def origin_of(handle: Any) -> Origin:  # noqa: ANN401 -- an agent, or what wrapper_cls put around it
    """Return how an agent was made, as far as its handle tells."""
    arguments = handle.settings.arguments() if hasattr(handle, "settings") else None
    # Not the name of a wrapper, which no checkpoint is loaded by.
    algorithm = type(handle).__name__ if isinstance(handle, AgentFiles) else None
    return Origin(algorithm, arguments)
