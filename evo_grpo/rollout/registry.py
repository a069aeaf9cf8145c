"""Makes the rollout engine that the settings select, or checks that it can be made.

`ENGINES` in `evo_grpo/settings/engine.py` is the table of engines. An engine is imported when it is
first asked for, since some load large packages.
"""

from __future__ import annotations

from pkgutil import resolve_name

from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.rollout.engine import EngineFactory, RolloutEngine
from evo_grpo.settings import AgentSettings, EngineConfig


def engine_class(engine: EngineConfig) -> type[RolloutEngine]:
    """Return the class of the selected engine."""
    return resolve_name(engine.rollout_settings.implementation)


def make_engine(slots: AdapterSlots, settings: AgentSettings) -> RolloutEngine:
    """Make the selected engine; an `EngineFactory`."""
    factory: EngineFactory = resolve_name(settings.engine.rollout_settings.implementation)
    return factory(slots, settings)


def check_engine(engine: EngineConfig) -> None:
    """Check that the selected engine can be used, before a model is loaded or a file is written.

    Raises:
        EngineUnavailable: The engine is not installed.
    """
    engine_class(engine).check(engine)
