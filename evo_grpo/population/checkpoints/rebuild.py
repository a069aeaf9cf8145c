"""From a checkpoint to what an agent is built of: its settings, its adapter's, and its base."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.model.loading import DTYPES, from_pretrained, pick_dtype
from evo_grpo.model.lora.configs import read_config
from evo_grpo.population.checkpoints.manifest import ATTRIBUTES
from evo_grpo.schema.problems import Problems
from evo_grpo.schema.validation import Rule, flag, shown
from evo_grpo.settings import AgentSettings, ModelConfig
from evo_grpo.sources import resolve


def _named_strings(value: object) -> bool:
    entries = cast("dict[object, object]", value).items() if isinstance(value, dict) else ()
    return isinstance(value, dict) and all(
        isinstance(part, str) for entry in entries for part in entry
    )


_DTYPE = Rule(lambda value: value in ("auto", *DTYPES), f"auto, {', '.join(DTYPES)}")
_TEXT = Rule(lambda value: isinstance(value, str), "a string")
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
#: Keywords of `from_pretrained` that a checkpoint may name. transformers has others that fetch code
#: (kernels, a revision of the code) or unpickle weights, and gets more with each release.
_KEYWORDS: dict[str, Rule] = {
    # Any other name is that of a repository, whose kernels would be fetched and imported.
    "attn_implementation": Rule(
        lambda value: isinstance(value, str) and value in _ATTENTION, ", ".join(_ATTENTION)
    ),
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "low_cpu_mem_usage": flag(),
    "key_mapping": Rule(_named_strings, "a mapping of strings"),
    "revision": _TEXT,
    "subfolder": _TEXT,
    "variant": _TEXT,
}


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


def recipe(
    folder: Path,
    attributes: Mapping[str, Any],
    kind: str,
    device: str,
    *,
    trust_remote_code: bool = False,
    zero: int | None = None,
) -> Recipe:
    """Return what to build a checkpoint's agent of; warns of what was not saved.

    Only the caller says whether Python that comes with the base may run: a checkpoint is data, and
    what it says of it itself is left out. `kind` is the algorithm that the caller builds: grpo,
    gspo or cispo; `zero` is the stage of DeepSpeed with which the agent goes on, None for stock
    AdamW.

    Raises:
        CheckpointError: The settings are not what `save_checkpoint` writes, or name a keyword for
            loading that no checkpoint may.
        ConfigError: The checkpoint is of another algorithm.
    """
    flag().check("trust_remote_code", trust_remote_code)
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
    # How it was trained is no part of an agent: a checkpoint of DeepSpeed's loads without it. What
    # generates belongs to the machine; a program that a checkpoint names is never started.
    engine = settings.engine.with_default_rollout(device=device, zero=zero)
    base = folder / "base"
    name = str(base) if base.is_dir() else str(attributes["base"])
    model = settings.model or ModelConfig(name=name)
    _check_keywords(model.config, folder)
    model = model.replace(trust_remote_code=trust_remote_code)
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


def _check_keywords(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse keywords for `from_pretrained` that are not on the list."""
    for name, value in config.items():
        rule = _KEYWORDS.get(name)
        if rule is None or not rule.good(value):
            expected = f"one of {', '.join(_KEYWORDS)}" if rule is None else rule.expected
            raise CheckpointError(
                f"checkpoint {folder / ATTRIBUTES}: settings.model.config.{name}: expected "
                f"{expected}, got {shown(value)}: nothing else is taken from a checkpoint for "
                "loading the base; build the agent yourself, GRPO(model=..., config={...}), and "
                "call load_checkpoint(path)"
            )


def _network(folder: Path, model: ModelConfig, dtype: str) -> Any:  # noqa: ANN401 -- of any transformers architecture
    words = {"trust_remote_code": model.trust_remote_code, **model.config}
    source = resolve(str(folder))
    chosen = pick_dtype(dtype, torch.device("cpu"))
    return from_pretrained(source, chosen, words, with_tokenizer=False)[0]
