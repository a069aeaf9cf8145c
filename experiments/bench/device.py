"""The device of a benchmark: models made on it, seconds, peaks of memory, rates and kernels.

`rehearsed` has the rehearsal device of tests/helpers/rehearsal.py, or else the CPU, in its place.
"""

import statistics
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from common import ROOT, Report
from shapes import COMMON, EMBEDDED, QWEN2
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from evo_grpo.model.base import SharedBase
from evo_grpo.model.loading import pick_dtype
from evo_grpo.training.sizing.cards import CARDS, Card, Gpu

#: Kernels in a graph from which the seconds of a launch are taken.
KERNELS = 200


@dataclass(frozen=True)
class Place:
    """Where it runs.

    Attributes:
        device: The device.
        dtype: Of the base.
    """

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def on_cuda(cls) -> "Place":
        """Return the CUDA device, in the half precision that a run takes there."""
        device = torch.device("cuda")
        return cls(device, pick_dtype("auto", device))

    @property
    def is_cuda(self) -> bool:
        """Whether it is a CUDA device."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object], repeats: int, warmup: int = 1) -> float:
        """Return the median seconds of a call."""
        found: list[float] = []
        for turn in range(warmup + repeats):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            if turn >= warmup:
                found.append(time.perf_counter() - start)
        return statistics.median(found)

    def pair(
        self, first: Callable[[], object], second: Callable[[], object], repeats: int
    ) -> tuple[float, float]:
        """Return the median seconds of two calls, sampled in turns."""
        first(), second()
        one = [(self.seconds(first, 1, 0), self.seconds(second, 1, 0)) for _ in range(repeats)]
        return statistics.median(a for a, _ in one), statistics.median(b for _, b in one)

    def replayed(self, call: Callable[[], object], repeats: int = 20) -> float:
        """Return the seconds of a call as a replayed CUDA graph; without CUDA, of the call."""
        if not self.is_cuda:
            return self.seconds(call, 1, 0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        times: list[float] = []
        for _ in range(3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            self.wait()
            times.append(begin.elapsed_time(end) / repeats / 1e3)
        return statistics.median(times)

    def reset_peak(self) -> None:
        """Forget the peaks so far."""
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def held(self) -> int | None:
        """Return the bytes that tensors hold; None where nothing counts them."""
        if self.is_cuda:
            return torch.cuda.memory_allocated(self.device)
        if self.device.type == "cpu":
            return None
        import rehearsal

        return rehearsal.bytes_in_use()

    def peaks(self) -> tuple[int, int] | None:
        """Return the peaks of allocated and reserved bytes; None without CUDA."""
        if not self.is_cuda:
            return None
        cuda = torch.cuda
        return cuda.max_memory_allocated(self.device), cuda.max_memory_reserved(self.device)


@contextmanager
def rehearsed() -> Generator[Place]:
    """Return a place without a card: the rehearsal device, or the CPU where there is none."""
    device = "cpu"
    with ExitStack() as stack:
        sys.path.append(str(ROOT / "tests" / "helpers"))
        try:
            import rehearsal

            stack.enter_context(rehearsal.known())
            device = rehearsal.NAME
        except ImportError as error:  # it needs pytest, and a torch that has what it registers
            print(f"the CPU stands for the card: {error}", flush=True)
        yield Place(torch.device(device), torch.bfloat16)


class Rates(NamedTuple):
    """What a device reaches.

    Attributes:
        flops: FLOPs per second of a large product in half precision.
        read: Bytes per second of a large sum.
        copy: Bytes per second of a large copy, read and written.
        launch: Seconds of a captured kernel that does next to nothing.
    """

    flops: float
    read: float
    copy: float
    launch: float

    @classmethod
    def measured(cls, place: Place) -> "Rates":
        """Measure a device."""
        size = 8192 if place.is_cuda else 64
        left = torch.ones(size, size, device=place.device, dtype=place.dtype).normal_()
        source = torch.ones(size * size * 16, device=place.device, dtype=place.dtype)
        target, small = torch.empty_like(source), torch.ones(64, device=place.device)
        moved = source.numel() * source.element_size()

        def kernels() -> None:
            for _ in range(KERNELS):
                small.add_(1)

        return cls(
            2 * size**3 / place.replayed(lambda: left @ left, 3),
            moved / place.replayed(source.sum, 3),
            2 * moved / place.replayed(lambda: target.copy_(source), 3),
            place.replayed(kernels) / KERNELS,
        )

    def least(self, flops: float, moved: float) -> float:
        """Return the least milliseconds in which a device computes and reads as much."""
        return 1e3 * max(flops / self.flops, moved / self.read)


def gpu_of(place: Place) -> Gpu:
    """Return the card of a place; an H200 stands for it in a rehearsal."""
    if not place.is_cuda:
        return Gpu("h200", int(CARDS["h200"].gib * 2**30))
    found = torch.cuda.get_device_properties(place.device)
    return Gpu(found.name, found.total_memory)


def row_of(gpu: Gpu, rates: Rates) -> Card:
    """Return the row of a card in the table of `evo_grpo.training.sizing.cards`, by its rates."""
    tflops = float(f"{rates.flops / 1e12:.3g}")
    read, copy = (float(f"{rate / 1e12:.3g}") for rate in (rates.read, rates.copy))
    measured = f"{time.strftime('%Y-%m-%d')}, PyTorch {torch.__version__.partition('+')[0]}"
    return Card(gpu.bytes * 10 // 2**30 / 10, tflops, read, copy, measured)


def config_of(shape: str) -> Qwen2Config:
    """Return the configuration of a shape."""
    return Qwen2Config(**{**COMMON, **QWEN2[shape], "max_position_embeddings": 4096})


def build(shape: str, place: Place) -> SharedBase:
    """Make a model of a shape with random weights, on the device."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        torch.set_default_dtype(place.dtype)
        try:
            # Made where it will stay: 3B in fp32 on the host first would be slow.
            with torch.device(place.device if place.is_cuda else "cpu"):
                model = Qwen2ForCausalLM(config_of(shape))
        finally:
            torch.set_default_dtype(torch.float32)
    model = model.eval().to(place.device)
    return SharedBase(model, AutoTokenizer.from_pretrained(EMBEDDED), shape)


def kernels_of(place: Place, call: Callable[[], object]) -> list[Any]:
    """Return what the profiler counts of one call on a CUDA device, the longest kernels first.

    CPU operators are left out: recording them would slow down what is measured.
    """
    from torch.profiler import ProfilerActivity, profile

    call()
    place.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        place.wait()
    return sorted(seen.key_averages(), key=lambda one: -one.self_device_time_total)


def busy_seconds(found: list[Any]) -> float:
    """Return the seconds in which a device computed, by `kernels_of`."""
    return sum(one.self_device_time_total for one in found) / 1e6


def add_longest(report: Report, table: str, found: list[Any], count: int = 12) -> None:
    """Report the longest kernels of `kernels_of`."""
    for one in found[:count]:
        report.add(table, name=one.key[:80], ms=one.self_device_time_total / 1e3, count=one.count)
