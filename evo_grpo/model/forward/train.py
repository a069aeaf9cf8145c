"""The forward of the learner: the joined Llama layers, or the model's own modules."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, final

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from evo_grpo.model.forward.fused import population_forward
from evo_grpo.model.forward.layout import RowLayout
from evo_grpo.model.forward.prefix import SharedPrefix
from evo_grpo.model.llama.cuda.choice import open_learner
from evo_grpo.model.llama.departures import can_join_layers
from evo_grpo.model.llama.train import LlamaForward
from evo_grpo.model.lora.slots import AdapterSlots


@final
class ModuleForward:
    """Runs the base and some adapters for one optimizer step through the model's own modules.

    It works for every architecture. Weights do not change within the step. `recompute` turns on
    gradient checkpointing.
    """

    def __init__(self, slots: AdapterSlots, *, recompute: bool = False) -> None:
        self.slots = slots
        self.recompute = recompute

    @contextmanager
    def rows(self, layout: RowLayout, dropout: Sequence[int] | None = None) -> Generator[None]:
        """Set the layout of the next rows, in a context that must span their backward.

        `dropout` has a seed for the LoRA dropout of each row.
        """
        with (
            self._checkpointing(),
            population_forward(self.slots.layers, layout.joined(), dropout=dropout),
        ):
            yield

    def hidden_at(self, ids: Tensor, where: Tensor, prefix: SharedPrefix | None = None) -> Tensor:
        """Return the final hidden states (M, H) at flat positions `where` (M,) of ids (B, T).

        `prefix` has the same rows and positions, split into shared prefixes and rests.
        `LlamaForward` uses it; the modules run whole rows.
        """
        return self.slots.base.hidden(ids).flatten(0, 1).index_select(0, where)

    def collect_gradients(self) -> None:
        """Write the gradients to the adapters' parameters; here autograd has already done it."""

    @contextmanager
    def _checkpointing(self) -> Generator[None]:
        """Turn on gradient checkpointing for the layers only; train() would also enable dropout."""
        modules = self.slots.base.trunk.modules() if self.recompute else ()
        layers = [m for m in modules if isinstance(m, GradientCheckpointingLayer)]
        # The layers' own switches: the model's method leaves one more hook on the embeddings at
        # every call, and its name changed within transformers 5.
        for layer in layers:
            vars(layer).update(
                gradient_checkpointing=True,
                training=True,
                _gradient_checkpointing_func=partial(_run_checkpointed, layer),
            )
        try:
            yield
        finally:
            for layer in layers:
                vars(layer).update(gradient_checkpointing=False, training=False)


#: The forward of an optimizer step.
TrainForward: TypeAlias = LlamaForward | ModuleForward


def _run_checkpointed(layer: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 -- what the layer takes and returns
    """Run a layer's forward under gradient checkpointing.

    A layer checkpoints only while its `training` is True. Many layers (OPT, XGLM, Falcon, the
    decoders of the Bart family) also use `training` for dropout, which draws from the global
    generator and would not match the rollout. `training` is therefore False while the layer
    computes.
    """

    def in_evaluation(*args: Any) -> Any:  # noqa: ANN401 -- as above
        was_training = layer.training
        vars(layer)["training"] = False
        try:
            return forward(*args)
        finally:
            vars(layer)["training"] = was_training

    return checkpoint(in_evaluation, *args, use_reentrant=False)


def open_forward(
    slots: AdapterSlots,
    adapters: Sequence[str | None],
    *,
    recompute: bool = False,
    plain: bool = False,
) -> TrainForward:
    """Return the forward of one optimizer step: the joined Llama layers, or modules if `plain`.

    Of the step's `adapters` only None may repeat. `recompute` is gradient checkpointing.
    """
    dropout = any(slots.lora_config(name).lora_dropout for name in adapters if name is not None)
    if not plain and not dropout and can_join_layers(slots.base, slots.layers):
        return open_learner(slots, adapters, recompute=recompute)
    return ModuleForward(slots, recompute=recompute)
