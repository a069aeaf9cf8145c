"""The built-in rollout engine, whose settings are in the group `engine` itself."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import ClassVar

from evo_grpo.settings.engines.declaration import EngineLoad, Part, RolloutSettings

DRAWN_LOGITS = 1 << 25
"""Most logits from which tokens are drawn at once, or those of one row if these are more."""
SPARE_COLUMNS = 16
"""Further columns of the cache if waiting rows take the places of finished ones: rows then begin at
different columns, and all move to the front when the columns are used up."""
_DRAW_TENSORS = 4
"""float32 tensors as large as the logits of a draw: logits, log-probs, probabilities, one more."""
_SORT_TENSORS = 5
"""Further such tensors if top-k or top-p sorts the vocabulary."""


class NativeSettings(RolloutSettings):
    """The built-in engine, which samples with the trainer's base and adapters."""

    implementation: ClassVar[str] = "evo_grpo.rollout.native.native_engine:NativeEngine"
    shares_base: ClassVar[bool] = True

    def held_memory(self, load: EngineLoad) -> tuple[Part, ...]:
        """Return the memory of the logits that tokens are drawn from, if CUDA graphs keep them."""
        return (_drawn(load),) if load.graphs else ()

    def sampling_memory(self, load: EngineLoad) -> tuple[Part, ...]:
        """Return the memory of keys, values, joined adapters and, without CUDA graphs, logits."""
        shape, work, rows, element = load.shape, load.work, load.rows, load.element
        columns = work.prompt_tokens + work.output_tokens
        waiting = max(work.rows, work.evaluation_rows) - rows
        if waiting > 0 and work.specialised and load.device != "cpu":
            columns += SPARE_COLUMNS
        layer = rows * columns * 2 * shape.kv_width * element
        # One layer is copied while finished rows are removed or replaced. The modules' attention
        # also repeats the keys and values of a layer for every query head.
        extra = layer
        if not work.specialised:
            extra = max(layer, rows * columns * 2 * shape.query_width * element)
        draw = () if load.graphs else (_drawn(load),)
        return (
            Part("keys and values", shape.layers * layer + extra, "engine.max_decode_rows"),
            *draw,
            Part("adapters side by side", _joined(load) * element, "population.size"),
        )


def _drawn(load: EngineLoad) -> Part:
    """Return the memory of the tensors from which tokens are drawn."""
    tensors = _DRAW_TENSORS + (_SORT_TENSORS if load.work.filtered else 0)
    tensors += 0 if load.element == 4 else 0.5
    vocabulary = load.shape.vocabulary
    logits = min(load.rows * vocabulary, max(DRAWN_LOGITS, vocabulary))
    return Part("logits of a token", int(tensors * logits * 4), "engine.max_decode_rows")


def _joined(load: EngineLoad) -> int:
    """Return the number of elements of all agents' adapters in the joined form for decoding.

    The LoRA matrix B of joined layers is block-diagonal, and its zeros count; a CPU may also keep
    the blocks. For kernels, LoRA A is concatenated to the weights, and LoRA B exists twice.
    """
    shape, work = load.shape, load.work
    hidden, inner = shape.hidden, shape.inner
    if not work.specialised:
        return work.agents * work.parameters
    heads = shape.query_width + 2 * shape.kv_width
    apart = 1 if load.device == "cpu" else 0
    qkv = work.rank * (3 * (hidden + heads) + apart * heads)
    out = work.rank * (shape.query_width + hidden)
    gate_up = work.rank * (2 * (hidden + 2 * inner) + apart * 2 * inner)
    down = work.rank * (inner + hidden)
    kernels = work.parameters if load.device == "cuda" and load.element == 2 else 0
    return work.agents * (shape.layers * (qkv + out + gate_up + down) + kernels)
