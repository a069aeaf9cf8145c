"""What a plan says of vLLM; it is looked for, and not loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from evo_grpo.settings.engine import EngineConfig


def generates(engine: EngineConfig) -> Iterator[str]:
    """Yield what generates, where it is not the engine built in."""
    if engine.rollout != "vllm":
        return
    vllm = engine.vllm
    whose = "this Python" if vllm.python is None else vllm.python
    where = "in a process of its own" if vllm.process == "child" else "in the trainer's process"
    yield f"vLLM {where}, run by {whose}; it loads the base once more"
    yield (
        "its log-probs differ from the trainer's; algorithm.sampler_correction acts, and "
        "sampler_gap says by how much"
    )


def missing(engine: EngineConfig) -> Iterator[str]:
    """Yield why a run could not generate on this machine."""
    if engine.rollout != "vllm":
        return
    python = engine.vllm.python
    if python is None:
        if find_spec("vllm") is None:
            yield (
                "engine.rollout is vllm, and this Python has no vllm: a run will be refused here; "
                'pip install "evo-grpo[vllm]", or name the Python of another environment in '
                "engine.vllm.python"
            )
    elif not os.access(Path(python).expanduser(), os.X_OK):
        yield f"engine.vllm.python: {python} is no program here: a run will be refused"
