"""`RolloutSettings`, which declares a rollout engine, and the values of a memory plan; no torch."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from evo_grpo.schema.group import Group
from evo_grpo.schema.problems import Problem
from evo_grpo.settings.model import LoraSettings

Device = Literal["cpu", "cuda"]


class Shape(NamedTuple):
    """Sizes of a decoder's layers, in features.

    Attributes:
        layers: Number of layers.
        hidden: Width of the hidden states.
        inner: Width of the gated MLP.
        query_width: Width of the queries of all heads together.
        kv_width: Width of the keys of all heads together; values have the same width.
        vocabulary: Number of logits per token.
        heads: Number of query heads.
    """

    layers: int
    hidden: int
    inner: int
    query_width: int
    kv_width: int
    vocabulary: int
    heads: int = 1


@dataclass(frozen=True)
class Work:
    """Upper bounds of what one process computes at once.

    Attributes:
        agents: Agents that train in this process.
        archive: Whether a copy of the best agent so far has a slot.
        references: Whether each agent has a reference adapter.
        parameters: Parameters of one adapter.
        rank: LoRA rank.
        rows: Completions of one step, over all agents of this process.
        evaluation_rows: Completions of one evaluation.
        prompt_tokens: Tokens of the longest prompt.
        output_tokens: Tokens of the longest completion.
        start: Whether the adapter that all agents start from is their shared reference.
        filtered: Whether top-k or top-p sorts the vocabulary.
        specialised: Whether the joined layers of the Llama family replace the model's own modules.
        shards: Processes that divide the base's weights; 1 if each process has all of them.
        group: Completions of one prompt; the joined layers compute the prompt once for all of them.
        least_rows: Completions that have to be decoded together: all completions of one prompt of
            every agent.
        head_norms: Whether queries and keys are normalised per head.
        kernels: Whether kernels of evo-grpo learn on a GPU in half precision; see `engine.kernels`.
        resident: Agents that are on the device at once; None if all are, and the archive too.
    """

    agents: int
    archive: bool
    references: bool
    parameters: int
    rank: int
    rows: int
    evaluation_rows: int
    prompt_tokens: int
    output_tokens: int
    start: bool = False
    filtered: bool = False
    specialised: bool = True
    shards: int = 1
    group: int = 1
    least_rows: int = 1
    head_norms: bool = False
    kernels: bool = False
    resident: int | None = None


@dataclass(frozen=True)
class Part:
    """One part of the memory that a run needs.

    Attributes:
        name: Name in the plan and in errors.
        bytes: Size in bytes.
        settings: The settings that make the part smaller; empty if there are none.
    """

    name: str
    bytes: int
    settings: str


@dataclass(frozen=True)
class EngineLoad:
    """The values from which an engine's memory is computed.

    Attributes:
        shape: Sizes of the base's layers.
        work: Upper bounds of what the process computes at once.
        rows: Completions decoded at once.
        element: Bytes of one number in the base's dtype.
        weights: Bytes of the base's weights in its dtype, not quantised.
        base: Bytes of the base as the trainer holds it.
        device: Kind of the device that has the base.
        capacity: Memory of that device in bytes; None if unknown.
        number: Number of that device.
        graphs: Whether decode steps are CUDA graphs.
    """

    shape: Shape
    work: Work
    rows: int
    element: int
    weights: int
    base: int
    device: Device
    capacity: int | None = None
    number: int = 0
    graphs: bool = False


class RolloutSettings(Group):
    """The settings of one rollout engine, and what the engine needs.

    `evo-grpo check`, the memory plan and the checks of a configuration read this class, so it loads
    no torch; the engine itself is the class that `implementation` names. A subclass overrides the
    methods that apply to its engine. Each subclass is entered in `ENGINES` of
    `evo_grpo/settings/engine.py`.
    """

    implementation: ClassVar[str]
    """The `RolloutEngine` class, as "module:Class"."""
    shares_base: ClassVar[bool] = False
    """Whether the engine samples with the trainer's modules, so that its log-probs are exact."""
    ignores: ClassVar[Mapping[str, str]] = {}
    """Settings of `engine` without effect -> the reason and the remedy, as a relative clause."""
    of_machine: ClassVar[tuple[str, ...]] = ()
    """Settings of this group that name something on one machine and may differ between ranks."""
    adjustable: ClassVar[tuple[str, ...]] = ()
    """Settings of this group that a resumed run may change, because no result depends on them."""
    programs: ClassVar[tuple[str, ...]] = ()
    """Settings of this group that name a program to start; one in a run folder is refused."""

    def problems(self, device: str, lora: LoraSettings | None) -> Iterator[Problem]:
        """Yield contradictions among these settings, even if another engine is selected.

        Args:
            device: `engine.device`.
            lora: `model.lora`; None if Python may supply other adapters.
        """
        del device, lora
        yield from ()

    def missing(self) -> Iterator[str]:
        """Yield a warning for each requirement that this machine lacks, without an import."""
        yield from ()

    def held_memory(self, load: EngineLoad) -> tuple[Part, ...]:
        """Return the memory that the engine holds all the time, without that of the trainer."""
        del load
        return ()

    def sampling_memory(self, load: EngineLoad) -> tuple[Part, ...]:
        """Return the memory that is needed only while the engine samples."""
        del load
        return ()

    def shortages(self, load: EngineLoad) -> Iterator[str]:
        """Yield a sentence for each limit in these settings that is too low for the base."""
        del load
        yield from ()

    def remedies(self, load: EngineLoad) -> Iterator[Mapping[str, object]]:
        """Yield changes of these settings that need less memory or avoid shortages, best first."""
        del load
        yield from ()
