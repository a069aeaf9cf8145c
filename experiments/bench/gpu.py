"""On a CUDA device: decode and learn of 8 agents against one by one, at Qwen2.5 shapes in bf16.

    python experiments/bench/gpu.py [--quick] [--shapes 0.5B 3B] [--out FILE]
    python experiments/bench/gpu.py --rehearse     a tiny model on the CPU: does the code run?

Random weights: a matmul costs the same whatever it multiplies. Shares are of what the same device
reaches in the same run: a large bf16 matmul, and a large copy (read and write counted).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import Report, parser, quiet
from peers import PeerError

THREADS = quiet()

import torch  # noqa: E402 -- after the threads are fixed, as what follows
from decode import hf_generate, vllm_peer  # noqa: E402
from jobs import EMBEDDED, Job, Work, population  # noqa: E402
from shapes import LARGE  # noqa: E402
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from evo_grpo.model.base import SharedBase  # noqa: E402

SHAPES = {
    **LARGE,
    "rehearsal": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 128, "vocab_size": 512,
    },
}  # fmt: skip
AGENTS = 8
MICRO_BATCH = 16_384


@dataclass(frozen=True)
class Place:
    """Where it runs.

    Attributes:
        device: The device.
        dtype: Of the base.
    """

    device: torch.device
    dtype: torch.dtype

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
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

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> float | None:
        """Return the peak of allocated memory in MiB."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device) / 2**20


def build(shape: str, place: Place) -> SharedBase:
    """Make a model of a shape with random weights, on the device."""
    config = Qwen2Config(
        max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        bos_token_id=2, **SHAPES[shape],
    )  # fmt: skip
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        # Made where it will stay: 3B in fp32 on the host first would be slow.
        with torch.device(place.device):
            torch.set_default_dtype(place.dtype)
            try:
                model = Qwen2ForCausalLM(config)
            finally:
                torch.set_default_dtype(torch.float32)
    return SharedBase(model.eval(), AutoTokenizer.from_pretrained(EMBEDDED), shape)


def peaks(report: Report, place: Place, size: int, repeats: int) -> tuple[float, float]:
    """Return what the device reaches: FLOPs per second of a matmul, bytes per second of a copy."""
    left = torch.randn(size, size, device=place.device, dtype=place.dtype)
    flops = 2 * size**3 / place.seconds(lambda: left @ left, repeats, warmup=3)
    source = torch.zeros(size * size * 4, device=place.device, dtype=place.dtype)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size()
    rate = copied / place.seconds(lambda: target.copy_(source), repeats, warmup=3)
    report.add("The device", matmul_tflops=flops / 1e12, copy_gb_per_second=rate / 1e9)
    return flops, rate


def speed(
    report: Report,
    shape: str,
    place: Place,
    work: Work,
    reached: tuple[float, float],
    repeats: int,
    vllm: Path | None,
) -> None:
    """Compare 8 agents in one batch with one by one, and both phases with the device's rates."""
    base = build(shape, place)
    # As many tokens in a pass as a run takes on a large card.
    sizes: dict[str, Any] = {"beta": 0.0, "max_tokens_per_microbatch": MICRO_BATCH}
    cohort, slots = population(base, AGENTS, work, cuda_graphs=False, **sizes)
    together = Job(cohort, slots, work)
    alone = [Job(cohort, [slot], work) for slot in slots]
    generate = place.pair(together.generate, lambda: [j.generate() for j in alone], repeats)
    learn = place.pair(together.learn, lambda: [j.learn() for j in alone], repeats)
    # Which is what a round is beside rewards and evaluation.
    whole = place.pair(together.both, lambda: [j.both() for j in alone], repeats)
    weights = base.weights()
    parameters = sum(value.numel() for value in weights.values())
    width = next(iter(weights.values())).element_size()
    config = base.model.config
    head_dim = config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * width
    # Each step reads the weights once and the cache as long as it is then, half of T on average.
    step_bytes = parameters * width + together.rows * cache * (work.prompt_tokens + work.tokens / 2)
    tokens = together.rows * (work.tokens + work.prompt_tokens)
    rate = 4 * parameters * tokens / learn[0]
    count = together.rows

    def add(phase: str, ours: float, theirs: float | None, share: float | None) -> None:
        what = f"{AGENTS} agents at once over one by one, Qwen2.5-{shape} shape, {place.dtype}"
        progress(what, phase=phase, seconds=ours, one_by_one=theirs, share=share)
        report.add(
            what, phase=phase, rows=count, tokens=work.tokens, at_once=ours,
            one_by_one=theirs, faster=None if theirs is None else theirs / ours,
            tokens_per_second=count * work.tokens / ours, share_of_device=share,
            of=None if share is None else "matrix peak" if phase == "learn" else "bandwidth",
        )  # fmt: skip

    bandwidth = step_bytes * work.tokens / reached[1]
    add("generate", *generate, bandwidth / generate[0])
    add("learn", *learn, rate / reached[0])
    add("generate and learn", *whole, None)
    alone.clear()
    del cohort, together
    cohort, slots = population(build(shape, place), AGENTS, work, **sizes)
    job = Job(cohort, slots, work)
    fastest = against_libraries(report, shape, place, job, repeats, vllm)
    if place.device.type == "cuda":
        add("generate, CUDA graphs", fastest, None, bandwidth / fastest)
    report.at_least(f"decode, 8 agents over one by one, {shape}", generate[1] / generate[0], 5.0)
    report.at_least(f"learn, 8 agents over one by one, {shape}", learn[1] / learn[0], 1.5)
    report.at_least(f"learn, share of the matrix peak, {shape}", rate / reached[0], 0.4)


def against_libraries(
    report: Report, shape: str, place: Place, job: Job, repeats: int, vllm: Path | None
) -> float:
    """Compare generate with that of other libraries, and return its seconds.

    The base without adapters through transformers' generate, and the agents through vLLM, by the
    interpreter `vllm`; None leaves vLLM out.
    """
    plain = build(shape, place).model
    ids = torch.tensor([p.token_ids for p in job.prompts], device=place.device)
    ids = ids.repeat_interleave(job.rows // len(ids), 0)
    generated = partial(hf_generate, plain, ids, job.work.tokens)

    def add(side: str, pair: tuple[float, float]) -> None:
        found = {"ours": pair[0], "theirs": pair[1]}
        report.add(
            f"Generate against other libraries, Qwen2.5-{shape} shape", side=side, **found,
            ours_is_faster=pair[1] / pair[0],
        )  # fmt: skip
        progress(side, **found)

    pair = place.pair(job.generate, generated, repeats)
    add("HF, no LoRA", pair)
    ahead, beside = f"generate, vLLM over ours, {shape}", None
    del plain, generated
    if vllm is not None:
        lengths = [job.work.tokens] * job.rows
        eager = place.device.type == "cpu"
        try:
            with ExitStack() as stack:
                peer = stack.enter_context(vllm_peer(job, lengths, stack, eager=eager, python=vllm))
                beside = place.pair(job.generate, lambda: peer.ask("generate"), repeats)
                add("vLLM", beside)
        except PeerError as error:
            progress("vLLM", not_measured=error)
    report.at_least(ahead, beside and beside[1] / beside[0], 1.0)
    return pair[0]


def steps(report: Report, shape: str) -> None:
    """Measure a replayed decode step by kernels, and hold it against what it should cost.

    The aim is a share of the least time: the sum over parts of the larger of bytes over the
    bandwidth and FLOPs over the matrix peak.
    """
    from decode_kernels import Peak, agents, parts, rollouts  # it needs Triton

    peak, own = Peak.measured(), agents(shape)
    for rows, aim in ((256, 0.6 if shape == "3B" else None), (64, 0.5)):
        job, times = rollouts(*own, rows)
        step, share = parts(job, peak)
        report.add(f"A decode step by kernels, Qwen2.5-{shape} shape", rows=rows, ms=step,
                   share=share, **times)  # fmt: skip
        if aim is not None:
            report.at_least(f"decode step, share of the least time, {shape}, {rows}", share, aim)
        if rows == 64:
            ours, torch_alone = times["sampler_gap_on"], times["sampler_gap_off"]
            report.at_most(f"sampler_gap, kernels over torch, {shape}", ours / torch_alone, 1.0)
        elif shape == "0.5B":
            report.at_most("decode step, ms, 0.5B, 256 rows", step, 1.6)


def progress(what: str, **values: object) -> None:
    """Print a measurement at once: a later one may not fit into the time."""
    print(what, *(f"{name} {value}" for name, value in values.items()), file=sys.stderr, flush=True)


def compiled(report: Report, shape: str, place: Place, work: Work, repeats: int) -> None:
    """Compare both phases with `engine.compile: default`, and report the first, which compiles."""
    sizes: dict[str, Any] = {"beta": 0.0, "max_tokens_per_microbatch": MICRO_BATCH}
    cohort, slots = population(build(shape, place), AGENTS, work, **sizes)
    job = Job(cohort, slots, work)
    calls = {"generate": job.generate, "learn": job.learn}
    plain = {phase: place.seconds(call, repeats) for phase, call in calls.items()}
    cohort.base.compile("default")
    for phase, call in calls.items():
        first = place.seconds(call, 1, 0)
        seconds = place.seconds(call, repeats)
        found = {"plain": plain[phase], "compiled": seconds, "first": first}
        report.add(
            f"engine.compile, {AGENTS} agents, Qwen2.5-{shape} shape", phase=phase, **found,
            faster=plain[phase] / seconds,
        )  # fmt: skip
        progress("compile", phase=phase, **found)


#: What the CUDA runtime is asked for, by the names of the profiler's events.
CALLS = {
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "graphs": ("cudaGraphLaunch",),
    "copies": ("cudaMemcpyAsync",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}


def launches(report: Report, shape: str, place: Place, work: Work) -> None:
    """Count what one call of each phase asks of the device, and the share of time it computes."""
    if place.device.type != "cuda":
        return
    from torch.profiler import ProfilerActivity, profile

    # A few steps: the profiler takes long over many events.
    work = replace(work, tokens=min(work.tokens, 10))
    cohort, slots = population(
        build(shape, place), AGENTS, work, beta=0.0, max_tokens_per_microbatch=MICRO_BATCH
    )
    job = Job(cohort, slots, work)
    for phase, call, steps in (("generate", job.generate, work.tokens), ("learn", job.learn, 1)):
        call()
        place.wait()
        # CPU operators are left out: recording them would slow down what is measured.
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            start = time.perf_counter()
            call()
            place.wait()
            seconds = time.perf_counter() - start
        found = seen.key_averages()
        counts = {
            name: sum(one.count for one in found if one.key in keys) for name, keys in CALLS.items()
        }
        busy = sum(one.self_device_time_total for one in found) / 1e6
        progress(phase, **counts, seconds=seconds, busy=busy)
        longest = sorted(found, key=lambda one: -one.self_device_time_total)[:12]
        for one in longest:
            milliseconds = one.self_device_time_total / 1e3
            report.add(
                f"Longest kernels, {phase}", name=one.key[:60], ms=milliseconds, count=one.count
            )
            progress(f"  {one.key[:90]}", count=one.count, ms=milliseconds)
        report.add(
            f"What is asked of the device, {AGENTS} agents, Qwen2.5-{shape} shape",
            phase=phase, **counts, launches_per_step=counts["launches"] / steps,
            seconds=seconds, busy=busy / seconds,
        )  # fmt: skip


def memory(report: Report, shape: str, place: Place, work: Work, sizes: tuple[int, ...]) -> None:
    """Report the peak over N; each agent brings its own rows."""
    for size in sizes:
        base = build(shape, place)
        place.wait()
        place.reset_peak()
        cohort, slots = population(base, size, work)
        job = Job(cohort, slots, work)
        generated = place.peak()
        place.reset_peak()
        # Twice: the first step makes AdamW's moments.
        job.learn()
        job.learn()
        report.add(
            f"Peak memory, Qwen2.5-{shape} shape (MiB)",
            N=size, rows=job.rows, generate=generated, learn=place.peak(),
        )  # fmt: skip
        progress("peak MiB", N=size, generate=generated, learn=place.peak())
        del base, cohort, job


def arguments() -> argparse.Namespace:
    """Read the command line."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument("--shapes", nargs="+", choices=["0.5B", "3B"], default=["0.5B", "3B"])
    parts = ["steps", "speed", "launches", "memory"]
    # Compiling takes minutes, so it is measured where asked for.
    given.add_argument("--parts", nargs="+", choices=[*parts, "compile"], default=parts)
    given.add_argument("--vllm", type=Path, metavar="PYTHON", help="an interpreter that has vLLM")
    given.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    return given.parse_args()


def main() -> int:
    """Measure each shape."""
    given = arguments()
    report = Report("gpu", given)
    if not given.rehearse and not torch.cuda.is_available():
        why = "no CUDA device"
        print(f"not measured: {why}")
        for shape in given.shapes:
            report.at_least(f"decode, 8 agents over one by one, {shape}", None, 5.0, why)
            report.at_least(f"learn, 8 agents over one by one, {shape}", None, 1.5, why)
        return report.finish()
    small = given.quick or given.rehearse
    given.quick = small
    place = Place(torch.device("cuda"), torch.bfloat16)
    if given.rehearse:
        place = Place(torch.device("cpu"), torch.float32)
    else:
        name = torch.cuda.get_device_name()
        report.add("The device", name=name, cuda=torch.version.cuda)
    repeats = given.repeats or (1 if small else 5)
    reached = peaks(report, place, 256 if given.rehearse else 8192, repeats)
    work = Work(1, 4, 4) if given.rehearse else Work(4, 8, 16 if small else 128, prompt_tokens=64)
    shapes = ["rehearsal"] if given.rehearse else given.shapes[:1] if small else given.shapes
    for shape in shapes:
        if "steps" in given.parts and not given.rehearse:
            steps(report, shape)
        if "speed" in given.parts:
            speed(report, shape, place, work, reached, repeats, given.vllm)
        if "compile" in given.parts:
            compiled(report, shape, place, work, repeats)
        if "launches" in given.parts:
            launches(report, shape, place, work)
        if "memory" in given.parts:
            memory(report, shape, place, work, (1, 8) if small else (1, 8, 32))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
