"""The keywords of both finetune functions."""

# No annotations from __future__ here: see `evo_grpo.schema.group`.

import warnings
from collections.abc import Mapping
from typing import Any, Self

from evo_grpo.errors import ConfigError
from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.validation import check_folder


class FinetuneSettings(Group):
    """Keywords of the finetune functions besides the population and the environment.

    Attributes:
        max_steps: Completions to sample in training, over the whole population, >= 1; the step
            that reaches it is finished. An episode of three turns counts three.
        num_epochs: Passes over the train rows, for prompts from a dataset. It takes precedence over
            `max_steps`, as in AgileRL, with a warning.
        evaluation_interval: GRPO steps of every agent between two evaluations, >= 1; the last
            step is always followed by one.
        evo_steps: GRPO steps between two evolutions; None evolves at every evaluation.
        tournament: The selection; None keeps all agents.
        mutation: The mutation of the hyperparameters in the agents' `hp_config`; None changes none.
        max_reward: Stop at the evaluation where an agent's fitness reaches it.
        prompts_per_step: P; None takes the environment's batch size.
        eval_prompts: Validation prompts, or episode seeds, behind a fitness.
        eval_samples: Completions, or episodes, of each.
        checkpoint_interval: GRPO steps between two checkpoints of all agents, which are written
            after the next evaluation.
        checkpoint_path: Folder of the checkpoints: `step-000100/agent-00/...`.
        save_elite: Whether to save the agent with the best last fitness at the end; None does so if
            `elite_path` is given.
        elite_path: Folder of that agent.
        verbose: Show progress, as `Population.train` does with `progress=True`.
        accelerator: The accelerator of the agents, which already use it.
    """

    max_steps: int | None = setting(None, ge=1)
    num_epochs: int | None = setting(None, ge=1)
    evaluation_interval: int = setting(10, ge=1)
    evo_steps: int | None = setting(None, ge=1)
    tournament: Any = None
    mutation: Any = None
    max_reward: float | None = None
    prompts_per_step: int | None = setting(None, ge=1)
    eval_prompts: int = setting(64, ge=1)
    eval_samples: int = setting(1, ge=1)
    checkpoint_interval: int | None = setting(None, ge=1)
    checkpoint_path: Any = None
    save_elite: bool | None = None
    elite_path: Any = None
    verbose: bool = True
    accelerator: Any = None

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Self:
        """Check keywords.

        Raises:
            ConfigError: A name is unknown, a value is out of range, or a keyword needs another one.
            CheckpointError: A folder to write to is a file.
        """
        settings = cls(**keywords)
        settings._refuse_what_misses_another()
        # Checked before hours of training.
        for name in ("checkpoint_path", "elite_path"):
            if getattr(settings, name) is not None:
                check_folder(name, getattr(settings, name))
        if settings.num_epochs is not None and settings.max_steps is not None:
            warnings.warn(
                f"max_steps={settings.max_steps}: has no effect beside "
                f"num_epochs={settings.num_epochs}, which decides how long the training is, as in "
                "AgileRL; leave one of them out",
                UserWarning,
                stacklevel=3,
            )
        return settings

    @property
    def evolves(self) -> bool:
        """Whether agents are selected or mutated."""
        return self.tournament is not None or self.mutation is not None

    def _refuse_what_misses_another(self) -> None:
        if self.evo_steps is not None and not self.evolves:
            raise ConfigError(
                f"evo_steps={self.evo_steps}: has no effect without tournament or mutation; pass "
                "that too"
            )
        one, other = "checkpoint_interval", "checkpoint_path"
        for name, missing in ((one, other), (other, one)):
            if getattr(self, name) is not None and getattr(self, missing) is None:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: has no effect without {missing}; pass that too"
                )
        if self.save_elite and self.elite_path is None:
            raise ConfigError("save_elite=True: expected elite_path, the folder to save it in")
