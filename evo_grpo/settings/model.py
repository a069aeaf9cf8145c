"""The group `model`: the base, the adapter of each agent, and checks of a search over adapters."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import BeforeValidator

from evo_grpo.schema import group
from evo_grpo.schema.hparams import LORA, Hparams, RankAlpha
from evo_grpo.schema.messages import shown
from evo_grpo.schema.patterns import ALL, ending, matches, union, why_no_pattern
from evo_grpo.schema.problems import (
    Path,
    Problem,
    Problems,
    below,
    dotted,
    nearest,
    unknown_name,
)
from evo_grpo.schema.search_space import HyperparameterConfig, outside
from evo_grpo.schema.validation import LEAST, MAX_RANK, MOST


def _modules(value: object) -> object:
    """Accept names of layers, or one regular expression."""
    value = group.one_or_several(value)
    if isinstance(value, str) and value != ALL and (why := why_no_pattern(value)):
        raise ValueError(f"{ALL}, a list of names, or a regular expression ({why})")
    return value


def _no_modules(value: object) -> object:
    return None if value is None else _modules(value)


def _ranks(value: object) -> object:
    return _by_name(value, lambda rank: type(rank) is int and rank >= 1, "an integer >= 1")


def _alphas(value: object) -> object:
    return _by_name(
        value,
        lambda alpha: type(alpha) in (int, float) and LEAST <= alpha <= MOST,
        f"a number > 0 from {LEAST:g} to {MOST:g}",
    )


def _by_name(value: object, good: Callable[[Any], bool], expected: str) -> object:
    """Accept a mapping of numbers whose keys are regular expressions for the end of layer names."""
    patterns = group.plain(value)
    problems: list[Problem] = []
    entries = cast("Mapping[str, object]", patterns) if isinstance(patterns, Mapping) else {}
    for name, number in entries.items():
        if why := why_no_pattern(ending(name)):
            text = f"expected a name or a regular expression as key, got {shown(name)} ({why})"
            problems.append(Problem((name,), text))
        elif not good(number):
            problems.append(Problem((name,), f"expected {expected}, got {shown(number)}"))
    if problems:
        raise Problems(*problems)
    return patterns


Modules = Annotated[str | list[str], BeforeValidator(_modules)]
NoModules = Annotated[str | list[str] | None, BeforeValidator(_no_modules)]
TargetSets = Annotated[
    dict[str, Modules],
    group.only(
        lambda value: isinstance(value, Mapping) and all(value),
        "a mapping of names to layers, such as {attention: [q_proj, v_proj]}",
    ),
]
Ranks = Annotated[dict[str, int], BeforeValidator(_ranks)]
Alphas = Annotated[dict[str, float], BeforeValidator(_alphas)]
Scale = Annotated[float | None, group.computable(LEAST, MOST)]


class LoraSettings(group.Group):
    """The adapter that each agent trains; settings that PEFT has too have PEFT's names."""

    r: int = group.setting(8, "Rank of the two matrices.", ge=1, le=MAX_RANK)
    alpha: Scale = group.setting(
        None, "LoRA alpha: the update is scaled by alpha / r; null means twice `r`.", gt=0
    )
    dropout: float = group.setting(0.0, "Dropout before the first matrix.", ge=0, lt=1)
    target_modules: Modules = group.setting(
        "all-linear",
        "Layers with an adapter: `all-linear`, a list of names such as `[q_proj, v_proj]`, or a "
        "regular expression that matches full module names.",
    )
    exclude_modules: NoModules = group.setting(
        None, "Layers without an adapter, in the form of `target_modules`."
    )
    target_sets: TargetSets = group.setting(
        factory=dict[str, str | list[str]],
        meaning="Sets of layers by name, each in the form of `target_modules`, of which "
        "`evolve.hyperparameters.lora.target_modules` searches the best, for instance "
        "`{attention: [q_proj, k_proj, v_proj, o_proj], all: all-linear}`.",
    )
    use_rslora: bool = group.setting(False, "Scale by alpha over the square root of the rank.")
    rank_pattern: Ranks = group.setting(
        factory=dict[str, int], meaning="Ranks of some layers, by name or regular expression."
    )
    alpha_pattern: Alphas = group.setting(
        factory=dict[str, float], meaning="Alphas of some layers, by name or regular expression."
    )

    @property
    def rank_alpha(self) -> RankAlpha:
        """The rank and the alpha, which is twice the rank by default."""
        return RankAlpha(self.r, 2.0 * self.r if self.alpha is None else self.alpha)

    @property
    def is_default(self) -> bool:
        """Whether every setting but `target_sets` has its default."""
        return self.replace(target_sets={}) == LoraSettings()

    def searched_sets(self, space: HyperparameterConfig) -> list[str]:
        """Return the names of the `target_sets` that are searched."""
        name = f"{LORA}target_modules"
        return [str(value) for value in space[name].choices or ()] if name in space.names() else []

    def largest(self, space: HyperparameterConfig) -> Self:
        """Return these settings with the largest rank and all layers that an agent may have."""
        name = f"{LORA}r"
        rank = int(space[name].max) if name in space.names() else self.r
        own = self.replace(r=rank) if rank > self.r else self
        names = self.searched_sets(space)
        sets = [own for name, own in self.target_sets.items() if name in names]
        return own.replace(target_modules=union(sets)) if sets else own


class ModelConfig(group.Group):
    """The frozen base model. A plain string is its name: `model: tiny-sums`."""

    shorthand: ClassVar[str | None] = "name"

    name: str = group.setting(
        meaning="An embedded model (`tiny-sums`, `tiny-foods`), `smollm2` (after `evo-grpo fetch "
        "smollm2`), a model folder, a `.gguf` file, or a hub id such as `owner/name`. In Python "
        "also a transformers module.",
        min_length=1,
    )
    lora: LoraSettings = group.setting(LoraSettings(), "The adapter that each agent trains.")
    config: group.PlainMapping = group.setting(
        factory=dict[str, Any],
        meaning="Keywords for `from_pretrained`, for instance `{attn_implementation: eager}`.",
    )
    trust_remote_code: bool = group.setting(
        False, "Run the Python code in the model's files. Only for models that you trust."
    )
    adapter: str | None = group.setting(
        None,
        "PEFT folder of the adapter from which every agent starts, also the reference of the KL "
        "term; null starts from the base.",
        min_length=1,
    )


def adapter_problems(
    model: ModelConfig | None, space: HyperparameterConfig, above: Path
) -> Iterator[Problem]:
    """Yield contradictions between a search over adapters and the settings of adapters.

    Args:
        model: The group `model`; None if the base is a transformers module.
        space: The hyperparameters that are searched.
        above: The path of the ranges in the settings.
    """
    if model is None or not searched(space):
        return
    for name, text in pattern_problems(space, model.lora, above):
        yield Problem(("model", "lora", name), text)
    yield from _set_problems(model.lora, space, above)


def _set_problems(
    lora: LoraSettings, space: HyperparameterConfig, above: Path
) -> Iterator[Problem]:
    """Yield problems of a search over sets of layers: unknown sets, or `target_modules` given."""
    names, at = lora.searched_sets(space), f"{LORA}target_modules"
    for name in names:
        if name not in lora.target_sets:
            text = unknown_name(name, lora.target_sets, "model.lora.target_sets")
            yield Problem((*above, at, "choices"), text)
    conflict, remedy = names and lora.target_modules != ALL, f"remove it, or {dotted((*above, at))}"
    row = ("target_modules", conflict, f"none where {at} is searched", remedy)
    yield from below(group.contradictions(lora, row), "model", "lora")


def missing_layers(
    targets: str | Sequence[str], layers: Collection[str], model: str, excluded: str | Sequence[str]
) -> str:
    """Return why a set of layers is refused: a layer is unknown, or all are excluded; else "".

    Args:
        targets: The set, in the form of `target_modules`.
        layers: Full names of the layers of the model that may have an adapter.
        model: The name of the model.
        excluded: `exclude_modules`; empty for none.
    """
    ends = sorted({layer.rpartition(".")[2] for layer in layers})
    if isinstance(targets, str):
        if not any(matches(layer, targets) for layer in layers):
            hint = f"; write [{targets}]" if targets in ends else ""
            return (
                f"expected {ALL}, a list of names, or a regular expression of full names of layers "
                f"of {model}, got {targets!r}, which matches none{hint}"
            )
    else:
        for name in targets:
            if not any(matches(layer, [name]) for layer in layers):
                near = nearest(name, ends)
                hint = f"Did you mean {near!r}?" if near else f"It has {', '.join(ends)}"
                return f"expected layers of {model}, got {name!r}, which it lacks. {hint}"
    if all(matches(layer, excluded) for layer in layers if matches(layer, targets)):
        return f"expected layers beside those of exclude_modules, got {targets}; remove one of both"
    return ""


def pattern_problems(
    space: HyperparameterConfig,
    lora: Any,  # noqa: ANN401 -- LoraSettings, or PEFT's LoraConfig
    above: Path,
) -> Iterator[tuple[str, str]]:
    """Yield (setting, sentence) for each pattern of ranks or alphas if adapters are searched."""
    for searching in searched(space)[:1]:
        for name in ("rank_pattern", "alpha_pattern"):
            if pattern := dict(getattr(lora, name) or {}):
                text = f"expected none where {searching} is searched, got {pattern}; remove it, or"
                yield name, f"{text} {dotted((*above, searching))}"


def begins_outside(
    space: HyperparameterConfig, adapter: RankAlpha, above: Path
) -> Iterator[tuple[str, str]]:
    """Yield (setting, sentence) if the run's `r` or `alpha` is outside the range of its search."""
    for value in outside(Hparams().with_scale(space.names(), adapter), space):
        if value.name.startswith(LORA):
            yield value.name.removeprefix(LORA), value.told(dotted((*above, value.name)))


def searched(space: HyperparameterConfig) -> list[str]:
    """Return the names of the searched settings of adapters."""
    return [name for name in space.names() if name.startswith(LORA)]
