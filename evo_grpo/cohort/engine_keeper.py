"""The rollout engine of a cohort: made when it is needed, told of updates, asleep in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.rollout.engine import RolloutEngine


@final
class EngineKeeper:
    """Keeps one engine over some adapters.

    Args:
        slots: The adapters.
        make: Makes the engine.

    Attributes:
        engine: The engine; None before its first use and once it is closed.
    """

    def __init__(self, slots: AdapterSlots, make: Callable[[], RolloutEngine]) -> None:
        """Keep the pieces; nothing is made yet."""
        self.slots = slots
        self.engine: RolloutEngine | None = None
        self._make = make
        self._asleep = False
        self._published: dict[str, int] = {}

    def open(self) -> RolloutEngine:
        """Make the engine where there is none."""
        if self.engine is None:
            self.engine = self._make()
        return self.engine

    def ready(self) -> RolloutEngine:
        """Return the engine, awake and told of every adapter that changed since its last use."""
        engine = self.open()
        if self._asleep:
            engine.wake()
            self._asleep = False
        versions = self.slots.versions
        changed = {n: v for n, v in versions.items() if self._published.get(n) != v}
        if changed:
            engine.publish(changed)
            self._published = versions
        return engine

    def sleep(self) -> None:
        """Let the engine give up what only sampling needs, until it is asked for again."""
        if self.engine is not None and not self._asleep:
            self.engine.sleep()
            self._asleep = True

    def close(self) -> None:
        """Free what the engine holds outside of this process; its next use makes another one."""
        engine, self.engine = self.engine, None
        self._asleep, self._published = False, {}
        if engine is not None:
            engine.close()

    @property
    def exact(self) -> bool:
        """Whether log-probs are the trainer's own; where nothing was sampled, nothing differs."""
        return self.engine is None or self.engine.exact
