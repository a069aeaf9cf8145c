"""Captures decode steps as CUDA graphs, each replayed by one launch."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import final

import torch

from evo_grpo.model.llama.cuda.operators import KernelError
from evo_grpo.model.out_of_memory import free_cached, is_out_of_memory
from evo_grpo.working import working

#: Least number of steps for which a step is captured: a capture takes about as long as a step.
_WORTH = 4


@final
class StepGraphs:
    """Runs a step once without a graph, then captures it and replays it on the same memory.

    All captures share one memory pool, because only the latest is replayed. The pool is kept
    between rollouts, so that later captures allocate nothing. If a capture fails, all later steps
    run without graphs, and a warning gives the reason.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
        self._memory: object = None
        self._graph: torch.cuda.CUDAGraph | None = None
        #: Whether no capture has failed.
        self.work = True

    def forget(self) -> None:
        """Forget the captured graph, because the next step reads other memory."""
        self._memory = None

    def run(self, step: Callable[[], None], memory: object, count: int) -> None:
        """Run a step `count` times; replay its graph if `memory` is as in the last call."""
        with torch.cuda.device(self._device):
            if memory != self._memory and self.work and count >= _WORTH:
                is_first = self._memory is None
                with working("capture the decode step") if is_first else nullcontext():
                    # Libraries load kernels and allocate in a first step, which no capture allows.
                    self._beside(step)
                    count -= 1
                    self._capture(step)
                self._memory = memory
            graph = self._graph if memory == self._memory else None
            for _ in range(count):
                if graph is None:
                    step()
                else:
                    graph.replay()

    def _beside(self, call: Callable[[], None]) -> None:
        """Call a function on the capture stream; order it with work on the current stream."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                call()
        finally:
            current.wait_stream(self._stream)

    def _capture(self, step: Callable[[], None]) -> None:
        """Capture a step as a graph that takes memory from the pool."""
        error = self._tried(step)
        if error is not None and is_out_of_memory(error):
            # A capture, unlike a plain step, does not take back what the allocator has cached.
            free_cached()
            error = self._tried(step)
        if error is None:
            return
        if is_out_of_memory(error) or isinstance(error, KernelError):
            raise error
        self.work, self._graph = False, None
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        warnings.warn(
            "engine.cuda_graphs: the decode step cannot be captured as a CUDA graph, and runs "
            f"kernel by kernel from now on ({reason[:200]}); set "
            "engine.cuda_graphs to false to spare the attempt",
            UserWarning,
            stacklevel=2,
        )

    def _tried(self, step: Callable[[], None]) -> RuntimeError | None:
        graph = torch.cuda.CUDAGraph()

        def capture() -> None:
            # Not `torch.cuda.graph`, which also empties the allocator's cache. Threads of the
            # program may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                with suppress(RuntimeError):  # it repeats that the capture has failed
                    graph.capture_end()
                raise
            graph.capture_end()

        try:
            self._beside(capture)
        except RuntimeError as error:
            # A capture that ends with an error leaves the allocator in the capture's pool.
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType] -- `capture_end` calls it where the capture succeeds
            return error
        self._graph = graph
        return None
