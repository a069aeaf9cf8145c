"""The values from which the memory of a run is predicted, and the parts of a prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Device = Literal["cpu", "cuda"]


class Shape(NamedTuple):
    """Sizes of a decoder's layers, in features.

    Attributes:
        layers: Number of layers.
        hidden: Width of the hidden states.
        inner: Width of the gated MLP.
        query_width: Width of the queries of all heads.
        kv_width: Width of the keys of all heads, and of the values.
        vocabulary: Number of logits per token.
        heads: Query heads.
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
    """The most that one process computes at once.

    Attributes:
        agents: Agents that train in this process.
        archive: Whether the best agent so far has a slot.
        references: Whether each agent has a reference adapter.
        parameters: Parameters of one adapter.
        rank: LoRA rank.
        rows: Completions of one step, over all agents of this process.
        evaluation_rows: Completions of one evaluation.
        prompt_tokens: Tokens of the longest prompt.
        output_tokens: Tokens of the longest completion.
        start: Whether all agents share one reference: the adapter that they start from.
        filtered: Whether top-k or top-p sorts the vocabulary.
        specialised: Whether the joined layers of the Llama family run instead of the modules.
        shards: Processes that divide the base's weights; 1 if each process has all of them.
        group: Completions of one prompt, whose prompt the joined layers compute once.
        least_rows: Completions that cannot be decoded in several parts: those of one prompt of
            every agent.
        head_norms: Whether queries and keys have norms of their own.
        kernels: Whether kernels of its own learn on a GPU in half precision; see `engine.kernels`.
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
    """A part of the memory.

    Attributes:
        name: Name in the plan and in errors.
        bytes: Size.
        settings: The settings that make it smaller; empty if there are none.
    """

    name: str
    bytes: int
    settings: str


@dataclass(frozen=True)
class EngineLoad:
    """The values from which an engine's memory is computed.

    Attributes:
        shape: Sizes of the base's layers.
        work: The most that the process computes at once.
        rows: Completions decoded at once.
        element: Bytes of one number in the base's dtype.
        weights: Bytes of the base's weights in its dtype, not quantised.
        base: Bytes of the base as the trainer holds it.
        device: Where the base is.
        capacity: Bytes of that device; None if unknown.
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
