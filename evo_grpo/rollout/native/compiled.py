"""Decode steps that torch.compile has made into a few fused kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import final

import torch

from evo_grpo.model.out_of_memory import is_out_of_memory
from evo_grpo.working import working

#: Most compilations of the step. Numbers of rows and widths are compiled once more, as variables,
#: when they first change; what else differs (filters of sampling, unequal rows of agents) is a
#: step of its own.
_MOST = 32

#: Modules whose errors mean that a compilation failed; those of the step are torch's own.
_COMPILER = ("torch._dynamo.", "torch._inductor.")


@final
class CompiledStep:
    """Compiles a step when it first meets its kind of rows, and runs it.

    If a compilation fails, steps stay plain from then on, and a warning gives the reason.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        # `StepGraphs` captures the step itself.
        options = torch._inductor.list_mode_options(mode) | {"triton.cudagraphs": False}  # pyright: ignore[reportPrivateUsage] -- documented
        self._compiled: Callable[[Callable[[], None]], None]
        self._compiled = torch.compile(  # pyright: ignore[reportCallIssue] -- overloads lack the limit
            _call, fullgraph=True, options=options, recompile_limit=_MOST
        )
        self._work = True
        self._first = True

    def run(self, step: Callable[[], None]) -> None:
        """Run a step, which reads and writes tensors alone."""
        if self._work:
            telling = working("compile the decode step") if self._first else nullcontext()
            self._first = False
            try:
                with telling:
                    return self._compiled(step)
            except Exception as error:
                cause = getattr(error, "inner_exception", error)
                if not type(error).__module__.startswith(_COMPILER):
                    raise
                if is_out_of_memory(cause):
                    raise cause from error  # fewer rows may compile
                self._work = False
                reason = next(iter(str(cause).splitlines()), "") or type(cause).__name__
                warnings.warn(
                    "engine.compile: the decode step cannot be compiled, and runs uncompiled from "
                    f"now on ({reason[:200]}); leave engine.compile out to spare the attempt",
                    UserWarning,
                    stacklevel=2,
                )
        return step()


def _call(step: Callable[[], None]) -> None:
    step()
