"""Checks that all ranks of a run have the same settings, data and code.

Ranks with different inputs would train a mixed run without an error, or wait for each other
forever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evo_grpo.errors import ConfigError
from evo_grpo.population.ranks.team import Team
from evo_grpo.schema.validation import shown
from evo_grpo.settings import RunConfig
from evo_grpo.settings.engine import ENGINES
from evo_grpo.training.inputs.recorded_inputs import DATA, Inputs, inputs_of

_OF_MACHINE = (
    *(f"engine.{name}.{own}" for name, kind in ENGINES.items() for own in kind.of_machine),
    *DATA,  # the content is compared instead
)
"""Settings that may differ between the machines of the ranks."""
_MOST = 4
"""Maximum number of differences that an error names."""

Given = Mapping[str, Any]
"""The inputs of a rank, by the names that an error uses for them."""


def check_same_run(team: Team, call: str, given: Given, config: RunConfig | None = None) -> None:
    """Refuse ranks that were started with different inputs; all ranks call this first.

    The ranks compare the name of the function that each was started with (`call`), its arguments
    (`given`), and the settings with their files. `config` is None if only the first rank has them.

    Raises:
        ConfigError: Raised on all ranks; it names a rank and what differs.
    """
    if team.size > 1:
        _check(team.gather({"": call, **given, **_compared_settings(config)}))


def check_same_files(team: Team, config: RunConfig) -> None:
    """Refuse ranks whose data or code differs from that of the first; see `check_same_run`."""
    if team.size > 1:
        _check(team.gather(_files(inputs_of(config))))


def _compared_settings(config: RunConfig | None) -> Given:
    if config is None:
        return {}
    now = inputs_of(config)
    settings = dict(now.settings)
    device = settings["engine.device"]
    if isinstance(device, str):  # each rank may take another device
        settings["engine.device"] = device.partition(":")[0]
    for name in ("model.name", "model.adapter"):
        place = settings.get(name)
        if isinstance(place, str) and Path(place).exists():  # the content is compared once loaded
            settings[name] = "a path"
    compared = {name: value for name, value in settings.items() if name not in _OF_MACHINE}
    return {**compared, **_files(now)}


def _files(now: Inputs) -> Given:
    """Return the digests of the files that a run reads, and the version, by name in errors."""
    found = {f"the file of {name}": digest for name, digest in now.files.items()}
    return {**found, "the version of evo-grpo": now.software["evo-grpo"]}


def _check(parts: Sequence[Given]) -> None:
    unlike = [
        text for rank, given in enumerate(parts) for text in _differences(rank, given, parts[0])
    ]
    if unlike:
        more = len(unlike) - _MOST
        listed = "; ".join(unlike[:_MOST]) + (f"; and {more} more" if more > 0 else "")
        raise ConfigError(
            f"ranks: expected the same run on all {len(parts)}, got others: {listed}. Start all "
            "ranks with the same settings, data and code"
        )


def _differences(rank: int, given: Given, first: Given) -> Iterator[str]:
    for name in (*first, *(name for name in given if name not in first)):
        mine, theirs = given.get(name), first.get(name)
        if mine == theirs and type(mine) is type(theirs):
            continue
        if not name:
            yield f"rank {rank} was asked to {mine} where rank 0 was asked to {theirs}"
            return  # other differences follow from the different commands
        if name.startswith("the file"):
            yield f"{name} on rank {rank} is {_unlike(mine, theirs)}"
        else:
            yield f"rank {rank} has {name} {shown(mine)} where rank 0 has {shown(theirs)}"


def _unlike(mine: str | None, theirs: str | None) -> str:
    if mine is None:
        return "not there"
    if theirs is None:
        return "there, and on rank 0 it is not"
    return f"another one than on rank 0 (sha256 {mine[:12]} and {theirs[:12]})"
