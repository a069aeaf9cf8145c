"""Runs made of numbers alone: what a loop would record, without a model."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.generation import next_generation
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.evolve.start import sample_hparams
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.types import Member, Score

HP_CONFIG = HyperparameterConfig(
    lr=RLParameter(min=1e-5, max=1e-2),
    beta=RLParameter(min=0.0, max=0.1),
    clip_coef=RLParameter(min=0.1, max=0.4),
    group_size=RLParameter(min=2, max=16),
)


def agent_record(member: Member, round: int, hparams: Hparams, mean: float | None) -> AgentRecord:
    """What one agent leaves of one round; a mean of None is a failed agent."""
    failed = mean is None
    return AgentRecord(
        agent=member.agent,
        member=member.id,
        parent=member.parent,
        round=round,
        state="failed" if failed else "ok",
        hparams=hparams,
        score=None if failed else Score(mean, 0.05, 4, (mean,) * 4),
        metrics={"reward": 0.5, "kl": 0.01},
        tokens=100 * (member.agent + 1),
        wall_seconds=0.5,
        checkpoint=f"checkpoints/round-{round:04d}/agent-{member.agent:02d}",
        adapter_sha256="ab" * 32,
        mutation=member.mutation,
        seed=17 * round + member.agent,
        reason="loss is nan" if failed else "",
    )


def make_run(
    size: int = 4,
    rounds: int = 3,
    seed: int = 0,
    *,
    failures: float = 0.0,
    base: Hparams | None = None,
    places: Sequence[int] = (),
) -> list[RoundRecord]:
    """Play a run with random fitness; a share of the agents fails, never all of them.

    `places[i]` agents go on after round i; all of them where it says nothing.
    """
    rng = np.random.default_rng(seed)
    base = base or Hparams(lr=1e-3, beta=0.0, clip_coef=0.2, group_size=8)
    members: Sequence[Member] = [Member(slot, slot) for slot in range(size)]
    hparams: Sequence[Hparams] = [sample_hparams(base, HP_CONFIG, rng) for _ in range(size)]
    selection = TournamentSelection()
    next_id, records = size, []
    for number in range(rounds):
        means = [
            None if slot and rng.random() < failures else float(rng.random())
            for slot in range(len(members))
        ]
        agents = tuple(
            agent_record(member, number, values, mean)
            for member, values, mean in zip(members, hparams, means, strict=True)
        )
        histories = [[agent.score] if agent.score else [] for agent in agents]
        room = places[number] if number < len(places) else len(members)
        plan = selection.plan(histories, room, rng)
        new = next_generation(
            plan, members, hparams, Mutations(), HP_CONFIG, rng, round=number, next_id=next_id
        )
        seconds = {"generate": 1.0, "learn": 2.0}
        mutable = tuple(HP_CONFIG.names())
        records.append(RoundRecord(number, agents, seconds, new.members, new.hparams, mutable))
        members, hparams, next_id = new.members, new.hparams, new.next_id
    return records


def with_scores(record: RoundRecord, means: Sequence[float | None]) -> RoundRecord:
    """The same round with other fitness values."""
    agents = tuple(
        replace(
            agent,
            state="failed" if mean is None else "ok",
            score=None if mean is None else Score(mean, 0.05, 4),
        )
        for agent, mean in zip(record.agents, means, strict=True)
    )
    return replace(record, agents=agents)


def timed(
    records: Sequence[RoundRecord], steps: Sequence[float | None] = (0.25, None, 0.75)
) -> list[RoundRecord]:
    """The same rounds with when they were played and the rewards of their steps."""
    return [
        replace(
            record,
            started=1_700_000_000.0 + 10 * record.round,
            ended=1_700_000_009.5 + 10 * record.round,
            agents=tuple(replace(agent, step_rewards=tuple(steps)) for agent in record.agents),
        )
        for record in records
    ]
