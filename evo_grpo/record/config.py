"""Reads the configuration and the code of a run folder.

YAML anchors are refused, since ten lines of aliases can stand for more values than fit into
memory. Runs write none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evo_grpo.errors import CheckpointError, ConfigError, EvoGrpoError
from evo_grpo.places import find
from evo_grpo.record.folder import config_text, run_containing
from evo_grpo.record.names import CONFIG
from evo_grpo.record.plain import read_plain
from evo_grpo.schema.hparams import RankAlpha
from evo_grpo.settings.model import LoraSettings
from evo_grpo.settings.yaml import WrittenOutLoader, from_written, parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from evo_grpo.settings import ModelConfig, RunConfig


def read_config(folder: Path, *, past: bool = False) -> RunConfig:
    """Return the settings of a run; with `past`, drop settings that enabled removed features.

    Raises:
        ConfigError: The settings are invalid, or name a program, or a model with code, inside a
            run folder.
    """
    file = folder / CONFIG
    config = from_written(config_text(folder), str(file), past=past)
    model = config.model
    if model.trust_remote_code:
        _refuse_inside("model.name, with model.trust_remote_code", model.name, file)
    for name, own in config.engine.engines.items():
        for setting in own.programs:
            program = getattr(own, setting)
            if program is not None and os.sep in program:
                _refuse_inside(f"engine.{name}.{setting}", program, file)
    return config


def adapter_of(model: ModelConfig) -> RankAlpha:
    """Return the rank and alpha with which the adapters of a run begin.

    They are those of `model.adapter`, unless `model.lora` is also given or the file is unreadable.
    """
    own = model.lora.rank_alpha
    if model.adapter is None or model.lora != LoraSettings():
        return own
    try:
        found = json.loads(read_plain(find(model.adapter) / "adapter_config.json"))
        return RankAlpha(int(found["r"]), float(found["lora_alpha"]))
    except (EvoGrpoError, OSError, ValueError, TypeError, KeyError, RecursionError):
        return own


def _refuse_inside(setting: str, path: str, file: Path) -> None:
    """Refuse code inside a run folder; see `envs.run_code`."""
    run = run_containing(Path(path).expanduser())
    if run is not None:
        raise ConfigError(
            f"{file}: {setting}: expected code outside of any run folder, got {path!r} in {run}, "
            "which may have come with the folder and is never run; move it out of there"
        )


def read_settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings of a run as written, by any version; CheckpointError if damaged."""
    text, file = config_text(folder), folder / CONFIG
    try:
        found = parse(text, str(file), WrittenOutLoader)
        if not isinstance(found, dict):
            raise ConfigError(f"they are no mapping: {found!r:.60}")
    except ConfigError as error:
        raise CheckpointError(
            f"{file}: expected the run's settings as they were written, but {error}; put the file "
            "back as it was"
        ) from error
    return cast("dict[str, Any]", found)


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
    """Return the folder of --code; ConfigError if it is no folder or lies in a run folder."""
    if path is None:
        return None
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"--code {path}: expected a folder, got {'a file' if folder.exists() else 'none'}"
        )
    if run := run_containing(folder):
        raise ConfigError(
            f"--code {path}: expected a folder outside of any run folder, got one in {run}: what "
            "lies there may have come with the folder; read it, and move it out of there"
        )
    return folder
