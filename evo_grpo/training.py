"""run(config) and resume(folder): from a YAML file to a leaderboard. Read this file first.

prepare     prepare.py: the shared base, N agents, the environment, the schedule
play_round  rounds.py: train, evaluate, checkpoint, select, mutate, record
judge       base and best agent on the test split, once, at the end
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evo_grpo import settings as configuration
from evo_grpo.assemble import Prepared, prepare
from evo_grpo.checkpoints.moments import OPTIMIZER
from evo_grpo.checkpoints.read import load_agent
from evo_grpo.envs.registry import build_task, is_multi_turn
from evo_grpo.errors import CheckpointError, EvoGrpoError, RunDirError, RunFailedError
from evo_grpo.evaluate import evaluate
from evo_grpo.evolve.generation import Generation
from evo_grpo.model.lora.files import WEIGHTS
from evo_grpo.record.folder import clear_run, refuse_taken
from evo_grpo.record.leaderboard import from_records
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.observer import Observer, Silent
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.run_dir import RunDir
from evo_grpo.round import apply, members_from, play_round
from evo_grpo.run_writer import FolderKeeper
from evo_grpo.settings import RunConfig
from evo_grpo.sources import resolve
from evo_grpo.types import Member

#: How population.yaml begins in a folder that Population.train wrote.
RECORDED_IN_PYTHON = "# Recorded by Population.train: not a configuration to run.\n"


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
    if out is not None and not force:
        refuse_taken(Path(out))
    resolve(config.model.name)
    task = None if is_multi_turn(config.env.kind) else build_task(config.env, config.seed)
    text = configuration.to_yaml(config)
    fresh = out is None or not Path(out).exists()
    folder = RunDir.create(None if out is None else Path(out), config.name, text, force=force)
    with folder:
        try:
            prepared = prepare(config, task)
        except (EvoGrpoError, KeyboardInterrupt):
            # What cannot begin leaves nothing behind, so that the next try finds its folder free.
            clear_run(folder.path)
            if fresh:
                shutil.rmtree(folder.path)
            raise
        return _play(config, folder, prepared, observer or Silent())


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
        if opened.config_text().startswith(RECORDED_IN_PYTHON):
            raise RunDirError(
                f"{opened.path}: expected a run of `evo-grpo run`, found the record of "
                "Population.train, which holds no configuration to go on with; call train again in "
                "Python"
            )
        config = configuration.load(opened.path / "population.yaml")
        return _play(config, opened, prepare(config), observer or Silent())


def _play(config: RunConfig, folder: RunDir, prepared: Prepared, observer: Observer) -> Path:
    start = time.perf_counter()
    rounds = folder.rounds()
    folder.drop_after(len(rounds) - 1)
    lineage = (
        Lineage(folder.journal, config.name, prepared.cohort.hp_config)
        if config.record.optuna
        else None
    )
    keeper = FolderKeeper(
        folder,
        lineage,
        keep_last=config.record.checkpoints == "last",
    )
    if rounds:
        restore(prepared, rounds, folder.path)
        keeper.follow_up(rounds)
    observer.started(folder.path, config.population.rounds, len(rounds), config)
    with keeper:
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


def restore(prepared: Prepared, rounds: Sequence[RoundRecord], folder: Path) -> None:
    """Bring a cohort to where it stood after the last whole round: load, then evolve as recorded.

    Raises:
        CheckpointError: When a checkpoint of that round is missing or was changed since.
    """
    last = rounds[-1]
    cohort = prepared.cohort
    if len(last.agents) != len(prepared.slots):
        raise CheckpointError(
            f"run {folder}: population.yaml asks for {len(prepared.slots)} agents, but its rounds "
            f"were played by {len(last.agents)}; put population.size back"
        )
    for record, slot in zip(last.agents, prepared.slots, strict=True):
        if record.checkpoint is None:
            raise CheckpointError(
                f"run {folder}: round {last.round} has no checkpoint of agent {record.agent}"
            )
        checkpoint = folder / record.checkpoint
        load_agent(cohort, slot, checkpoint, load_optimizer=True)
        _check_file(checkpoint / "actor" / WEIGHTS, record.adapter_sha256, record)
        # Runs that began before this digest was recorded have none.
        if record.optimizer_sha256 is not None:
            _check_file(checkpoint / OPTIMIZER, record.optimizer_sha256, record)
        own = [
            r.agents[record.agent] for r in rounds if r.agents[record.agent].member == record.member
        ]
        # A failed evaluation clears the history, so only the scores after the last failure count.
        scores = [r.score for r in own]
        cut = max((i + 1 for i, s in enumerate(scores) if s is None), default=0)
        # A new member begins without a history, so the member comes first.
        cohort.set_member(
            slot, Member(record.member, record.agent, record.parent, mutation=record.mutation)
        )
        cohort.agents[slot].history = [s for s in scores[cut:] if s is not None]
    members = [cohort.agents[slot].member for slot in prepared.slots]
    born = {m.id: m for r in rounds for m in r.members}
    for slot, member in zip(prepared.slots, members, strict=True):
        cohort.agents[slot].member = born.get(member.id, member)
    parents = members_from(last, members)
    generation = Generation(last.members, last.next_hparams, parents, cohort.next_member)
    apply(cohort, prepared.slots, generation, inherit_optimizer=prepared.schedule.inherit_optimizer)
    ids = [m.id for r in rounds for m in r.members]
    cohort.reserve_members(max(ids, default=-1) + 1)


def _check_file(file: Path, expected: str | None, record: AgentRecord) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "none: no file"
    if digest != expected:
        raise CheckpointError(
            f"checkpoint {file}: it is not the one that round {record.round} recorded for agent "
            f"{record.agent} (sha256 {digest}, expected {expected}); put the file back as it was"
        )


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
