"""Maps flat keywords to settings; a keyword is the last part of a YAML path, unique in a call."""

from collections.abc import Mapping
from typing import Any

from evo_grpo.errors import ConfigError
from evo_grpo.schema.group import Group
from evo_grpo.schema.messages import other_name
from evo_grpo.schema.problems import Path, Problems, nearest
from evo_grpo.settings import algorithm, engine, evolve, model, population, record, run


def _below(group: type[Group], name: str, *, without: str = "") -> dict[str, Path]:
    return {field: (name, field) for field in group.model_fields if field != without}


AGENT_KEYWORDS: dict[str, Path] = {
    "seed": ("seed",),
    "model": ("model", "name"),
    **_below(model.ModelConfig, "model", without="name"),
    # The class determines the algorithm.
    **_below(algorithm.AlgorithmConfig, "algorithm", without="kind"),
    "hyperparameters": ("hyperparameters",),
    **_below(engine.EngineConfig, "engine"),
}
"""Keyword of the constructors -> its path in `AgentSettings`."""

POPULATION_KEYWORDS: dict[str, Path] = {name: ("population", name) for name in ("size", "init")}
"""Keyword that only `GRPO.population` takes -> its path in population.yaml."""

TRAIN_KEYWORDS: dict[str, Path] = {
    "name": ("name",),
    **{
        name: path
        for name, path in _below(population.PopulationConfig, "population").items()
        if name not in POPULATION_KEYWORDS
    },
    **_below(evolve.EvolveConfig, "evolve", without="hyperparameters"),
    **_below(record.RecordConfig, "record"),
}
"""Keyword of `Population.train` -> its path in population.yaml."""


def agent_settings(given: Mapping[str, Any], *, kind: str) -> run.AgentSettings:
    """Build settings from the keywords of a constructor; errors name the keywords.

    Args:
        given: Values by the names in `AGENT_KEYWORDS`; `model` is None for a model object.
        kind: grpo, gspo or cispo.
    """
    groups: dict[str, Any] = {"algorithm": {"kind": kind}}
    for name, value in given.items():
        group, *rest = AGENT_KEYWORDS[name]
        if rest:
            groups.setdefault(str(group), {})[rest[0]] = value
        else:
            groups[str(group)] = value
    if groups.get("model", {}).get("name") is None:
        groups.pop("model", None)
    try:
        return run.AgentSettings(**groups)
    except Problems as error:
        raise Problems(*(p._replace(path=_flat(p.path)) for p in error.problems)) from None


def unknown_keyword(call: str, name: str, known: Mapping[str, object]) -> ConfigError:
    """Return the error for an unknown keyword, with the most similar known keyword."""
    if (other := other_name(name, known)) is not None:
        hint = f" Here it is {other}{'' if other in known else ', a path of population.yaml'}."
    elif near := nearest(name, known):
        hint = f" Did you mean {near!r}?"
    else:
        hint = ""
    return ConfigError(
        f"{call}: unknown argument {name!r}.{hint} Expected one of {', '.join(known)}"
    )


def _flat(path: Path) -> Path:
    """Return a path in `AgentSettings` with its first parts replaced by their keyword."""
    for name, prefix in AGENT_KEYWORDS.items():
        if path[: len(prefix)] == prefix:
            return (name, *path[len(prefix) :])
    return path
