"""Finds a run's present inputs, reads its recorded inputs, and compares inputs between ranks.

Ranks with different inputs would train different runs without an error, or wait for each other
forever.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from evo_grpo.envs.data.hub import hub_dataset
from evo_grpo.envs.data.tables import read_rows
from evo_grpo.envs.finding import defining_files
from evo_grpo.envs.registry import code_in
from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.places import find
from evo_grpo.population.ranks.team import Team
from evo_grpo.record.files import reading, to_line, unseal
from evo_grpo.record.names import INPUTS
from evo_grpo.record.plain import read_plain, sha256_of
from evo_grpo.schema.problems import validated
from evo_grpo.schema.validation import shown
from evo_grpo.settings import RunConfig
from evo_grpo.settings.engine import ENGINES
from evo_grpo.settings.objects import HubDataset, PythonObject

FORMAT = 1
"""Version of the format of inputs.json."""
ROUNDS = "population.rounds"
DATA = ("env.train", "env.validation", "env.test")
"""Settings that name a data set."""
_PACKAGES = ("evo-grpo", "torch", "transformers", "peft", "numpy")
_MACHINE_SETTINGS = (
    *(f"engine.{name}.{setting}" for name, kind in ENGINES.items() for setting in kind.of_machine),
    *DATA,  # the content is compared instead
)
"""Settings that may differ between the machines of the ranks."""
_MOST = 4
"""Maximum number of differences that an error names."""
_ADAPTER = ("adapter_model.safetensors", "adapter_config.json")
"""Names of the files in which PEFT saves an adapter."""


@dataclass(frozen=True)
class Inputs:
    """What the results of a run depend on.

    Attributes:
        settings: The resolved settings by dotted path, as JSON values.
        files: SHA-256 of each file of the user that the run reads, by the setting that names it:
            data sets (also rows from Python and the Hub), the adapter that agents start from, the
            modules named for rewards, environments and strategies, and the modules in which these
            are defined; None if the file was not found.
        software: Versions of Python and packages, name of the processor, and number of threads.
        changes: Changes since the start of the run. Each has a "name", the values "from" and "to",
            and the first "round" with the new value, from 0.
        format: Version of the format.
        places: Path of each file in `files` when the run began. Paths are shown in messages and
            never opened, because the run folder may come from a stranger.
        id: Identifies the run outside of its folder.
        objects: A text or a digest for each part of the Python objects that the run uses; see
            `evo_grpo.envs.describing`.
    """

    settings: Mapping[str, Any]
    files: Mapping[str, str | None]
    software: Mapping[str, str]
    changes: Sequence[Mapping[str, Any]] = field(default_factory=tuple[Mapping[str, Any], ...])
    format: int = FORMAT
    id: str = ""
    places: Mapping[str, str] = field(default_factory=dict[str, str])
    objects: Mapping[str, str] = field(default_factory=dict[str, str])

    def changes_of_rounds(self, played: int) -> list[Mapping[str, Any]]:
        """Return the changes of `population.rounds` made when `played` rounds were finished."""
        return [c for c in self.changes if c["name"] == ROUNDS and c["round"] == played]


_SCHEMA = TypeAdapter(Inputs)


def inputs_of(config: RunConfig) -> Inputs:
    """Return the present inputs of a run, without running the user's code."""
    paths = dict(_files(config))
    files = {name: None if file is None else sha256_of(file) for name, file in paths.items()}
    places = {name: str(file.absolute()) for name, file in paths.items() if file is not None}
    for name in DATA:
        rows = _data(config, name)
        if isinstance(rows, PythonObject) or hub_dataset(rows) is not None:
            files[name] = _digest(read_rows(rows, name, config.env.max_data_gb))
    return Inputs(settings_of(config), files, _software(config), places=places)


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a run by dotted path, as JSON values."""
    return dict(flat(config.model_dump(mode="json")))


def _data(config: RunConfig, name: str) -> str | HubDataset | PythonObject | None:
    return getattr(config.env, name.removeprefix("env."))


def _digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256 of rows; a value that JSON cannot represent counts only by its type."""
    text = json.dumps(rows, sort_keys=True, default=lambda value: f"<{type(value).__name__}>")
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_inputs_of(folder: Path) -> Inputs:
    """Read the inputs that a run folder records; CheckpointError if they are missing or damaged."""
    file = folder / INPUTS
    try:
        if not os.path.lexists(file):
            raise ValueError("there is no file")
        with reading(file):
            data = unseal(read_plain(file))
        if data.get("format") != FORMAT:
            raise ValueError(f"format: expected {FORMAT}, got {shown(data.get('format'))}")
        inputs = validated(_SCHEMA, data)
        _check_numbers_of_rounds(inputs)
    except ValueError as error:
        raise CheckpointError(
            f"{file}: expected the record of what the run was made of, but {error}; put the file "
            "back as it was"
        ) from error
    return inputs


def flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each setting; `above` is put before each path."""
    for name, value in settings.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def _check_numbers_of_rounds(inputs: Inputs) -> None:
    """Raise ValueError unless all changes are complete and all numbers of rounds are integers."""
    numbers = [inputs.settings.get(ROUNDS)]
    for change in inputs.changes:
        if not {"name", "round", "from", "to"} <= set(change):
            raise ValueError(
                f"changes: expected name, round, from and to, got {shown(dict(change))}"
            )
        numbers += [
            change["round"],
            *((change["from"], change["to"]) if change["name"] == ROUNDS else ()),
        ]
    if wrong := [number for number in numbers if type(number) is not int]:
        raise ValueError(f"expected integers as numbers of rounds, got {shown(wrong[0])}")


def _files(config: RunConfig) -> Iterator[tuple[str, Path | None]]:
    env = config.env
    for name in DATA:
        data = _data(config, name)
        if isinstance(data, str) and hub_dataset(data) is None:
            yield name, find(data)
    if config.model.adapter is not None:
        # Agents start from this adapter, and it is the reference of the KL term in every round.
        adapter = find(config.model.adapter)
        if not (adapter / _ADAPTER[-1]).exists() and (adapter / "actor").is_dir():
            adapter /= "actor"  # a checkpoint has its adapter in this subfolder
        for name in _ADAPTER:
            yield f"model.adapter: {name}", adapter / name
    named = [("env.reward", reward) for reward in env.rewards if isinstance(reward, str)]
    if code := code_in(env.kind):
        named.append(("env.kind", code))
    strategies = {name: getattr(config.evolve, name).kind for name in ("selection", "exploration")}
    named += [(f"evolve.{name}", kind) for name, kind in strategies.items() if ":" in kind]
    for setting, code in named:
        defining = code.partition(":")[0]
        for module, file in defining_files(code).items():
            yield f"{setting}: {code}" + (f" ({module})" if module != defining else ""), file


def refuse_own_code(config: RunConfig, folder: Path | None) -> None:
    """Refuse a run folder that contains code of the run: no command imports code from there."""
    if folder is None:
        return
    for name, file in _files(config):
        is_code = name not in DATA and not name.startswith("model.adapter")
        if is_code and file is not None and file.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"--out {folder}: expected a folder without code of the run, got one that holds "
                f"{file} ({name}); code is never imported from inside a run folder: choose another "
                "folder with --out"
            )


def _software(config: RunConfig) -> dict[str, str]:
    software = {"python": platform.python_version(), "processor": _processor()}
    for name in _PACKAGES:
        try:
            software[name] = version(name)
        except PackageNotFoundError:  # run from source, not installed
            software[name] = "unknown"
    threads = config.engine.threads
    software["threads"] = str(threads or os.environ.get("OMP_NUM_THREADS") or os.cpu_count())
    return software


def _processor() -> str:
    """Return the name of the processor; rounding may differ between processors."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value before, value after) where two mappings differ; None if missing."""
    for name in {**before, **after}:
        both = name in before and name in after
        if not both or _canonical(before[name]) != _canonical(after[name]):
            yield name, before.get(name), after.get(name)


def _canonical(value: object) -> str:
    """Return a value as JSON, which distinguishes `true`, 1 and 1.0."""
    return to_line(value, sort_keys=True)


def check_same_run(
    team: Team, call: str, given: Mapping[str, Any], config: RunConfig | None = None
) -> None:
    """Refuse ranks that were started with different inputs; all ranks call this first.

    Compared are the name of the called function (`call`), its arguments (`given`) and, unless
    `config` is None, the settings with their data and code. The ConfigError is raised on all ranks.
    """
    if team.size == 1:
        return
    settings = {} if config is None else _compared(config)
    parts = team.gather({"the call": call, **given, **settings})
    unlike = [
        f"rank {rank} has {name} {shown(mine)} where rank 0 has {shown(theirs)}"
        for rank, part in enumerate(parts)
        for name, theirs, mine in changed(parts[0], part)
    ]
    if unlike:
        tail = f"; and {len(unlike) - _MOST} more" if len(unlike) > _MOST else ""
        raise ConfigError(
            f"ranks: expected the same run on all {len(parts)}, got others: "
            f"{'; '.join(unlike[:_MOST])}{tail}. Start all ranks with the same settings, data and "
            "code"
        )


def _compared(config: RunConfig) -> Mapping[str, Any]:
    inputs = inputs_of(config)
    settings = {
        name: value for name, value in inputs.settings.items() if name not in _MACHINE_SETTINGS
    }
    # Each rank may take another device.
    settings["engine.device"] = str(settings["engine.device"]).partition(":")[0]
    for name in ("model.name", "model.adapter"):
        place = settings.get(name)
        if isinstance(place, str) and Path(place).exists():  # the content is compared once loaded
            settings[name] = "a path"
    digests = {f"the file of {name}": digest or "missing" for name, digest in inputs.files.items()}
    return {**settings, **digests, "the version of evo-grpo": inputs.software["evo-grpo"]}
