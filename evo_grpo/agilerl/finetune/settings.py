"""The keywords that both finetune functions take, checked once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from evo_grpo.agilerl.checks import check_accelerator
from evo_grpo.envs.messages import listed, nearest
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.evolve.explore.protocol import Explorer
from evo_grpo.evolve.select.protocol import Selector
from evo_grpo.validation import check_folder

_TRACKERS = ("wb", "tensorboard", "wandb_api_key", "wandb_kwargs", "tensorboard_log_dir")
"""AgileRL's experiment trackers, not available in this version."""


@dataclass(frozen=True)
class FinetuneSettings:
    """What the finetune functions take besides the population and the environment.

    Attributes:
        max_steps: Completions to sample in training, over the whole population, >= 1; the step
            that reaches it is finished. An episode of three turns counts three.
        num_epochs: Passes over the train rows instead, for prompts from a dataset.
        evaluation_interval: GRPO steps of every agent between two evaluations, >= 1; the last
            step is always followed by one.
        evo_steps: GRPO steps between two evolutions; None evolves at every evaluation.
        tournament: Who survives; None keeps everyone.
        mutation: What changes in the survivors; None changes nothing. The agents' `hp_config` says
            which hyperparameters may.
        max_reward: Stop at the evaluation where an agent's fitness reaches it.
        prompts_per_step: P; None takes the environment's batch size.
        eval_prompts: Validation prompts, or episode seeds, behind a fitness.
        eval_samples: Completions, or episodes, of each.
        checkpoint_interval: GRPO steps between two checkpoints of all agents, written after the
            evaluation that follows.
        checkpoint_steps: The same under an older name.
        checkpoint_path: Folder of the checkpoints: `step-000100/agent-00/...`.
        save_elite: Save the agent with the best last fitness at the end; None does with an
            `elite_path`.
        elite_path: Folder of that agent.
        verbose: Show progress: a bar on a terminal, a line per evaluation elsewhere.
        init_hp: What AgileRL writes to its trackers; has no effect.
        accelerator: The agents' own; has no effect beside theirs.
        wb, tensorboard, wandb_api_key, wandb_kwargs, tensorboard_log_dir: Trackers, not available
            in this version.
    """

    max_steps: int | None = None
    num_epochs: int | None = None
    evaluation_interval: int = 10
    evo_steps: int | None = None
    tournament: Selector | None = None
    mutation: Explorer | None = None
    max_reward: float | None = None
    prompts_per_step: int | None = None
    eval_prompts: int = 64
    eval_samples: int = 1
    checkpoint_interval: int | None = None
    checkpoint_steps: int | None = None
    checkpoint_path: str | Path | None = None
    save_elite: bool | None = None
    elite_path: str | Path | None = None
    verbose: bool = True
    init_hp: Mapping[str, Any] | None = None
    accelerator: Any = None
    wb: bool = False
    tensorboard: bool = False
    wandb_api_key: str | None = None
    wandb_kwargs: Mapping[str, Any] | None = None
    tensorboard_log_dir: str | None = None

    @classmethod
    def of(cls, keywords: Mapping[str, Any], **defaults: Any) -> FinetuneSettings:
        """Check keywords.

        Args:
            keywords: What the caller gave.
            **defaults: Of the function that was called.

        Raises:
            ConfigError: For an unknown name, a value out of range, or a name that misses another.
            CheckpointError: When there is a file in place of a folder to write to.
            EngineUnavailable: For a tracker.
        """
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                raise ConfigError(
                    f"unknown argument {name!r}.{nearest(name, known)} Expected one of "
                    f"{listed(known)}"
                )
        settings = cls(**{**defaults, **keywords})
        settings._refuse_unavailable()
        settings._refuse_out_of_range()
        # Before hours of training, after which it would be found.
        for name in ("checkpoint_path", "elite_path"):
            if getattr(settings, name) is not None:
                check_folder(name, getattr(settings, name))
        return settings

    @property
    def checkpoint_every(self) -> int | None:
        """GRPO steps between two checkpoints, None for none."""
        return self.checkpoint_interval or self.checkpoint_steps

    @property
    def evolves(self) -> bool:
        """Whether anything is selected or mutated."""
        return self.tournament is not None or self.mutation is not None

    def _refuse_unavailable(self) -> None:
        for name in _TRACKERS:
            if getattr(self, name):
                raise EngineUnavailable(
                    f"{name}={getattr(self, name)!r}: experiment trackers are not available in "
                    "this version; leave it out, and read agent.fitness or population.leaderboard()"
                )
        check_accelerator(self.accelerator)
        if self.init_hp is not None:
            warnings.warn(
                "init_hp: has no effect, since it was only written to trackers; the agents' own "
                "hyperparameters count",
                UserWarning,
                stacklevel=5,
            )

    def _refuse_out_of_range(self) -> None:
        for name in (
            "max_steps",
            "num_epochs",
            "evaluation_interval",
            "evo_steps",
            "prompts_per_step",
            "eval_prompts",
            "eval_samples",
            "checkpoint_interval",
            "checkpoint_steps",
        ):
            value: Any = getattr(self, name)
            # None means "no limit" where it is the default, and nothing elsewhere.
            if value is None and getattr(type(self), name) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}: expected an integer >= 1, got {value!r}")
        for name, other, lacking in (
            ("checkpoint_interval", "checkpoint_path", self.checkpoint_path is None),
            ("evo_steps", "tournament or mutation", not self.evolves),
        ):
            given = self.checkpoint_every if name == "checkpoint_interval" else self.evo_steps
            if given is not None and lacking:
                raise ConfigError(f"{name}={given}: has no effect without {other}; pass that too")
        if self.checkpoint_interval is not None and self.checkpoint_steps is not None:
            raise ConfigError(
                f"checkpoint_steps={self.checkpoint_steps}: is an older name of "
                f"checkpoint_interval, expected one of them, got checkpoint_interval="
                f"{self.checkpoint_interval} too; leave one out"
            )
        if self.checkpoint_path is not None and self.checkpoint_every is None:
            raise ConfigError(
                f"checkpoint_path={str(self.checkpoint_path)!r}: has no effect without "
                "checkpoint_interval; pass that too"
            )
        if self.save_elite and self.elite_path is None:
            raise ConfigError("save_elite=True: expected elite_path, the folder to save it in")
