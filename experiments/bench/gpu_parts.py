"""The parts of gpu.py, which starts each with `--child JOB`: its command line and `part`."""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, chdir, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from common import HERE, ROOT, Live, Report, quiet, say
from peers import Peer, PeerError

THREADS = quiet()

import torch  # noqa: E402 -- after the threads are fixed, as what follows
from decode import hf_generate, vllm_peer  # noqa: E402
from device import (  # noqa: E402
    Place,
    Rates,
    add_longest,
    build,
    busy_seconds,
    config_of,
    gpu_of,
    kernels_of,
    rehearsed,
    row_of,
)
from jobs import Job, Work, population, questions  # noqa: E402
from rounds import DEFAULT, play  # noqa: E402
from shapes import BETA, EMBEDDED, question  # noqa: E402

from evo_grpo import run  # noqa: E402
from evo_grpo import settings as configuration  # noqa: E402
from evo_grpo.errors import EvoGrpoError  # noqa: E402
from evo_grpo.record.observer import Observer  # noqa: E402
from evo_grpo.record.records import RoundRecord  # noqa: E402
from evo_grpo.training.sizing.cards import CARDS, Gpu  # noqa: E402
from evo_grpo.training.sizing.duration import LAUNCH, Duration, duration_of  # noqa: E402
from evo_grpo.training.sizing.machine import Fit, Setup, fit_of  # noqa: E402
from evo_grpo.training.sizing.memory import total  # noqa: E402
from evo_grpo.training.sizing.model_size import from_config  # noqa: E402

AGENTS = 8
REAL = ROOT / "examples" / "real_model" / "population.yaml"
CURVES = HERE / "results" / "real-model.json"
NO_CARD = "it needs a CUDA device"


@dataclass(frozen=True)
class Bench:
    """What a part gets.

    Attributes:
        report: Where its numbers go.
        place: Where it computes.
        given: The command line.
    """

    report: Live
    place: Place
    given: argparse.Namespace

    @property
    def small(self) -> bool:
        """Whether sizes are the smallest."""
        return self.given.quick

    @property
    def shapes(self) -> list[str]:
        """The shapes that are measured."""
        if self.given.rehearse:
            return ["rehearsal"]
        return self.given.shapes[:1] if self.small else self.given.shapes

    @property
    def work(self) -> Work:
        """What every agent generates and learns from."""
        if self.given.rehearse:
            return Work(1, 4, 4)
        return Work(4, 8, 16 if self.small else 128, prompt_tokens=64)

    @property
    def repeats(self) -> int:
        """Samples of each number."""
        return self.given.repeats or (1 if self.small else 3)

    @cached_property
    def rates(self) -> Rates:
        """What the device reaches."""
        known = getattr(self.given, "rates", None)
        return Rates(**known) if known else Rates.measured(self.place)

    def fit(self, shape: str, agents: int = AGENTS) -> tuple[Fit, Duration | None]:
        """Return the plan of a step of agents of a shape on this card, and its seconds."""
        work, gpu = self.work, gpu_of(self.place)
        if gpu.card is None:
            CARDS["measured"] = row_of(gpu, self.rates)
            gpu = Gpu("measured", gpu.bytes)
        algorithm = {
            "group_size": work.groups, "prompts_per_step": work.prompts, "update_epochs": 1,
            "max_output_tokens": work.tokens, "max_model_len": work.prompt_tokens + work.tokens,
        }  # fmt: skip
        config = configuration.from_dict(
            {
                "model": {"name": str(EMBEDDED), "lora": {"r": 8}},
                "env": {"kind": "sums"},
                "population": {"size": agents, "rounds": 1, "steps_per_round": 1},
                "algorithm": {**algorithm, "beta": 0.0},
                "evolve": {
                    "archive": False, "selection": {"kind": "none"}, "fitness": {"prompts": 1},
                },
            }
        )  # fmt: skip
        size = from_config(shape, config_of(shape).to_dict())
        dtype = str(self.place.dtype).removeprefix("torch.")
        setup = Setup(size, work.tokens, dtype, "cuda", gpu.bytes, "the card", 1, gpu)
        found = fit_of(config, setup)
        assert found is not None
        rows = agents * work.prompts * int(work.groups)
        return found, duration_of(
            config, found, prompt=work.prompt_tokens, turns=1, rows=rows, evaluated=()
        )

    def job(self, shape: str, agents: int = AGENTS, **settings: Any) -> Job:
        """Return agents of a shape with the limits of batches that a run chooses on this card."""
        limits = {
            name.rpartition(".")[2]: n for name, n in self.fit(shape, agents)[0].chosen.items()
        }
        settings = {"beta": 0.0, **limits, **settings}
        cohort, slots = population(build(shape, self.place), agents, self.work, **settings)
        return Job(cohort, slots, self.work)


# --- card


def card(bench: Bench) -> None:
    """Measure the rates of the device, and print them as a row of the table of cards."""
    gpu, rates = gpu_of(bench.place), bench.rates
    bench.report.add("card, rates", **rates._asdict(), planned_launch=LAUNCH)
    name = next((known for known, row in CARDS.items() if row is gpu.card), gpu.name.lower())
    values = ", ".join(f'"{x}"' if isinstance(x, str) else f"{x:g}" for x in row_of(gpu, rates))
    bench.report.add("card, of the table", row=f'"{name}": Card({values}),')


# --- plan and memory


def plan(bench: Bench) -> None:
    """Compare the plan of each shape with what its phases take."""
    for shape in bench.shapes:
        compare(bench, shape, AGENTS, timed=True)


def memory(bench: Bench) -> None:
    """Compare the planned memory with the measured one, for few agents and many."""
    for shape in bench.shapes:
        for agents in (4,) if bench.small else (1, 32):
            compare(bench, shape, agents, timed=False)


def compare(bench: Bench, shape: str, agents: int, *, timed: bool) -> None:
    """Report planned and measured bytes of a step, and its seconds; each agent has its own rows."""
    report, place = bench.report, bench.place
    table = f"plan, Qwen2.5-{shape} shape, {agents} agents"

    def add(what: str, planned: float | None, measured: float | None, **more: object) -> None:
        ratio = planned / measured if planned and measured else None
        report.add(table, what=what, planned=planned, measured=measured, ratio=ratio, **more)
        allowed = 0.3 if what.startswith("s,") else 0.1
        off = None if ratio is None else abs(ratio - 1)
        report.at_most(f"|planned / measured - 1|, {what}, {shape}, {agents} agents", off, allowed,
                       "" if measured else NO_CARD)  # fmt: skip

    fit, duration = bench.fit(shape, agents)
    place.reset_peak()
    before = place.held() or 0
    base = build(shape, place)
    parts = {part.name: part.bytes / 2**20 for part in fit.plan.held}
    weights = place.held()
    add("MiB, base", parts["base"], weights and (weights - before) / 2**20)
    limits = {name.rpartition(".")[2]: number for name, number in fit.chosen.items()}
    cohort, slots = population(base, agents, bench.work, beta=0.0, **limits)
    job = Job(cohort, slots, bench.work)
    job.learn()  # the moments of AdamW come with the first step
    held = place.held()
    add("MiB, agents", parts["agents"], held and weights and (held - weights) / 2**20)
    libraries = parts["Python and libraries"]  # and the context of CUDA, which torch does not count
    phases = (
        ("generate", job.generate, fit.plan.sampling, duration and duration.generate),
        ("learn", job.learn, fit.plan.learning, duration and duration.learn),
    )
    for phase, call, extra, planned in phases:
        place.reset_peak()
        seconds = place.seconds(call, bench.repeats if timed else 1, warmup=int(timed))
        if timed:
            add(f"s, {phase}", planned, seconds)
        allocated, reserved = place.peaks() or (None, None)
        peak = total(fit.plan.held) / 2**20 - libraries + total(extra) / 2**20
        add(f"MiB, peak of {phase}", peak, allocated and allocated / 2**20,
            reserved=reserved and reserved / 2**20)  # fmt: skip


# --- real


class Curve(Observer):
    """Reports the fitness of the best agent by round, and of it and the base on the test.

    Args:
        report: Where it goes.
        side: What is run.
        beside: The same on the CPU: seeds, base, rounds and test.
    """

    def __init__(self, report: Report, side: str, beside: dict[str, Any]) -> None:
        """Nothing has been played."""
        self.report, self.side, self.beside = report, side, beside
        self.began = time.perf_counter()

    def _add(self, what: str, value: float, cpu: Sequence[float]) -> None:
        known = {"cpu": mean(cpu), "cpu_low": min(cpu), "cpu_high": max(cpu)} if cpu else {}
        seconds = time.perf_counter() - self.began
        self.report.add(f"real, {self.side}", what=what, fitness=value, **known, seconds=seconds)

    def round_done(self, record: RoundRecord) -> None:
        """Report the best agent of a round."""
        best = max(agent.score.mean for agent in record.agents if agent.score is not None)
        curves = self.beside.get("rounds", [])
        cpu = [curve[record.round] for curve in curves if record.round < len(curve)]
        self._add(f"best of round {record.round}", best, cpu)

    def finished(self, summary: Any) -> None:  # noqa: ANN401 -- JSON
        """Report the test."""
        self._add("base, test", summary["base"]["mean"], self.beside.get("base", []))
        self._add("best, test", summary["best"]["mean"], self.beside.get("test", []))


def real(bench: Bench) -> None:
    """Run the example with a real model, and report its curve beside the CPU's."""
    if bench.given.rehearse:
        path, own = DEFAULT, ["population.rounds=2", "population.steps_per_round=1"]
        own += ["evolve.fitness.prompts=8", "evolve.fitness.test_prompts=8"]
        own += [f"engine.device={bench.place.device.type}", "population.size=4"]
    elif REAL.is_file():
        path, own = REAL, list[str]()
    else:
        say("real: not measured", why=f"{REAL.relative_to(ROOT)} is not there")
        return
    curves = json.loads(CURVES.read_text()) if CURVES.is_file() and path is REAL else {}
    sides = {"fp32": ["engine.dtype=float32"], "bf16": ["engine.dtype=bfloat16"]}
    if bench.given.vllm is not None:
        python = f"engine.vllm.python={bench.given.vllm}"
        sides["vllm"] = ["engine.rollout=vllm", python]
    for side, overrides in sides.items():
        bench.place.reset_peak()  # an engine in another process wants what is not in use
        beside = curves.get("vllm", {}) if side == "vllm" else curves
        with tempfile.TemporaryDirectory(prefix="bench-real-") as folder, chdir(path.parent):
            try:
                config = configuration.load(path, [*own, *overrides])
                run(config, out=Path(folder) / "run", observer=Curve(bench.report, side, beside))
            except EvoGrpoError as error:
                say(f"real, {side}: not measured", why=error)


# --- round


class Span(NamedTuple):
    """What a profile saw: start and end in nanoseconds since 1970."""

    start: int
    end: int
    name: str


def covered(spans: Iterable[Span], start: int, end: int) -> tuple[float, list[dict[str, Any]]]:
    """Return the seconds in which at least one span lasts, and the gaps, the longest first."""
    busy, at, last, gaps = 0, start, "the start", list[dict[str, Any]]()
    for one in [*sorted(s for s in spans if s.end > start and s.start < end),
                Span(end, end, "the end")]:  # fmt: skip
        if one.start > at:
            gaps.append({"ms": (one.start - at) / 1e6, "at": (at - start) / 1e9,
                         "after": last[:40], "before": one.name[:40]})  # fmt: skip
        busy += max(0, min(one.end, end) - max(one.start, at))
        if one.end > at:
            at, last = one.end, one.name
    return busy / 1e9, sorted(gaps, key=lambda gap: -gap["ms"])


#: A model of random weights says nothing that another reward tells apart, and learns from no group
#: of equal rewards.
REWARD = """
import random

def reward(completion, **columns):
    return random.random()
"""


def whole_round(bench: Bench) -> None:
    """Play a round as a run does, under the profiler, and report when the device computes."""
    from torch.profiler import ProfilerActivity, profile

    shape, place, on_card = bench.shapes[0], bench.place, bench.place.is_cuda
    seen: dict[str, Any] = {}

    @contextmanager
    def around(number: int) -> Generator[None]:
        if number == 0:  # it warms up
            yield
            return
        kind = ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU
        with profile(activities=[kind]) as seen["profile"]:
            seen["start"] = time.time_ns()
            yield
            place.wait()
            seen["end"] = time.time_ns()

    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder, chdir(folder):
        build(shape, place).save(Path("model"))
        start = question(0, bench.work.prompt_tokens - 3)
        rows = [{"question": f"{start}{i:03}"} for i in range(400)]
        Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        Path("drawn.py").write_text(REWARD)
        env = '{kind: dataset, train: rows.jsonl, prompt: "{question}", reward: "drawn:reward"}'
        settings = {
            "env": env,
            "model.name": f"{folder}/model", "engine.device": place.device.type,
            "algorithm.max_output_tokens": bench.work.tokens,
            "algorithm.min_output_tokens": bench.work.tokens,
            "population.steps_per_round": 1 if bench.small else 4, **bench.fit(shape)[0].chosen,
        }  # fmt: skip
        if bench.small:
            settings |= {"algorithm.prompts_per_step": 1, "evolve.fitness.prompts": 2}
        lines = play(Path(folder), 1, [f"{k}={v}" for k, v in settings.items()], around)
    table = f"round, Qwen2.5-{shape} shape, {AGENTS} agents"
    bench.report.add(f"{table} (seconds)", **lines[0])
    cuda, found = torch.autograd.DeviceType.CUDA, list[tuple[bool, Span]]()
    for one in seen["profile"].profiler.kineto_results.events():
        span = Span(one.start_ns(), one.start_ns() + one.duration_ns(), one.name())
        found.append((one.device_type() == cuda, span))
    kernels = [s for device, s in found
               if device is on_card and not s.name.startswith(("Memcpy", "Memset"))]  # fmt: skip
    busy, gaps = covered(kernels, seen["start"], seen["end"])
    share = busy / (seen["end"] - seen["start"]) * 1e9
    waits = [s for device, s in found if not device and s.name in CALLS["waits"]]
    bench.report.add(table, kernels=len(kernels), busy=busy, waits=len(waits),
                     waited=sum(s.end - s.start for s in waits) / 1e9)  # fmt: skip
    for gap in gaps[:10]:
        bench.report.add("round, longest gaps", **gap)
    bench.report.at_least(f"round, share of the time in which the device computes, {shape}",
                          share if on_card else None, 0.85, "" if on_card else NO_CARD)  # fmt: skip


# --- trl


def trl(bench: Bench) -> None:
    """Compare a step of the agents with as many steps of TRL, one after another."""
    shape, work, place = bench.shapes[0], bench.work, bench.place
    what = f"trl, {AGENTS} of its steps over one of {AGENTS} agents, {shape}"
    python = bench.given.trl
    if python is None and importlib.util.find_spec("trl") is None:
        bench.report.at_least(what, None, 4.0, "trl is not installed; see --trl")
        return
    job = bench.job(shape, beta=BETA)
    job.prompts = questions(work.prompts, work.prompt_tokens)
    ours = place.seconds(job.both, bench.repeats)
    job.check()
    bench.report.add("trl, generate and learn", side="ours", seconds=ours)
    asked = {
        "shape": shape, "prompts": work.prompts, "group": work.groups, "tokens": work.tokens,
        "prompt_tokens": work.prompt_tokens, "device": "cuda" if place.is_cuda else "cpu",
    }  # fmt: skip
    try:
        with Peer("trl", asked, Path(python or sys.executable)) as peer:
            peer.ask("step")
            theirs = sum(peer.ask("step")["seconds"] for _ in range(AGENTS))
    except PeerError as error:
        bench.report.at_least(what, None, 4.0, str(error))
        return
    bench.report.add(
        "trl, generate and learn", side="TRL", seconds=theirs, **peer.facts["versions"]
    )
    bench.report.at_least(what, theirs / ours, 4.0)


# --- steps, speed, launches


def steps(bench: Bench) -> None:
    """Measure a replayed decode step by kernels, and hold it against what it should cost.

    The aim is a share of the least time: the sum over parts of the larger of bytes over the
    bandwidth and FLOPs over the matrix peak.
    """
    if importlib.util.find_spec("triton") is None:
        say("steps: not measured", why="triton is not installed")
        return
    from decode_kernels import agents, parts, rollouts

    report, rates = bench.report, bench.rates
    for shape in bench.shapes:
        own = agents(shape)
        sizes = ((256, 0.6 if shape == "3B" else None), (64, 0.5))
        for rows, aim in sizes if bench.place.is_cuda else ((4, None),):
            job, times = rollouts(*own, rows)
            step, share = parts(job, rates)
            report.add(f"steps, Qwen2.5-{shape} shape", rows=rows, ms=step, share=share, **times)
            if aim is not None:
                report.at_least(f"decode step, share of the least time, {shape}, {rows}", share,
                                aim)  # fmt: skip
            if rows <= 64:
                ours, torch_alone = times["sampler_gap_on"], times["sampler_gap_off"]
                report.at_most(f"sampler_gap, kernels over torch, {shape}", ours / torch_alone, 1.0)
            elif shape == "0.5B":
                report.at_most("decode step, ms, 0.5B, 256 rows", step, 1.6)


def speed(bench: Bench) -> None:
    """Compare 8 agents in one batch with one by one, and both phases with the device's rates."""
    report, place, rates, work = bench.report, bench.place, bench.rates, bench.work
    for shape in bench.shapes:
        together = bench.job(shape, cuda_graphs=False)
        cohort, count = together.cohort, together.rows
        alone = [Job(cohort, [slot], work) for slot in together.slots]

        def one_by_one(phase: str, alone: list[Job] = alone) -> None:
            for job in alone:
                getattr(job, phase)()

        generate = place.pair(together.generate, partial(one_by_one, "generate"), bench.repeats)
        learn = place.pair(together.learn, partial(one_by_one, "learn"), bench.repeats)
        weights = cohort.base.weights()
        parameters = sum(value.numel() for value in weights.values())
        width = next(iter(weights.values())).element_size()
        config = cohort.base.model.config
        head_dim = config.hidden_size // config.num_attention_heads
        cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * width
        # Each step reads the weights once and the cache as long as it is then, half of T on
        # average.
        step_bytes = parameters * width + count * cache * (work.prompt_tokens + work.tokens / 2)
        least = step_bytes * work.tokens / rates.read
        share = 4 * parameters * count * (work.tokens + work.prompt_tokens) / learn[0] / rates.flops

        def add(phase: str, ours: float, theirs: float | None, share: float, shape: str = shape,
                count: int = count) -> None:  # fmt: skip
            report.add(
                f"speed, Qwen2.5-{shape} shape, {AGENTS} agents over one by one", phase=phase,
                rows=count, at_once=ours, one_by_one=theirs, faster=theirs and theirs / ours,
                tokens_per_second=count * work.tokens / ours, share_of_device=share,
            )  # fmt: skip

        add("generate, without graphs", *generate, least / generate[0])
        add("learn", *learn, share)
        report.at_least(
            f"generate, 8 agents over one by one, {shape}", generate[1] / generate[0], 5
        )
        report.at_least(f"learn, 8 agents over one by one, {shape}", learn[1] / learn[0], 1.5)
        report.at_least(f"learn, share of the matrix peak, {shape}", share, 0.4)
        del cohort, together
        alone.clear()
        fastest = against_libraries(bench, shape)
        add("generate", fastest, None, least / fastest)


def against_libraries(bench: Bench, shape: str) -> float:
    """Compare generate with that of other libraries, and return its seconds.

    The base without adapters through transformers' generate, and the agents through vLLM, by the
    interpreter of --vllm.
    """
    report, place, job = bench.report, bench.place, bench.job(shape)
    plain = build(shape, place).model
    ids = torch.tensor([p.token_ids for p in job.prompts], device=place.device)
    ids = ids.repeat_interleave(job.rows // len(ids), 0)

    def add(side: str, pair: tuple[float, float]) -> None:
        report.add(f"speed, generate against other libraries, Qwen2.5-{shape} shape", side=side,
                   ours=pair[0], theirs=pair[1], ours_is_faster=pair[1] / pair[0])  # fmt: skip

    pair = place.pair(
        job.generate, partial(hf_generate, plain, ids, job.work.tokens), bench.repeats
    )
    add("HF, no LoRA", pair)
    what = f"generate, vLLM over ours, {shape}"
    del plain
    if bench.given.vllm is None:
        report.at_least(what, None, 1.0, "see --vllm")
        return pair[0]
    lengths, python = [job.work.tokens] * job.rows, Path(bench.given.vllm)
    try:
        with ExitStack() as stack:
            eager = not place.is_cuda
            peer = stack.enter_context(vllm_peer(job, lengths, stack, eager=eager, python=python))
            beside = place.pair(job.generate, lambda: peer.ask("generate"), bench.repeats)
            add("vLLM", beside)
            report.at_least(what, beside[1] / beside[0], 1.0)
    except PeerError as error:
        report.at_least(what, None, 1.0, str(error))
    return pair[0]


#: What the CUDA runtime is asked for, by the names of the profiler's events.
CALLS = {
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "graphs": ("cudaGraphLaunch",),
    "copies": ("cudaMemcpyAsync",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}


def launches(bench: Bench) -> None:
    """Count what one call of each phase asks of the device, and the share of time it computes."""
    if not bench.place.is_cuda:
        say("launches: not measured", why=NO_CARD)
        return
    # A few steps: the profiler takes long over many events.
    few = replace(bench.work, tokens=min(bench.work.tokens, 10))
    for shape in bench.shapes:
        job = bench.job(shape)
        job.work = few
        for phase, call, steps in (("generate", job.generate, few.tokens), ("learn", job.learn, 1)):
            found = kernels_of(bench.place, call)
            counts = {
                name: sum(one.count for one in found if one.key in keys)
                for name, keys in CALLS.items()
            }
            seconds, busy = bench.place.seconds(call, 1, 0), busy_seconds(found)
            bench.report.add(
                f"launches, Qwen2.5-{shape} shape, {AGENTS} agents", phase=phase, **counts,
                launches_per_step=counts["launches"] / steps, seconds=seconds, busy=busy / seconds,
            )  # fmt: skip
            add_longest(bench.report, f"launches, longest kernels, {phase}", found)


PARTS: dict[str, Callable[[Bench], None]] = {
    "card": card, "plan": plan, "real": real, "round": whole_round, "trl": trl, "steps": steps,
    "speed": speed, "launches": launches, "memory": memory,
}  # fmt: skip


def main() -> None:
    """Measure a part, and tell its numbers."""
    given = argparse.Namespace(**json.loads(sys.argv[-1]))
    with rehearsed() if given.rehearse else nullcontext(None) as place:
        bench = Bench(Live("gpu", given, tells=True), place or Place.on_cuda(), given)
        PARTS[given.part](bench)
    sys.stdout.flush()
    os._exit(0)  # torch takes seconds to leave


if __name__ == "__main__":
    main()
