"""Plans of rounds from values alone: agents that answered so many prompts."""

from dataclasses import replace

import numpy as np

from evo_grpo.envs.protocol import Experience
from evo_grpo.evolve.decide import Standing
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.on_copy import NoExploration
from evo_grpo.evolve.select.truncation import TruncationSelection
from evo_grpo.population.evaluate import Evaluation, summarise
from evo_grpo.population.plan import AgentReport, PlanInputs, RankReport, next_round
from evo_grpo.population.rules import RoundSettings
from evo_grpo.population.stats import Tally
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.settings import EvolveConfig, FitnessConfig, PopulationConfig, RecordConfig
from evo_grpo.types import Member

PROMPTS = 40


def settings(racing=0.0, rounds=3, **population):
    return RoundSettings(
        PopulationConfig(size=3, rounds=rounds, sizes="constant", **population),
        EvolveConfig(significance=None, dead_steps=None, fitness=FitnessConfig(racing=racing)),
        RecordConfig(),
        selector=TruncationSelection(share=0.34),
        explorer=NoExploration(),
        prompts_per_step=1,
        rows_per_step=None,
    )


def report(right, tokens=10, kl=0.0, checkpoint=None, equal=0.0):
    """An agent that answered so many prompts of the evaluation; None failed."""
    rewards = np.array([1.0] * (right or 0) + [0.0] * (PROMPTS - (right or 0)))
    score = summarise(rewards, range(PROMPTS))
    steps = [{"failed": float(right is None), "kl": kl, "reward": 0.5, "zero_variance": equal}]
    return AgentReport(
        score=None if right is None else score,
        tally=Tally(metrics=steps, tokens=tokens),
        evaluation=Evaluation(score, Experience((), rewards[:, None]), rewards, tokens=3),
        checkpoint=checkpoint,
        steps=4,
        dead_steps=0,
    )


def planned(reports, number=0, made=None, past=(), archive=None, of_rank=None, **given):
    standings = [
        Standing(slot, Member(slot, slot), Hparams(), [r.score] if r.score else [])
        for slot, r in enumerate(reports)
    ]
    inputs = PlanInputs(
        round=number,
        ranks=[RankReport(dict(enumerate(reports)), **(of_rank or {}))],
        standings=standings,
        settings=made or settings(),
        hp_config=HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-2)),
        seed=1,
        past=past,
        archive=archive,
        next_id=len(reports),
        task="sums",
        **given,
    )
    return next_round(inputs)


def between(**changes):
    """Settings of six rounds that decide after the third and the last one."""
    made = settings(rounds=6, decisions=[3, 6], **changes)
    evolve = made.evolve.replace(archive=False)
    return replace(made, explorer=Mutations(), evolve=evolve, rows_per_step=96)


def with_archive(made):
    return replace(made, evolve=made.evolve.replace(archive=True))
