"""A constructor's arguments in a checkpoint: to JSON and back, and the names of what is lost."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

import torch

from evo_grpo.checkpoints.manifest import ATTRIBUTES
from evo_grpo.cohort.settings import argument_names
from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.model.loading import DTYPES, from_pretrained, pick_dtype
from evo_grpo.model.lora.configs import read_config
from evo_grpo.objective.lr_schedule import CosineLRScheduleConfig
from evo_grpo.schema.hparams import Hparams, HyperparameterConfig, RLParameter
from evo_grpo.sources import resolve

#: Saved elsewhere: hyperparameters, which may have moved since; the adapter; the base by its name
#: or in base/.
_ELSEWHERE = {*(entry.name for entry in fields(Hparams)), "lora_config", "actor_network"}
_SCHEDULE, _EVOLUTION = "cosine_lr_schedule_config", "hp_config"
#: The class that each loss belongs to, for checkpoints that do not name theirs.
CLASSES = {"grpo": "GRPO", "gspo": "GSPO", "cispo": "CISPO"}


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def encode_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `arguments` by name as JSON can hold them, and the names of others in `not_saved`."""
    kept: dict[str, Any] = {}
    lost: list[str] = []
    for name, value in arguments.items():
        if name in _ELSEWHERE:
            continue
        if isinstance(value, CosineLRScheduleConfig):
            kept[name] = asdict(value)
        elif isinstance(value, HyperparameterConfig):
            kept[name] = {
                key: asdict(bounds) | {"dtype": bounds.dtype.__name__}
                for key, bounds in value.parameters.items()
            }
        elif name == "model_config" and isinstance(value, Mapping):
            words = _dtypes_by_name(cast("Mapping[str, Any]", value))
            kept[name] = {key: word for key, word in words.items() if _is_json(word)}
            lost += [f"{name}[{key!r}]" for key in words if key not in kept[name]]
        elif _is_json(value):
            kept[name] = value
        else:
            lost.append(name)
    return {"arguments": kept, "not_saved": lost}


def constructor_arguments(
    folder: Path, attributes: Mapping[str, Any], algorithm: str
) -> dict[str, Any]:
    """Return what to build a checkpoint's agent with; warns of what was not saved.

    Args:
        folder: The checkpoint.
        attributes: Its attributes.json.
        algorithm: Name of the class to build.

    Raises:
        CheckpointError: When the arguments are not what `save_checkpoint` writes.
        ConfigError: When the checkpoint is of another class.
    """
    given = _decoded(attributes, folder)
    _check_class(attributes, given, algorithm, folder)
    own = folder / "base"
    lost = set(attributes.get("not_saved", ()))
    given.update(
        Hparams.from_dict(attributes["hparams"]).to_dict(),
        lora_config=read_config(folder / "actor"),
        # Also one that set_reference_policy gave to an agent built without.
        use_separate_reference_adapter=(folder / "reference").is_dir(),
    )
    # A base that came as an object, or whose weights are here, is of the dtype it was saved in.
    if given.get("model_name") is None or own.is_dir():
        config = dict(given.get("model_config") or {})
        if attributes.get("dtype") in DTYPES:
            config.setdefault("dtype", attributes["dtype"])
        given["model_config"] = config
    given["model_name"] = str(own) if own.is_dir() else attributes["base"]
    if own.is_dir():
        lost.discard("tokenizer")
        if not (own / "tokenizer_config.json").is_file():
            # Saved without a tokenizer: built as it was then, from a model alone.
            given["actor_network"] = _network(own, given.pop("model_config"))
            del given["model_name"]
    _warn_of_lost(folder, lost)
    return given


def _warn_of_lost(folder: Path, lost: Collection[str]) -> None:
    names = set(argument_names())
    arguments = sorted(name for name in lost if name.partition("[")[0] in names)
    options = sorted(set(lost) - set(arguments))
    remedy = "build the agent with it and call load_checkpoint(path)"
    for found, why in (
        (arguments, f"cannot be written to {ATTRIBUTES} and is left at its default; {remedy}"),
        # What only a run can set.
        (options, "has no argument here and is left at its default; resume the run to keep it"),
    ):
        if found:
            warnings.warn(
                f"checkpoint {folder}: {', '.join(found)} {why}", UserWarning, stacklevel=4
            )


def _network(folder: Path, config: dict[str, Any]) -> Any:  # noqa: ANN401 -- of any transformers architecture
    words = dict(config)
    dtype = pick_dtype(words.pop("dtype", "auto"), torch.device("cpu"))
    return from_pretrained(resolve(str(folder)), dtype, words, with_tokenizer=False)[0]


def _decoded(attributes: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    kinds: dict[str, Any] = {"int": int, "float": float}
    try:
        given = dict(attributes.get("arguments", {}))
        if given.get(_SCHEDULE) is not None:
            given[_SCHEDULE] = CosineLRScheduleConfig(**given[_SCHEDULE])
        if given.get(_EVOLUTION) is not None:
            given[_EVOLUTION] = HyperparameterConfig(
                **{
                    name: RLParameter(**{**bounds, "dtype": kinds[bounds["dtype"]]})
                    for name, bounds in given[_EVOLUTION].items()
                }
            )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {folder / ATTRIBUTES}: arguments are not what save_checkpoint writes: "
            f"{error}"
        ) from error
    return given


def _check_class(
    attributes: Mapping[str, Any], given: Mapping[str, Any], algorithm: str, folder: Path
) -> None:
    """Refuse to train on with another algorithm under the name of this one."""
    saved = attributes.get("algorithm") or CLASSES.get(str(given.get("loss_type")))
    if saved is not None and saved != algorithm:
        raise ConfigError(
            f"{algorithm}.load: checkpoint {folder} is of {saved}, expected one of {algorithm}; "
            f"use {saved}.load(path), or build {algorithm}(...) and call load_checkpoint(path) for "
            "its weights and hyperparameters"
        )


def _dtypes_by_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords with dtypes by name, under the one spelling that is written."""
    words = {k: dtype_name(v) if isinstance(v, torch.dtype) else v for k, v in config.items()}
    older = words.pop("torch_dtype", None)
    return words if older is None else {"dtype": older, **words}


def _is_json(value: object) -> bool:
    """Return whether a value can be written as JSON and read back equal."""
    if isinstance(value, list):
        return all(_is_json(entry) for entry in cast("list[object]", value))
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value).items()
        return all(isinstance(key, str) and _is_json(entry) for key, entry in entries)
    return value is None or isinstance(value, bool | int | float | str)
