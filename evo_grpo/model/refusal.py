"""Restoring a user's model after an error while it is set up."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from evo_grpo.model.rotary import keep_frequencies


@contextmanager
def unchanged_if_refused(model: object) -> Generator[None]:
    """After an exception, restore a model's `requires_grad`, training mode and rotary embeddings.

    Adapters and the device are not restored. Objects that are not modules are ignored.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    training = [(module, module.training) for module in model.modules()]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    give_back = keep_frequencies(model)
    try:
        yield
    except BaseException:
        for module, mode in training:
            module.training = mode
        for parameter, mode in trainable:
            parameter.requires_grad_(mode)
        give_back()
        raise
