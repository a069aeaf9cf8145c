"""The decode step under torch.compile, in the cache of a GPU; dynamo runs, inductor where slow."""

from functools import partial

import architectures
import pytest
import tiny
import torch
from engine_contract import ids_of, prompts_of

from evo_grpo.model.llama import decode
from evo_grpo.model.llama.cache import FixedCache
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native import graphs, loop
from evo_grpo.rollout.native.engine import NativeEngine
from evo_grpo.rollout.native.graphs import CompiledStep
from evo_grpo.rollout.sampling import Sampling

#: Requests that need kinds of steps of their own.
KINDS = {
    "plain": {},
    "more rows": {"samples": 5},
    "filtered": {"repetition_penalty": 1.2, "top_p": 0.9, "min_output_tokens": 3},
}

pytestmark = [
    # torch's own, when its compiler is loaded.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """The cache and blocks of steps of a GPU."""
    torch.compiler.reset()
    monkeypatch.setattr(decode, "cache_for", lambda device, *layers: FixedCache(*layers))
    monkeypatch.setattr(loop, "block_of", lambda device: 8)


@pytest.fixture
def eager(monkeypatch):
    """Trace and check steps as torch.compile does, without making kernels."""
    made = []

    def traced(call, *, options, **how):
        made.append(options)
        return torch.compile(call, backend="eager", **how)

    monkeypatch.setattr(graphs, "torch", _Torch(traced))
    return made


class _Torch:
    def __init__(self, compile):
        self.compile = compile

    def __getattr__(self, name):
        return getattr(torch, name)


def drawn(slots, engine, samples=3, **sampling):
    sampling = Sampling(temperature=0.9, max_output_tokens=20, **sampling)
    out = engine.rollout(
        [
            RolloutRequest(slot, name, prompts_of(3, 9, 1, 6), samples, sampling, slot)
            for slot, name in enumerate(slots.names)
        ]
    )
    return [ids_of(groups) for groups in out]


def compiled_engine(slots, monkeypatch, mode="default"):
    """Norms stay as they are: the test is about the step."""
    monkeypatch.setattr(slots.base, "compiled", mode)
    return NativeEngine(slots)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_compiled_steps_draw_the_same_tokens_while_rows_leave(name, eager, monkeypatch):
    build = architectures.FAMILIES.get(name, tiny.llama)
    slots = tiny.population(build(), (4, 2, 8))
    expected = [drawn(slots, NativeEngine(slots), **kind) for kind in KINDS.values()]
    steps = count_steps(monkeypatch)
    engine = compiled_engine(slots, monkeypatch)
    assert [drawn(slots, engine, **kind) for kind in KINDS.values()] == expected
    assert set(steps) == {"compiled"}
    assert len(eager) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_kernels_of_a_compiler_draw_the_same_tokens(mode, monkeypatch):
    slots = tiny.population(architectures.FAMILIES["qwen3"](), (4, 2, 8))
    expected = drawn(slots, NativeEngine(slots))
    steps = count_steps(monkeypatch)
    assert drawn(slots, compiled_engine(slots, monkeypatch, mode)) == expected
    assert set(steps) == {"compiled"}


def test_cuda_graphs_hold_the_compiled_step_not_graphs_of_the_compiler(eager, monkeypatch):
    held = []

    class Graphs:
        work = True

        def forget(self):
            pass

        def run(self, step, memory, count):
            held.append((memory, count))
            for _ in range(count):
                step()

    slots = tiny.population(tiny.llama(), (4, 2))
    expected = drawn(slots, NativeEngine(slots))
    steps = count_steps(monkeypatch)
    engine = compiled_engine(slots, monkeypatch, "reduce-overhead")
    engine._graphs = Graphs()
    assert drawn(slots, engine) == expected
    assert sum(count for _, count in held) == len(steps)
    assert eager[0]["triton.cudagraphs"] is False


def test_a_step_that_cannot_be_compiled_runs_as_it_is_and_says_why_once(eager, monkeypatch):
    slots = tiny.population(tiny.llama(), (4, 2))
    expected = drawn(slots, NativeEngine(slots))
    begin = FixedCache.begin

    def breaks(self):
        begin(self)
        torch._dynamo.graph_break()

    monkeypatch.setattr(FixedCache, "begin", breaks)
    assert_warns_once(slots, monkeypatch, expected)


def test_a_step_of_too_many_kinds_runs_as_it_is_and_says_why_once(eager, monkeypatch):
    monkeypatch.setattr(graphs, "_MOST", 1)
    slots = tiny.population(tiny.llama(), (4, 2))
    assert_warns_once(slots, monkeypatch, drawn(slots, NativeEngine(slots)))


def test_a_compilation_without_memory_is_repeated_with_fewer_rows(monkeypatch):
    left = [torch.OutOfMemoryError("no memory for the kernels")]

    def traced(call, *, options, **how):
        def backend(graph, inputs):
            if left:
                raise left.pop()
            return graph.forward

        return torch.compile(call, backend=backend, **how)

    monkeypatch.setattr(graphs, "torch", _Torch(traced))
    slots = tiny.population(tiny.llama(), (4, 2))
    expected = drawn(slots, NativeEngine(slots))
    steps = count_steps(monkeypatch)
    engine = compiled_engine(slots, monkeypatch)
    with pytest.warns(UserWarning, match=r"out of memory: engine\.max_decode_rows is"):
        assert drawn(slots, engine) == expected
    assert set(steps) == {"compiled"}


def assert_warns_once(slots, monkeypatch, expected):
    engine = compiled_engine(slots, monkeypatch)
    with pytest.warns(UserWarning, match=r"engine\.compile: .* runs uncompiled .*leave") as found:
        twice = [drawn(slots, engine) for _ in range(2)]
    assert twice == [expected] * 2
    assert len(found) == 1


def test_steps_of_a_growing_cache_are_not_compiled(monkeypatch):
    monkeypatch.undo()
    slots = tiny.population(tiny.llama(), (4, 2))
    monkeypatch.setattr(CompiledStep, "run", partial(pytest.fail, "compiled"))
    expected = drawn(slots, NativeEngine(slots))
    assert drawn(slots, compiled_engine(slots, monkeypatch)) == expected


def count_steps(monkeypatch):
    """Return a list that gets how each step runs; a traced step adds nothing."""
    steps, run = [], CompiledStep.run

    def counted(self, step):
        run(self, step)
        steps.append("compiled" if self._work else "plain")

    monkeypatch.setattr(CompiledStep, "run", counted)
    return steps
