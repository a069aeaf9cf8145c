"""sample(run, prompts): answers of an agent of a run, and of its base model."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from evo_grpo.analysis.sampling.policy import (
    Policy,
    adapter_of,
    check_answers,
    config_of,
    loaded,
    played_out,
    start_of,
)
from evo_grpo.envs.asking import Asking, asking
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.protocol import Ask, starts_under
from evo_grpo.envs.task import Split
from evo_grpo.errors import ConfigError, DataError, EvoGrpoError, PromptTooLongError
from evo_grpo.places import looking_in
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.sampler import PopulationSampler
from evo_grpo.population.evaluate import weighted
from evo_grpo.readers.terminal.console import say
from evo_grpo.record.choice import ChosenAgent, choose_of
from evo_grpo.record.folder import code_folder
from evo_grpo.record.wording import number
from evo_grpo.schema.validation import shown, whole
from evo_grpo.settings import EnvConfig
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS
from evo_grpo.types import Prompt


@dataclass(frozen=True)
class Sampled:
    """The answers of one policy to a prompt.

    Attributes:
        prompt: The prompt as the model reads it, with the chat template.
        who: Name of the policy: "agent 1, member 4", or "base" for the model without an adapter.
        texts: Completions, or episodes, in the order in which they were drawn.
        rewards: Reward of each answer. None if the prompt is no row of the task, or if all reward
            functions abstained.
        ended: Whether each answer is complete, rather than cut at the limit of tokens.
    """

    prompt: str
    who: str
    texts: tuple[str, ...]
    rewards: tuple[float | None, ...]
    ended: tuple[bool, ...]


def sample(  # noqa: PLR0913 -- all but the first two have defaults
    run: str | Path,
    prompts: str | Sequence[str] = (),
    *,
    rows: int | Sequence[int] = (),
    split: Split = "validation",
    agent: int | None = None,
    member: int | None = None,
    round: int | None = None,
    best_ever: bool = False,
    prefer: Mapping[str, float] | None = None,
    n: int = 4,
    temperature: float | None = None,
    base: bool = True,
    seed: int = 0,
    raw: bool = False,
    allow: Sequence[str] = (),
    code: str | Path | None = None,
    env: object = None,
) -> list[Sampled]:
    """Sample answers of an agent to prompts, or to rows of its task, as in training.

    A prompt is rendered with the template of the task, and an answer ends at the same tokens as in
    training. Agent and base draw with the same random numbers.

    Args:
        run: Run folder with at least one finished round.
        prompts: Values of the column that the task's template names; JSON objects if it names
            several columns.
        rows: Rows of the task by their position in the split (0-based), or episodes of a task of
            several turns. Answers to rows have rewards.
        split: Split of the rows.
        agent: Agent to sample, selected with `member`, `round` (0-based), `best_ever` and `prefer`
            as in `export`; the winner by default.
        member: See `agent`.
        round: See `agent`.
        best_ever: See `agent`.
        prefer: See `agent`.
        n: Answers to each prompt, >= 1; greedy decoding gives one, since all would be equal.
        temperature: Sampling temperature, 0 for greedy decoding; None takes that of evaluations.
        base: Whether to sample the base model too.
        seed: Seed of the draws.
        raw: Send prompts as they are, without the template.
        allow: For rows, your files that may differ from the run's, named as in the error message.
        code: A further folder for the files and modules that the run names.
        env: For rows, the environment given to `Population.train`, if it was an object.

    Returns:
        The answers to each prompt, then to each row; those of the agent before those of the base.

    Raises:
        CheckpointError: No round is finished, or the checkpoint is missing or damaged.
        ConfigError: There is no such agent or row, or a number is out of range; or rows are given,
            and the settings or the files of the run have changed.
        RunDirError: The run was recorded with a model or a tokenizer that no file can name.
        PromptTooLongError: A prompt leaves no room for an answer.
        RunFailedError: The agent, or the base, has log-probabilities that are not finite.
    """
    choice = choose_of(run, agent, member, round, best_ever=best_ever, prefer=prefer)
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    numbers = [rows] if isinstance(rows, int) else list(rows)
    how: dict[str, Any] = {"n": n, "temperature": temperature, "base": base, "seed": seed}
    how |= {"split": split, "raw": raw, "allow": allow, "env": env}
    with looking_in(code_folder(code), is_code=True):
        return [one for found in answers(choice, given, numbers, **how) for one in found]


def answers(  # noqa: PLR0913 -- the arguments of `sample`
    choice: ChosenAgent,
    prompts: Iterable[str],
    rows: Sequence[int],
    *,
    n: int,
    temperature: float | None,
    base: bool,
    seed: int,
    split: Split,
    raw: bool,
    allow: Sequence[str],
    env: object = None,
) -> Generator[list[Sampled]]:
    """Yield the answers to each prompt, then to each row; see `sample`.

    Prompts are read one at a time. The agent stays loaded until the generator ends or is closed.
    """
    whole(1).check("n", n)
    whole().check("seed", seed)
    # For rows, code that the task names is imported and called.
    command = f"sample {choice.run} --row N" if rows else None
    call = f"evo_grpo.sample({str(choice.run)!r}, rows=[...], env=...)"
    config = config_of(choice, command, allow, env=env, call=call)
    fitness = config.evolve.fitness
    if temperature is not None:
        fitness = fitness.replace(temperature=temperature)
    adapter, own = adapter_of(choice), choice.agent.record.hparams
    # For rows, the environment makes the prompts and limits the answers.
    how = None if rows else _how(config.env, config.seed, own.prompt, raw=raw)
    tokens = None if how is None else how.max_output_tokens
    with loaded(
        config, adapter, with_env=bool(rows), env=env, max_output_tokens=tokens, own=own
    ) as policy:
        how = how or _how(config.env, config.seed, own.prompt, raw=raw)
        slots = {choice.title: policy.slot, **({"base": None} if base else {})}
        numbers = count(1)

        def sampler() -> PopulationSampler:
            return PopulationSampler.compared(
                policy.cohort,
                list(slots.values()),
                samples=fitness.per_prompt(n),
                temperature=fitness.temperature,
                stream=("sample", seed, next(numbers)),
            )

        for text in prompts:
            yield _answer_prompt(policy.cohort, list(slots), how, text, sampler())
        for number in rows:
            yield _answer_row(policy, list(slots), split, number, sampler())


def _answer_prompt(
    cohort: Cohort, who: Sequence[str], how: Asking, text: str, sampler: PopulationSampler
) -> list[Sampled]:
    row = _row(text, how.columns)
    rendered, ids = how.template.render(row, cohort.base.tokenizer)
    limit = cohort.context_length
    if limit is not None and len(ids) > limit - 1:
        raise PromptTooLongError(
            f"prompt: expected at most {limit - 1} tokens, so that one more fits the context "
            f"of {limit}, got {len(ids)}; shorten it"
        )
    prompt = Prompt(0, rendered, ids, row)
    groups = sampler.sample(Ask([[prompt]] * len(who), sampler.group_sizes))
    found: list[Sampled] = []
    for name, (group,) in zip(who, groups, strict=True):
        given = group.completions
        check_answers(name, (one.logprobs for one in given))
        texts, ended = tuple(one.text for one in given), tuple(one.ended for one in given)
        found.append(Sampled(rendered, name, texts, (None,) * len(given), ended))
    return found


def _answer_row(
    policy: Policy, who: Sequence[str], split: Split, number: int, sampler: PopulationSampler
) -> list[Sampled]:
    env = policy.env
    assert env is not None, "rows are asked of an environment"
    name = policy.cohort.agents[policy.slot].hparams.prompt
    starts = starts_under(env, name, [start_of(env, split, number)])
    play = played_out(policy.cohort.begin(env, [starts] * len(who), sampler.group_sizes), sampler)
    found: list[Sampled] = []
    for name, experience in zip(who, play.experiences(), strict=True):
        given = experience.trajectories
        check_answers(name, (one.logprobs for one in given))
        earned = weighted(experience.rewards, env.weights)
        rewards = tuple(None if math.isnan(one) else float(one) for one in earned)
        texts, ended = tuple(t.text or t.error for t in given), tuple(t.ended for t in given)
        found.append(Sampled(given[0].prompt, name, texts, rewards, ended))
    return found


def _how(env: EnvConfig, seed: int, prompt: str | None, *, raw: bool) -> Asking:
    if not raw:
        return asking(env, seed, prompt)
    try:
        tokens = asking(env, seed).max_output_tokens
    except EvoGrpoError:  # a raw prompt does not need the task
        tokens = DEFAULT_OUTPUT_TOKENS
    return Asking(Template.of("{prompt}"), tokens, {})


def _row(text: str, columns: Sequence[str]) -> dict[str, Any]:
    """Return a prompt as a row of the task; for several columns, the prompt is a JSON object."""
    if len(columns) == 1:
        return {columns[0]: text}
    if not columns:
        raise DataError(
            "prompt: the task's template names no column, so its prompt is always the same; sample "
            "a row with --row, or send your prompt as it is with --raw"
        )
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not set(columns) <= set(cast("dict[str, Any]", row)):
        example = json.dumps(dict.fromkeys(columns, "..."), ensure_ascii=False)
        raise ConfigError(
            f"prompt: the task's template names {len(columns)} columns; expected a JSON object of "
            f"them, such as '{example}', got {shown(text)}; or sample a row with --row, or send "
            "the prompt as it is with --raw"
        )
    return cast("dict[str, Any]", row)


def show_sampled(console: Console, sampled: Sequence[Sampled]) -> None:
    """Print a prompt and the answers to it, each with its own line breaks."""
    for line in sampled[0].prompt.split("\n"):
        say(console, f"> {line}", "bold", wrap=True)
    for one in sampled:
        say(console, f"{one.who}:", "dim")
        for text, reward, ended in zip(one.texts, one.rewards, one.ended, strict=True):
            said = "" if reward is None else f"  [reward {number(reward, 2)}]"
            show_answer(console, text, ("" if ended else " ...") + said)
    console.print()


def show_answer(console: Console, text: str, after: str) -> None:
    """Print an answer as an item of a list, with its own line breaks."""
    for place, line in enumerate((text + after).split("\n")):
        say(console, f"{'    ' if place else '  - '}{line}", wrap=True)
