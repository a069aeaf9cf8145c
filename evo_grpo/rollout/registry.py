"""The rollout engines by name. A new engine is its module, a function here, and its line below."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from evo_grpo.errors import ConfigError
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.rollout.engine import EngineFactory, RolloutEngine
from evo_grpo.settings import AgentSettings, EngineConfig


def _native(slots: AdapterSlots, settings: AgentSettings, /) -> RolloutEngine:
    # Imported when it is asked for, as every engine is: another one may load gigabytes.
    from evo_grpo.rollout.native.engine import NativeEngine

    return NativeEngine(
        slots,
        max_rows=settings.engine.max_decode_rows,
        max_prompts=settings.engine.max_decode_prompts,
        max_context=settings.algorithm.max_model_len,
        repeats=settings.engine.each_alone,
    )


def _vllm(slots: AdapterSlots, settings: AgentSettings, /) -> RolloutEngine:
    from evo_grpo.rollout.vllm.engine import VLLMEngine

    return VLLMEngine(slots, settings)


ENGINES: Mapping[str, EngineFactory] = {"native": _native, "vllm": _vllm}


def check_engine(engine: EngineConfig) -> None:
    """See that an engine is installed, before anything is loaded or written for it.

    Raises:
        EngineUnavailable: It is not.
    """
    if engine.rollout == "vllm":
        from evo_grpo.rollout.vllm.start import find_vllm

        find_vllm(engine.vllm)


def engine_factory(name: str) -> EngineFactory:
    """Return the factory of an engine.

    Raises:
        ConfigError: There is no engine of that name.
    """
    if name not in ENGINES:
        near = get_close_matches(name, ENGINES, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise ConfigError(f"engine: expected one of {', '.join(ENGINES)}, got {name!r}; {remedy}")
    return ENGINES[name]
