"""Defines try_config(config), which samples and scores answers before training."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from evo_grpo.analysis.sampling.answers import check_answers, played_out, show_answer, start_of
from evo_grpo.envs.data.tables import Split
from evo_grpo.envs.protocol import Environment, Experience, starts_under
from evo_grpo.envs.resolve import environment_of, named_task
from evo_grpo.envs.rewards.weights import values_by_name
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import ConfigError
from evo_grpo.learn.objective.advantages import zero_variance_groups
from evo_grpo.model.loading import load_tokenizer
from evo_grpo.places import searching
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.sampler import PopulationSampler
from evo_grpo.population.evaluate import weighted
from evo_grpo.readers.terminal.console import say
from evo_grpo.record.files import plain_value
from evo_grpo.record.folder import beside, code_folder
from evo_grpo.record.wording import count, number
from evo_grpo.schema.validation import whole
from evo_grpo.settings import RunConfig, algorithm, yaml
from evo_grpo.sources import resolve
from evo_grpo.training.assemble import add_agents, build_cohort, build_parts, environment_for
from evo_grpo.training.sizing.model_size import read_model_size
from evo_grpo.types import Completion, CompletionGroup, Slot

PROMPTS = 3
"""Prompts that are tried if no rows are named."""
CUT_OFTEN = 0.2
"""If a greater share of the answers is cut off, the advice names the limit of tokens."""


@dataclass(frozen=True)
class TriedAnswer:
    """An answer to a prompt: a completion or, in a task of several turns, an episode.

    Attributes:
        text: The text that the reward functions get; of an episode, its turns on separate lines.
        ended: Whether the answer is complete, rather than cut at the limit of tokens.
        turns: Number of completions.
        rewards: Value of each reward function, without its weight; None if it abstained.
        reward: Weighted sum of the rewards; None if all abstained.
        error: The error of the environment that dropped the episode, else empty.
    """

    text: str
    tokens: int
    ended: bool
    turns: int
    rewards: Mapping[str, float | None]
    reward: float | None
    error: str = ""


@dataclass(frozen=True)
class TriedPrompt:
    """A prompt and a group of answers to it.

    Attributes:
        prompt: The text that the model gets, special tokens included.
        signal: Whether the rewards differ, so that the group has a gradient.
    """

    prompt: str
    tokens: int
    answers: tuple[TriedAnswer, ...]
    signal: bool


@dataclass(frozen=True)
class Tried:
    """The prompts, answers and rewards of the first step of a run.

    Attributes:
        sampling_seconds: Time to sample the answers; 0 if the user wrote the answer.
        reward_seconds: Time to score the answers.
    """

    task: str
    prompts: tuple[TriedPrompt, ...]
    weights: Mapping[str, float]
    sampling_seconds: float
    reward_seconds: float

    @property
    def answers(self) -> tuple[TriedAnswer, ...]:
        """The answers to all prompts."""
        return tuple(answer for prompt in self.prompts for answer in prompt.answers)

    @property
    def signal(self) -> float:
        """Share of the groups whose rewards differ."""
        return sum(prompt.signal for prompt in self.prompts) / len(self.prompts)

    @property
    def cut(self) -> float:
        """Share of the answers that the limit of tokens has cut off."""
        return sum(not answer.ended for answer in self.answers) / len(self.answers)

    @property
    def tokens(self) -> float:
        """Mean tokens of an answer."""
        return sum(answer.tokens for answer in self.answers) / len(self.answers)

    def sentences(self) -> list[str]:
        """Return sentences on the answers: their length, rewards, time and signal."""
        answers = self.answers
        length = f"{self.tokens:.0f} tokens each on average"
        if self.sampling_seconds:
            length += f", sampled in {self.sampling_seconds:.1f} s"
        lines = [f"{count(len(answers), 'answer')}: {length}, scored in "
                 f"{self.reward_seconds:.1f} s; {self.cut:.0%} were cut off"]  # fmt: skip
        for name, weight in self.weights.items():
            values = [value for answer in answers if (value := answer.rewards[name]) is not None]
            spread = "abstained on every answer"
            if values:
                mean = sum(values) / len(values)
                spread = f"{min(values):g} to {max(values):g}, mean {mean:.2f}"
            times = "" if weight == 1 else f", times {weight:g}"
            lines.append(f"reward {name}: {spread}{times}")
        if self.sampling_seconds == 0:
            return lines
        differ = sum(prompt.signal for prompt in self.prompts)
        lines.append(
            f"{differ} of {count(len(self.prompts), 'group')} have a signal: only a group whose "
            "rewards differ changes an agent"
        )
        return lines if differ else [*lines, self._without_signal()]

    def _without_signal(self) -> str:
        """Return advice on raising the share of groups with a signal."""
        rewards = {answer.reward for answer in self.answers}
        if rewards == {None}:
            return "every reward function abstained on every answer: none is meant for this task"
        remedies = [
            "look at the answers above: if a right one earns nothing, mend the reward",
            "reward a part of the answer, such as its format",
            "take easier rows, solved examples (env.few_shot) or a stronger model",
            "raise algorithm.group_size or algorithm.temperature",
        ]
        if self.cut > CUT_OFTEN:
            remedies.insert(0, "raise algorithm.max_output_tokens, since many answers are cut off")
        return f"A run would learn nothing from these: {'; '.join(remedies)}"

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values; numbers that are not finite are None."""
        prompts = [
            {**vars(prompt), "answers": [vars(answer) for answer in prompt.answers]}
            for prompt in self.prompts
        ]
        measured = ("signal", "cut", "tokens")
        values = {**vars(self), **{name: getattr(self, name) for name in measured}}
        return plain_value({**values, "prompts": prompts})


def try_config(
    config: RunConfig | str | Path | Mapping[str, Any],
    *,
    rows: int | Sequence[int] = (),
    split: Split = "train",
    samples: int | None = None,
    answer: str | None = None,
    code: str | Path | None = None,
    env: object = None,
) -> Tried:
    """Sample the untrained model at the settings of a run, and score its answers.

    Args:
        config: A `RunConfig`, the path of a YAML file, or a mapping as in such a file.
        rows: Rows of the task by their position in the split (0-based); none takes the first
            prompts of the run.
        split: Split of the rows.
        samples: Answers to each prompt, >= 2; None takes `algorithm.group_size`.
        answer: A text to score as the answer to each prompt, without a model.
        code: A further folder to search for files and modules of the task.
        env: The environment, in place of the task of `config`.

    Raises:
        ConfigError: There is no such row, a number is out of range, or an answer is given to a task
            of several turns.
        RunFailedError: The model has log-probabilities that are not finite.
    """
    run = yaml.as_config(config)
    if (task_settings := named_task(env)) is not None:
        run, env = run.replace(env=task_settings), None
    if samples is not None:
        whole(2).check("samples", samples)
    numbers = [rows] if isinstance(rows, int) else list(rows)
    with ExitStack() as stack:
        stack.enter_context(searching(code_folder(code), is_code=True))
        stack.enter_context(searching(beside(config)))
        if answer is not None:
            tokenizer = load_tokenizer(
                resolve(run.model.name), trust_remote_code=run.model.trust_remote_code
            )
            make = environment_of(
                run.env, run.seed, algorithm.DEFAULT_PROMPTS, algorithm.DEFAULT_OUTPUT_TOKENS, None
            )
            gym = make(tokenizer) if env is None else env
            windows = run.algorithm.max_model_len, read_model_size(run.model.name).context
            if isinstance(gym, ReasoningGym) and (limits := [size for size in windows if size]):
                gym.limit_context(min(limits), run.algorithm.longest_output(run.search_space()))
            return _scored(gym, run.env.kind, split, numbers, answer)
        agents = run.agents().replace(engine=run.engine.replace(zero=None))
        if env is None:
            cohort, task_env, start = build_parts(run, agents)
        else:
            cohort, start = build_cohort(agents)
            task_env = environment_for(cohort, env)
        (slot,) = add_agents(cohort, 1, "same", start)
        cohort.open_engine()
        stack.callback(cohort.close_engine)
        return _sampled(cohort, slot, task_env, _starts(task_env, split, numbers), samples)


def _sampled(
    cohort: Cohort,
    slot: Slot,
    env: Environment[Any],
    starts: Sequence[Any],
    samples: int | None,
) -> Tried:
    """Sample and score answers as the first agent of the run does in its first step."""
    hparams = cohort.agents[slot].hparams
    size = samples or hparams.group_size
    sampler = PopulationSampler.in_training(cohort, [slot], stream=("try",))
    prompted_starts = starts_under(env, hparams.prompt, starts)
    fresh_play = cohort.begin(env, [prompted_starts], [size])  # makes environments of several turns
    began = time.perf_counter()
    play = played_out(fresh_play, sampler)
    sampled = time.perf_counter()
    (experience,) = play.experiences()
    check_answers("the model", (trajectory.logprobs for trajectory in experience.trajectories))
    return _tried(env, experience, size, sampled - began, time.perf_counter() - sampled)


def _scored(env: object, kind: str, split: Split, numbers: Sequence[int], text: str) -> Tried:
    """Score a text as the answer to each prompt, after loading only the model's tokenizer."""
    if not isinstance(env, ReasoningGym):
        raise ConfigError(
            f"answer: expected a task of one turn, got {kind}, whose episodes go on after an "
            "answer; leave the answer out"
        )
    for scorer in env.scorers:
        scorer.prepare("cpu")
    ids = tuple(env.tokenizer(text, add_special_tokens=False)["input_ids"])
    prompts = _starts(env, split, numbers)
    answer = (Completion(ids, text, None, ended=True),)
    play = env.begin([prompts], [1])
    play.tell([[CompletionGroup(-1, prompt, answer) for prompt in prompts]])
    began = time.perf_counter()
    (experience,) = play.experiences()
    return _tried(env, experience, 1, 0.0, time.perf_counter() - began)


def _starts(env: Environment[Any], split: Split, numbers: Sequence[int]) -> list[Any]:
    """Return the starts of the numbered rows; without numbers, the first starts of the run."""
    return [start_of(env, split, number) for number in numbers] or env.batch(0, PROMPTS)


def _tried(
    env: Environment[Any], scored: Experience, size: int, sampling: float, scoring: float
) -> Tried:
    differ = ~zero_variance_groups(scored.rewards, size, weights=env.weights)
    values = values_by_name(env, scored.rewards)
    rows = zip(scored.trajectories, values, weighted(scored.rewards, env.weights), strict=True)
    answers = [
        TriedAnswer(
            trajectory.text,
            trajectory.sampled,
            trajectory.ended,
            trajectory.turns,
            rewards,
            None if math.isnan(total) else float(total),
            trajectory.error,
        )
        for trajectory, rewards, total in rows
    ]
    prompts: list[TriedPrompt] = []
    for start, signal in zip(range(0, len(answers), size), differ, strict=True):
        group = answers[start : start + size]
        # A dropped episode has no tokens.
        complete = next(
            (episode for episode in scored.trajectories[start : start + size] if episode.mask), None
        )
        ids = () if complete is None else complete.token_ids[: (*complete.mask, True).index(True)]
        text = env.tokenizer.decode(ids) if ids else scored.trajectories[start].prompt
        prompts.append(TriedPrompt(str(text), len(ids), tuple(group), bool(signal)))
    weights = dict(zip(values[0], env.weights.tolist(), strict=True))
    return Tried(env.name, tuple(prompts), weights, sampling, scoring)


def show_tried(console: Console, tried: Tried) -> None:
    """Print prompts, answers and rewards before training, and the conclusions from them."""
    for prompt in tried.prompts:
        say(console, f"prompt of {count(prompt.tokens, 'token')}, as the model gets it:", "dim")
        for line in prompt.prompt.split("\n"):
            say(console, f"> {line}", "bold", wrap=True)
        for answer in prompt.answers:
            values = ", ".join(f"{name} {number(x, 2)}" for name, x in answer.rewards.items())
            total = "" if len(answer.rewards) < 2 else f", sum {number(answer.reward, 2)}"
            cut = "" if answer.ended else " ... (cut off)"
            show_answer(console, answer.text or answer.error, f"{cut}  [{values}{total}]")
        console.print()
    for line in tried.sentences():
        say(console, line, wrap=True)
