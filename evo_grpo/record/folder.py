"""Recognises run folders, and reads their settings and rounds, without locking them."""

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import TypeAdapter

from evo_grpo import errors
from evo_grpo.places import find
from evo_grpo.record import files, names, plain
from evo_grpo.record.records import (
    Amendment,
    RoundRecord,
    amendment_from_json,
    check_format,
    round_from_json,
)
from evo_grpo.schema.hparams import RankAlpha
from evo_grpo.schema.problems import validated
from evo_grpo.settings import ModelConfig, RunConfig
from evo_grpo.settings.model import LoraSettings
from evo_grpo.settings.yaml import MAX_YAML_BYTES, WrittenOutLoader, from_written, parse

T = TypeVar("T")

_SETTINGS = "the run's settings as they were written"
_ROUND = re.compile(r"round-(\d{4,})(\.jsonl)?")


def is_run(path: str | Path) -> bool:
    """Return whether a path is a run folder."""
    folder = Path(path)
    return (folder / names.CONFIG).is_file() and (folder / names.ROUNDS).is_file()


def run_containing(path: Path) -> Path | None:
    """Return the run folder in which a path lies, as written or with links resolved, or None."""
    paths = path.absolute(), path.resolve()
    folders = [folder for place in paths for folder in (place, *place.parents)]
    return next((folder for folder in folders if is_run(folder)), None)


def is_trained(folder: Path) -> bool:
    """Return whether a process holds the lock of a run."""
    try:
        descriptor = plain.open_plain(folder / names.LOCK, os.O_RDONLY)
    except OSError:
        return False
    with os.fdopen(descriptor) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def expect_run(path: str | Path) -> Path:
    """Return the path of a run folder, or raise RunNotFoundError, which names missing files."""
    folder = Path(path)
    if is_run(folder):
        return folder
    missing = [name for name in (names.CONFIG, names.ROUNDS) if not (folder / name).is_file()]
    state = f"one without {' and '.join(missing)}" if folder.is_dir() else "no folder"
    raise errors.RunNotFoundError(
        f"{folder}: no run folder: expected one with {names.ROUNDS} and {names.CONFIG} in it, got "
        f"{state}; give the folder that `evo-grpo run` printed"
    )


def read_rounds(path: str | Path) -> list[RoundRecord]:
    """Return the finished rounds of a run, even while it trains; raises as `parse_rounds` does."""
    file = expect_run(path) / names.ROUNDS
    with files.reading(file, ""):
        return parse_rounds(file).records


def read_result(
    file: Path, schema: TypeAdapter[T], what: str, command: str
) -> tuple[dict[str, Any], T] | None:
    """Return the content of a result file, as JSON and as the schema's type; None if it is missing.

    Raises CheckpointError for a damaged file; the message names its content (`what`) and the
    `command` that writes it.
    """
    if not os.path.lexists(file):
        return None
    with files.expecting(file, what, f"delete it, then write it again with: evo-grpo {command}"):
        with files.reading(file, command):
            data = files.unseal_result(plain.read_plain(file))
        return data, validated(schema, data)


def config_text(folder: Path) -> str:
    """Return the text of a run's population.yaml."""
    with files.expecting(folder / names.CONFIG, _SETTINGS), files.reading(folder, ""):
        return plain.read_plain(folder / names.CONFIG, MAX_YAML_BYTES).decode("utf-8")


def read_config(folder: Path, *, past: bool = False) -> RunConfig:
    """Return the settings of a run; with `past`, without settings of removed features.

    ConfigError if the settings name a program, or a model with code, that lies in a run folder.
    """
    file = folder / names.CONFIG
    config = from_written(config_text(folder), str(file), past=past)
    code = {
        f"engine.{name}.{setting}": getattr(engine, setting)
        for name, engine in config.engine.engines.items()
        for setting in engine.programs
    }
    code = {key: path for key, path in code.items() if path is not None and os.sep in path}
    if config.model.trust_remote_code:
        code["model.name, with model.trust_remote_code"] = config.model.name
    for setting, path in code.items():
        if run := run_containing(Path(path).expanduser()):  # see `envs.run_code`
            raise errors.ConfigError(
                f"{file}: {setting}: expected code outside of any run folder, got {path!r} in "
                f"{run}, which may have come with the folder and is never run; move it out of there"
            )
    return config


def adapter_of(model: ModelConfig) -> RankAlpha:
    """Return the rank and alpha with which the adapters of a run begin.

    They are read from the adapter in `model.adapter`. If there is none, if it cannot be read, or if
    `model.lora` is also set, they come from `model.lora`.
    """
    configured = model.lora.rank_alpha
    if model.adapter is None or model.lora != LoraSettings():
        return configured
    try:
        adapter = json.loads(plain.read_plain(find(model.adapter) / "adapter_config.json"))
        return RankAlpha(int(adapter["r"]), float(adapter["lora_alpha"]))
    except (errors.EvoGrpoError, OSError, ValueError, TypeError, KeyError, RecursionError):
        return configured


def read_settings(folder: Path) -> Mapping[str, Any]:
    """Return a run's settings, of any version, without validation; CheckpointError if damaged."""
    text, file = config_text(folder), folder / names.CONFIG
    with files.expecting(file, _SETTINGS):
        settings = parse(text, str(file), WrittenOutLoader)
        if not isinstance(settings, dict):
            raise ValueError(f"they are no mapping: {settings!r:.60}")
    return cast("dict[str, Any]", settings)


def beside(config: object) -> Path | None:
    """Return the folder of a YAML configuration, which is searched for files and modules.

    None if the configuration is no path, or if the file lies in a run folder: the copy of the
    configuration there may come from a stranger.
    """
    if not isinstance(config, str | Path):
        return None
    folder = Path(config).expanduser().absolute().parent
    return None if run_containing(folder) else folder


def code_folder(path: str | Path | None) -> Path | None:
    """Return the folder that --code names; ConfigError if it is no folder or is in a run folder."""
    if path is None:
        return None
    folder = Path(path).expanduser().absolute()
    problem = ""
    if not folder.is_dir():
        problem = f"a folder, got {'a file' if folder.exists() else 'none'}"
    elif run := run_containing(folder):
        problem = (
            f"a folder outside of any run folder, got one in {run}: what lies there may have come "
            "with the folder; read it, and move it out of there"
        )
    if problem:
        raise errors.ConfigError(f"--code {path}: expected {problem}")
    return folder


def with_objects(text: str, objects: Iterable[str]) -> str:
    """Put a line that lists Python objects, if there are any, before the text of a YAML file."""
    line = ", ".join(objects)
    return f"{names.RECORDED_IN_PYTHON}{line}\n{text}" if line else text


def listed_objects(folder: Path) -> list[str]:
    """Return a description of each Python object that a run needs; it begins with a keyword."""
    first_line = config_text(folder).partition("\n")[0]
    line = first_line.removeprefix(names.RECORDED_IN_PYTHON)
    return [] if line == first_line else line.strip().split(", ")


def recorded_objects(folder: Path) -> dict[str, str]:
    """Return the descriptions of a run's Python objects, by keyword ("env", "model", ...).

    The keyword "agents" stands for agents that had trained before the run.
    """
    return {description.partition(" ")[0]: description for description in listed_objects(folder)}


def continuing(folder: Path) -> str:
    """Return the command that continues a run, or the Python call if the run needs objects."""
    if listed_objects(folder):
        return f"evo_grpo.Population.resume({str(folder)!r}, env=...) in Python"
    return f"evo-grpo resume {folder}"


def refuse_objects(folder: Path, so: str) -> None:
    """Refuse a run with Python objects that no file can name; `so` continues the message."""
    if objects := listed_objects(folder):
        raise errors.RunDirError(
            f"{folder}: it was recorded from Python with {', '.join(objects)}, which no file can "
            f"name, {so}"
        )


class ParsedRounds(NamedTuple):
    """The contents of rounds.jsonl from a byte offset on.

    Attributes:
        records: The finished rounds.
        length: Bytes of the complete lines; a kill may have truncated a line after them.
        places: Byte offset of each round's line in the file.
    """

    records: list[RoundRecord]
    length: int
    places: list[int]


def parse_rounds(path: Path, *, start: int = 0, first: int = 0) -> ParsedRounds:
    """Read rounds.jsonl from byte `start`, where the line of round `first` begins.

    Raises:
        CheckpointError: A line is damaged; the error names it.
        RunDirError: Another version of this library wrote it.
    """
    records: list[RoundRecord] = []
    places: list[int] = []
    length = 0
    with plain.opened_plain(path, plain.MAX_LOG_BYTES) as file:
        file.seek(start)
        for number, line in enumerate(file, start=1):
            try:
                head = files.unsealed_head(line)
                # A whole line of another version raises RunDirError, no ValueError: it passes.
                check_format(head, f"{path}, line {first + number}")
                if "amends" in head:
                    _amend(records, amendment_from_json(line), first)
                    length += len(line)
                    continue
                record = round_from_json(line)
                if record.round != first + len(records):
                    raise ValueError(
                        f"it is round {record.round + 1}, expected {first + len(records) + 1}"
                    )
            except ValueError as error:
                if files.is_truncated(line):  # the last line: all others have a line break
                    break
                if line.startswith(b'{"round"'):  # evo-grpo 0.2 wrote no format
                    check_format({}, f"{path}, line {first + number}")
                raise errors.CheckpointError(
                    f"{path}, line {first + number}: expected round {first + len(records) + 1} as "
                    f"it was written, but {error}; put the file back as it was, from a copy, or "
                    "read it with the version of evo-grpo that wrote it"
                ) from error
            records.append(record)
            places.append(start + length)
            length += len(line)
    return ParsedRounds(records, length, places)


def _amend(records: list[RoundRecord], amendment: Amendment, first: int) -> None:
    """Apply an amendment to the last of `records`, unless it amends a round before `first`."""
    if amendment.amends != first + len(records) - 1:
        raise ValueError(
            f"it amends round {amendment.amends}, expected round {first + len(records) - 1}"
        )
    if records:
        records[-1] = amendment.applied(records[-1])


def round_name(round: int) -> str:
    """Return the prefix of the names of a round's files and folders."""
    return f"round-{round:04d}"


def round_entries(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield, for each entry of `folder` that is named after a round, the round and the path."""
    for path in sorted(folder.iterdir()) if plain.is_folder(folder) else ():
        if match := _ROUND.fullmatch(path.name):
            yield int(match[1]), path


def refuse_links_in_run(folder: Path) -> None:
    """Refuse a run folder in which one of the run's files is a link, pipe, socket or device."""
    for path in folder.iterdir():
        if path.name in names.OWN or names.EARLIER.fullmatch(path.name):
            # wandb creates links below its own folder
            plain.refuse_links(path, deep=path.name not in names.OF_READERS)
