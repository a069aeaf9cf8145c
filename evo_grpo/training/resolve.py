"""Fills in the settings of a run that depend on its machine, before anything is built."""

import warnings
from collections.abc import Mapping

import torch

from evo_grpo.envs.data.hub import pinned
from evo_grpo.envs.task import Task
from evo_grpo.errors import ConfigError
from evo_grpo.model.loading import pick_device, pick_dtype
from evo_grpo.population.ranks.team import Team, is_silent_rank
from evo_grpo.record.history import resolved_start
from evo_grpo.rollout.engine import check_engine
from evo_grpo.settings import DoubtfulSetting, RunConfig
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS, DEFAULT_PROMPTS
from evo_grpo.settings.trackers import check_trackers
from evo_grpo.training import shortages, starting, strategies
from evo_grpo.training.sizing import machine, model_size

OWN_BYTES = 2 << 30
"""Most bytes in use on a GPU, besides torch's, that count as the CUDA context of this process."""


def resolve(config: RunConfig, team: Team) -> tuple[RunConfig, Task | None]:
    """Fill in those settings of a new run that depend on its machine, the Hub or earlier runs.

    All ranks get the same settings. The settings never change afterwards, because the number of
    shards and the batch limits affect how sums are rounded. The task of the run is also returned;
    it is None if episodes have several turns.
    """
    if config.engine.zero is None and (shards := config.engine.parts(team.size)) > 1:
        config = config.replace(engine=config.engine.replace(shards=shards))
    shortages.check_ranks(config, team)
    check_trackers(config.record.trackers)
    model_size.check_available(config.model.name)
    check_engine(config.engine)
    config = _with_revisions(config, team)
    if isinstance(config.population.init, Mapping):  # the first rank alone may have those runs
        population, first, space = config.population, config.first_hparams(), config.search_space()
        init = (
            resolved_start(population.init, first, space, population.size, config.seed)
            if team.rank == 0
            else None
        )
        config = config.replace(population=population.replace(init=team.first(init)))
    task = strategies.task_of(config)
    setup = _setup(config, task, team.size)
    config = _with_limits(config, setup, team)
    config = config.settled(DEFAULT_OUTPUT_TOKENS if task is None else task.max_output_tokens)
    _check_memory(config, setup)
    if team.rank == 0:
        prompts = config.algorithm.prompts_per_step or DEFAULT_PROMPTS
        shortages.warn_of_shortages(task, prompts, config.evolve.fitness)
    return config, task


def checked_task(config: RunConfig, team: Team | None = None) -> Task | None:
    """Return the single-turn task of a recorded run; refuse a run that does not fit in memory."""
    check_trackers(config.record.trackers)
    task = strategies.task_of(config)
    _check_memory(config, _setup(config, task, 1 if team is None else team.size))
    return task


def _with_revisions(config: RunConfig, team: Team) -> RunConfig:
    revisions = team.first(pinned(config.env) if team.rank == 0 else None)
    return config.replace(env=config.env.replace(**revisions)) if revisions else config


def _setup(config: RunConfig, task: Task | None, processes: int) -> machine.Setup | None:
    """Return the device of a run and its memory; None if the memory is unknown."""
    device, total = pick_device(config.engine.device), 0
    if device.type not in ("cpu", "cuda"):
        return None
    if device.type == "cpu":
        kind, place, room = "cpu", machine.MACHINE, machine.machine_memory()
    else:
        kind, place, (free, room) = "cuda", "the CUDA device", torch.cuda.mem_get_info(device)
        total = room
        # Memory that torch has reserved belongs to this process, from an earlier run.
        others = room - free - torch.cuda.memory_reserved(device)
        if others > OWN_BYTES:
            room, place = (
                room - others,
                f"{place}, {machine.format_bytes(others)} of which others use,",
            )
    place, capacity = machine.within(config, place, room)
    if capacity is None:
        return None
    hint = DEFAULT_OUTPUT_TOKENS if task is None else task.max_output_tokens
    return machine.Setup(
        model_size.read_model_size(config.model.name),
        config.algorithm.longest_output(config.search_space()) or hint,
        str(pick_dtype(config.engine.dtype, device)).removeprefix("torch."),
        kind,
        capacity,
        place,
        processes,
        total=total,
    )


def _with_limits(config: RunConfig, setup: machine.Setup | None, team: Team) -> RunConfig:
    """Replace batch limits that are null by the most rows and tokens that fit on every rank."""
    limits: dict[str, int] = {}
    if setup is not None:
        limits = machine.choose_limits(_with_adapter(config, setup), setup)
    by_rank = team.gather(limits)
    agreed = {
        name: min(rank_limits[name] for rank_limits in by_rank if name in rank_limits)
        for name in set().union(*by_rank)
    }
    return config.replace(engine=config.engine.replace(**agreed)) if agreed else config


def _with_adapter(config: RunConfig, setup: machine.Setup) -> RunConfig:
    """Return settings with `model.lora` read from `model.adapter`, for an estimate of memory."""
    model = starting.with_adapter(config.model, setup.size, config.search_space().names())
    return config.model_copy(update={"model": model})


def _check_memory(config: RunConfig, setup: machine.Setup | None) -> None:
    """Refuse adapters that do not fit the base, and a run that needs more memory than there is.

    Only warns if the excess is within the error of the prediction, `TOLERANCE`.
    """
    if setup is None:
        return
    config = _with_adapter(config, setup)
    model_size.check_adapters_fit(config.model, config.largest_lora, setup.size)
    plan = setup.plan(config)
    if plan is None or plan.peak <= setup.capacity:
        return
    text = setup.shortage(plan)
    if plan.peak * (1 - machine.TOLERANCE) > setup.capacity:
        lowers = plan.largest.settings
        raise ConfigError(f"memory: {text}: lower {lowers}; evo-grpo check proposes values")
    if not is_silent_rank():
        warnings.warn(f"{text}; evo-grpo check proposes values", DoubtfulSetting, stacklevel=4)
