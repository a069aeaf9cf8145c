"""How a task asks, from its settings alone: what a prompt is made of, and how long an answer is.

A task is asked again after its run, on another machine too, where its data may be missing and its
reward functions are of no use. So no code of the user's is imported, and rows are only read where
nothing else says what is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.data.dataset import default_template
from evo_grpo.envs.data.tables import read_rows
from evo_grpo.envs.episodes.dialogue import OBSERVATION
from evo_grpo.envs.finding import find_function
from evo_grpo.envs.from_config import configured_template
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.registry import FAMILIES, build_task, is_multi_turn
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS

if TYPE_CHECKING:
    from evo_grpo.settings import EnvConfig


@dataclass(frozen=True)
class Asking:
    """How a task asks.

    Attributes:
        template: What a row becomes a prompt by.
        max_output_tokens: Tokens that hold a usual answer.
        example: A row of the task, where its rows belong to nobody; else empty.
    """

    template: Template
    max_output_tokens: int
    example: Mapping[str, Any]

    @property
    def columns(self) -> list[str]:
        """The columns that the template names."""
        return list(self.template.columns())


def asking(env: EnvConfig, seed: int) -> Asking:
    """Return how a task asks."""
    if is_multi_turn(env.kind):
        opening = Template.of([{"role": "user", "content": f"{{{OBSERVATION}}}"}])
        return Asking(opening, DEFAULT_OUTPUT_TOKENS, {})
    family = FAMILIES.get(env.kind.partition(":")[0])
    if family is not None and family.names_code:
        template = configured_template(env)
        if template is None and env.train is not None:
            template = default_template(read_rows(env.train, "train")[0])
        return Asking(Template.of(template), DEFAULT_OUTPUT_TOKENS, {})
    task = build_task(env, seed, find_function)
    made = Template(task.prompt, task.conversation)
    return Asking(made, task.max_output_tokens, task.splits["validation"][0])
