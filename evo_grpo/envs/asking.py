"""Finds the prompt template and answer length of a task from its settings alone.

This works on a machine without the task's data and reward functions: no user code is imported. The
user's rows are read only to find a template if the settings have none, or to show few-shot examples
drawn from train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from evo_grpo.envs.builtin.dataset import default_template
from evo_grpo.envs.data.tables import read_rows
from evo_grpo.envs.episodes.dialogue import opening
from evo_grpo.envs.finding import find_function
from evo_grpo.envs.prompting import configured_template, named_template
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.registry import build_task, family_of, is_multi_turn
from evo_grpo.errors import ConfigError
from evo_grpo.settings import EnvConfig, algorithm, objects


@dataclass(frozen=True)
class TaskPrompt:
    """The prompt template of a task and the length of its answers.

    Attributes:
        template: Turns a row into a prompt.
        max_output_tokens: Tokens of a usual answer.
        example: A row of a built-in task, to fill in the template with; empty for any other task.
        hidden: Number of examples in the template whose values are not shown.
    """

    template: Template
    max_output_tokens: int
    example: Mapping[str, Any]
    hidden: int = 0

    @property
    def columns(self) -> list[str]:
        """Names of the columns whose values the template takes from a row."""
        return list(self.template.columns())


class _Hidden(str):
    """Stands for a hidden value of a row; a template prints it as "..." in any format."""

    def __new__(cls) -> _Hidden:
        return super().__new__(cls, "...")

    def __format__(self, form: str) -> str:
        return str(self)

    __repr__ = str.__str__


def asking(
    env: EnvConfig, seed: int, prompt: str | None = None, *, show_rows: bool = True
) -> TaskPrompt:
    """Return the prompt template of a task and the length of its answers.

    `prompt` is a name in `env.prompts`; None takes the first prompt. If `show_rows` is false, the
    examples of `env.few_shot` have "..." in place of the user's values.
    """
    if is_multi_turn(env.kind):
        messages = Template.of(opening(env.system_prompt))
        opening_template = replace(messages, keywords=env.chat_template_kwargs)
        return TaskPrompt(opening_template, algorithm.DEFAULT_OUTPUT_TOKENS, {})
    family = family_of(env.kind)
    is_object = env.kind.startswith(objects.OBJECT)
    is_user_task = is_object or (family is not None and bool(family.reads))
    few_shot, hidden = env.few_shot, 0
    if few_shot is not None and not show_rows and not isinstance(few_shot.rows, int):
        rows = [dict.fromkeys(row, _Hidden()) for row in few_shot.rows]
        env, hidden = env.replace(few_shot=few_shot.replace(rows=rows)), len(rows)
    examples = [] if env.few_shot is None else env.few_shot.rows
    # Examples that are shown, and given as a number of rows, are drawn from train.
    if is_user_task and not (show_rows and isinstance(examples, int)):
        template = configured_template(env)
        if is_object and template is None:
            raise ConfigError(
                "prompt: the environment of the run was a Python object without a prompt template; "
                "send your prompt as it is with --raw, or sample a row in Python"
            )
        if template is None and env.train is not None:
            template = default_template(read_rows(env.train, "train", env.max_data_gb)[0])
        base = Template.of(template)
        if few_shot is not None and isinstance(examples, int):
            question = named_template(prompt, base, env.replace(few_shot=None).prompting(), ())
            names = question.columns() | Template.of(few_shot.answer).columns()
            examples, hidden = [dict.fromkeys(names, _Hidden())] * examples, examples
        assert not isinstance(examples, int), "without few_shot, there are no examples"
        full_template = named_template(prompt, base, env.prompting(), examples)
        return TaskPrompt(full_template, algorithm.DEFAULT_OUTPUT_TOKENS, {}, hidden)
    task = build_task(env, seed, find_function)
    example = {} if is_user_task else task.splits["validation"][0]
    template = task.templates.get(prompt, task.template)
    return TaskPrompt(template, task.max_output_tokens, example, hidden)
