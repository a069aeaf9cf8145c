"""The prompt template and answer length of a task, from its settings alone.

After its run, a model is asked on other machines too, without the data and the reward functions of
the task. So no user code is imported, and rows are read only if no setting gives the template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.data.dataset import default_template
from evo_grpo.envs.data.tables import read_rows
from evo_grpo.envs.episodes.dialogue import OBSERVATION, opening
from evo_grpo.envs.finding import find_function
from evo_grpo.envs.from_config import configured_template
from evo_grpo.envs.prompting import named_template
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.registry import FAMILIES, build_task, is_multi_turn
from evo_grpo.errors import ConfigError
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS
from evo_grpo.settings.given import OBJECT

if TYPE_CHECKING:
    from evo_grpo.settings import EnvConfig


@dataclass(frozen=True)
class Asking:
    """How a task asks.

    Attributes:
        template: Turns a row into a prompt.
        max_output_tokens: Tokens of a usual answer.
        example: A row of a built-in task; empty for the user's own rows.
    """

    template: Template
    max_output_tokens: int
    example: Mapping[str, Any]

    @property
    def columns(self) -> list[str]:
        """The columns in the template."""
        return list(self.template.columns())


def asking(env: EnvConfig, seed: int, prompt: str | None = None) -> Asking:
    """Return how the task of a configuration asks; `prompt` is a name in `env.prompts`."""
    if is_multi_turn(env.kind):
        messages = opening(env.system_prompt) or [{"role": "user", "content": f"{{{OBSERVATION}}}"}]
        first = replace(Template.of(messages), keywords=env.chat_template_kwargs)
        return Asking(first, DEFAULT_OUTPUT_TOKENS, {})
    family = FAMILIES.get(env.kind.partition(":")[0])
    is_object = env.kind.startswith(OBJECT)
    own = is_object or (family is not None and family.names_code)
    examples = [] if env.few_shot is None else env.few_shot.rows
    if own and not isinstance(examples, int):  # otherwise they depend on the rows of train
        template = configured_template(env)
        if is_object and template is None:
            raise ConfigError(
                "prompt: the environment of the run was a Python object without a prompt template; "
                "send your prompt as it is with --raw, or sample a row in Python"
            )
        if template is None and env.train is not None:
            template = default_template(read_rows(env.train, "train", env.max_data_gb)[0])
        asked = named_template(prompt, Template.of(template), env.prompting(), examples)
        return Asking(asked, DEFAULT_OUTPUT_TOKENS, {})
    task = build_task(env, seed, find_function)
    example = {} if own else task.splits["validation"][0]
    return Asking(Template.of_task(task, prompt), task.max_output_tokens, example)
