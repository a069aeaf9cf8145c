"""Decode steps as CUDA graphs: one launch for the hundreds of kernels of a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import final

import torch

from evo_grpo.model.out_of_memory import is_out_of_memory


@final
class StepGraphs:
    """Runs a step in plain once, captures it, and replays it as long as its memory is the same.

    One memory pool serves all captures, since only the latest is ever replayed. The latest keeps
    the pool between rollouts, so that a capture allocates nothing after the first. If a capture
    fails, steps stay plain from then on, and a warning gives the reason.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
        self._memory: object = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._fails = False

    def forget(self) -> None:
        """Replay no earlier capture: the next step reads other memory."""
        self._memory = None

    def run(self, step: Callable[[], None], memory: object, count: int) -> None:
        """Run a step `count` times, which reads and writes the memory of the last call if equal."""
        with torch.cuda.device(self._device):
            if memory != self._memory and not self._fails:
                self._memory = memory
                # Libraries load kernels and allocate in the first step, which no capture allows.
                self._beside(step)
                count -= 1
                self._capture(step)
            for _ in range(count):
                if self._graph is None or self._fails:
                    step()
                else:
                    self._graph.replay()

    def _beside(self, call: Callable[[], None]) -> None:
        """Call on the stream of captures, after and before all else."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            call()
        current.wait_stream(self._stream)

    def _capture(self, step: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()

        def capture() -> None:
            # Not `torch.cuda.graph`, which also empties the allocator's cache. Threads of the
            # program may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()

        try:
            self._beside(capture)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._fails = True
            warnings.warn(
                "engine.cuda_graphs: the decode step cannot be captured as a CUDA graph, and runs "
                f"kernel by kernel from now on ({str(error).splitlines()[0][:200]}); set "
                "engine.cuda_graphs to false to spare the attempt",
                UserWarning,
                stacklevel=2,
            )
        else:
            self._graph = graph
