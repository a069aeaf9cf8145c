"""Resolves `population.init: {from: RUN}`: the best settings of earlier runs as a list."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING

from evo_grpo.errors import ConfigError, RunNotFoundError
from evo_grpo.evolve.earlier import carried_over, in_both, starts_with
from evo_grpo.places import find
from evo_grpo.record import columns
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.leaderboard import leaderboard_rows
from evo_grpo.record.summary import read_summary, winner_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Any

    from evo_grpo.evolve.start import Start
    from evo_grpo.record.records import RoundRecord
    from evo_grpo.schema.hparams import Hparams
    from evo_grpo.schema.search_space import HyperparameterConfig

SETTING = "population.init.from"


def resolved_start(
    init: Start, first: Hparams, hp_config: HyperparameterConfig, size: int, seed: int
) -> Start:
    """Return `population.init` with the settings of earlier runs in it; other starts as they are.

    The settings are those of the agents in the order of each run's leaderboard, the first of every
    run before the second of any.

    Args:
        init: The setting.
        first: The hyperparameters of the first agent.
        hp_config: The ranges of this run.
        size: Number of agents.
        seed: Seed of the run.

    Raises:
        ConfigError: A folder is no run, a run has no finished round or searched nothing that this
            one searches, or there is no place for its settings.
        CheckpointError: The records of a run are damaged.
        RunDirError: Another version of this library wrote them.
    """
    if not isinstance(init, Mapping):
        return init
    if size < 2:
        raise ConfigError(
            f"{SETTING}: expected a population.size of at least 2, since the first agent has the "
            f"values of algorithm, got {size}; raise it, or write the settings of the winner with: "
            "evo-grpo recipe RUN"
        )
    runs = [list(_settings(find(run), first, hp_config)) for run in init["from"]]
    found = [one for rank in zip_longest(*runs) for one in rank if one is not None]
    return starts_with(first, hp_config, size, found, seed)


def _settings(run: Path, first: Hparams, hp_config: HyperparameterConfig) -> Iterator[Hparams]:
    """Yield the hyperparameters of a run's agents inside of the ranges of another, best first."""
    try:
        rounds = read_rounds(run)
    except RunNotFoundError as error:
        raise ConfigError(f"{SETTING}: {error}") from error
    if not rounds:
        raise ConfigError(
            f"{SETTING}: {run}: expected a run with a finished round, got one without; continue it "
            f"with: evo-grpo resume {run}"
        )
    searched = {name for record in rounds for name in record.mutable} | set(columns.steered(rounds))
    names = in_both(searched, hp_config)
    if not names:
        raise ConfigError(
            f"{SETTING}: {run}: expected a run that searched some of "
            f"{', '.join(hp_config.names()) or 'no hyperparameter'}, as this one does, got one "
            f"that searched {', '.join(sorted(searched)) or 'nothing'}; name another run, or "
            "search the same with evolve.hyperparameters"
        )
    for hparams in _in_order(rounds, read_summary(run)):
        yield carried_over(hparams, names, first, hp_config)


def _in_order(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None
) -> Iterator[Hparams]:
    """Yield the hyperparameters of the agents in the order of the leaderboard; none that failed."""
    by_round = {(one.agent, one.round): one for record in rounds for one in record.agents}
    for row in leaderboard_rows(rounds, summary):
        if row["agent"] is None:  # the mean of two agents won
            winner = winner_of(rounds, summary)
            assert winner is not None, "it has a row"
            yield winner.record.hparams
        elif row["fitness"] is not None:
            yield by_round[row["agent"], row["round"]].hparams
