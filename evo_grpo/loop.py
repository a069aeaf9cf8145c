"""run(config) and resume(folder): from a YAML file to a leaderboard. Read this file first.

prepare     the shared base, N agents, the environment, the schedule
play_round  rounds.py: train, evaluate, checkpoint, select, mutate, record
judge       base and best agent on the test split, once, at the end
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig

from evo_grpo import config as configuration
from evo_grpo.config import RunConfig
from evo_grpo.envs.registry import build_task
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import CheckpointError, RunFailedError
from evo_grpo.evaluate import evaluate
from evo_grpo.evolve.generation import Generation
from evo_grpo.evolve.mutate import Mutations, sample_hparams
from evo_grpo.evolve.select import NoSelection, Selector, TournamentSelection
from evo_grpo.grpo.advantages import ADV_NORM_TO_SCALE
from evo_grpo.grpo.checkpoint import load_agent, save_agent
from evo_grpo.grpo.cohort import Cohort, CohortOptions
from evo_grpo.grpo.learn_options import LearnOptions
from evo_grpo.grpo.loss import LossConfig
from evo_grpo.model.base import SharedBase
from evo_grpo.record.leaderboard import from_records, write_csv
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.observer import Observer, Silent
from evo_grpo.record.run_dir import RunDir
from evo_grpo.records import Member, RoundRecord
from evo_grpo.rounds import Schedule, apply, members_from, play_round
from evo_grpo.seeding import derive, generator


@dataclass(frozen=True)
class Prepared:
    """Everything a run needs, built from its config."""

    cohort: Cohort
    env: ReasoningGym
    schedule: Schedule
    slots: tuple[int, ...]


class FolderKeeper:
    """Writes rounds into a run folder.

    Args:
        folder: The open run folder.
        lineage: The Optuna study, or None.
        keep_last: Delete a round's checkpoints once the next round is whole.
    """

    def __init__(self, folder: RunDir, lineage: Lineage | None, *, keep_last: bool) -> None:
        """Keep the pieces."""
        self.folder = folder
        self.lineage = lineage
        self.keep_last = keep_last

    def checkpoint(
        self, cohort: Cohort, round: int, agent: int, slot: int
    ) -> tuple[str | None, str | None]:
        """Save one agent; see `Keeper`."""
        path = self.folder.checkpoint_path(round, agent)
        digest = save_agent(cohort, slot, path)
        return self.folder.relative(path), digest

    def commit(self, record: RoundRecord, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write the round: completions first, the line in rounds.jsonl makes it count, the rest can be made again."""
        self.folder.write_completions(record.round, [dict(row) for row in completions])
        self.folder.append_round(record)
        if self.lineage is not None:
            self.lineage.record(record)
        write_csv(self.folder.rounds(), self.folder.leaderboard)
        if self.keep_last:
            self.folder.drop_checkpoints_before(record.round)


def run(
    config: RunConfig,
    *,
    out: str | Path | None = None,
    force: bool = False,
    observer: Observer | None = None,
) -> Path:
    """Train and evolve a population from its first round to its last.

    Args:
        config: What to run.
        out: Run folder; None makes a fresh `runs/<name>-<n>`.
        force: Replace a run that is already there.
        observer: Told about progress.

    Returns:
        The run folder.

    Raises:
        EvoGrpoError: Any subclass; bad input is found before the first round where it can be.
    """
    task = build_task(config.env, config.seed)
    text = configuration.to_yaml(config)
    folder = RunDir.create(None if out is None else Path(out), config.name, text, force=force)
    with folder:
        return _play(config, folder, task, observer or Silent())


def resume(folder: str | Path, *, observer: Observer | None = None) -> Path:
    """Go on with a stopped run after its last whole round; a finished run is left as it is.

    Args:
        folder: The run folder.
        observer: Told about progress.

    Returns:
        The run folder.
    """
    with RunDir.open(Path(folder)) as opened:
        summary = opened.summary()
        if summary is not None:
            (observer or Silent()).finished(summary)
            return opened.path
        config = configuration.load(opened.path / "population.yaml")
        return _play(config, opened, build_task(config.env, config.seed), observer or Silent())


def _play(config: RunConfig, folder: RunDir, task: Any, observer: Observer) -> Path:  # noqa: ANN401 -- a Task
    start = time.perf_counter()
    prepared = prepare(config, task)
    rounds = folder.rounds()
    folder.drop_after(len(rounds) - 1)
    lineage = (
        Lineage(folder.journal, config.name, config.evolve.hp_config())
        if config.record.optuna
        else None
    )
    if rounds:
        restore(prepared, rounds, folder.path)
        if lineage is not None:
            # The last round may have been written without its trials; recording twice leaves one.
            lineage.record_all(rounds)
    observer.started(config, folder.path, len(rounds))
    keeper = FolderKeeper(folder, lineage, keep_last=config.record.checkpoints == "last")
    for number in range(len(rounds), prepared.schedule.rounds):
        rounds.append(
            play_round(
                prepared.cohort,
                prepared.env,
                prepared.schedule,
                prepared.slots,
                number,
                keeper=keeper,
                observer=observer,
            )
        )
    observer.stage(prepared.schedule.rounds - 1, "test", 0, 1)
    summary = judge(config, prepared, rounds, time.perf_counter() - start)
    folder.write_summary(summary)
    observer.finished(summary)
    return folder.path


def prepare(config: RunConfig, task: Any = None) -> Prepared:  # noqa: ANN401 -- a Task
    """Build the shared base, the agents, the environment and the schedule that a config describes."""
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    task = task if task is not None else build_task(config.env, config.seed)
    base = SharedBase.load(
        config.model.name, device=config.engine.device, dtype=config.engine.dtype
    )
    algorithm = config.algorithm
    limit = algorithm.max_model_len or base.context_length or None
    env = ReasoningGym.from_task(
        task,
        base.tokenizer,
        algorithm.prompts_per_step,
        derive(config.seed, "env"),
        max_context_length=limit,
    )
    cohort = Cohort(
        base,
        _lora(config),
        _options(config, task.max_output_tokens),
        hp_config=config.evolve.hp_config(),
        seed=config.seed,
    )
    first = algorithm.hparams()
    draw = config.population.init == "sample"
    slots: list[int] = []
    for index in range(config.population.size):
        rng = generator(derive(config.seed, "init", index))
        slots.append(
            cohort.add(
                sample_hparams(first, cohort.hp_config, rng) if draw and index else first
            ).slot
        )
    return Prepared(cohort, env, _schedule(config), tuple(slots))


def restore(prepared: Prepared, rounds: Sequence[RoundRecord], folder: Path) -> None:
    """Bring a cohort to where it stood after the last whole round: load, then evolve as recorded.

    Raises:
        CheckpointError: When a checkpoint of that round is missing or was changed since.
    """
    last = rounds[-1]
    cohort = prepared.cohort
    for record, slot in zip(last.agents, prepared.slots, strict=True):
        if record.checkpoint is None:
            raise CheckpointError(
                f"run {folder}: round {last.round} has no checkpoint of agent {record.agent}"
            )
        attributes = load_agent(cohort, slot, folder / record.checkpoint, load_optimizer=True)
        if attributes.get("adapter_sha256") != record.adapter_sha256:
            raise CheckpointError(
                f"checkpoint {folder / record.checkpoint}: it is not the one that round {last.round} recorded for agent "
                f"{record.agent} (sha256 {attributes.get('adapter_sha256')}, expected {record.adapter_sha256})"
            )
        own = [
            r.agents[record.agent] for r in rounds if r.agents[record.agent].member == record.member
        ]
        # A failed evaluation clears the history, so only the scores after the last failure count.
        scores = [r.score for r in own]
        cut = max((i + 1 for i, s in enumerate(scores) if s is None), default=0)
        cohort.agents[slot].history = [s for s in scores[cut:] if s is not None]
        cohort.set_member(
            slot, Member(record.member, record.agent, record.parent, mutation=record.mutation)
        )
    members = [cohort.agents[slot].member for slot in prepared.slots]
    born = {m.id: m for r in rounds for m in r.members}
    for slot, member in zip(prepared.slots, members, strict=True):
        cohort.agents[slot].member = born.get(member.id, member)
    parents = members_from(last, members)
    generation = Generation(last.members, last.next_hparams, parents, cohort.next_member)
    apply(cohort, prepared.slots, generation, inherit_optimizer=prepared.schedule.inherit_optimizer)
    ids = [m.id for r in rounds for m in r.members]
    cohort.reserve_members(max(ids, default=-1) + 1)


def judge(
    config: RunConfig, prepared: Prepared, rounds: Sequence[RoundRecord], seconds: float
) -> dict[str, Any]:
    """Compare the base with the best agent on the test split, which nothing was selected on."""
    table = from_records(rounds)
    ranked = table[table["fitness"].notna()]
    if ranked.empty:
        raise RunFailedError(
            "no agent of the last round has a fitness, so there is no best one to judge"
        )
    best = ranked.iloc[0]
    fitness = config.evolve.fitness
    base, agent = evaluate(
        prepared.cohort,
        prepared.env,
        [None, prepared.slots[int(best["agent"])]],
        prepared.env.prompts("test", fitness.test_prompts),
        samples=fitness.test_samples,
        temperature=fitness.temperature,
        stream=("test",),
    )
    return {
        "split": "test",
        "base": {"mean": base.score.mean, "se": base.score.se, "n": base.score.n},
        "best": {
            "mean": agent.score.mean,
            "se": agent.score.se,
            "n": agent.score.n,
            "agent": int(best["agent"]),
            "member": int(best["member"]),
            "fitness": float(best["fitness"]),
            "checkpoint": str(best["checkpoint"]),
        },
        "gain": agent.score.mean - base.score.mean,
        # Two independent samples would have this error; the shared prompts make the true one
        # smaller.
        "gain_se": float(np.hypot(agent.score.se, base.score.se)),
        "rounds": len(rounds),
        "wall_seconds": seconds,
    }


def _lora(config: RunConfig) -> LoraConfig:
    lora = config.model.lora
    alpha = lora.alpha if lora.alpha is not None else 2 * lora.r
    return LoraConfig(
        r=lora.r,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType] -- PEFT types it as int and takes floats
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )


def _options(config: RunConfig, hint: int) -> CohortOptions:
    algorithm, engine = config.algorithm, config.engine
    longest = algorithm.max_output_tokens or hint
    loss_type: Any = algorithm.loss_type or algorithm.kind
    return CohortOptions(
        learn=LearnOptions(
            loss=LossConfig(loss_type=loss_type, max_completion_length=longest),
            token_budget=engine.max_tokens_per_microbatch,
            gradient_checkpointing=engine.gradient_checkpointing,
        ),
        adv_scale=ADV_NORM_TO_SCALE[algorithm.adv_norm],
        max_output_tokens=longest,
        min_output_tokens=algorithm.min_output_tokens,
        max_model_len=algorithm.max_model_len,
    )


def _schedule(config: RunConfig) -> Schedule:
    evolve, size = config.evolve, config.population.size
    selection = evolve.selection
    selectors: dict[str, Selector] = {"none": NoSelection()}
    if selection.kind == "tournament":
        selectors["tournament"] = TournamentSelection(
            tournament_size=selection.size,
            elitism=selection.elitism,
            population_size=size,
            eval_loop=evolve.fitness.window,
        )
    return Schedule(
        rounds=config.population.rounds,
        steps_per_round=config.population.steps_per_round,
        prompts_per_step=config.algorithm.prompts_per_step,
        selector=selectors[selection.kind],
        mutations=Mutations(
            no_mutation=evolve.mutation.no_mutation,
            rl_hp=evolve.mutation.rl_hp,
            mutate_elite=evolve.mutation.mutate_elite,
        ),
        eval_prompts=evolve.fitness.prompts,
        eval_samples=evolve.fitness.samples,
        eval_temperature=evolve.fitness.temperature,
        inherit_optimizer=evolve.inherit_optimizer,
        completions=config.record.completions,
    )
