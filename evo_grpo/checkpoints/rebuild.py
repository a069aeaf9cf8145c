"""From a checkpoint to what an agent is built of: its settings, its adapter's, and its base."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from evo_grpo.checkpoints.manifest import ATTRIBUTES
from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.model.loading import DTYPES, from_pretrained, pick_dtype
from evo_grpo.model.lora.configs import read_config
from evo_grpo.schema.problems import Problems
from evo_grpo.settings import AgentSettings, ModelConfig
from evo_grpo.sources import resolve


@dataclass(frozen=True)
class Recipe:
    """What an agent is built of.

    Attributes:
        settings: Its settings; `model` is None where `model` below holds the base.
        lora: Its adapter's configuration.
        model: The base, where it can only be built as an object.
        padding: What the base's `set_padding` was given, None where it was not called.
    """

    settings: AgentSettings
    lora: LoraConfig
    model: Any = None
    padding: tuple[int, str | None] | None = None


def recipe(folder: Path, attributes: Mapping[str, Any], kind: str, device: str) -> Recipe:
    """Return what to build a checkpoint's agent of; warns of what was not saved.

    Args:
        folder: The checkpoint.
        attributes: Its attributes.json.
        kind: The algorithm that the caller builds: grpo, gspo or cispo.
        device: Where the base goes.

    Raises:
        CheckpointError: The settings are not what `save_checkpoint` writes.
        ConfigError: The checkpoint is of another algorithm.
    """
    settings = _settings(attributes, folder)
    algorithm = settings.algorithm
    if algorithm.kind != kind:
        own, wanted = algorithm.kind.upper(), kind.upper()
        raise ConfigError(
            f"{wanted}.load: checkpoint {folder} is of {own}, expected one of {wanted}; use "
            f"{own}.load(path), or build {wanted}(...) and call load_checkpoint(path) for its "
            "weights and hyperparameters"
        )
    # Also one that set_reference_policy gave to an agent built without.
    algorithm = algorithm.replace(separate_reference=(folder / "reference").is_dir())
    engine = settings.engine.replace(device=device)
    base = folder / "base"
    name = str(base) if base.is_dir() else str(attributes["base"])
    model = settings.model or ModelConfig(name=name)
    # A base that came as an object, or whose weights are here, is of the dtype it was saved in.
    if (settings.model is None or base.is_dir()) and attributes["dtype"] in DTYPES:
        engine = engine.replace(dtype=attributes["dtype"])
    network = None
    if base.is_dir() and not (base / "tokenizer_config.json").is_file():
        # Saved without a tokenizer: built as it was then, from a model alone.
        network = _network(base, model, engine.dtype)
    elif "tokenizer" in attributes["objects"] and not base.is_dir():
        warnings.warn(
            f"checkpoint {folder}: tokenizer cannot be written to {ATTRIBUTES} and is left at its "
            "default; build the agent with it and call load_checkpoint(path)",
            UserWarning,
            stacklevel=3,
        )
    # The adapter to start from was the first step's; the checkpoint brings its own.
    model = None if network is not None else model.replace(name=name, adapter=None)
    settings = settings.replace(model=model, algorithm=algorithm, engine=engine)
    padding = None if attributes["padding"] is None else tuple(attributes["padding"])
    return Recipe(settings, read_config(folder / "actor"), network, padding)


def _settings(attributes: Mapping[str, Any], folder: Path) -> AgentSettings:
    try:
        return AgentSettings(**attributes["settings"])
    except (Problems, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder / ATTRIBUTES}: settings are not what save_checkpoint writes: "
            f"{error}"
        ) from error


def _network(folder: Path, model: ModelConfig, dtype: str) -> Any:  # noqa: ANN401 -- of any transformers architecture
    words = {"trust_remote_code": model.trust_remote_code, **model.config}
    source = resolve(str(folder))
    chosen = pick_dtype(dtype, torch.device("cpu"))
    return from_pretrained(source, chosen, words, with_tokenizer=False)[0]
