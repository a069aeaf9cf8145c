"""The group `evolve`: selection, exploration, and how fitness is measured."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator

from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.kinds import Exploration, Selection
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.schema.group import Group, as_list, setting
from evo_grpo.schema.hparams import MUTABLE, Factor, Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter, default_ranges
from evo_grpo.schema.validation import is_number
from evo_grpo.types import KEPT_SCORES


def _typed_ranges(value: object) -> object:
    """Accept a HyperparameterConfig, a mapping of names to ranges, None or `{}`."""
    if isinstance(value, Mapping):
        value = HyperparameterConfig(**cast("Mapping[str, Any]", value))
    return dict(value.parameters) if isinstance(value, HyperparameterConfig) else value


def _weights(value: object) -> object:
    """Accept a name, or a mapping of names to finite numbers that are not all 0."""
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value)
        if entries and all(isinstance(name, str) and name for name in entries):
            weights = {str(name): number for name, number in entries.items()}
            if all(map(is_number, weights.values())) and any(weights.values()):
                return {name: float(cast("float", weight)) for name, weight in weights.items()}
    raise ValueError(
        "the name of a reward function, or a mapping of names to weights of which one is not 0"
    )


FITNESS, TOKENS = "fitness", "tokens"
"""Names of objectives that are no reward functions."""
BETWEEN = 8
"""Validation prompts of a round without decisions, unless its training measures fitness."""
FitnessReward = Annotated[str | dict[str, float] | None, BeforeValidator(_weights)]
Ranges = Annotated[dict[str, RLParameter] | None, BeforeValidator(_typed_ranges)]


class ObjectiveConfig(Group):
    """A goal of evolution. A plain string is its name: `[exact, {name: tokens, ...}]`."""

    shorthand: ClassVar[str | None] = "name"

    name: str = setting(
        meaning="The measure: the name of a reward function; `fitness`, which is what "
        "`evolve.fitness.reward` says; or `tokens`, the mean number of sampled tokens of a "
        "completion.",
        min_length=1,
    )
    direction: Literal["maximize", "minimize"] | None = setting(
        None, "Whether larger or smaller values are better. null: `maximize`; `tokens` needs one."
    )

    @property
    def minimize(self) -> bool:
        """Whether smaller values are better."""
        return self.direction == "minimize"


Objectives = Annotated[list[ObjectiveConfig], BeforeValidator(as_list)]


class FitnessConfig(Group):
    """How agents are evaluated, with the same prompts, seeds and temperature for all of them."""

    prompts: int = setting(64, "Validation prompts after a decision.", ge=1)
    samples: int = setting(1, "Completions per validation prompt.", ge=1)
    share: float | None = setting(
        None,
        "Most completions that evaluations, second looks, the archive and the final comparison "
        "sample together, as a share of those that agents train on: as many of `prompts` are taken "
        "as it pays for, at least 8. A run records that number. null takes all of them.",
        gt=0,
    )
    temperature: Factor = setting(
        1.0,
        "Sampling temperature of evaluations, independent of that in training. 0 is greedy: each "
        "token is the likeliest one, and every prompt gets one completion, since others would be "
        "equal.",
        ge=0,
    )
    between: int | None = setting(
        None,
        "Validation prompts of a round after which nothing is decided. 0 samples none: the fitness "
        "of such a round is the mean reward of its training. null: 0 where agents train as fitness "
        "measures (the same rewards, prompt, temperature and lengths), else 8; and `prompts` with "
        "`population.stop.fitness`, `rewards` or `patience`. A run records the number.",
        ge=0,
    )
    racing: float = setting(
        0.0,
        "Completions with which agents that one evaluation cannot separate are evaluated again, as "
        "a share of the completions of that evaluation; 0 evaluates once.",
        ge=0,
        le=100,
    )
    window: int = setting(
        1,
        "Number of a member's latest evaluations whose mean selection uses.",
        ge=1,
        le=KEPT_SCORES,
    )
    test_prompts: int = setting(
        256, "Test prompts on which base and best agent are compared at the end.", ge=1
    )
    test_samples: int = setting(4, "Completions per test prompt.", ge=1)
    final_samples: int = setting(
        2,
        "Completions per validation prompt in the final comparison of the best agent of the last "
        "round, the best agent of all rounds and the mean of related survivors; 0 takes the best "
        "agent of the last round without a comparison.",
        ge=0,
    )

    reward: FitnessReward = setting(
        None,
        "What fitness measures, if not the reward that agents learn from: the name of a reward "
        "function, or a mapping of names to weights, for instance `{exact: 1, format: 0.1}`. "
        "Selection, the final comparison and the test use it. null takes all reward functions with "
        "the weights of the environment. Required if a `reward_weights` is searched.",
    )
    objectives: Objectives = setting(
        factory=list[ObjectiveConfig],
        meaning="Two or more goals in place of one, for `evolve.selection: pareto`: "
        "`[exact, {name: tokens, direction: minimize}]`. The first is the fitness of the run. "
        "Empty: fitness is the only goal.",
    )
    correct: float | None = setting(
        None,
        "Least reward of a completion that counts as correct. With it, the end of a run also gives "
        "pass@1 and pass@k of base and winner on the test prompts, where k is `test_samples`; null "
        "gives mean rewards only.",
    )

    @property
    def counted(self) -> FitnessReward:
        """What fitness measures: the first objective, or `reward` without objectives."""
        objective = self.objectives[0].name if self.objectives else FITNESS
        return self.reward if objective == FITNESS else objective

    @property
    def in_between(self) -> int:
        """Number of validation prompts after a round without a decision, at most `prompts`.

        A `between` of null counts as 8 until `RunConfig.settled` replaces it.
        """
        return min(self.prompts, BETWEEN if self.between is None else self.between)

    @property
    def further(self) -> list[ObjectiveConfig]:
        """The objectives after the first one, which is fitness."""
        return self.objectives[1:]

    def per_prompt(self, samples: int) -> int:
        """Return the number of completions per prompt: `samples`, or one for greedy decoding."""
        return samples if self.temperature else min(samples, 1)

    @property
    def second_looks(self) -> float:
        """The value of `racing`; 0 for greedy evaluations, because a second one would be equal."""
        return self.racing if self.temperature else 0.0


class EvolveConfig(Group):
    """What happens between two rounds."""

    selection: Selection = setting(
        TournamentSelection(),
        "Which agents survive a round: a kind, a mapping of kind and settings, or your own class "
        "as `module:Class`.",
    )
    exploration: Exploration = setting(
        Mutations(),
        "How hyperparameters change after selection: a kind, a mapping of kind and settings, or "
        "your own class as `module:Class`.",
    )
    hyperparameters: Ranges = setting(
        None,
        f"Ranges of the hyperparameters that may mutate, by name: {', '.join(MUTABLE)}, or "
        "`reward_weights.NAME` for the weight of a reward function. clip_low "
        "and clip_high are the two bounds of the clip range; clip_coef is their distance from 1. "
        "null lets lr vary: within a factor of ten of `algorithm.lr`, or, if that is null too, in "
        "[1e-4, 1e-2] for the embedded models and [1e-6, 3e-4] for all others. `{}` lets nothing "
        "mutate.",
    )
    significance: float | None = setting(
        0.1,
        "Largest p-value of a paired test at which a difference in fitness counts. An agent that "
        "is not significantly behind keeps its weights, and one that is significantly ahead is "
        "not removed. null counts every difference.",
        gt=0,
        le=0.5,
    )
    archive: bool = setting(
        False,
        "Keep the best agent of all rounds in checkpoints/best. If the population falls "
        "significantly behind it, two copies of it, with a half and a quarter of its lr, replace "
        "the two worst agents. For rewards under which agents may collapse together; each "
        "decision measures it and the best agent afresh.",
    )
    dead_steps: int | None = setting(
        8,
        "Consecutive steps without a learning signal, in which the rewards of every group are "
        "equal, after which an agent that is behind the best is removed. An agent whose KL "
        "divergence explodes is removed too. null disables both.",
        ge=1,
    )
    fitness: FitnessConfig = setting(FitnessConfig(), "How agents are evaluated.")
    inherit_optimizer: bool = setting(
        True, "Copy the optimizer state with an agent; false resets it in the copy."
    )

    @property
    def keeps_archive(self) -> bool:
        """Whether the best agent so far, or the front of several objectives, is kept."""
        return self.archive or bool(self.fitness.objectives)

    @property
    def selects(self) -> bool:
        """Whether the selection may remove or overwrite agents."""
        return bool(getattr(self.selection, "selects", True))

    @property
    def decides_always(self) -> bool:
        """Whether a run decides after every round, because a schedule may act in any round."""
        return bool(getattr(self.exploration, "scheduled", False))


def search_space(ranges: Mapping[str, RLParameter] | None, first: Hparams) -> HyperparameterConfig:
    """Return the ranges in which hyperparameters may mutate.

    Args:
        ranges: `evolve.hyperparameters`; None lets lr vary within a factor of ten either way.
        first: The initial hyperparameters.
    """
    return HyperparameterConfig(**(default_ranges(first.lr) if ranges is None else ranges))
