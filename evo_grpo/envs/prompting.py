"""Builds the prompt templates of a task, with a system prompt and solved examples in front."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from evo_grpo.envs.data.tables import DatasetRow, Split, require_columns
from evo_grpo.envs.prompts import SYSTEM, Messages, Template
from evo_grpo.envs.task import Task
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.schema.problems import unknown_name
from evo_grpo.seeding import generator
from evo_grpo.settings.env import PROMPTS, EnvConfig, FewShot, PromptSettings


def configured_template(env: EnvConfig) -> str | Messages | None:
    """Return the template in `env.prompt` or `env.conversation`, or None if both are unset."""
    if env.conversation is None:
        return env.prompt
    if env.prompt is not None:
        raise ConfigError(
            "env: expected prompt (a raw template) or conversation (messages for the chat "
            "template), got both"
        )
    return [{"role": message.role, "content": message.content} for message in env.conversation]


def with_prompting(task: Task, settings: PromptSettings, seed: int) -> Task:
    """Add system prompt, examples, template keywords and thinking tags of `settings` to a task."""
    if settings == type(settings)():
        return task
    template = task.template
    examples: Sequence[DatasetRow] = ()
    if settings.few_shot is not None:
        task, examples = _with_examples(task, template, settings.few_shot, seed)
    templates = {
        name: named_template(name, template, settings, examples)
        for name in settings.prompts or (None,)
    }
    for name, prompt in templates.items():
        if prompt.conversations or not prompt.columns().keys() <= template.columns().keys():
            who = "the prompt template" if name is None else f"env.prompts.{name}"
            fitted = {
                split: prompt.fitted(rows, split, who)[0] for split, rows in task.splits.items()
            }
            task = replace(task, splits=fitted)
    return replace(
        task, templates=templates, thinking=settings.thinking, too_long=settings.too_long
    )


def named_template(
    name: str | None, template: Template, settings: PromptSettings, examples: Sequence[DatasetRow]
) -> Template:
    """Return the template called `name` in `env.prompts`, with system prompt and examples.

    For None as `name`, the first template of `env.prompts` is taken, or `template`, that of the
    task, if `env.prompts` is empty.
    """
    prompts = settings.prompts or {}
    if name is None:
        name = next(iter(prompts), None)
    if name is None:
        return prompting_template(template, settings, examples)
    if name not in prompts:
        raise ConfigError(unknown_name(name, prompts, PROMPTS))
    named_prompt, setting = prompts[name], f"env.prompts.{name}"
    if settings.system_prompt is not None and named_prompt.system_prompt is not None:
        raise ConfigError(
            f"{setting}: expected no system prompt beside env.system_prompt, got both; remove one"
        )
    try:
        if named_prompt.prompt is not None:
            template = Template.of(named_prompt.prompt)
        elif named_prompt.conversation is not None:
            messages = [{"role": m.role, "content": m.content} for m in named_prompt.conversation]
            template = Template.of(messages)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    system_prompt_group = setting if named_prompt.system_prompt is not None else "env"
    settings = settings.replace(system_prompt=named_prompt.system_prompt or settings.system_prompt)
    return prompting_template(template, settings, examples, above=system_prompt_group)


def prompting_template(
    template: Template,
    settings: PromptSettings,
    examples: Sequence[DatasetRow],
    *,
    above: str = "env",
) -> Template:
    """Add the system prompt, examples and chat template keywords in `settings` to a template.

    `settings.prompts` is not read. `above`, which errors name, is the settings group with the
    system prompt.
    """
    if settings.few_shot is not None:
        template = _solved_before(template, settings.few_shot, examples)
    messages, system_prompt = template.conversation, settings.system_prompt
    name = "env.chat_template_kwargs" if system_prompt is None else f"{above}.system_prompt"
    problem = ""
    if messages is None and (system_prompt is not None or settings.chat_template_kwargs):
        problem = (
            "expected messages for the chat template, got the raw text of a prompt; give "
            f"{above}.conversation in place of {above}.prompt"
        )
    elif messages is not None and system_prompt is not None and messages[0]["role"] == "system":
        problem = "expected a conversation without a system message, got both; remove one of them"
    if problem:
        raise ConfigError(f"{name}: {problem}")
    if messages is not None and system_prompt is not None:
        system = {"role": "system", "content": system_prompt}
        template = replace(template, conversation=(system, *messages))
        template.columns()  # refuses a malformed one
    return replace(template, keywords=dict(settings.chat_template_kwargs))


def _with_examples(
    task: Task, template: Template, few_shot: FewShot, seed: int
) -> tuple[Task, Sequence[DatasetRow]]:
    """Return a task without the rows that become examples, and those rows."""
    needs = dict.fromkeys(Template.of(few_shot.answer).columns(), "env.few_shot.answer")
    if not isinstance(few_shot.rows, int):
        rows = template.fitted(few_shot.rows, "env.few_shot.rows")[0]
        require_columns(rows, needs, "env.few_shot.rows", filled=needs)
        return task, rows
    train = task.splits["train"]
    require_columns(train, needs, "train", filled=needs)
    examples, other_rows = _taken_out(train, template, few_shot.rows, seed)
    splits: dict[Split, Sequence[DatasetRow]] = {**task.splits, "train": other_rows}
    return replace(task, splits=splits), examples


def _taken_out(
    train: Sequence[DatasetRow], template: Template, count: int, seed: int
) -> tuple[list[DatasetRow], list[DatasetRow]]:
    """Draw `count` prompts of train; return one row of each, and all rows of all other prompts."""
    by_prompt: dict[str, list[DatasetRow]] = {}
    for row in train:
        by_prompt.setdefault(template.plain(row), []).append(row)
    if count >= len(by_prompt):
        raise DataError(
            f"env.few_shot.rows: expected fewer than the {len(by_prompt)} different prompts of "
            f"train, so that some are left to train on, got {count}; lower it, add rows, or write "
            "the examples into env.few_shot.rows"
        )
    order = generator(seed, "few_shot").permutation(len(by_prompt))[:count]
    prompts = list(by_prompt)
    example_prompts = [prompts[index] for index in order]
    used = set(example_prompts)
    other_rows = [row for key, rows in by_prompt.items() if key not in used for row in rows]
    return [by_prompt[key][0] for key in example_prompts], other_rows


def _solved_before(
    template: Template, few_shot: FewShot, examples: Sequence[DatasetRow]
) -> Template:
    """Put the questions and answers of examples in front of a template."""
    answer = Template.of(few_shot.answer)
    if template.text is not None:
        solved_texts = (
            _literal(template.plain(row) + answer.plain(row) + few_shot.separator)
            for row in examples
        )
        return replace(template, text="".join(solved_texts) + template.text)
    messages = template.conversation or ()
    system = tuple(message for message in messages[:1] if message["role"] == "system")
    question = replace(template, conversation=messages[len(system) :])
    solved = (message for row in examples for message in _solved(question, answer, row))
    return replace(template, conversation=(*system, *solved, *messages[len(system) :]))


def _solved(asked: Template, answer: Template, row: DatasetRow) -> list[Mapping[str, str]]:
    # A system message of the row is left out: the question's system message comes first.
    full_row, messages = asked.filled(row)
    example = [message for message in messages if message["role"] not in SYSTEM]
    # The answer continues a last message of the assistant.
    answer_start = (
        example.pop()["content"] if example[-1:] and example[-1]["role"] == "assistant" else ""
    )
    solution = answer.plain(full_row)
    example.append({"role": "assistant", "content": answer_start + solution})
    return [
        {"role": message["role"], "content": _literal(message["content"])} for message in example
    ]


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
