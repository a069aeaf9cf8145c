"""sample(run, prompts): what an agent of a run answers, and its base beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from evo_grpo.cohort.sampler import PopulationSampler
from evo_grpo.envs.asking import Asking, asking
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.protocol import Ask
from evo_grpo.envs.task import Split
from evo_grpo.errors import ConfigError, DataError, EvoGrpoError, PromptTooLongError
from evo_grpo.evaluate import weighted
from evo_grpo.record.choice import Choice, Wanted, choose_of
from evo_grpo.settings import RunConfig
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS
from evo_grpo.trying.policy import Policy, adapter_of, config_of, loaded
from evo_grpo.types import Prompt
from evo_grpo.validation import LEAST, MOST, computable, shown, whole

_OBJECTS = (
    "so its base and its task are not known here; in Python, load a checkpoint with "
    "load_checkpoint, and ask the agent with get_action"
)


@dataclass(frozen=True)
class Answers:
    """What one policy answered to a prompt.

    Attributes:
        who: "agent 1, member 4", or "base" for the model without an adapter.
        texts: Its completions, or episodes, in the order in which they were drawn.
        rewards: That of each, None where there is none: of a prompt that is no row of the task, or
            where every reward function abstained.
        ended: Whether each came to its end; else the limit of tokens cut it.
    """

    who: str
    texts: tuple[str, ...]
    rewards: tuple[float | None, ...]
    ended: tuple[bool, ...]


@dataclass(frozen=True)
class Sampled:
    """A prompt with its answers.

    Attributes:
        prompt: As the model read it, chat template included.
        answers: The agent's first, then those of the base where it was asked.
    """

    prompt: str
    answers: tuple[Answers, ...]


@dataclass(frozen=True)
class Drawn:
    """How answers are drawn.

    Attributes:
        n: How many to each prompt.
        temperature: None takes that of the run's evaluations.
        base: Whether the base answers too.
        seed: Other seeds give other answers.
    """

    n: int = 4
    temperature: float | None = None
    base: bool = True
    seed: int = 0

    def check(self) -> None:
        """Refuse numbers out of range.

        Raises:
            ConfigError: It names the first.
        """
        whole(1).check("n", self.n)
        whole().check("seed", self.seed)
        if self.temperature is not None:
            computable(LEAST, MOST).check("temperature", self.temperature)


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
    n: int = 4,
    temperature: float | None = None,
    base: bool = True,
    seed: int = 0,
    raw: bool = False,
) -> list[Sampled]:
    """Let an agent of a run answer prompts, or rows of its task, as it did in training.

    A prompt goes through the template of the task, and an answer ends where one of training did.
    Agent and base draw with the same random numbers.

    Args:
        run: Run folder with at least one finished round.
        prompts: What to ask: the value of the one column that the task's template names; of
            several columns a JSON object.
        rows: Rows of the task by their position in the split (0-based), of a task of several turns
            episodes. These have rewards.
        split: Which one.
        agent: Whom to ask, with `member`, `round` (0-based) and `best_ever` as in `export`; by
            default the winner.
        member: See `agent`.
        round: See `agent`.
        best_ever: See `agent`.
        n: Answers to each prompt, >= 1.
        temperature: Of sampling, > 0; None takes that of the run's evaluations.
        base: Whether the base answers too.
        seed: Other seeds give other answers.
        raw: Send prompts as they are, without the template.

    Returns:
        One entry per prompt, then one per row.

    Raises:
        CheckpointError: No round is finished, or the checkpoint is gone or damaged.
        ConfigError: There is no such agent or row, or a number is out of range.
        RunDirError: The run was recorded with objects that no file can name.
        PromptTooLongError: A prompt leaves no room for an answer.
    """
    choice = choose_of(run, Wanted(agent, member, round, best_ever))
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    numbers = [rows] if isinstance(rows, int) else list(rows)
    drawn = Drawn(n, temperature, base, seed)
    with asked(choice, drawn, split=split, with_rows=bool(numbers), raw=raw) as ask:
        return [*(ask.prompt(one) for one in given), *(ask.row(one) for one in numbers)]


class Asker:
    """Asks an agent, and its base beside it; `asked` makes one.

    Args:
        policy: The agent.
        who: What it is called.
        drawn: How answers are drawn.
        temperature: Of sampling.
        how: The template that prompts go through.
        split: Of the rows.
    """

    def __init__(
        self,
        policy: Policy,
        who: str,
        drawn: Drawn,
        temperature: float,
        how: Asking,
        split: Split,
    ) -> None:
        self._policy = policy
        self._who = [who, *(["base"] if drawn.base else [])]
        self._drawn, self._temperature = drawn, temperature
        self._how = how
        self._split: Split = split
        self._count = 0

    def prompt(self, text: str) -> Sampled:
        """Ask a prompt; see `sample`."""
        cohort = self._policy.cohort
        row = _row(text, self._how.columns)
        rendered, ids = self._how.template.render(row, cohort.base.tokenizer)
        limit = cohort.context_length
        if limit is not None and len(ids) > limit - 1:
            raise PromptTooLongError(
                f"prompt: expected at most {limit - 1} tokens, so that one more fits the context "
                f"of {limit}, got {len(ids)}; shorten it"
            )
        prompt = Prompt(0, rendered, ids, row)
        sampler = self._sampler()
        groups = sampler.sample(Ask([[prompt]] * len(self._who), sampler.group_sizes))
        answers = [
            Answers(
                who,
                tuple(one.text for one in group.completions),
                (None,) * len(group.completions),
                tuple(one.ended for one in group.completions),
            )
            for who, (group,) in zip(self._who, groups, strict=True)
        ]
        return Sampled(rendered, tuple(answers))

    def row(self, number: int) -> Sampled:
        """Ask a row of the task, or play an episode; see `sample`."""
        env, cohort = self._policy.env, self._policy.cohort
        assert env is not None, "rows are asked of an environment"
        start = _start(env, self._split, number)
        sampler = self._sampler()
        play = cohort.begin(env, [[start]] * len(self._who), sampler.group_sizes)
        while (ask := play.ask()) is not None:
            play.tell(sampler.sample(ask))
        answers: list[Answers] = []
        prompt = ""
        for who, experience in zip(self._who, play.experiences(), strict=True):
            rewards = weighted(experience.rewards, env.weights)
            prompt = experience.trajectories[0].prompt
            answers.append(
                Answers(
                    who,
                    tuple(t.text or t.error for t in experience.trajectories),
                    tuple(None if math.isnan(one) else float(one) for one in rewards),
                    tuple(t.ended for t in experience.trajectories),
                )
            )
        return Sampled(prompt, tuple(answers))

    def _sampler(self) -> PopulationSampler:
        slots = [self._policy.slot, *([None] if self._drawn.base else [])]
        self._count += 1
        return PopulationSampler.compared(
            self._policy.cohort,
            slots,
            samples=self._drawn.n,
            temperature=self._temperature,
            stream=("sample", self._drawn.seed, self._count),
        )


@contextmanager
def asked(
    choice: Choice, drawn: Drawn, *, split: Split, with_rows: bool, raw: bool
) -> Generator[Asker]:
    """Load an agent of a run, to be asked; see `sample` for the arguments and the errors.

    Args:
        choice: The agent.
        drawn: How answers are drawn.
        split: Of the rows.
        with_rows: Whether rows are asked, for which the task is built.
        raw: Send prompts as they are.
    """
    drawn.check()
    config = config_of(choice, _OBJECTS)
    adapter = adapter_of(choice)
    # Of rows the environment says itself how long an answer is, and what is asked.
    how = None if with_rows else _how(config, raw=raw)
    tokens = None if how is None else how.max_output_tokens
    with loaded(config, adapter, with_env=with_rows, max_output_tokens=tokens) as policy:
        temperature = drawn.temperature or config.evolve.fitness.temperature
        yield Asker(policy, choice.title, drawn, temperature, how or _how(config, raw=raw), split)


def _how(config: RunConfig, *, raw: bool) -> Asking:
    """Return how prompts are asked."""
    if not raw:
        return asking(config.env, config.seed)
    try:
        tokens = asking(config.env, config.seed).max_output_tokens
    except EvoGrpoError:  # the task is not there, nor needed
        tokens = DEFAULT_OUTPUT_TOKENS
    return Asking(Template.of("{prompt}"), tokens, {})


def _start(env: Any, split: Split, number: int) -> Any:  # noqa: ANN401 -- of any environment
    """Return a row of a task of one turn, or the seed of an episode."""
    splits = getattr(getattr(env, "task", None), "splits", None)
    count = None if splits is None else len(splits[split])
    if number < 0 or (count is not None and number >= count):
        expected = ">= 0" if count is None else f"from 0 to {count - 1}, of {count} in {split}"
        raise ConfigError(f"row: expected a number {expected}, got {number}")
    if count is None:
        return env.prompts(split, number + 1)[number]
    return env.row(split, number)


def _row(text: str, columns: Sequence[str]) -> dict[str, Any]:
    """Return the row that a prompt stands for.

    Raises:
        ConfigError: The template names several columns, and the prompt is no JSON object of them.
        DataError: The template names none.
    """
    if len(columns) == 1:
        return {columns[0]: text}
    if not columns:
        raise DataError(
            "prompt: the task's template names no column, so it asks always the same; ask a row "
            "with --row, or send your prompt as it is with --raw"
        )
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not set(columns) <= set(cast("dict[str, Any]", row)):
        example = json.dumps(dict.fromkeys(columns, "..."), ensure_ascii=False)
        raise ConfigError(
            f"prompt: the task's template names {len(columns)} columns; expected a JSON object of "
            f"them, such as '{example}', got {shown(text)}; or ask a row with --row, or send the "
            "prompt as it is with --raw"
        )
    return cast("dict[str, Any]", row)
