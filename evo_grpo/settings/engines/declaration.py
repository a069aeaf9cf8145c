"""`RolloutSettings`: the settings of a rollout engine, and its requirements, without torch."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Iterator, Mapping
from typing import ClassVar

from evo_grpo.schema.group import Group
from evo_grpo.schema.problems import Problem
from evo_grpo.settings.engines.memory import EngineLoad, Part
from evo_grpo.settings.model import LoraSettings


class RolloutSettings(Group):
    """The settings of one rollout engine, and what the engine needs.

    `evo-grpo check`, the memory plan and the checks of a configuration read this class, so it
    loads no torch; the engine itself is the class that `implementation` names. A subclass
    overrides the methods that apply to its engine. It is entered in `ENGINES` of
    `evo_grpo/settings/engine.py`.
    """

    implementation: ClassVar[str]
    """The `RolloutEngine` class, as "module:Class"."""
    shares_base: ClassVar[bool] = False
    """Whether the engine samples with the trainer's modules, so that its log-probs are exact."""
    ignores: ClassVar[Mapping[str, str]] = {}
    """Settings of `engine` without effect -> the reason and the remedy, as a relative clause."""
    of_machine: ClassVar[tuple[str, ...]] = ()
    """Own settings that name something on one machine, which may differ between ranks."""
    adjustable: ClassVar[tuple[str, ...]] = ()
    """Own settings that a resumed run may change, since no result depends on them."""
    programs: ClassVar[tuple[str, ...]] = ()
    """Own settings that name a program to start; one inside a run folder is refused."""

    def problems(self, device: str, lora: LoraSettings | None) -> Iterator[Problem]:
        """Yield contradictions among these settings, also when another engine is selected.

        Args:
            device: `engine.device`.
            lora: `model.lora`; None if Python may supply other adapters.
        """
        del device, lora
        yield from ()

    def missing(self) -> Iterator[str]:
        """Yield a warning for each requirement that this machine lacks; import nothing."""
        yield from ()

    def held_memory(self, load: EngineLoad) -> tuple[Part, ...]:
        """Return the memory that the engine holds all the time, beside the trainer's."""
        del load
        return ()

    def sampling_memory(self, load: EngineLoad) -> tuple[Part, ...]:
        """Return the memory that is needed only while the engine samples."""
        del load
        return ()

    def shortages(self, load: EngineLoad) -> Iterator[str]:
        """Yield a sentence for each limit of the engine's own that is too low for the base."""
        del load
        yield from ()

    def remedies(self, load: EngineLoad) -> Iterator[Mapping[str, object]]:
        """Yield changes of own settings that need less memory or end a shortage, best first."""
        del load
        yield from ()
