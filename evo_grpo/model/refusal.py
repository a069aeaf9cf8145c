"""A model that somebody gave, as it was where what is to be built on it is refused."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from evo_grpo.model.rotary import keep_frequencies


@contextmanager
def unchanged_if_refused(model: object) -> Generator[None]:
    """Undo, after an exception, that a model was frozen, set to evaluation and its rotary held.

    Adapters are the business of whoever adds them. The device is left: a copy on the one before
    might no longer fit. What is no module is left alone.
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
