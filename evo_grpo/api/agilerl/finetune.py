"""Defines AgileRL's ReasoningGym, and the functions that train agents in one call.

The functions play the same rounds as `run(config)`, until a budget is spent.
"""

# No annotations from __future__ here: see `evo_grpo.schema.group`.

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast, final

from transformers import PreTrainedTokenizerBase  # for annotations only: it loads torch

from evo_grpo.api import unapplied
from evo_grpo.api.agilerl.evolution import Mutations, TournamentSelection
from evo_grpo.api.calls import shown_progress, warn_of_inert_mutations
from evo_grpo.api.population import Population
from evo_grpo.envs import single_turn
from evo_grpo.envs.builtin.dataset import Rewards
from evo_grpo.envs.episodes.gym import MultiTurnGym
from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv, TokenObservationWrapper
from evo_grpo.envs.prompts import Messages
from evo_grpo.envs.protocol import Environment
from evo_grpo.errors import ConfigError
from evo_grpo.evolve.explore.on_copy import NoExploration
from evo_grpo.evolve.select.halving import NoSelection
from evo_grpo.population.checkpoints.write import save_agent
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.round import Round, next_slots, play_round
from evo_grpo.population.rules import RoundSettings
from evo_grpo.population.stats import Tally
from evo_grpo.population.steps import RunWriter
from evo_grpo.record.observer import Observer
from evo_grpo.schema.group import Group, setting
from evo_grpo.schema.validation import check_folder, whole
from evo_grpo.seeding import derive
from evo_grpo.settings import (
    EvolveConfig,
    FitnessConfig,
    PopulationConfig,
    RecordConfig,
    StopConfig,
)
from evo_grpo.types import Score, Slot

PopT = TypeVar("PopT")

DEFAULT_MAX_STEPS = 32768
"""Default of `max_steps` in `finetune_llm_multiturn`: completions of the whole population."""


@dataclass(frozen=True)
class TextSpace:
    """The inputs or outputs of a language model, as a space for scripts that expect Gymnasium."""

    vocab_size: int
    max_tokens: int | None


@final
class ReasoningGym(single_turn.ReasoningGym):
    """`evo_grpo.ReasoningGym` with AgileRL's argument names; the other arguments are the same.

    `data_batch_size_per_gpu`, >= 1, is the number of prompts per step and process. The `batch_size`
    of `evo_grpo.ReasoningGym` is this number times the number of processes of `accelerator`. Every
    process gets all prompts of a step, and the agents divide them.
    """

    def __init__(
        self,
        train_dataset: object,
        test_dataset: object,
        tokenizer: "PreTrainedTokenizerBase",
        reward_fn: Rewards,
        conversation_template: str | Messages,
        data_batch_size_per_gpu: int = 8,
        *,
        accelerator: object = None,
        **others: Any,
    ) -> None:
        super().__init__(
            train_dataset,
            test_dataset,
            tokenizer,
            reward_fn,
            conversation_template,
            batch_size=data_batch_size_per_gpu * getattr(accelerator, "num_processes", 1),
            **others,
        )

    @property
    def observation_space(self) -> TextSpace:
        """The space of prompts."""
        return TextSpace(len(self.tokenizer), self.max_context_length)

    @property
    def action_space(self) -> TextSpace:
        """The space of completions."""
        return TextSpace(len(self.tokenizer), self.max_output_tokens)


#: The name of earlier AgileRL versions.
HuggingFaceGym = ReasoningGym


class FinetuneSettings(Group):
    """Keywords of the finetune functions besides the population and the environment.

    Attributes:
        max_steps: Completions in training, of all agents, after which training ends, >= 1; the step
            that reaches this number is finished. An episode of three turns counts as three.
        num_epochs: Passes over the train rows, for prompts from a dataset. It takes precedence over
            `max_steps`, as in AgileRL.
        evaluation_interval: GRPO steps of every agent between two evaluations, >= 1; an
            evaluation always follows the last step.
        evo_steps: GRPO steps between two evolutions; None evolves at every evaluation.
        tournament: The selection; None keeps all agents.
        mutation: The mutation of the hyperparameters in the agents' `hp_config`; None: no mutation.
        max_reward: Stop after an evaluation in which an agent's fitness is at least this number.
        prompts_per_step: Prompts of a GRPO step; None takes the environment's batch size.
        eval_prompts: Validation prompts, or episode seeds, of an evaluation.
        eval_samples: Completions of each prompt, or episodes of each seed.
        checkpoint_interval: GRPO steps between two checkpoints of all agents; a checkpoint is
            written after the next evaluation.
        checkpoint_path: Folder of the checkpoints: `step-000100/agent-00/...`.
        save_elite: Whether to save the agent with the best last fitness at the end; None does so if
            `elite_path` is given.
        elite_path: Folder in which the agent with the best last fitness is saved.
        verbose: Show progress, as `Population.train` does with `progress=True`.
        accelerator: The accelerator of the agents; not used here, because they already use it.
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
        """Build the settings from keywords; refuse keywords without effect and unusable folders."""
        settings = cls(**keywords)
        for name, other in (
            ("checkpoint_interval", "checkpoint_path"),
            ("checkpoint_path", "checkpoint_interval"),
            ("save_elite", "elite_path"),
        ):
            if getattr(settings, name) and getattr(settings, other) is None:
                raise ConfigError(f"{name}: has no effect without {other}; pass that too")
        # Checked before hours of training.
        for name in ("checkpoint_path", "elite_path"):
            if getattr(settings, name) is not None:
                check_folder(name, getattr(settings, name))
        return settings

    @property
    def evolves(self) -> bool:
        """Whether agents are selected or mutated."""
        return self.tournament is not None or self.mutation is not None


class Budget:
    """A `Limit` on completions of all agents, on GRPO steps and on fitness; None is no limit."""

    def __init__(
        self, completions: int | None, steps: int | None, max_reward: float | None
    ) -> None:
        self.completions = completions
        self.steps = steps
        self.max_reward = max_reward
        self.sampled = 0
        self.taken = 0
        self.over = False
        self._in_round = 0

    def spent(self, tallies: Sequence[Tally]) -> bool:
        """Count a GRPO step; return whether the limit on completions or steps is reached."""
        completions = sum(tally.completions for tally in tallies)
        self.sampled += completions - self._in_round
        self._in_round = completions
        self.taken += 1
        self.over = (self.completions is not None and self.sampled >= self.completions) or (
            self.steps is not None and self.taken >= self.steps
        )
        return self.over

    def ends_after(self, scores: Sequence[Score | None]) -> bool:
        """Return whether a limit is reached after the evaluation with these scores."""
        self._in_round = 0
        best = max((score.mean for score in scores if score is not None), default=-math.inf)
        self.over = self.over or (self.max_reward is not None and best >= self.max_reward)
        return self.over


@dataclass
class Checkpoints(RunWriter):
    """Writes all agents into `folder`, if there is one, every `every` GRPO steps.

    Attributes:
        budget: Counts the steps taken.
        saved: Number of steps taken until the last checkpoint.
    """

    folder: Path | None
    every: int
    budget: Budget
    saved: int = 0

    def checkpoint(self, cohort: Cohort, round: int, slot: Slot) -> str | None:
        """Write an agent if a checkpoint is due; see `RunWriter`."""
        del round
        steps = self.budget.taken
        if self.folder is None or steps // self.every <= self.saved // self.every:
            return None
        path = self.folder / f"step-{steps:06d}" / f"agent-{slot:02d}"
        save_agent(cohort, slot, path)
        return str(path)

    def round_over(self) -> None:
        """Set `saved` if the round wrote a checkpoint; see `RunWriter`."""
        if self.budget.taken // self.every > self.saved // self.every:
            self.saved = self.budget.taken


def as_population(pop: object) -> Population[Any]:
    """Return `pop`, an agent, a list of agents over one base or a Population, as a Population."""
    if isinstance(pop, Population):
        return pop
    agents: list[Any] = [pop]
    if not hasattr(pop, "cohort") and isinstance(pop, Iterable):
        agents = list(cast("Iterable[Any]", pop))
    if not agents or not all(hasattr(agent, "cohort") for agent in agents):
        kinds = sorted({type(agent).__name__ for agent in agents}) or "nothing"
        problem = (
            f"expected an agent, a list of agents or a Population, got {kinds}; make one with "
            "GRPO(...) or GRPO.population(size=...)"
        )
    else:
        bases = len({id(agent.cohort) for agent in agents})
        if bases == 1 and len({agent.slot for agent in agents}) == len(agents):
            return Population(agents[0].cohort, agents)
        problem = (
            f"expected different agents over one base, got {len(agents)} over {bases} bases, or "
            "one of them twice; make them with GRPO.population(size=...) or agent.clone()"
        )
    raise ConfigError(f"pop: {problem}")


def train(
    population: Population[Any],
    env: Environment[Any],
    settings: FinetuneSettings,
    budget: Budget,
) -> None:
    """Train and evolve the agents of a population until the budget is spent."""
    cohort = population.cohort
    cohort.adapt_to(env)
    prompts = settings.prompts_per_step or env.batch_size
    explorer = settings.mutation
    if isinstance(explorer, Mutations):
        explorer = explorer.strategy
    warn_of_inert_mutations(cohort, population.slots, explorer, prompts)
    writer = Checkpoints(
        None if settings.checkpoint_path is None else Path(settings.checkpoint_path),
        settings.checkpoint_interval or 1,
        budget,
    )
    # Agents of a list have no record of their rounds. Their steps never decrease, so a second call
    # continues with other prompts and other random numbers.
    states = [cohort.agents[slot] for slot in population.slots]
    last = population.rounds[-1] if population.rounds else unapplied.find(cohort, population.slots)
    number = max(state.steps for state in states) if last is None else last.round + 1
    record = unapplied.make_up(cohort, population.slots, inherit_optimizer=True)
    if record is not None:
        population.rounds[-1:] = [record] if population.rounds else []
        population.keep(next_slots(record))
    due = False
    size = sum(state.hparams.group_size for state in states)
    steps = budget.steps or math.ceil((budget.completions or 1) / (size * prompts))
    rounds = math.ceil(steps / settings.evaluation_interval)  # fewer, if completions are turns
    title = f"{cohort.base.name} on {env.name}, {len(population)} agents, at most {rounds} rounds"
    with shown_progress(settings.verbose, title, population.hp_config.names()) as progress:
        observer = progress or Observer()
        observer.started(None, number + rounds, number, None)
        while not budget.over:
            planned = _round_settings(population, env, settings, number, budget.taken)
            due = planned.population.rounds > number + 1
            round = Round(
                cohort, env, planned, population.slots, number, writer, observer, limit=budget
            )
            record = play_round(round)
            population.rounds.append(record)
            population.keep(next_slots(record))
            number += 1
    if due and record is not None:  # the budget ended where agents would have been selected
        unapplied.note(cohort, record)


def _round_settings(
    population: Population[Any],
    env: Environment[Any],
    settings: FinetuneSettings,
    number: int,
    before: int,
) -> RoundSettings:
    interval, tournament = settings.evaluation_interval, settings.tournament
    period = settings.evo_steps or interval
    due = settings.evolves and (before + interval) // period > before // period
    fitness = FitnessConfig(prompts=settings.eval_prompts, samples=settings.eval_samples)
    if isinstance(tournament, TournamentSelection):
        fitness = fitness.replace(window=tournament.eval_loop)
    return RoundSettings(
        PopulationConfig(
            size=len(population),
            # After the last round, no selection follows.
            rounds=number + (2 if due else 1),
            steps_per_round=interval,
            decisions="every",
            sizes="constant",
            stop=StopConfig(no_signal=None),
        ),
        EvolveConfig(significance=None, archive=False, dead_steps=None, fitness=fitness),
        RecordConfig(completions=0, metrics=False),
        selector=tournament if due and tournament is not None else NoSelection(),
        explorer=settings.mutation if due and settings.mutation else NoExploration(),
        prompts_per_step=settings.prompts_per_step or env.batch_size,
        rows_per_step=None,
    )


def finetune_llm_reasoning(
    pop: PopT,
    env: single_turn.ReasoningGym | None = None,
    *,
    env_fn: Callable[[], single_turn.ReasoningGym] | None = None,
    **settings: Any,
) -> PopT:
    """Finetune agents on prompts of one turn, by the reward of the completion.

    Args:
        pop: One agent, a list of agents over one base, or a Population; they train together, in
            the same forward passes.
        env: Prompts and rewards, the same for all agents.
        env_fn: Makes the environment, instead of `env`.
        **settings: See `FinetuneSettings`; without max_steps and num_epochs, the agents train for
            one pass over the train rows.

    Returns:
        `pop` itself, trained.
    """
    chosen = FinetuneSettings.of(settings)
    prompts = env_fn() if env_fn is not None else env
    if (env is None) == (env_fn is None) or not isinstance(prompts, single_turn.ReasoningGym):
        raise ConfigError(
            f"env: expected a ReasoningGym as exactly one of env= and env_fn=, got "
            f"{type(prompts).__name__}; episodes of several turns are for finetune_llm_multiturn"
        )
    steps = None
    if chosen.num_epochs is not None or chosen.max_steps is None:
        size = chosen.prompts_per_step or prompts.batch_size
        steps = math.ceil((chosen.num_epochs or 1) * len(prompts.task.splits["train"]) / size)
    return _finetune(pop, lambda _: prompts, chosen, steps)


def finetune_llm_multiturn(
    pop: PopT,
    env_factory: Callable[[], MultiTurnEnv | TokenObservationWrapper],
    max_turns: int,
    **settings: Any,
) -> PopT:
    """Finetune agents on episodes of many turns, by the cumulative reward of an episode.

    Args:
        pop: As for `finetune_llm_reasoning`.
        env_factory: Makes a new environment at each call: a `TokenObservationWrapper`, or a bare
            `MultiTurnEnv` when the agents have a tokenizer.
        max_turns: Completions after which an episode is over; at most the wrapper's `max_turns`.
        **settings: See `FinetuneSettings`. `prompts_per_step` is the number of episode seeds; the
            default is `batch_size` / `group_size` of the first agent, rounded up, or 4 without
            `batch_size`. The default of `max_steps` is 32,768.

    Returns:
        `pop` itself, trained.
    """
    chosen = FinetuneSettings.of({"evaluation_interval": 50, "eval_prompts": 32, **settings})
    if chosen.num_epochs is not None:
        raise ConfigError("num_epochs: episodes have no epochs; give max_steps instead")
    whole(1).check("max_turns", max_turns)

    def environment(population: Population[Any]) -> MultiTurnGym:
        cohort = population.cohort
        hparams = cohort.agents[population.slots[0]].hparams
        rows = hparams.batch_size or 4 * hparams.group_size
        return MultiTurnGym(
            env_factory,
            cohort.base.tokenizer,
            max_turns=max_turns,
            batch_size=max(1, math.ceil(rows / hparams.group_size)),
            seed=derive(cohort.seed, "env"),
        )

    return _finetune(pop, environment, chosen, None)


def save_llm_checkpoint(agent: Any, path: str | Path) -> None:  # noqa: ANN401 -- GRPO, GSPO or CISPO
    """Write an agent to a folder, for `PeftModel.from_pretrained(base, path / "actor")`."""
    agent.save_checkpoint(path)


def _finetune(
    pop: PopT,
    environment: Callable[[Population[Any]], Environment[Any]],
    settings: FinetuneSettings,
    steps: int | None,
) -> PopT:
    population = as_population(pop)
    env = environment(population)
    completions = None if steps else settings.max_steps or DEFAULT_MAX_STEPS
    try:
        train(population, env, settings, Budget(completions, steps, settings.max_reward))
    finally:
        if isinstance(env, MultiTurnGym):
            env.close()
    if settings.save_elite is not False and settings.elite_path is not None:
        save_llm_checkpoint(max(population, key=_last_fitness), settings.elite_path)
    return pop


def _last_fitness(agent: Any) -> float:  # noqa: ANN401 -- GRPO, GSPO or CISPO
    history = agent.state.history
    return history[-1].mean if history else -math.inf
