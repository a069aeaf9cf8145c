"""recipe(run, out): the settings and the schedule of a run's winner as a file for another run.

planning   planning.py: the line of the winner as settings of a run
writing    here: the file, which begins with where its values come from
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from evo_grpo.after.recipe.planning import AROUND, Size, recipe_settings
from evo_grpo.errors import ConfigError
from evo_grpo.printable import printable
from evo_grpo.record.config import read_config
from evo_grpo.record.files import atomic_write, writing
from evo_grpo.record.names import CONFIG
from evo_grpo.record.schedule import Schedule, read_schedule
from evo_grpo.record.summary import read_summary, score_of
from evo_grpo.schema.search_space import RLParameter
from evo_grpo.schema.shown import shown_value
from evo_grpo.schema.validation import whole
from evo_grpo.settings import RunConfig, from_dict
from evo_grpo.settings.plain_yaml import Dumper

ALWAYS: Mapping[str, tuple[str, ...]] = {
    "model": ("name",),
    "env": ("kind",),
    "population": ("size", "rounds", "steps_per_round"),
    "algorithm": ("lr", "group_size", "prompts_per_step"),
    "evolve": ("hyperparameters",),
}
"""Settings that a recipe has even where they are the defaults."""
_RANGE = {
    name: field.default
    for name, field in RLParameter.model_fields.items()
    if name not in ("min", "max", "choices")
}


def recipe(
    run: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    size: int = 1,
    rounds: int | None = None,
    steps: int | None = None,
    force: bool = False,
) -> Path:
    """Write the settings and the schedule of a run's winner as a YAML file for another run.

    One agent trains with the hyperparameters of the winner's line, round by round, stretched to the
    number of rounds; several search in narrow ranges around them. Everything else is as in the run,
    also for another model: `evo-grpo check` tells whether that fits into memory.

    Args:
        run: The run folder, of a finished run.
        out: The file.
        model: Name of another model, as in `model.name`; None keeps that of the run.
        size: Number of agents, >= 1.
        rounds: Rounds, >= 1; None takes those of the winner's line.
        steps: GRPO steps per round, >= 1; None takes those of the run.
        force: Replace an existing file.

    Raises:
        RunNotFoundError: `run` is no run folder.
        RunDirError: The run is not finished, its winner trained for a single round, or it was
            recorded with objects that no file can name.
        ConfigError: The file exists, or an argument is out of range.
    """
    for name, number in (("size", size), ("rounds", rounds), ("steps", steps)):
        if number is not None:
            whole(1).check(name, number)
    path = Path(out)
    check_file(path, force=force)
    schedule = read_schedule(run)
    folder = Path(run)
    config = read_config(folder)
    if model == config.model.name:
        model = None
    wanted = Size(size, rounds or len(schedule.rounds), steps or schedule.steps)
    found = recipe_settings(config, schedule, wanted, model=model)
    lines = _heading(folder, config, schedule, found, path)
    text = "".join(f"# {printable(line)}".rstrip() + "\n" for line in lines)
    with writing(path):
        atomic_write(path, f"{text}\n{_yaml(found)}")
    return path


def check_file(path: Path, *, force: bool) -> None:
    """Refuse a file that cannot be written, or that exists and is not to be replaced."""
    if path.is_dir():
        raise ConfigError(f"{path}: expected the name of a file to write, got a folder")
    if path.exists() and not force:
        raise ConfigError(
            f"{path}: already exists; choose another name, or replace it with --force"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; create it first")


def _heading(
    folder: Path, config: RunConfig, schedule: Schedule, found: RunConfig, path: Path
) -> Iterator[str]:
    """Yield the comments that the file begins with."""
    settings = found.population
    alone = settings.size == 1
    summary = cast("dict[str, Any]", read_summary(folder))
    best, base = score_of(summary["best"]).mean, score_of(summary["base"]).mean
    last = schedule.rounds[-1]
    yield f"A recipe from the winner of {folder}: member {schedule.member} over {config.model.name}"
    yield (
        f"It scored {best:.3f} on the test prompts, the base {base:.3f}. Its line "
        f"has {len(schedule.rounds)} rounds of {schedule.steps} steps."
    )
    yield ""
    yield f"evo-grpo check {path}    what this run will do"
    yield f"evo-grpo run {path}      do it"
    yield ""
    yield "Where the values come from:"
    rounds = f"{settings.rounds} rounds of {settings.steps_per_round} steps"
    if alone:
        yield f"  population  one agent, {rounds}, over which the winner's line is stretched"
    else:
        yield f"  population  {settings.size} agents, {rounds}, that search around the winner"
    first = shown_value(schedule.rounds[0].hparams.lr)
    yield f"  algorithm   the values of the winner's first round; lr {first} there"
    prompts = found.algorithm.prompts_per_step
    if alone:
        yield f"  prompts_per_step  {prompts}, those of the winner in its round {last.round + 1}"
    else:
        yield f"  prompts_per_step  {prompts}: all agents take as many as those of the run"
    if alone and found.search_space():
        yield "  evolve      the values of the later rounds, each from its share of the rounds on"
    elif not alone:
        yield (
            f"  evolve      ranges a factor of {AROUND:g} around the values of the winner's line, "
            "within those of the run"
        )
    yield f"  all others  as in {folder / CONFIG}; what is not named here has its default"


def _yaml(config: RunConfig) -> str:
    """Return settings as YAML without defaults; loading it gives equal settings."""
    full = config.model_dump(mode="json")
    plain = from_dict({"model": "m", "env": "e"}).model_dump(mode="json")
    short = _without_defaults(full, plain)
    for group, names in ALWAYS.items():
        own = {name: full[group][name] for name in names}
        short[group] = own | short.get(group, {})
    short["evolve"]["hyperparameters"] = {
        name: _without_defaults(one, _RANGE | {"dtype": one.get("dtype")})
        for name, one in full["evolve"]["hyperparameters"].items()
    }
    for group, name in (("env", "prompts"), ("evolve", "fitness")):
        if name in short.get(group, {}):
            short[group][name] = _without_none(short[group][name])
    ordered = {name: short[name] for name in full if name in short}
    return yaml.dump(
        {"name": config.name, "seed": config.seed, **ordered},
        Dumper=Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )


def _without_none(value: Any) -> Any:  # noqa: ANN401 -- a part of a file
    """Return a part of a file without the entries that are null, at any depth."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {name: _without_none(one) for name, one in items if one is not None}
    if isinstance(value, list):
        return [_without_none(one) for one in cast("list[Any]", value)]
    return value


def _without_defaults(full: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults, group by group."""
    found: dict[str, Any] = {}
    for name, value in full.items():
        default = plain.get(name)
        if value == default and name in plain:
            continue
        if isinstance(value, dict) and isinstance(default, dict) and default:
            value = _without_defaults(
                cast("dict[str, Any]", value), cast("dict[str, Any]", default)
            )
        found[name] = value
    return found
