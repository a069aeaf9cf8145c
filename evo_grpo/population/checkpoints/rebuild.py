"""Derives from a checkpoint the settings, the adapter configuration and the base of an agent."""

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
from evo_grpo.record.names import ATTRIBUTES
from evo_grpo.schema.problems import Problems
from evo_grpo.schema.validation import Rule, flag, shown
from evo_grpo.settings import AgentSettings, ModelConfig
from evo_grpo.settings.yaml import without_removed
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
    # Any other name refers to a repository, whose kernels would be downloaded and imported.
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
    """The settings and objects from which an agent is built.

    `model` is the base as an object; if it is set, `settings.model` is None. `padding` are the
    arguments of the base's `set_padding`, None if it was not called.
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
    """Return the recipe for a checkpoint's agent; warn of parts that were not saved.

    `trust_remote_code` alone decides whether Python code of the base may run; the value in the
    checkpoint is ignored. `kind` is the algorithm to build: grpo, gspo or cispo. `zero` is the
    DeepSpeed stage with which the agent continues, None for stock AdamW.
    """
    flag().check("trust_remote_code", trust_remote_code)
    settings = _settings(attributes, folder)
    algorithm = settings.algorithm
    if algorithm.kind != kind:
        saved, expected = algorithm.kind.upper(), kind.upper()
        raise ConfigError(
            f"{expected}.load: checkpoint {folder} is of {saved}, expected one of {expected}; use "
            f"{saved}.load(path), or build {expected}(...) and call load_checkpoint(path) for its "
            "weights and hyperparameters"
        )
    # The agent may have received its reference from set_reference_policy after it was built.
    algorithm = algorithm.replace(separate_reference=(folder / "reference").is_dir())
    # The training engine is not part of an agent: a checkpoint written with DeepSpeed loads without
    # it. The rollout engine depends on the machine, and a checkpoint must not start a program.
    engine = settings.engine.with_default_rollout(device=device, zero=zero)
    base = folder / "base"
    name = str(base) if base.is_dir() else str(attributes["base"])
    model = settings.model or ModelConfig(name=name, lora=settings.lora)
    _check_keywords(model.config, folder)
    model = model.replace(trust_remote_code=trust_remote_code)
    # A base given as an object, or saved in the checkpoint, keeps the dtype it was saved in.
    if (settings.model is None or base.is_dir()) and attributes["dtype"] in DTYPES:
        engine = engine.replace(dtype=attributes["dtype"])
    network = None
    if base.is_dir() and not (base / "tokenizer_config.json").is_file():
        # The base was saved without a tokenizer, so build it from the model alone.
        network = _network(base, model, engine.dtype)
    elif "tokenizer" in attributes["objects"] and not base.is_dir():
        warnings.warn(
            f"checkpoint {folder}: tokenizer cannot be written to {ATTRIBUTES} and is left at its "
            "default; build the agent with it and call load_checkpoint(path)",
            UserWarning,
            stacklevel=3,
        )
    # The start adapter only matters for the first step; the checkpoint has a trained adapter.
    model = None if network is not None else model.replace(name=name, adapter=None)
    sets = settings.lora.target_sets if model is None else {}
    settings = settings.replace(model=model, algorithm=algorithm, engine=engine, target_sets=sets)
    padding = None if attributes["padding"] is None else tuple(attributes["padding"])
    return Recipe(settings, read_config(folder / "actor"), network, padding)


def _settings(attributes: Mapping[str, Any], folder: Path) -> AgentSettings:
    try:
        return AgentSettings(**without_removed(attributes["settings"])[0])
    except (Problems, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder / ATTRIBUTES}: settings are not what save_checkpoint writes: "
            f"{error}"
        ) from error


def _check_keywords(config: Mapping[str, Any], folder: Path) -> None:
    """Raise an error for keywords of `from_pretrained` that are not in `_KEYWORDS`."""
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
    keywords = {"trust_remote_code": model.trust_remote_code, **model.config}
    source = resolve(str(folder))
    torch_dtype = pick_dtype(dtype, torch.device("cpu"))
    return from_pretrained(source, torch_dtype, keywords, with_tokenizer=False)[0]
