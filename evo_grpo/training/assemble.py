"""Builds a run from its settings: base, agents, environment, and the settings of its rounds."""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from peft import LoraConfig

from evo_grpo.envs.protocol import Environment
from evo_grpo.envs.resolve import environment_of, resolve_environment
from evo_grpo.envs.rewards.weights import check_rewards, named_weights
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.envs.task import Task
from evo_grpo.errors import ConfigError
from evo_grpo.evolve.select.pareto import ParetoSelector
from evo_grpo.evolve.start import Start, start_hparams
from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.choice import serves_head
from evo_grpo.model.loading import pick_device
from evo_grpo.model.lora.adapter_files import AdapterCopy
from evo_grpo.model.lora.load import detach_adapter, trainable
from evo_grpo.model.sharding import ShardedLayers
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.state import rank_alpha
from evo_grpo.population.ranks.ranks import find_team
from evo_grpo.population.ranks.team import Team, deal
from evo_grpo.population.rules import RoundSettings
from evo_grpo.record.names import JUDGED
from evo_grpo.record.records import RoundRecord
from evo_grpo.rollout.engine import check_engine
from evo_grpo.schema.group import Group
from evo_grpo.schema.problems import below, refuse
from evo_grpo.settings import (
    AgentSettings,
    DoubtfulSetting,
    EvolveConfig,
    PopulationConfig,
    RecordConfig,
    RunConfig,
    cross_checks,
)
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS, DEFAULT_PROMPTS
from evo_grpo.training import starting
from evo_grpo.training.sizing.cards import torch_build, unseen_gpus
from evo_grpo.training.starting import lora_config, read_start
from evo_grpo.training.strategies import check_columns, check_explorer, explorer, selector
from evo_grpo.types import Slot
from evo_grpo.working import working

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Objects:
    """Python objects that a caller passes in place of settings that name them.

    Attributes:
        model: A transformers causal language model, or a PeftModel, whose adapter is removed in
            place; None loads the model that the settings name.
        tokenizer: Replaces the model's tokenizer.
        lora: Replaces `lora` of the settings.
        padding: Id and string of the padding token; a tokenizer without a padding token gets the
            string. None uses the model's padding token.
        accelerator: An accelerate.Accelerator with the DeepSpeed stage of the settings; None
            creates one.
    """

    model: Any = None
    tokenizer: Any = None
    lora: LoraConfig | None = None
    padding: tuple[int, str | None] | None = None
    accelerator: Any = None

    def names(self) -> tuple[str, ...]:
        """Return which of "model", "tokenizer" and "lora" are set."""
        objects = {"model": self.model, "tokenizer": self.tokenizer, "lora": self.lora}
        return tuple(name for name, value in objects.items() if value is not None)


def _nothing(slots: Sequence[Slot], rounds: int) -> None:
    """Do nothing; the default of `Prepared.between_rounds`."""


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to train; a context manager that closes the rollout engine on exit.

    Attributes:
        cohort: The agents, with the base, the engine and the learner that they share.
        env: The environment.
        round_settings: Settings of the rounds.
        slots: Slots of the agents that play the first round.
        between_rounds: Called before the first round and after every round, with the slots of the
            agents of the next round and the number of finished rounds.
        objects: Descriptions of the run's Python objects, to be recorded; see `Inputs.objects`.
    """

    cohort: Cohort
    env: Environment[Any]
    round_settings: RoundSettings
    slots: tuple[Slot, ...]
    between_rounds: Callable[[Sequence[Slot], int], None] = _nothing
    objects: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        """Refuse settings of rounds that contradict each other or the environment."""
        evolve, space = self.round_settings.evolve, self.cohort.hp_config
        fitness = evolve.fitness
        stop = self.round_settings.population.stop.rewards
        check_rewards(named_weights(self.env), space, fitness.reward, fitness.objectives, stop)
        check_columns(getattr(self.env, "task", None), self.round_settings.record.columns)
        refuse(below(cross_checks.fitness_problems(space, fitness), "evolve", "fitness"))
        own = not isinstance(self.round_settings.selector, Group | ParetoSelector)
        refuse(below(cross_checks.objective_problems(evolve, own=own), "evolve"))

    def is_unfinished(self, rounds: Sequence[RoundRecord]) -> bool:
        """Return whether a run, or a call of `train`, has rounds to play after `rounds`."""
        ended = bool(rounds) and rounds[-1].is_end
        return len(rounds) < self.round_settings.population.rounds and not ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.cohort.close_engine()


def prepare(config: RunConfig, task: Task | None = None, team: Team | None = None) -> Prepared:
    """Build the base, the agents, the environment and the round settings of a run.

    `task` is the single-turn task of `config.env`, if it is already built.
    """
    team = team or Team()
    rounds = settings_of_rounds(config)
    check_explorer(rounds.explorer, config.agents())
    team.wait_for_all()  # every rank checks its input before any rank loads a model
    cohort, env, start = build_parts(config, config.agents(), task, team)
    slots = add_agents(cohort, config.population.size, config.population.init, start)
    with working("start the rollout engine"):
        cohort.open_engine()
    team.wait_for_all()
    return Prepared(cohort, env, rounds, slots)


def build_parts(
    config: RunConfig,
    agents: AgentSettings,
    task: Task | None = None,
    team: Team | None = None,
) -> tuple[Cohort, Environment[Any], AdapterCopy | None]:
    """Build a run's cohort without agents, build its environment, and read the start adapter.

    `agents` is `config.agents()`, possibly with another seed. `task` is the single-turn task of
    `config.env`, if it is already built. The start adapter is None if agents start from the base.
    """
    tokens = config.algorithm.longest_output(config.search_space()) or DEFAULT_OUTPUT_TOKENS
    # Build everything that does not need the base first, to report bad input before a model loads.
    prompts = config.algorithm.prompts_per_step or DEFAULT_PROMPTS
    make = environment_of(config.env, config.seed, prompts, tokens, task)
    cohort, start = build_cohort(agents, team=team)
    with working("render the prompts"):
        env = make(cohort.base.tokenizer)
        cohort.adapt_to(env)
    return cohort, env, start


def build_cohort(
    settings: AgentSettings, objects: Objects | None = None, team: Team | None = None
) -> tuple[Cohort, AdapterCopy | None]:
    """Build a cohort without agents; return it and the adapter that agents start from.

    The adapter is None if agents start from the base.
    """
    objects = objects or Objects()
    if team is None:
        # A run passes its team; a script that uses DeepSpeed may also run in several processes.
        team = Team() if settings.engine.zero is None else find_team()
    with team.sharing_errors():
        base, start = _base(settings, objects, team)
        if objects.padding is not None:
            base.set_padding(*objects.padding)
        lora = objects.lora
        if lora is None and start is not None and settings.lora.is_default:
            lora = trainable(start.config)
        cohort = Cohort(
            base,
            lora or lora_config(settings.lora),
            settings,
            objects=objects.names(),
            team=team,
            accelerator=objects.accelerator,
        )
        starting.check_adapters(cohort)
    if team.rank == 0:
        penalty = "repetition_penalty" in cohort.hp_config.names()
        starting.warn_of_processors(base, settings.algorithm, mutates=penalty)
    return cohort, start


def build_agents(
    settings: AgentSettings, objects: Objects, size: int, init: Start
) -> tuple[Cohort, tuple[Slot, ...]]:
    """Build a cohort with `size` agents; return it and the slots of the agents."""
    cohort, start = build_cohort(settings, objects)
    return cohort, add_agents(cohort, size, init, start)


def add_agents(
    cohort: Cohort, size: int, init: Start, start: AdapterCopy | None = None
) -> tuple[Slot, ...]:
    """Add `size` agents that start from the adapter `start`, or the base; return their slots."""
    rank_and_alpha = rank_alpha(cohort.slots.config)
    first = cohort.settings.algorithm.first_hparams(cohort.hp_config, rank_and_alpha)
    starts = start_hparams(first, cohort.hp_config, size, init, cohort.seed)
    dealt = enumerate(deal(starts, cohort.shards))
    slots = [cohort.add(hparams, shard).slot for shard, part in dealt for hparams in part]
    if start is not None:
        starting.start_with(cohort, slots, start)
    return tuple(slots)


def _base(
    settings: AgentSettings, objects: Objects, team: Team
) -> tuple[SharedBase, AdapterCopy | None]:
    check_engine(settings.engine)
    if settings.engine.threads is not None:
        torch.set_num_threads(settings.engine.threads)
    # Dividing a base moves it to the device one layer at a time.
    on_host = _divided(settings, team) or settings.engine.zero == 3
    base, start = _whole_base(settings, objects, on_host=on_host)
    if settings.engine.device == "auto" and not torch.cuda.is_available():
        unseen = unseen_gpus(torch_build(torch.version))
        if unseen is not None:
            warnings.warn(f"{unseen}; the CPU computes", DoubtfulSetting, stacklevel=4)
    if base.device.type == "cuda":
        # cuDNN plans each new shape for 30 ms: learning on an H200 took .81 s with it, .71 without.
        torch.backends.cuda.enable_cudnn_sdp(False)
    starting.check_same_base(team, base, start)
    if settings.engine.base == "sharded" or settings.engine.zero == 3:
        # Also set in one process, so that results do not depend on the number of processes.
        base.specialized = False
    base.kernels = settings.engine.kernels
    # The order is set for the whole process, also for rewards that compute at the same time.
    base.in_order = not settings.engine.overlap
    base.head_kernels = base.specialized and serves_head(base)
    starting.agree_on_path(team, base, native=settings.engine.rollout_settings.shares_base)
    if _divided(settings, team):
        device = pick_device(settings.engine.device)
        layers = ShardedLayers(base, device)
        base.passes = team.in_lockstep(layers.join_forward, layers.join_backward)
        _log.info("%s: %d bytes on rank %d of %d", base.name, base.bytes_here, team.rank, team.size)
    return base, start


def _divided(settings: AgentSettings, team: Team) -> bool:
    return settings.engine.base == "sharded" and team.size > 1


def _whole_base(
    settings: AgentSettings, objects: Objects, *, on_host: bool
) -> tuple[SharedBase, AdapterCopy | None]:
    model = settings.model
    if (objects.model is None) == (model is None):
        got = "both a module and a name" if model is not None else "none"
        raise ConfigError(
            f"model: expected the name of a model or a transformers module, got {got}; for "
            'instance model="tiny-sums"'
        )
    if model is None:
        network, start = detach_adapter(objects.model)
        where = pick_device(settings.engine.device)
        return SharedBase(network.to("cpu" if on_host else where), objects.tokenizer), start
    start = read_start(model)  # before the base, which takes longer
    base = SharedBase.load(
        model.name,
        device=settings.engine.device,
        dtype=settings.engine.dtype,
        tokenizer=objects.tokenizer,
        quantization=settings.engine.quantization,
        on_host=on_host,
        **{"trust_remote_code": model.trust_remote_code, **model.config},
    )
    return base, start


def settings_of_rounds(config: RunConfig, prompts: int = DEFAULT_PROMPTS) -> RoundSettings:
    """Return the settings of a run's rounds; `prompts` is the default of `prompts_per_step`."""
    algorithm = config.algorithm
    prompts = algorithm.prompts_per_step or prompts
    return round_settings(
        config.population, config.evolve, config.record, prompts, algorithm.group_size
    )


def round_settings(
    population: PopulationConfig,
    evolve: EvolveConfig,
    record: RecordConfig,
    prompts: int,
    group_size: int,
) -> RoundSettings:
    """Return the settings of rounds.

    A step has `prompts` prompts for each agent, with `group_size` completions each. An agent whose
    group size changes still gets as many completions in a step as the other agents.
    """
    return RoundSettings(
        population,
        evolve,
        record,
        selector=selector(evolve.selection, evolve.significance),
        explorer=explorer(evolve.exploration),
        prompts_per_step=prompts,
        rows_per_step=population.size * prompts * group_size,
    )


def environment_for(cohort: Cohort, env: object) -> Environment[Any]:
    """Build the environment `env` with the tokenizer and the seed of a cohort.

    `env` has the types of `env` in `Population.train`. Raises PromptTooLongError for a prompt that
    leaves no room for a completion in the model's context.
    """
    environment = resolve_environment(
        env,
        tokenizer=cohort.base.tokenizer,
        seed=cohort.seed,
        max_output_tokens=cohort.max_output_tokens,
        batch_size=cohort.settings.algorithm.prompts_per_step,
    )
    cohort.adapt_to(environment)
    return environment


def record_rewards(env: object, path: Path, team: Team, *, writes: bool, shared: bool) -> None:
    """Make judges record their answers in a run folder, and ask each question on one rank only.

    `writes`: whether this rank writes the run's records; `shared`: whether all see the folder.
    """
    if not isinstance(env, ReasoningGym):
        return
    if writes or shared:
        for number, judge in env.judges.items():
            name = f"judge-{number}-rank-{team.rank}"
            judge.record_in(path / JUDGED, name, counts=team.rank == 0)
    if (board := team.board()) is not None:
        for judge in env.judges.values():
            judge.share(board, known=writes and not shared)


def spent_on_rewards(env: object, team: Team, *, writes: bool) -> dict[str, float]:
    """Return the numbers of answers and tokens, and the cost, of judges, summed over all ranks.

    If `writes`, this rank records the answers that other ranks could not write to a file.
    """
    spent = Counter[str]()
    if isinstance(env, ReasoningGym):
        judges = env.judges.values()
        for answers in team.gather([(judge.spent(), judge.unrecorded()) for judge in judges]):
            for judge, (cost, unrecorded) in zip(judges, answers, strict=True):
                spent.update(cost)
                if writes:
                    judge.record(unrecorded)
    return dict(spent)
