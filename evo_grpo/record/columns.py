"""Defines the columns that all tables of a run share, and converts rows to a typed frame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.vocabulary import OBJECTIVE
from evo_grpo.schema.hparams import Hparams, Value, in_order, type_of

if TYPE_CHECKING:
    import pandas as pd

#: Columns of every table, also of hyperparameters that do not mutate.
ALWAYS = ("lr", "beta", "clip_coef", "clip_low", "clip_high", "group_size")


def hyperparameters(rounds: Sequence[RoundRecord]) -> list[str]:
    """Return the names of the hyperparameters that have a column in the tables of a run.

    The columns of every table come first, then hyperparameters that mutate or that the user set.
    """
    moving = {name for record in rounds for name in record.mutable} | set(steered(rounds))
    return [*ALWAYS, *in_order(moving - set(ALWAYS))]


def steered(rounds: Sequence[RoundRecord]) -> list[str]:
    """Return the names of the hyperparameters that the user set, in the order of the schema."""
    names = {
        name
        for record in rounds
        for outcome in record.steering
        if outcome.request.op == "set" and not outcome.refused
        for name in outcome.request.values
    }
    return in_order(names)


def dtypes(names: Sequence[str]) -> dict[str, str]:
    """Return the pandas dtype of each hyperparameter; integers are nullable, to allow for None."""
    types: dict[type, str] = {int: "Int64", float: "float64", str: "object"}
    return {name: types[type_of(name)] for name in names}


def values(hparams: Hparams, names: Sequence[str]) -> dict[str, Value | None]:
    """Return the values of an agent's hyperparameters, for each name in `names`.

    clip_low and clip_high are the bounds of the probability ratio, also if clip_coef is a scalar.
    If clip_coef is a pair of bounds, its own value is NaN.
    """
    return {name: hparams.get(name) for name in names}


def objectives(rounds: Sequence[RoundRecord]) -> dict[str, str]:
    """Return the table column of each objective of a run beside fitness, by name."""
    scores = (agent.score for record in rounds for agent in record.agents)
    score = next((score for score in scores if score is not None), None)
    return {} if score is None else {goal.name: objective(goal.name) for goal in score.further}


def objective(name: str) -> str:
    """Return the column name of an objective."""
    return f"{OBJECTIVE}{name}"


def fitness(agent: AgentRecord) -> float:
    """Return an agent's fitness, NaN if it failed."""
    return agent.score.mean if agent.score is not None and agent.state == "ok" else math.nan


def fitness_se(agent: AgentRecord) -> float:
    """Return the standard error of an agent's fitness, NaN if it has none."""
    return math.nan if agent.score is None else agent.score.se


def was_evaluated(agent: AgentRecord) -> bool:
    """Return whether an agent's fitness comes from an evaluation, not from rewards of training."""
    return agent.score is not None and not agent.score.steps


def frame(rows: Sequence[Mapping[str, object]], types: Mapping[str, str]) -> pd.DataFrame:
    """Return rows as a pandas frame, with the columns and dtypes in `types`; None means missing."""
    # pandas takes longer to import than everything else that the command line needs.
    import pandas as pd

    # Objects first: pandas would convert a column of integers and None to float.
    return pd.DataFrame(list(rows), columns=list(types), dtype=object).astype(dict(types))
