"""Defines sample(run, prompts), which samples answers of an agent and of its base model.

`loaded` makes an agent ready to sample; the other commands of this folder use it too.
"""

import json
import math
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from evo_grpo import errors
from evo_grpo.analysis.export.contents import checked_adapter
from evo_grpo.envs.asking import TaskPrompt, asking
from evo_grpo.envs.data.tables import Split
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.protocol import Ask, Environment, Play, starts_under
from evo_grpo.envs.task import Task
from evo_grpo.places import searching
from evo_grpo.population.checkpoints.read import refuse_foreign_files
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.sampler import PopulationSampler
from evo_grpo.population.evaluate import weighted
from evo_grpo.readers.terminal.console import say
from evo_grpo.record.choice import ChosenAgent, choose_of
from evo_grpo.record.folder import code_folder, read_config, recorded_objects
from evo_grpo.record.plain import inside
from evo_grpo.record.wording import number
from evo_grpo.schema.hparams import LORA, Hparams
from evo_grpo.schema.validation import shown, whole
from evo_grpo.settings import EnvConfig, RunConfig
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS
from evo_grpo.settings.model import LoraSettings
from evo_grpo.training.assemble import add_agents, build_cohort, build_parts, environment_for
from evo_grpo.training.from_python import FromPython
from evo_grpo.training.recorded_inputs import read_inputs_of
from evo_grpo.training.resume_check import check_inputs
from evo_grpo.types import Prompt, Slot


@dataclass(frozen=True)
class Policy:
    """A cohort of one agent, and the environment of its task, None if that was not loaded."""

    cohort: Cohort
    env: Environment[Any] | None
    slot: Slot


@contextmanager
def loaded(
    config: RunConfig,
    adapter: Path,
    hparams: Hparams,
    *,
    with_env: bool,
    task: Task | None = None,
    env: object = None,
    max_output_tokens: int | None = None,
) -> Generator[Policy]:
    """Load the base of a configuration, an adapter and, if `with_env`, the task; yield the policy.

    The adapter's LoRA settings replace `model.lora` of the configuration. `task` is the single-turn
    task of the configuration, if it is already built; `env` replaces the task. The argument
    `max_output_tokens` is the limit of answers if the configuration has none. Of `hparams`, the
    agent's hyperparameters, only `max_output_tokens` and `prompt` are used.
    """
    algorithm = config.algorithm
    longest = algorithm.longest_output(config.search_space())
    if longest is None and max_output_tokens is not None:
        algorithm = algorithm.replace(max_output_tokens=max_output_tokens)
    # The adapter has fixed LoRA settings, even if the run searched them.
    ranges = config.evolve.hyperparameters
    others = ranges and {name: span for name, span in ranges.items() if not name.startswith(LORA)}
    agents = config.agents().replace(
        model=config.model.replace(lora=LoraSettings(), adapter=str(adapter)),
        hyperparameters=others,
        algorithm=algorithm.replace(separate_reference=False),
        # One process samples, and nothing is trained.
        engine=config.engine.replace(zero=None),
    )
    environment: Environment[Any] | None = None
    if with_env and env is None:
        cohort, environment, start = build_parts(config, agents, task)
    else:
        cohort, start = build_cohort(agents)
        environment = environment_for(cohort, env) if with_env else None
    (slot,) = add_agents(cohort, 1, "same", start)
    prompt_names: Sequence[str] = getattr(environment, "prompt_names", ())
    prompt = hparams.prompt
    if prompt is not None and environment is not None and prompt not in prompt_names:
        warnings.warn(
            f"the agent was trained with the prompt {prompt!r}, which env.prompts does not have: "
            "it is asked with the prompt of the task",
            UserWarning,
            stacklevel=3,
        )
    answering = {
        "prompt": prompt if prompt in prompt_names else None,
        "max_output_tokens": hparams.max_output_tokens,
    }
    cohort.set_hparams(slot, cohort.agents[slot].hparams.replace(**answering))
    cohort.open_engine()
    try:
        yield Policy(cohort, environment, slot)
    finally:
        cohort.close_engine()


def check_answers(who: str, logprobs: Iterable[Sequence[float] | None]) -> None:
    """Refuse answers with a log-prob of NaN, because their tokens are arbitrary."""
    if any(math.isnan(value) for values in logprobs for value in values or ()):
        raise errors.RunFailedError(
            f"{who}: expected finite log-probabilities, got NaN: its weights are not finite, or "
            "overflow in the dtype of the base, so that its answers are arbitrary; use another "
            "checkpoint, or engine.dtype: float32"
        )


def config_of(
    choice: ChosenAgent,
    command: str | None,
    allow: Iterable[str],
    *,
    env: object = None,
    call: str = "",
) -> RunConfig:
    """Return the settings of a run; refuse a run whose base cannot be built from them.

    If a `command` is given, it builds the task too: the user's files must then be as in the run,
    except those that `allow` names. `env` is the environment object for a run that was recorded
    with one; messages name the `call` that passes it.
    """
    recorded, from_python = recorded_objects(choice.run), FromPython(env)
    if base := [name for name in ("model", "tokenizer") if name in recorded]:
        raise errors.RunDirError(
            f"{choice.run}: it was recorded by Population.train with {' and '.join(base)}, which "
            "no file can name, so its base cannot be built from the folder; in Python, "
            f"evo_grpo.Population.resume({str(choice.run)!r}, env, {base[0]}=...) returns its "
            "agents, which have the methods get_action and test"
        )
    config = read_config(choice.run)
    if command is not None:
        config = from_python.with_env(recorded, config, choice.run, call)
        parts: dict[str, str] | None = None
        if any(name.partition(".")[0] == "env" for name in recorded):
            # Of the objects, only the environment is used again.
            past = read_inputs_of(choice.run).objects
            others = {name: value for name, value in past.items() if not name.startswith("env")}
            parts = others | from_python.parts(config.seed)
        check_inputs(choice.run, config, command=command, allow=allow, objects=parts)
    return config


def adapter_of(choice: ChosenAgent) -> Path:
    """Return the PEFT folder of an agent of a run, after checking its files."""
    refuse_foreign_files(inside(choice.run, choice.checkpoint or "."))
    return checked_adapter(choice)


def played_out(play: Play, sampler: PopulationSampler) -> Play:
    """Sample all remaining turns of the episodes of `play`, and return `play`."""
    while (ask := play.ask()) is not None:
        play.tell(sampler.sample(ask))
    return play


def start_of(env: Any, split: Split, row: int) -> Any:  # noqa: ANN401 -- of any environment
    """Return the start with number `row` in a split: a prompt, or the seed of an episode."""
    splits = getattr(getattr(env, "task", None), "splits", None)
    rows = None if splits is None else len(splits[split])
    if row < 0 or (rows is not None and row >= rows):
        expected = ">= 0" if rows is None else f"from 0 to {rows - 1}, of {rows} in {split}"
        raise errors.ConfigError(f"row: expected a number {expected}, got {row}")
    if rows is None:
        return env.prompts(split, row + 1)[row]
    return env.row(split, row)


# --- sample --------------------------------------------------------------------------------------


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
        n: Answers to each prompt, >= 1; greedy decoding gives one, because all would be equal.
        temperature: Sampling temperature, 0 for greedy decoding; None takes the temperature of
            evaluations.
        base: Whether to sample the base model too.
        seed: Seed of the draws.
        raw: Send prompts as they are, without the template.
        allow: For rows, your files that may differ from the run's, named as in the error message.
        code: A further folder to search for the files and modules that the run names.
        env: For rows, the object that was passed to `Population.train` as the environment.

    Returns:
        The answers to each prompt, then to each row; the agent's answers precede the base's.

    Raises:
        CheckpointError: No round is finished, or the checkpoint is missing or damaged.
        ConfigError: There is no such agent or row, a number is out of range, or rows are given and
            the settings or the files of the run have changed.
        RunDirError: The run was recorded with a model or a tokenizer that no file can name.
        RunFailedError: The agent, or the base, has log-probabilities that are not finite.
    """
    choice = choose_of(run, agent, member, round, best_ever=best_ever, prefer=prefer)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    numbers = [rows] if isinstance(rows, int) else list(rows)
    options: dict[str, Any] = {"n": n, "temperature": temperature, "base": base, "seed": seed}
    options |= {"split": split, "raw": raw, "allow": allow, "env": env}
    with searching(code_folder(code), is_code=True):
        return [answer for part in answers(choice, texts, numbers, **options) for answer in part]


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
    adapter, hparams = adapter_of(choice), choice.agent.record.hparams
    # For rows, the environment makes the prompts and limits the answers.
    question = None if rows else _how(config.env, config.seed, hparams.prompt, raw=raw)
    tokens = None if question is None else question.max_output_tokens
    with loaded(
        config, adapter, hparams, with_env=bool(rows), env=env, max_output_tokens=tokens
    ) as policy:
        question = question or _how(config.env, config.seed, hparams.prompt, raw=raw)
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
            yield _answer_prompt(policy.cohort, list(slots), question, text, sampler())
        for number in rows:
            yield _answer_row(policy, list(slots), split, number, sampler())


def _answer_prompt(
    cohort: Cohort, who: Sequence[str], how: TaskPrompt, text: str, sampler: PopulationSampler
) -> list[Sampled]:
    row = _row(text, how.columns)
    rendered, ids = how.template.render(row, cohort.base.tokenizer)
    limit = cohort.context_length
    if limit is not None and len(ids) > limit - 1:
        raise errors.PromptTooLongError(
            f"prompt: expected at most {limit - 1} tokens, so that one more fits the context "
            f"of {limit}, got {len(ids)}; shorten it"
        )
    prompt = Prompt(0, rendered, ids, row)
    groups = sampler.sample(Ask([[prompt]] * len(who), sampler.group_sizes))
    answers: list[Sampled] = []
    for name, (group,) in zip(who, groups, strict=True):
        completions = group.completions
        check_answers(name, (completion.logprobs for completion in completions))
        texts = tuple(completion.text for completion in completions)
        ended = tuple(completion.ended for completion in completions)
        answers.append(Sampled(rendered, name, texts, (None,) * len(texts), ended))
    return answers


def _answer_row(
    policy: Policy, who: Sequence[str], split: Split, number: int, sampler: PopulationSampler
) -> list[Sampled]:
    env = policy.env
    assert env is not None, "rows are asked of an environment"
    name = policy.cohort.agents[policy.slot].hparams.prompt
    starts = starts_under(env, name, [start_of(env, split, number)])
    play = played_out(policy.cohort.begin(env, [starts] * len(who), sampler.group_sizes), sampler)
    answers: list[Sampled] = []
    for name, experience in zip(who, play.experiences(), strict=True):
        episodes = experience.trajectories
        check_answers(name, (episode.logprobs for episode in episodes))
        earned = weighted(experience.rewards, env.weights)
        rewards = tuple(None if math.isnan(reward) else float(reward) for reward in earned)
        texts = tuple(episode.text or episode.error for episode in episodes)
        ended = tuple(episode.ended for episode in episodes)
        answers.append(Sampled(episodes[0].prompt, name, texts, rewards, ended))
    return answers


def _how(env: EnvConfig, seed: int, prompt: str | None, *, raw: bool) -> TaskPrompt:
    if not raw:
        return asking(env, seed, prompt)
    try:
        tokens = asking(env, seed).max_output_tokens
    except errors.EvoGrpoError:  # a raw prompt does not need the task
        tokens = DEFAULT_OUTPUT_TOKENS
    return TaskPrompt(Template.of("{prompt}"), tokens, {})


def _row(text: str, columns: Sequence[str]) -> dict[str, Any]:
    """Return a prompt as a row of the task; for several columns, the prompt is a JSON object."""
    if len(columns) == 1:
        return {columns[0]: text}
    if not columns:
        raise errors.DataError(
            "prompt: the task's template names no column, so its prompt is always the same; sample "
            "a row with --row, or send your prompt as it is with --raw"
        )
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not set(columns) <= set(cast("dict[str, Any]", row)):
        example = json.dumps(dict.fromkeys(columns, "..."), ensure_ascii=False)
        raise errors.ConfigError(
            f"prompt: the task's template names {len(columns)} columns; expected a JSON object of "
            f"them, such as '{example}', got {shown(text)}; or sample a row with --row, or send "
            "the prompt as it is with --raw"
        )
    return cast("dict[str, Any]", row)


def show_sampled(console: Console, sampled: Sequence[Sampled]) -> None:
    """Print a prompt and the answers to it, with the line breaks that they contain."""
    for line in sampled[0].prompt.split("\n"):
        say(console, f"> {line}", "bold", wrap=True)
    for result in sampled:
        say(console, f"{result.who}:", "dim")
        for text, reward, ended in zip(result.texts, result.rewards, result.ended, strict=True):
            reward_text = "" if reward is None else f"  [reward {number(reward, 2)}]"
            show_answer(console, text, ("" if ended else " ...") + reward_text)
    console.print()


def show_answer(console: Console, text: str, after: str) -> None:
    """Print an answer, with the line breaks that it contains, as an item of a list."""
    for place, line in enumerate((text + after).split("\n")):
        say(console, f"{'    ' if place else '  - '}{line}", wrap=True)
