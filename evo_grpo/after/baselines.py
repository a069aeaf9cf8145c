"""What the tokens of a run would have bought without evolution: two populations beside it.

They play one round without selection or mutation, and are evaluated once, at its end, so that what
evolution spends on evaluations goes into their training:

    guess    all agents at the values of `algorithm`
    random   every agent at values drawn from the ranges

The best agent of each by validation is judged on the test prompts of the run, with the same draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from evo_grpo import settings as configuration
from evo_grpo.errors import RunDirError
from evo_grpo.evolve.explore.none import NoExploration
from evo_grpo.evolve.select.none import NoSelection
from evo_grpo.evolve.start import described_start, sample_hparams
from evo_grpo.population.stats import Tally
from evo_grpo.record.comparison import (
    EVOLVED,
    compared_arm,
    read_comparison,
    tokens_by_purpose,
    tokens_to_train,
)
from evo_grpo.record.config import read_config
from evo_grpo.record.files import atomic_write, to_line
from evo_grpo.record.folder import (
    config_text,
    expect_run,
    is_run,
    read_rounds,
    refuse_objects,
    refuse_planted,
    remove,
)
from evo_grpo.record.names import BASELINE, COMPARE, COMPARED, COMPARISON, INPUTS
from evo_grpo.record.observer import Observer, Several, check_observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.summary import read_summary
from evo_grpo.seeding import derive, generator
from evo_grpo.settings import RunConfig, StopConfig
from evo_grpo.settings.run import check_comparable
from evo_grpo.training.assemble import prepare
from evo_grpo.training.followers import Followers
from evo_grpo.training.inputs.differences import check_inputs
from evo_grpo.training.inputs.made_of import inputs_of, read_inputs_of
from evo_grpo.training.run import play_and_judge
from evo_grpo.types import Score

ROOM = 2
"""How many times the steps that it is likely to need a population may take, should its completions
be shorter than those of the run."""


class TokenLimit:
    """Ends a training with the step in which all agents together have sampled so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def spent(self, tallies: Sequence[Tally]) -> bool:
        """See `Limit`."""
        return sum(tally.tokens for tally in tallies) >= self.tokens

    def reached(self, scores: Sequence[Score | None]) -> bool:
        """See `Limit`."""
        del scores
        return False


def compare(
    run: str | Path,
    *,
    force: bool = False,
    allow: Sequence[str] = (),
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Compare a finished run with the same population without evolution, at equal tokens.

    Two more populations train, each in a run folder of its own below `RUN/compare`, until they have
    sampled as many tokens as the run did in training, in its evaluations and in its final
    comparison. A comparison that was stopped goes on with what it lacks; a finished one is read.

    Args:
        run: The folder of a finished run.
        force: Train again what is there.
        allow: Files of yours that may be others than those of the run, by the names that the error
            gives which such a file raises without this.
        observer: Follows the progress of both populations, one after the other.

    Returns:
        What RUN/compare/compare.json holds: `arms`, the last of which is the run itself, each with
        its name, `tokens` by purpose, and the mean, standard error and number of prompts of its
        `test`. Where nothing may differ between agents, there is no arm `random`.

    Raises:
        RunDirError: The run is not finished, or `Population.train` recorded it with objects that
            no file can name, or one of its names leads out of the folder.
        ConfigError: Its population has fewer than two agents, or its settings or files have
            changed.
        CheckpointError: A record of it is missing or damaged.
        RunNotFoundError: It is no run folder.
    """
    observer = observer or Observer()
    check_observer(observer)
    folder = expect_run(run)
    config, rounds, summary = _finished(folder)
    if not force and (found := read_comparison(folder)) is not None:
        return found
    refuse_planted(folder)
    check_inputs(folder, config, command=f"resume {folder} --compare", allow=allow)
    # An earlier result goes first: stopped half way, it would speak of populations not yet trained.
    remove(folder / COMPARISON)
    training = tokens_by_purpose(rounds, summary)["training"]
    budget = tokens_to_train(rounds, summary)
    arms: list[dict[str, Any]] = []
    for name, init in _starts(config):
        arm = _arm_config(config, name, init, budget, training, len(rounds))
        path = _play(folder, name, arm, budget, observer, force=force)
        own, judged = read_rounds(path), read_summary(path)
        assert judged is not None, path
        arms.append(compared_arm(name, f"{COMPARE}/{name}", own, judged))
    arms.append(compared_arm(EVOLVED, ".", rounds, summary))
    result = {"agents": config.population.size, "split": summary["split"], "arms": arms}
    atomic_write(folder / COMPARISON, to_line(result, indent=2) + "\n")
    return result


def _finished(folder: Path) -> tuple[RunConfig, list[RoundRecord], dict[str, Any]]:
    summary = read_summary(folder)
    if summary is None:
        raise RunDirError(
            f"{folder}: expected a finished run to compare, got one without its summary; finish "
            f"and compare it with: evo-grpo resume {folder} --compare"
        )
    refuse_objects(
        folder, "so that no other population can be trained alike; compare a run of names alone"
    )
    config = read_config(folder)
    check_comparable(config)
    return config, read_rounds(folder), summary


def _starts(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield what the populations begin with, by name, as `population.init` has it."""
    yield COMPARED[0], "same"
    first, space = config.algorithm.hparams(), config.search_space()
    if space:
        streams = (
            generator(derive(config.seed, "random guess", number))
            for number in range(config.population.size)
        )
        drawn = [sample_hparams(first, space, stream) for stream in streams]
        yield COMPARED[1], described_start(drawn, first, space, config.seed)


def _arm_config(
    config: RunConfig,
    name: str,
    init: Any,  # noqa: ANN401 -- a Start, as YAML has it
    budget: int,
    training: int,
    rounds: int,
) -> RunConfig:
    """Return the configuration of a population without evolution that trains on `budget` tokens.

    `training` tokens are those that the run trained on in `rounds`, which a rule may have ended
    early.
    """
    population, algorithm = config.population, config.algorithm
    steps = rounds * population.steps_per_round
    likely = math.ceil(steps * budget / max(1, training))
    schedule = algorithm.lr_schedule
    if schedule is not None:
        # The end of the schedule stays as far from the end of training as it was.
        schedule = schedule.replace(steps=max(1, round(schedule.steps * likely / steps)))
    return config.replace(
        name=f"{config.name}-{name}",
        population=population.replace(
            rounds=1,
            steps_per_round=ROOM * likely,
            sizes="constant",
            init=init,
            stop=StopConfig(),
        ),
        algorithm=algorithm.replace(lr_schedule=schedule),
        # Trained by one process, to the same result but for rounding.
        engine=config.engine.replace(zero=None),
        evolve=config.evolve.replace(
            selection=NoSelection(), exploration=NoExploration(), archive=False, dead_steps=None
        ),
    )


def _play(
    folder: Path, name: str, config: RunConfig, budget: int, observer: Observer, *, force: bool
) -> Path:
    """Play a population into its folder, or what is left of it; a finished one is left alone."""
    path = folder / COMPARE / name
    text = f"{BASELINE}{budget}\n{configuration.to_yaml(config)}"
    same = is_run(path) and config_text(path) == text and _of_the_same_files(path, config)
    if same and not force and read_summary(path) is not None:
        return path
    opened = (
        RunDir.open(path)
        if same and not force
        else RunDir.create(path, config.name, text, force=True)
    )
    with Followers(trackers=False) as followers, opened, prepare(config) as prepared:
        watching = Several((observer, followers))
        play_and_judge(config, path, opened, prepared, watching, limit=TokenLimit(budget))
    return path


def _of_the_same_files(path: Path, config: RunConfig) -> bool:
    """Return whether a population was begun with the files as they are."""
    if not (path / INPUTS).exists():  # stopped before it was recorded
        return True
    return read_inputs_of(path).files == inputs_of(config).files
