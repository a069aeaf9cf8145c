"""Which steps run in plain, are captured and are replayed; tests/device runs real graphs."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from evo_grpo.model.llama.cuda.operators import KernelError
from evo_grpo.rollout.native.graphs import StepGraphs

HERE, ELSEWHERE = (8, 64), (4, 64)


class Cuda:
    """Doubles of torch.cuda: a capture runs the step as such, and a replay counts."""

    def __init__(self):
        self.capturing, self.done, self.freed, self.errors = False, [], 0, []

    def graph(self):
        def begin(**_):
            self.capturing = True
            self.done.append("capture")

        def end():
            self.capturing = False

        replay = SimpleNamespace(capture_begin=begin, capture_end=end)
        replay.replay = lambda: self.done.append("replay")
        return replay

    def step(self):
        if not self.capturing:
            self.done.append("plain")
        elif self.errors:
            raise self.errors.pop(0)


@pytest.fixture
def cuda(monkeypatch):
    double = Cuda()
    stream = SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def placed(_):
        yield

    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": placed,
        "device": placed,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": double.graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def free():
        double.freed += 1

    monkeypatch.setattr("evo_grpo.rollout.native.graphs.free_cached", free)
    return double


@pytest.fixture
def graphs(cuda):
    return StepGraphs(torch.device("cuda", 0))


def test_a_step_runs_once_in_plain_and_is_replayed_while_its_memory_is_the_same(cuda, graphs):
    graphs.run(cuda.step, HERE, 8)
    graphs.run(cuda.step, HERE, 2)
    assert cuda.done == ["plain", "capture"] + ["replay"] * 9


def test_other_memory_or_another_rollout_is_captured_again(cuda, graphs):
    graphs.run(cuda.step, HERE, 4)
    graphs.run(cuda.step, ELSEWHERE, 4)
    graphs.forget()
    graphs.run(cuda.step, ELSEWHERE, 4)
    assert cuda.done == (["plain", "capture"] + ["replay"] * 3) * 3


def test_a_few_steps_are_not_worth_a_capture(cuda, graphs):
    graphs.run(cuda.step, HERE, 3)
    assert cuda.done == ["plain"] * 3


def test_a_capture_that_fails_leaves_plain_steps_and_says_why_once(cuda, graphs):
    cuda.errors = [RuntimeError("operation not permitted when stream is capturing")]
    with pytest.warns(UserWarning, match=r"engine\.cuda_graphs: .* \(operation not permitted"):
        graphs.run(cuda.step, HERE, 8)
    graphs.run(cuda.step, ELSEWHERE, 8)
    assert cuda.done == ["plain", "capture"] + ["plain"] * 15
    assert not graphs.work


def test_a_kernel_that_fails_in_a_capture_is_for_the_engine_to_give_up(cuda, graphs):
    cuda.errors = [KernelError("qkv: CompilationError")]
    with pytest.raises(KernelError):
        graphs.run(cuda.step, HERE, 8)
    assert graphs.work


def test_a_capture_without_memory_is_tried_again_after_the_cache_is_freed(cuda, graphs):
    cuda.errors = [torch.OutOfMemoryError("out of memory")]
    graphs.run(cuda.step, HERE, 4)
    assert cuda.done == ["plain", "capture", "capture"] + ["replay"] * 3
    cuda.errors = [torch.OutOfMemoryError("out of memory") for _ in range(2)]
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run(cuda.step, ELSEWHERE, 4)
    assert (cuda.freed, graphs.work) == (2, True)
