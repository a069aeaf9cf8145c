"""The rollout engines by name. A new engine is its module, a function here, and its line below."""

from __future__ import annotations

from collections.abc import Mapping

from evo_grpo.errors import ConfigError
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.rollout.engine import EngineFactory, RolloutEngine
from evo_grpo.settings import AgentSettings, EngineConfig


def _native(slots: AdapterSlots, settings: AgentSettings) -> RolloutEngine:
    # Imported when it is asked for, as every engine is: another one may load gigabytes.
    from evo_grpo.rollout.native.engine import NativeEngine

    return NativeEngine(
        slots,
        max_rows=settings.engine.max_decode_rows,
        max_prompts=settings.engine.max_decode_prompts,
        max_context=settings.algorithm.max_model_len,
        repeats=settings.engine.each_alone,
    )


def _vllm(slots: AdapterSlots, settings: AgentSettings) -> RolloutEngine:
    from evo_grpo.rollout.vllm.engine import VLLMEngine

    return VLLMEngine(slots, settings)


ENGINES: Mapping[str, EngineFactory] = {"native": _native, "vllm": _vllm}


def check_engine(engine: EngineConfig, *, ranks: bool) -> None:
    """See that an engine can be used, before anything is loaded or written for it.

    `ranks` says whether this process was started as one of several.

    Raises:
        ConfigError: The engine cannot run in a process that is one of several.
        EngineUnavailable: The engine is not installed.
    """
    if engine.rollout != "vllm":
        return
    if ranks and engine.vllm.process == "inside":
        raise ConfigError(
            "engine.vllm.process: expected child where a run has several processes, got inside: "
            "vLLM would use the connections between these processes as its own; leave it out"
        )
    from evo_grpo.rollout.vllm.start import find_vllm

    find_vllm(engine.vllm)
