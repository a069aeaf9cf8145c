"""Exploration by Optuna: one of its samplers proposes the hyperparameters of copies."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

import math
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast, final

from pydantic import AfterValidator

from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.evolve.explore.step import put, value_of
from evo_grpo.evolve.protocols import Candidate, Trial
from evo_grpo.evolve.ranges import distance_range, from_distance, parts
from evo_grpo.evolve.start import sample_hparams
from evo_grpo.schema.group import Group, PlainMapping, setting
from evo_grpo.schema.hparams import CLIP_ENDS, Hparams, Value
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.seeding import generator

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

#: Trials of an invented run: more than a sampler needs before it learns from them.
_TRIALS = 12


Sampler = Literal[
    "BruteForceSampler",
    "CmaEsSampler",
    "GPSampler",
    "GridSampler",
    "NSGAIIISampler",
    "NSGAIISampler",
    "PartialFixedSampler",
    "QMCSampler",
    "RandomSampler",
    "TPESampler",
]
"""The classes of `optuna.samplers`, by name, because importing Optuna is slow."""


def _without_seed(args: Mapping[str, Any]) -> Mapping[str, Any]:
    if "seed" in args:
        raise ValueError("no seed, because it follows from the seed of the run")
    return args


@final
class OptunaExploration(Group):
    """A sampler of Optuna proposes the hyperparameters of copies; survivors keep their values.

    The sampler proposes within the ranges, and learns from the hyperparameters and the fitness of
    the agents of all rounds. Fitness is relative to the mean of its round, because the fitness of
    all agents grows from round to round. TPESampler (Bergstra et al. 2011) and GPSampler learn from
    such trials. Samplers that learn only from their own proposals, such as CMA-ES, never leave
    their start-up phase.
    """

    copies_only: ClassVar[bool] = True
    one_goal: ClassVar[bool] = True  # a trial has one value
    kind: Literal["optuna"] = setting("optuna", "A sampler of Optuna proposes values for copies.")
    sampler: Sampler = setting("TPESampler", "A class of `optuna.samplers`.")
    args: Annotated[PlainMapping, AfterValidator(_without_seed)] = setting(
        meaning="Keyword arguments of the sampler, for instance `{n_startup_trials: 8}`.",
        factory=dict,
    )

    def explore(
        self, candidate: Candidate, hp_config: HyperparameterConfig, rng: "np.random.Generator"
    ) -> Hparams:
        """Propose the hyperparameters of a copy; nothing is drawn for survivors.

        A proposed clip pair with low >= high is ignored. Errors of the sampler raise ConfigError.
        """
        hparams = candidate.hparams
        space = dict(parts(hparams, hp_config.parameters))
        if not candidate.copied or not space:
            return hparams
        proposed = self._propose(space, candidate.trials, int(rng.integers(2**31)))
        values = {name: _value(name, space[name], proposed[name]) for name in space}
        low, high = (values.get(*end) for end in zip(CLIP_ENDS, hparams.clip_bounds, strict=True))
        if cast("float", low) >= cast("float", high):
            values = {name: value for name, value in values.items() if name not in CLIP_ENDS}
        return put(hparams, values, space)

    def check(self, first: Hparams, hp_config: HyperparameterConfig) -> None:
        """Let the sampler propose for an invented run, so that errors of `explore` occur early."""
        rng = generator(0, "check")
        samples = [sample_hparams(first, hp_config, rng) for _ in range(_TRIALS)]
        trials = [Trial(hparams, float(number), 0) for number, hparams in enumerate(samples)]
        self.explore(Candidate(first, copied=True, trials=trials), hp_config, rng)

    def _propose(
        self, space: Mapping[str, RLParameter], trials: Sequence[Trial], seed: int
    ) -> dict[str, Any]:
        """Return the proposed values by name; clip ends and decay rates as distances from 1."""
        import optuna  # slow to import, and most runs do not need it

        distributions = {n: _distribution(_measure(n, p)) for n, p in space.items()}
        sampler = self._sampler(seed)
        with _quiet():
            study = optuna.create_study(direction="maximize", sampler=sampler)
            for hparams, fitness in _relative(trials):
                params = _params(hparams, space)
                measured = {name: distributions[name] for name in params}
                study.add_trial(
                    optuna.trial.create_trial(params=params, distributions=measured, value=fitness)
                )
            try:
                return study.ask(distributions).params
            except ImportError as error:
                raise EngineUnavailable(
                    f"evolve.exploration.sampler: {self.sampler} needs a package that is not "
                    f"installed: {error}; install it, or choose TPESampler"
                ) from error
            except Exception as error:  # a sampler may raise anything
                raise ConfigError(
                    f"evolve.exploration: {self.sampler} cannot propose {', '.join(space)}: "
                    f"{type(error).__name__}: {error}; choose another sampler, such as TPESampler"
                ) from error

    def _sampler(self, seed: int) -> "BaseSampler":
        import inspect

        import optuna

        sampler_class = getattr(optuna.samplers, self.sampler)
        seeded = {"seed": seed} if "seed" in inspect.signature(sampler_class).parameters else {}
        try:
            with _quiet():
                return sampler_class(**self.args, **seeded)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"evolve.exploration.args: {self.sampler} refuses {self.args}: {error}; see its "
                "page in Optuna's documentation"
            ) from error


def _relative(trials: Sequence[Trial]) -> list[tuple[Hparams, float]]:
    """Return the hyperparameters of each trial, and its fitness minus the mean of its round."""
    finished = [trial for trial in trials if math.isfinite(trial.fitness)]
    rounds: dict[int, list[float]] = {}
    for trial in finished:
        rounds.setdefault(trial.round, []).append(trial.fitness)
    means = {number: math.fsum(fitness) / len(fitness) for number, fitness in rounds.items()}
    return [(trial.hparams, trial.fitness - means[trial.round]) for trial in finished]


def _measure(name: str, parameter: RLParameter) -> RLParameter:
    distance = distance_range(name, parameter)
    return parameter if distance is None else distance


def _value(name: str, parameter: RLParameter, proposed: Value) -> Value:
    if isinstance(proposed, str) or parameter.choices is not None:
        return proposed
    if distance_range(name, parameter) is not None:
        return from_distance(name, parameter, proposed)
    return parameter.clip(proposed)


def _params(hparams: Hparams, space: Mapping[str, RLParameter]) -> dict[str, Any]:
    """Return a trial's parameters for Optuna; clip ends and decay rates as distances from 1."""
    params: dict[str, Any] = {}
    for name, parameter in space.items():
        value, measure = value_of(hparams, name, parameter), _measure(name, parameter)
        if parameter.choices is not None:
            if parameter.allows(value):
                params[name] = value
        elif not isinstance(value, str) and not math.isnan(value):
            params[name] = measure.clip(value if measure is parameter else abs(value - 1))
    return params


def _distribution(parameter: RLParameter) -> "BaseDistribution":
    from optuna import distributions

    if parameter.choices is not None:
        return distributions.CategoricalDistribution(parameter.choices)
    low, high = parameter.min, parameter.max
    if parameter.dtype == "int":
        return distributions.IntDistribution(math.ceil(low), math.floor(high), log=low > 0)
    return distributions.FloatDistribution(low, high, log=low > 0)


@contextmanager
def _quiet() -> Generator[None]:
    """Suppress Optuna's message about a new study and its warning about experimental samplers."""
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
