"""Put a system prompt and solved examples in front of the questions of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from evo_grpo.envs.data.tables import require_columns
from evo_grpo.envs.prompts import SYSTEM, Template
from evo_grpo.envs.task import DatasetRow, Split, Task
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.schema.problems import unknown_name
from evo_grpo.seeding import generator
from evo_grpo.settings.env import PROMPTS

if TYPE_CHECKING:
    from evo_grpo.settings.env import FewShot, PromptSettings

_NO_MESSAGES = "expected messages for the chat template, got the raw text of a prompt"


def with_prompting(task: Task, given: PromptSettings, seed: int) -> Task:
    """Add a system prompt, examples from train, template keywords and thinking tags to a task."""
    if given == type(given)():
        return task
    template = Template.of_task(task)
    examples: Sequence[DatasetRow] = ()
    if given.few_shot is not None:
        task, examples = _with_examples(task, template, given.few_shot, seed)
    named = {name: named_template(name, template, given, examples) for name in given.prompts or ()}
    made = next(iter(named.values())) if named else prompting_template(template, given, examples)
    for name, one in named.items() or [(None, made)]:
        if one.conversations or not one.columns().keys() <= template.columns().keys():
            who = "the prompt template" if name is None else f"env.prompts.{name}"
            fitted = {split: one.fitted(rows, split, who)[0] for split, rows in task.splits.items()}
            task = replace(task, splits=fitted)
    return replace(
        task,
        prompt=made.text,
        conversation=made.conversation,
        keywords=made.keywords,
        thinking=given.thinking,
        too_long=given.too_long,
        prompts={name: one.text or one.conversation or "" for name, one in named.items()},
    )


def named_template(
    name: str | None, template: Template, given: PromptSettings, examples: Sequence[DatasetRow]
) -> Template:
    """Return the template of a prompt in `env.prompts`; None stands for the first or only one."""
    prompts = given.prompts or {}
    if name is None:
        name = next(iter(prompts), None)
    if name is None:
        return prompting_template(template, given, examples)
    if name not in prompts:
        raise ConfigError(unknown_name(name, prompts, PROMPTS))
    one, above = prompts[name], f"env.prompts.{name}"
    try:
        if one.prompt is not None:
            template = Template.of(one.prompt)
        elif one.conversation is not None:
            messages = [{"role": m.role, "content": m.content} for m in one.conversation]
            template = Template.of(messages)
    except ConfigError as error:
        raise ConfigError(f"{above}: {error}") from error
    if given.system_prompt is not None and one.system_prompt is not None:
        raise ConfigError(
            f"{above}: expected no system prompt beside env.system_prompt, got both; remove one"
        )
    system = one.system_prompt or given.system_prompt
    given = given.replace(system_prompt=system)
    where = above if one.system_prompt is not None else "env"
    return prompting_template(template, given, examples, above=where)


def prompting_template(
    template: Template,
    given: PromptSettings,
    examples: Sequence[DatasetRow],
    *,
    above: str = "env",
) -> Template:
    """Return a template with a system prompt, examples and keywords of the chat template.

    `given.prompts` is not read. `above` is the settings group of the system prompt, for messages.
    """
    if given.few_shot is not None:
        template = _solved_before(template, given.few_shot, examples)
    asked = template.conversation
    if given.system_prompt is not None:
        if asked is None:
            raise ConfigError(
                f"{above}.system_prompt: {_NO_MESSAGES}, which has no place for a system message; "
                f"give {above}.conversation, or write it into {above}.prompt"
            )
        if asked[0]["role"] == "system":
            raise ConfigError(
                f"{above}.system_prompt: expected a conversation without a system message, got "
                "both; remove one of them"
            )
        system = {"role": "system", "content": given.system_prompt}
        template = replace(template, conversation=(system, *asked))
        template.columns()  # refuses a malformed one
    if given.chat_template_kwargs and asked is None:
        raise ConfigError(
            f"env.chat_template_kwargs: {_NO_MESSAGES}, which no chat template renders; give "
            "env.conversation, or remove them"
        )
    return replace(template, keywords=dict(given.chat_template_kwargs))


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
    examples, rest = _taken_out(train, template, few_shot.rows, seed)
    splits: dict[Split, Sequence[DatasetRow]] = {**task.splits, "train": rest}
    return replace(task, splits=splits), examples


def _taken_out(
    train: Sequence[DatasetRow], template: Template, count: int, seed: int
) -> tuple[list[DatasetRow], list[DatasetRow]]:
    """Return a row for each of `count` prompts drawn from train, and the rows of other prompts."""
    together: dict[str, list[DatasetRow]] = {}
    for row in train:
        together.setdefault(template.plain(row), []).append(row)
    if count >= len(together):
        raise DataError(
            f"env.few_shot.rows: expected fewer than the {len(together)} different prompts of "
            f"train, so that some are left to train on, got {count}; lower it, add rows, or write "
            "the examples into env.few_shot.rows"
        )
    order = generator(seed, "few_shot").permutation(len(together))[:count]
    keys = list(together)
    picked = [keys[index] for index in order]
    taken = set(picked)
    rest = [row for key, rows in together.items() if key not in taken for row in rows]
    return [together[key][0] for key in picked], rest


def _solved_before(
    template: Template, few_shot: FewShot, examples: Sequence[DatasetRow]
) -> Template:
    """Return a template preceded by the questions of examples and their answers."""
    answer = Template.of(few_shot.answer)
    if template.text is not None:
        shown = (
            _literal(template.plain(row) + answer.plain(row) + few_shot.separator)
            for row in examples
        )
        return replace(template, text="".join(shown) + template.text)
    asked = template.conversation or ()
    system = tuple(message for message in asked[:1] if message["role"] == "system")
    own = replace(template, conversation=asked[len(system) :])
    solved = (message for row in examples for message in _solved(own, answer, row))
    return replace(template, conversation=(*system, *solved, *asked[len(system) :]))


def _solved(asked: Template, answer: Template, row: DatasetRow) -> list[Mapping[str, str]]:
    # A system message of the row is left out, since that of the question comes first.
    whole, messages = asked.filled(row)
    filled = [one for one in messages if one["role"] not in SYSTEM]
    # A last message of the assistant begins each answer.
    start = filled.pop()["content"] if filled[-1:] and filled[-1]["role"] == "assistant" else ""
    solution = answer.plain(whole)
    filled.append({"role": "assistant", "content": start + solution})
    return [{"role": one["role"], "content": _literal(one["content"])} for one in filled]


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
