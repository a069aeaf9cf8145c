"""Finds settings that have no effect in combination with others; `check` and runs warn of them.

Only given settings are reported: those with a value other than the default, or with a range. A
finding holds for every agent and round that the settings allow, until steering, or an assignment in
Python, changes hyperparameters.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from evo_grpo.schema.group import Group
from evo_grpo.schema.hparams import LOSS_USES, Hparams, LossType, LossUse
from evo_grpo.schema.search_space import CLIPS, HyperparameterConfig
from evo_grpo.settings.algorithm import AlgorithmConfig, LossFields
from evo_grpo.settings.engine import EngineConfig
from evo_grpo.settings.evolve import EvolveConfig
from evo_grpo.settings.population import PopulationConfig

OF_ONE_LOSS = [name for name in LossFields.model_fields if name.partition("_")[0] in LOSS_USES]
"""Settings that begin with the name of the only loss that uses them."""
RANGES = "hyperparameters"
WHY_RATIO_IS_ONE = (
    "with update_epochs 1 and all rows of a step in one batch the probability ratio is exactly 1; "
    "set update_epochs to 2, or a batch_size below the rows of a step"
)
WHY_NOTHING_DRAWN = (
    "has no effect: population.init draws nothing; set that to latin_hypercube, or leave start out"
)
_ONCE_GREEDY = {"samples": 1, "test_samples": 1, "final_samples": 1, "racing": 0}
"""Settings of `evolve.fitness` that ask for further completions -> the value that asks for none."""
Row = tuple[str, object, str]
"""Path of a setting, whether it has no effect, and the rest of the sentence."""


class WithoutEffect(UserWarning):
    """A warning of a setting that is given, but has no effect in combination with others."""


class Finding(NamedTuple):
    """A setting without effect.

    Attributes:
        path: Its path; ranges of hyperparameters are below `hyperparameters`.
        why: The rest of the sentence that begins with `path`: the reason and the remedy.
    """

    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} {self.why}"


@dataclass(frozen=True)
class KnownSettings:
    """The settings to check; for constructors in Python, only those of the agents are known.

    Attributes:
        algorithm: The group `algorithm`.
        ranges: Ranges of the hyperparameters that may mutate.
        engine: The group `engine`.
        begin: Initial hyperparameters of the agents, at least one.
        prompts: Prompts of a GRPO step; None if the environment is not known yet.
        population: The group `population`; None outside a run.
        evolve: The group `evolve`; None outside a run.
        own_exploration: Whether exploration is a user's class, which may change hyperparameters
            that have no range.
    """

    algorithm: AlgorithmConfig
    ranges: HyperparameterConfig
    engine: EngineConfig
    begin: Sequence[Hparams]
    prompts: int | None = None
    population: PopulationConfig | None = None
    evolve: EvolveConfig | None = None
    own_exploration: bool = False

    @property
    def losses(self) -> tuple[str, ...]:
        """The losses that agents may have."""
        if self.mutates("loss_type"):
            return tuple(map(str, self.ranges["loss_type"].choices or ()))
        loss_types = (hparams.loss_type for hparams in self.begin)
        return tuple(
            dict.fromkeys(
                loss_type or self.algorithm.loss_type or self.algorithm.kind
                for loss_type in loss_types
            )
        )

    @property
    def loss_uses(self) -> list[LossUse]:
        """The `LossUse` of each loss in `losses`."""
        return [LOSS_USES[cast("LossType", name)] for name in self.losses]

    def is_set(self, name: str) -> bool:
        """Whether a setting of the algorithm differs from its default."""
        return _is_given(self.algorithm, name)

    def mutates(self, name: str) -> bool:
        """Whether the hyperparameter `name` has a range, in which it may mutate."""
        return name in self.ranges.names()

    def bounds(self, name: str) -> tuple[float, float]:
        """The least and the greatest value of a hyperparameter in any agent."""
        if self.own_exploration:
            return 0.0, math.inf
        initial = (hparams.get(name) for hparams in self.begin)
        values = [math.inf if value is None else cast("float", value) for value in initial]
        if self.mutates(name):
            values += [self.ranges[name].min, self.ranges[name].max]
        return min(values), max(values)

    @property
    def clip(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(Least, greatest) lower clip bound of the ratio, then (least, greatest) upper bound."""
        low, high = self.bounds("clip_low"), self.bounds("clip_high")
        if not self.mutates("clip_coef"):
            return low, high
        least, most = self.ranges["clip_coef"].min, self.ranges["clip_coef"].max
        return (
            (min(low[0], 1 - most), max(low[1], 1 - least)),
            (min(high[0], 1 + least), max(high[1], 1 + most)),
        )

    @property
    def has_kl(self) -> bool:
        """Whether any agent may have a beta above 0."""
        return self.bounds("beta")[1] > 0

    @property
    def ratio_is_one(self) -> bool:
        """Whether the ratio is always 1, because a GRPO step is a single optimizer step.

        False while the environment is not known, because rows may be passed by hand.
        """
        if self.prompts is None or self.bounds("update_epochs")[1] > 1:
            return False
        if (
            self.population is not None
            and self.bounds("batch_size")[1] == math.inf
            and self.most_rows > self.prompts * self.bounds("group_size")[1]
        ):
            return False  # fewer agents take more rows, in minibatches
        return self.bounds("batch_size")[0] >= self.most_rows

    @property
    def most_rows(self) -> float:
        """The most rows of a step of one agent; infinite while the environment is not known."""
        if self.prompts is None:
            return math.inf
        rows = self.prompts * self.bounds("group_size")[1]
        if self.population is None:
            return rows
        # The remaining agents take over the rows of removed ones.
        selects = self.evolve is None or self.evolve.selects
        places = self.population.places(selects=selects)
        return rows * self.population.size / min(places[: self.population.rounds])


def _is_given(group: Group, name: str) -> bool:
    """Return whether a setting differs from its default."""
    return getattr(group, name) != type(group).model_fields[name].default


def _findings(*rows: Row) -> Iterator[Finding]:
    return (Finding(path, why) for path, applies, why in rows if applies)


def _clip(seen: KnownSettings, name: str) -> str | None:
    """Return why the clip range `name` has no effect; None if it has an effect."""
    (_, low), (high, _) = seen.clip
    bounds = {use.bounds for use in seen.loss_uses}
    reason = f"cannot act: with loss_type {' or '.join(seen.losses)}, which"
    if bounds == {"none"}:
        return f"{reason} does not clip; leave it out"
    if name == "clip_low" and "both" not in bounds:
        return f"{reason} uses at most the upper bound; leave it out"
    if seen.ratio_is_one and low <= 1 <= high:
        return f"cannot act: {WHY_RATIO_IS_ONE}"
    return None


def _clip_range(seen: KnownSettings) -> Iterator[Finding]:
    why = _clip(seen, "clip_coef")
    yield from _findings(("clip_coef", why and seen.is_set("clip_coef"), why or ""))
    for name in CLIPS:
        why = _clip(seen, name)
        yield from _findings((f"{RANGES}.{name}", why and seen.mutates(name), why or ""))


def algorithm_rows(seen: KnownSettings) -> tuple[Row, ...]:
    """Return a `Row` for each reason for which a setting of the algorithm may have no effect."""
    algorithm, losses = seen.algorithm, set(seen.losses)
    other_loss = f"has no effect with loss_type {' or '.join(seen.losses)}; leave it out"
    fixed = all(use.fixed_level for use in seen.loss_uses)
    level_of_kl = algorithm.kl_bias_correction and seen.has_kl and not algorithm.kl_shaping
    delta, least = algorithm.delta or math.inf, seen.clip[1][0]
    no_kl, no_beta = not seen.has_kl, "has no effect with beta 0, which computes no KL; give a beta"
    exact, no_cap = seen.engine.rollout_settings.shares_base, algorithm.sampler_correction == "none"
    engine = f"has no effect with rollout {seen.engine.rollout}, whose log-probs are the trainer's"
    tokens, limit = algorithm.dynamic_sampling_tokens, algorithm.shortest_output(seen.ranges) or 0
    too_few = (tokens or math.inf) < limit * seen.bounds("group_size")[0]
    group = f"{tokens} has no effect: each completion of a group may take {limit}; raise it"
    below = (
        f"{delta:g} lies below the upper clip bound {least:g}: positive advantages are clipped at "
        f"{delta:g} and negative ones at {least:g}; choose one above it"
    )
    shaped = "has no effect with kl_shaping, which replaces the penalty; leave it out"
    return (
        ("importance_sampling_level", fixed and not level_of_kl, other_loss),
        ("delta", all(use.bounds != "both" for use in seen.loss_uses), other_loss),
        ("delta", seen.ratio_is_one and seen.clip[0][1] <= 1, f"has no effect {WHY_RATIO_IS_ONE}"),
        ("delta", delta < least, below),
        *((name, name.partition("_")[0] not in losses, other_loss) for name in OF_ONE_LOSS),
        ("kl_bias_correction", no_kl, no_beta),
        ("kl_bias_correction", algorithm.kl_shaping, shaped),
        ("kl_shaping", no_kl, no_beta),
        ("separate_reference", no_kl, no_beta),
        ("sampler_correction", exact, engine),
        ("sampler_ratio_cap", exact, engine),
        ("sampler_ratio_cap", no_cap, "has no effect with sampler_correction none; leave it out"),
        ("adv_filter_eps", not algorithm.filter_zero_adv, "has no effect without filter_zero_adv"),
        (
            "overlong_penalty",
            algorithm.overlong_buffer is None,
            "has no effect without overlong_buffer",
        ),
        ("dynamic_sampling_tokens", too_few, group),
    )


def _algorithm(seen: KnownSettings) -> Iterator[Finding]:
    findings = [
        finding for finding in _findings(*algorithm_rows(seen)) if seen.is_set(finding.path)
    ]
    # Only the first finding of each setting.
    yield from {finding.path: finding for finding in reversed(findings)}.values()
    least, most = seen.bounds("batch_size")[0], seen.most_rows
    rows = f"has no effect: it is {least:g}, and a step of an agent has at most {most:g} rows"
    yield from _findings(
        ("batch_size", seen.is_set("batch_size") and least > most, f"{rows}; lower it"),
    )


def _engine(seen: KnownSettings) -> Iterator[Finding]:
    engine = seen.engine
    with_rollout = f"has no effect with engine.rollout {engine.rollout}"
    yield from _findings(
        *(
            (f"engine.{name}", settings != type(settings)(), f"{with_rollout}; set that to {name}")
            for name, settings in engine.engines.items()
            if name != engine.rollout
        ),
        *(
            (f"engine.{name}", _is_given(engine, name), f"{with_rollout}, {why}")
            for name, why in engine.rollout_settings.ignores.items()
        ),
    )


def _run(seen: KnownSettings) -> Iterator[Finding]:
    """Yield findings on `population` and `evolve`; none if only the agents' settings are known."""
    population, evolve = seen.population, seen.evolve
    if population is None or evolve is None:
        return
    fitness, exploration, init = evolve.fitness, evolve.exploration, population.init
    only_copies = getattr(exploration, "copies_only", False)
    # The archive may restore the best agent, which is a copy too, with any selection.
    copies = getattr(evolve.selection, "copies", True)
    inherits = evolve.inherit_optimizer or copies or evolve.keeps_archive
    nobody = f"selection {evolve.selection.kind} copies no agent"
    greedy = "has no effect with evolve.fitness.temperature 0, which samples one completion"
    draws_start = isinstance(init, dict) or init in ("latin_hypercube", "sample")
    yield from _findings(
        (
            f"evolve.exploration {exploration.kind}",
            only_copies and not copies,
            f"has no effect: it changes only copies, and {nobody}; choose another one of both",
        ),
        ("evolve.inherit_optimizer", not inherits, f"has no effect: {nobody}; leave it out"),
        *(
            (
                f"{RANGES}.{name}.start",
                not draws_start and seen.ranges[name].start,
                WHY_NOTHING_DRAWN,
            )
            for name in seen.ranges.names()
        ),
        *(
            (
                f"evolve.fitness.{name}",
                getattr(fitness, name) > least and _is_given(fitness, name),
                f"{greedy}; leave it out, or give a temperature",
            )
            for name, least in ({} if fitness.temperature else _ONCE_GREEDY).items()
        ),
    )


def without_effect(seen: KnownSettings) -> list[Finding]:
    """Return a finding for each given setting that has no effect."""
    return [
        finding for check in (_clip_range, _algorithm, _engine, _run) for finding in check(seen)
    ]
