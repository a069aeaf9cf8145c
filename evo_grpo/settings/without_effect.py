"""Finds settings that have no effect in combination with others; `check` and runs warn of them.

Only settings that were given are reported: a value other than the default, or a range in which it
may mutate. A finding holds for every agent and round that the settings allow; steering, and
hyperparameters assigned in Python, may change that later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.on_copy import LowerLROnCopy
from evo_grpo.evolve.explore.optuna import OptunaExploration
from evo_grpo.evolve.explore.resample import Resample
from evo_grpo.evolve.explore.schedule import ROUND, ScheduleExploration
from evo_grpo.evolve.select.halving import HalvingSelection
from evo_grpo.evolve.select.none import NoSelection
from evo_grpo.schema.hparams import LossType
from evo_grpo.schema.search_space import CLIPS, HyperparameterConfig
from evo_grpo.schema.shown import shown_value

if TYPE_CHECKING:
    from evo_grpo.schema.hparams import Hparams
    from evo_grpo.settings.algorithm import AlgorithmConfig
    from evo_grpo.settings.engine import EngineConfig
    from evo_grpo.settings.evolve import EvolveConfig
    from evo_grpo.settings.population import PopulationConfig

CLIPPED: tuple[LossType, ...] = ("grpo", "gspo", "bnpo", "dr_grpo", "dapo", "luspo")
"""The losses with a clipped surrogate; only they use `delta` and the lower clip bound."""
RANGES = "hyperparameters"


class WithoutEffect(UserWarning):
    """A setting was given that has no effect in combination with others."""


class Finding(NamedTuple):
    """A setting without effect.

    Attributes:
        path: Its path; ranges of hyperparameters are below `hyperparameters`.
        why: The rest of the sentence: the reason and the remedy.
    """

    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} {self.why}"


@dataclass(frozen=True)
class Seen:
    """The settings that are known; constructors in Python know only those of the agents.

    Attributes:
        algorithm: The group `algorithm`.
        ranges: Ranges of the hyperparameters that may mutate.
        engine: The group `engine`.
        begin: Initial hyperparameters of the agents, at least one.
        prompts: Prompts of a GRPO step; None if the environment is not known yet.
        population: The group `population`; None outside a run.
        evolve: The group `evolve`; None outside a run.
        own_exploration: Whether a user's class explores; it may change hyperparameters without a
            range.
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
        given = (one.loss_type for one in self.begin)
        return tuple(
            dict.fromkeys(one or self.algorithm.loss_type or self.algorithm.kind for one in given)
        )

    def is_set(self, name: str) -> bool:
        """Whether a setting of the algorithm differs from its default."""
        return getattr(self.algorithm, name) != type(self.algorithm).model_fields[name].default

    def mutates(self, name: str) -> bool:
        """Whether a hyperparameter has a range."""
        return name in self.ranges.names()

    def bounds(self, name: str) -> tuple[float, float]:
        """The least and the greatest value of a hyperparameter in any agent."""
        if self.own_exploration:
            return 0.0, math.inf
        begin = (one.get(name) for one in self.begin)
        values = [math.inf if v is None else cast("float", v) for v in begin]
        if self.mutates(name):
            values += [self.ranges[name].min, self.ranges[name].max]
        return min(values), max(values)

    @property
    def clip(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Least and greatest lower clip bound of the ratio, and the same of the upper bound."""
        low, high = self.bounds("clip_low"), self.bounds("clip_high")
        if not self.mutates("clip_coef"):
            return low, high
        least, most = self.ranges["clip_coef"].min, self.ranges["clip_coef"].max
        return (
            (min(low[0], 1 - most), max(low[1], 1 - least)),
            (min(high[0], 1 + least), max(high[1], 1 + most)),
        )

    @property
    def kl_shaping(self) -> tuple[bool, ...]:
        """Whether agents may have KL shaping: True, False or both."""
        if self.mutates("kl_shaping"):
            return tuple(map(bool, self.ranges["kl_shaping"].choices or ()))
        return tuple(dict.fromkeys(map(self.algorithm.shapes_kl, self.begin)))

    @property
    def has_kl(self) -> bool:
        """Whether any agent may have a beta above 0."""
        return self.bounds("beta")[1] > 0

    @property
    def ratio_is_one(self) -> bool:
        """Whether every optimizer step uses the policy that computed the old log-probs.

        False while the environment is not known, since rows may be passed by hand.
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
        # The others take over the rows of removed agents.
        selects = self.evolve is None or self.evolve.selection.kind != "none"
        places = self.population.places(selects=selects)
        return rows * self.population.size / min(places[: self.population.rounds])


def _clip(seen: Seen, name: str) -> str | None:
    """Return why a clip range has no effect; None if it has one."""
    if set(seen.losses) <= {"sapo", "vespo"}:
        return f"with loss_type {' or '.join(seen.losses)}, which does not clip; leave it out"
    (_, low), (high, _) = seen.clip
    if name == "clip_low" and set(seen.losses) <= {"cispo", "sapo", "vespo"}:
        return "with loss_type cispo, which uses only the upper bound; leave it out"
    if seen.ratio_is_one and low <= 1 <= high:
        return (
            "with update_epochs 1 and all rows of a step in one batch the probability ratio is "
            "exactly 1; set update_epochs to 2, or a batch_size below the rows of a step"
        )
    return None


def _clip_coef(seen: Seen) -> Iterator[Finding]:
    why = _clip(seen, "clip_coef")
    if why is not None and seen.is_set("clip_coef"):
        yield Finding("clip_coef", f"cannot act: {why}")
    for name in CLIPS:
        why = _clip(seen, name)
        if why is not None and seen.mutates(name):
            yield Finding(f"{RANGES}.{name}", f"cannot act: {why}")


def _ratio_level(seen: Seen) -> str | None:
    own = seen.algorithm
    kl_reads_it = own.kl_bias_correction and seen.has_kl and False in seen.kl_shaping
    if set(seen.losses) == {"vespo"} and not kl_reads_it:
        return "has no effect with loss_type vespo, which weights whole rows; leave it out"
    return None


def _delta(seen: Seen) -> str | None:
    delta, least = seen.algorithm.delta, seen.clip[1][0]
    if not set(seen.losses) & set(CLIPPED):
        named = " or ".join(seen.losses)
        return f"has no effect with loss_type {named}, which has no unclipped ratio"
    if seen.ratio_is_one and seen.clip[0][1] <= 1:
        return (
            "has no effect with update_epochs 1 and all rows of a step in one batch, where the "
            "probability ratio is exactly 1; set update_epochs to 2, or leave it out"
        )
    if delta is not None and delta < least:
        return (
            f"{delta:g} lies below the upper clip bound {least:g}: positive advantages are clipped "
            f"at {delta:g} and negative ones at {least:g}; choose one above it"
        )
    return None


def _other_loss(own: LossType) -> Callable[[Seen], str | None]:
    def why(seen: Seen) -> str | None:
        if own in seen.losses:
            return None
        named = " or ".join(seen.losses)
        return f"has no effect with loss_type {named}; it is a setting of {own}"

    return why


def _kl_bias_correction(seen: Seen) -> str | None:
    if False not in seen.kl_shaping and seen.has_kl:
        return "has no effect with kl_shaping, which replaces the penalty; leave it out"
    return _without_kl(seen)


def _without_kl(seen: Seen) -> str | None:
    return None if seen.has_kl else "has no effect with beta 0, which computes no KL; give a beta"


def _without_filter(seen: Seen) -> str | None:
    return None if seen.algorithm.filter_zero_adv else "has no effect without filter_zero_adv"


def _without_buffer(seen: Seen) -> str | None:
    if seen.algorithm.overlong_buffer is not None:
        return None
    return "has no effect without overlong_buffer; give that, or leave it out"


def _too_few_tokens(seen: Seen) -> str | None:
    tokens = seen.algorithm.dynamic_sampling_tokens
    longest = seen.algorithm.shortest_output(seen.ranges)
    if tokens is None or longest is None or tokens >= longest * seen.bounds("group_size")[0]:
        return None
    return (
        f"{tokens} has no effect: a group may take {longest} tokens, max_output_tokens, for each "
        "of its group_size completions; raise it, or leave it out"
    )


def _exact_sampler(seen: Seen) -> str | None:
    if not seen.engine.rollout_settings.shares_base:
        return None
    return (
        f"has no effect with rollout {seen.engine.rollout}, whose log-probs are the trainer's; "
        "leave it out"
    )


def _ratio_cap(seen: Seen) -> str | None:
    if seen.algorithm.sampler_correction == "none":
        return "has no effect with sampler_correction none; leave it out"
    return _exact_sampler(seen)


ALGORITHM: Mapping[str, Callable[[Seen], str | None]] = {
    "importance_sampling_level": _ratio_level,
    "delta": _delta,
    "kl_bias_correction": _kl_bias_correction,
    "sapo_temperature_pos": _other_loss("sapo"),
    "sapo_temperature_neg": _other_loss("sapo"),
    "vespo_positive": _other_loss("vespo"),
    "vespo_negative": _other_loss("vespo"),
    "sampler_correction": _exact_sampler,
    "sampler_ratio_cap": _ratio_cap,
    "adv_filter_eps": _without_filter,
    "overlong_penalty": _without_buffer,
    "dynamic_sampling_tokens": _too_few_tokens,
    "kl_shaping": _without_kl,
    "separate_reference": _without_kl,
}
"""Setting of the algorithm -> function that returns why it has no effect, or None."""


def _algorithm(seen: Seen) -> Iterator[Finding]:
    for name, why in ALGORITHM.items():
        if seen.is_set(name) and (text := why(seen)) is not None:
            yield Finding(name, text)


def _kl_shaping(seen: Seen) -> Iterator[Finding]:
    if seen.mutates("kl_shaping") and (why := _without_kl(seen)) is not None:
        yield Finding(f"{RANGES}.kl_shaping", why)


def _batch_size(seen: Seen) -> Iterator[Finding]:
    if seen.is_set("batch_size") and (least := seen.bounds("batch_size")[0]) > seen.most_rows:
        yield Finding(
            "batch_size",
            f"has no effect: it is {least:g}, and a step of an agent has at most "
            f"{seen.most_rows:g} rows, which one optimizer step then takes; lower it, or leave it "
            "out",
        )


def _still(seen: Seen) -> Iterator[Finding]:
    for name in seen.ranges.names():
        parameter = seen.ranges[name]
        least, most = parameter.min, parameter.max
        if parameter.choices is not None:
            if len(parameter.choices) == 1:
                only = shown_value(parameter.choices[0])
                yield Finding(f"{RANGES}.{name}", f"never moves: its only choice is {only}")
        elif least == most:
            yield Finding(f"{RANGES}.{name}", f"never moves: min and max are both {least:g}")


def _engine(seen: Seen) -> Iterator[Finding]:
    engine = seen.engine
    for name, own in engine.engines.items():
        if name != engine.rollout and own != type(own)():
            yield Finding(
                f"engine.{name}",
                f"has no effect with engine.rollout {engine.rollout}; set that to {name}, or leave "
                f"engine.{name} out",
            )
    for name, why in engine.rollout_settings.ignores.items():
        if getattr(engine, name) != type(engine).model_fields[name].default:
            yield Finding(
                f"engine.{name}", f"has no effect with engine.rollout {engine.rollout}, {why}"
            )
    if engine.offload_adapters and engine.device in ("cpu", "mps"):
        yield Finding(
            "engine.offload_adapters",
            f"has no effect with engine.device {engine.device}, whose memory is the host's; leave "
            "it out",
        )


def _exploration(seen: Seen) -> Iterator[Finding]:
    if seen.evolve is None or not isinstance(seen.evolve.selection, NoSelection | HalvingSelection):
        return
    kind = seen.evolve.exploration.kind
    if _copies_only(seen.evolve):
        yield Finding(
            f"evolve.exploration {kind}",
            f"has no effect: it changes only copies, and selection {seen.evolve.selection.kind} "
            "copies no agent; choose another exploration or selection",
        )


def _schedule(seen: Seen) -> Iterator[Finding]:
    if seen.evolve is None or seen.population is None:
        return
    exploration, rounds = seen.evolve.exploration, seen.population.rounds
    last = exploration.rounds[-1][ROUND] if isinstance(exploration, ScheduleExploration) else 0
    if last > rounds:
        yield Finding(
            "evolve.exploration.rounds",
            f"has an entry without effect: round {last} is never played, since population.rounds "
            f"is {rounds}; raise that, or leave the entry out",
        )


def _copies_only(evolve: EvolveConfig) -> bool:
    exploration = evolve.exploration
    if isinstance(exploration, Mutations):
        return exploration.copies_only
    return isinstance(exploration, LowerLROnCopy | Resample | OptunaExploration)


def _inherit_optimizer(seen: Seen) -> Iterator[Finding]:
    population, evolve = seen.population, seen.evolve
    if population is None or evolve is None or evolve.inherit_optimizer:
        return
    # The archive may restore the best agent, which is a copy too, with any selection.
    if isinstance(evolve.selection, NoSelection | HalvingSelection) and not evolve.keeps_archive:
        yield Finding(
            "evolve.inherit_optimizer",
            f"has no effect: selection {evolve.selection.kind} copies no agent, and without "
            "evolve.archive none is restored; leave it out",
        )


def _start(seen: Seen) -> Iterator[Finding]:
    init = None if seen.population is None else seen.population.init
    if init is None or isinstance(init, dict) or init in ("latin_hypercube", "sample"):
        return
    for name in seen.ranges.names():
        if seen.ranges[name].start is not None:
            yield Finding(
                f"{RANGES}.{name}.start",
                "has no effect: population.init draws nothing; set that to latin_hypercube or "
                "sample, or leave start out",
            )


def _greedy(seen: Seen) -> Iterator[Finding]:
    fitness = None if seen.evolve is None else seen.evolve.fitness
    if fitness is None or fitness.temperature:
        return
    fields = type(fitness).model_fields
    for name in ("samples", "test_samples", "final_samples"):
        if getattr(fitness, name) > 1 and getattr(fitness, name) != fields[name].default:
            yield Finding(
                f"evolve.fitness.{name}",
                "has no effect with evolve.fitness.temperature 0, where all completions of a "
                "prompt are equal and one is sampled; leave it out, or give a temperature",
            )
    if fitness.racing:
        yield Finding(
            "evolve.fitness.racing",
            "has no effect with evolve.fitness.temperature 0, where a second evaluation gives the "
            "same answers; leave it out, or give a temperature",
        )


def _final_samples(seen: Seen) -> Iterator[Finding]:
    fitness = None if seen.evolve is None else seen.evolve.fitness
    if fitness is None or not fitness.objectives:
        return
    if fitness.final_samples != type(fitness).model_fields["final_samples"].default:
        yield Finding(
            "evolve.fitness.final_samples",
            "has no effect with evolve.fitness.objectives, whose winner is an agent of the front "
            "without a final comparison; leave it out",
        )


TABLE: tuple[Callable[[Seen], Iterator[Finding]], ...] = (
    *(_clip_coef, _algorithm, _kl_shaping, _batch_size, _still, _engine),
    *(_exploration, _schedule, _inherit_optimizer, _start, _greedy),
    _final_samples,
)
"""All checks; those about a run find nothing if only the agents' settings are known."""


def without_effect(seen: Seen) -> list[Finding]:
    """Return all settings that were given and have no effect."""
    return [finding for row in TABLE for finding in row(seen)]
