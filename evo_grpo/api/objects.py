"""Separates the arguments of a constructor into settings and Python objects."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from peft import LoraConfig

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.start import Start, start_problems
from evo_grpo.population.cohort.state import rank_alpha
from evo_grpo.record.history import resolved_start
from evo_grpo.schema.hparams import RankAlpha
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.settings import (
    AgentSettings,
    DoubtfulSetting,
    ModelConfig,
    PopulationConfig,
)
from evo_grpo.settings.keywords import agent_settings
from evo_grpo.settings.model import begins_outside
from evo_grpo.settings.run import doubts_of_agents, without_effect_of_agents
from evo_grpo.settings.without_effect import WithoutEffect
from evo_grpo.training.assemble import Objects
from evo_grpo.training.start_adapter import lora_config

_NAMED_MODEL_ONLY = ("config", "trust_remote_code", "adapter")


def separated(given: Mapping[str, Any], kind: str) -> tuple[AgentSettings, Objects]:
    """Separate the keywords of a constructor into settings and Python objects.

    Args:
        given: Keywords of a constructor by the names of `AGENT_KEYWORDS`, and `tokenizer`.
        kind: The algorithm: "grpo", "gspo" or "cispo".
    """
    keywords: dict[str, Any] = {**given}
    tokenizer = keywords.pop("tokenizer", None)
    model, lora = keywords.get("model"), keywords.get("lora")
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise _problem(
            "tokenizer",
            f"expected a transformers tokenizer, got {type(tokenizer).__name__}; load one with "
            "AutoTokenizer.from_pretrained, or omit it: a model by name has its own",
        )
    peft = lora if isinstance(lora, LoraConfig) else None
    if peft is not None:
        # The adapter's adapter_config.json stores PEFT's object.
        del keywords["lora"]
    if isinstance(model, ModelConfig):
        keywords.update({**dict(model), "model": model.name})
        del keywords["name"]
    if model is None or isinstance(model, str | ModelConfig):
        return _checked(agent_settings(keywords, kind=kind), Objects(None, tokenizer, peft))
    _check_module(model, keywords)
    dropped = ("model", "lora", *_NAMED_MODEL_ONLY)
    settings = agent_settings({n: v for n, v in keywords.items() if n not in dropped}, kind=kind)
    if peft is None and lora is not None:
        # Validate `lora` as for a named model; a module needs PEFT's object.
        model_settings: dict[str, Any] = {"name": "object", "lora": lora}
        adapter = ModelConfig(**model_settings).lora
        settings = settings.replace(target_sets=adapter.target_sets)
        peft = None if adapter.is_default else lora_config(adapter)
    return _checked(settings, Objects(model, tokenizer, peft))


def adapter_of(settings: AgentSettings, objects: Objects) -> RankAlpha:
    """Return the rank and alpha of the adapters."""
    return settings.lora.rank_alpha if objects.lora is None else rank_alpha(objects.lora)


def _checked(settings: AgentSettings, objects: Objects) -> tuple[AgentSettings, Objects]:
    """Check that initial rank and alpha are in their ranges, unless a start adapter gives them."""
    is_named_model = settings.model is not None and settings.model.adapter is None
    if objects.lora is not None or is_named_model:
        adapter, above = adapter_of(settings, objects), ("hyperparameters",)
        for name, text in begins_outside(settings.search_space(), adapter, above):
            raise ConfigError(f"lora.{name}: {text}")
    return settings, objects


def checked_start(population: PopulationConfig, settings: AgentSettings, objects: Objects) -> Start:
    """Return the checked `population.init`, with runs replaced by the settings of their agents."""
    size, space = population.size, settings.search_space()
    hparams = settings.algorithm.first_hparams(space, adapter_of(settings, objects))
    init = resolved_start(population.init, hparams, space, size, settings.seed)
    if problems := list(start_problems(hparams, space, size, init)):
        raise Problems(*problems).below("init")
    return init


def warn_of_settings(settings: AgentSettings, init: Start = "same") -> None:
    """Warn about each setting that was given and has no effect, or is doubtful."""
    for finding in without_effect_of_agents(settings, init):
        warnings.warn(str(finding), WithoutEffect, stacklevel=4)
    for doubt in doubts_of_agents(settings, init):
        warnings.warn(doubt, DoubtfulSetting, stacklevel=4)


def _check_module(model: object, given: dict[str, Any]) -> None:
    if not (hasattr(model, "config") and hasattr(model, "get_output_embeddings")):
        raise _problem(
            "model",
            "expected the name of a model or a transformers causal language model, got "
            f"{type(model).__name__}; load one with AutoModelForCausalLM.from_pretrained",
        )
    for name in _NAMED_MODEL_ONLY:
        if given.get(name):
            raise _problem(
                name,
                f"expected only with the name of a model, got {given[name]!r} beside a "
                f"{type(model).__name__}; configure the module itself",
            )


def _problem(name: str, text: str) -> Problems:
    return Problems(Problem((name,), text))
