"""A decode step by kernels on a CUDA device: are they right, what does each cost, is it faster.

    python experiments/bench/decode_kernels.py [--limit 300] [--out FILE]
    python experiments/bench/decode_kernels.py --cpu     tiny, in Triton's interpreter
    python experiments/bench/decode_kernels.py --expected     what a step should take, by counting

Prints as it goes, the most wanted first, and leaves out what does not fit into the time. Weights
are random; a step is a replayed CUDA graph inside a whole rollout, as in production.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

if "--cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
CPU = os.environ.get("TRITON_INTERPRET") == "1"

from common import BEGAN, ROOT, Live, parser, quiet  # noqa: E402 -- after the interpreter is chosen

THREADS = quiet()
sys.path.append(str(ROOT / "tests" / "helpers"))

import kernel_reference as reference  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from device import Place, Rates, add_longest, build, busy_seconds, kernels_of  # noqa: E402
from jobs import EXPECTED, Job, Work, counted, population  # noqa: E402
from torch import Tensor  # noqa: E402

from evo_grpo.model.forward.fused import population_forward  # noqa: E402
from evo_grpo.model.forward.stacks import RowLayout  # noqa: E402
from evo_grpo.model.llama.cuda import operators  # noqa: E402
from evo_grpo.model.llama.cuda.generate import KernelDecoder  # noqa: E402
from evo_grpo.model.llama.weights import LlamaWeights  # noqa: E402
from evo_grpo.population.cohort.cohort import Cohort  # noqa: E402
from evo_grpo.rollout.native.graphs import StepGraphs  # noqa: E402

PLACE = Place(torch.device("cpu" if CPU else "cuda"), torch.float32 if CPU else torch.bfloat16)
DEVICE, DTYPE = PLACE.device, PLACE.dtype
AGENTS = 2 if CPU else 8
PROMPT, TOKENS = (5, 3) if CPU else (64, 128)
#: Completions of a prompt, and ranks, of agents that differ.
UNEQUAL = ((2, 3), (4, 6)) if CPU else ((2, 14, 8, 5, 11, 8, 3, 13), (4, 8, 16, 8, 2, 8, 12, 6))
PRODUCTS = ("qkv", "o", "gate_up", "down")
REPORT = Live("decode_kernels", argparse.Namespace(quick=CPU, out=None))
say = REPORT.add


def milliseconds(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call as a replayed graph."""
    return 1e3 * PLACE.replayed(call)


# --- Are the kernels right on this card?


def random_arguments(dtype: torch.dtype) -> dict[str, tuple[list[Any], Callable[[], list[Any]]]]:
    """Return arguments of each operator, with unequal rows, ranks and odd sizes."""
    torch.manual_seed(0)
    agents, hidden, heads, kv, size, inner, vocabulary = 5, 160, 6, 2, 64, 500, 9001
    counts, ranks = [3, 16, 0, 33, 5], [8, 3, 16, 40, 0]
    rows = sum(counts)

    def noise(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, device=DEVICE) * scale).to(dtype)

    def whole(values: object) -> Tensor:
        return torch.tensor(values, device=DEVICE)

    def adapted(parts: Sequence[int]) -> list[Any]:
        column = offset = 0
        table: list[list[list[int]]] = [[] for _ in ranks]
        for part in parts:
            for agent, rank in enumerate(ranks):
                table[agent].append([column, rank, offset])
                column, offset = column + rank, offset + rank * operators.padded(part)
        width = sum(parts)
        z = noise(rows, -(-(width + column) // 64) * 64)
        return [z, z[:, width:], noise(offset, scale=0.2), whole(table), 48]

    tiles, start = [], 0
    for agent, count in enumerate(counts):
        tiles += [[start + i, min(16, count - i), agent] for i in range(0, count, 16)]
        start += count
    owners = torch.arange(agents, device=DEVICE).repeat_interleave(whole(counts))
    positions = torch.randint(0, 128, (rows,), device=DEVICE)
    cache = noise(rows, kv, 128, size), noise(rows, kv, 128, size)
    turn = noise(128, size // 2), noise(128, size // 2)
    x, weight = noise(rows, hidden), noise(hidden)
    attention = (heads + 2 * kv) * size
    logits = noise(rows, vocabulary, scale=3.0)
    temperature = torch.rand(rows, device=DEVICE) + 0.5
    ends = torch.zeros(vocabulary, dtype=torch.bool, device=DEVICE)
    ends[[1, 7]] = True
    draws = torch.rand(20, rows, device=DEVICE, dtype=torch.float64)
    drawn = torch.randint(0, 19, (rows,), device=DEVICE)
    greedy = torch.arange(rows, device=DEVICE) % 5 == 0
    heads_norms = noise(size), noise(size)

    def state() -> list[Any]:
        none = torch.zeros(rows, dtype=torch.long, device=DEVICE)
        out = torch.full((20, rows), -9, device=DEVICE), torch.zeros(20, rows, device=DEVICE)
        return [drawn.clone(), none.bool(), none, *out]

    def written() -> list[Any]:
        return [noise(rows, heads, size) * 0, *(part.clone() for part in cache)]

    return {
        "embed_norm": ([owners, noise(50, hidden), weight, 1.5, 1e-6], list),
        "qkv": (
            [
                *adapted([heads * size, kv * size, kv * size]), noise(attention), whole(tiles),
                positions, *turn, *heads_norms, 1e-6, 1e-6,
            ], written,
        ),
        "attend": ([noise(rows, heads, size), *cache, positions, size**-0.5, 0], list),
        "attend, window": ([noise(rows, heads, size), *cache, positions, size**-0.5, 37], list),
        "add_norm": ([*adapted([hidden]), None, owners, x, None, 0.0, weight, 1e-6, 1.0], list),
        "gate_up": ([*adapted([inner, inner]), None, whole(tiles), inner, False], list),
        "draw_token": (
            [
                logits, None, temperature, greedy, draws, drawn // 2 * 3, drawn + 2, ends,
                torch.arange(rows, device=DEVICE), 1.0, 0.0,
            ], state,
        ),
    }  # fmt: skip


def check() -> None:
    """Compare every kernel with torch, and print the largest differences by dtype."""
    for dtype in (torch.float32,) if CPU else (torch.bfloat16, torch.float16, torch.float32):
        worst: dict[str, float] = {}
        for name, (given, state) in random_arguments(dtype).items():
            own, key = state(), name.partition(",")[0]
            same = [t.clone() for t in own]
            if key == "draw_token":
                logits, _, temperature, _, _, minimum, _, ends, _, scale, cap = given
                given[1] = operators.weigh_blocks(
                    logits, temperature, own[0], minimum, ends, scale, cap
                )
            made = getattr(operators, key)(*given, *own)
            wanted = getattr(reference, key)(*given, *same)
            if made is not None:
                made, wanted = ((m,) if isinstance(m, Tensor) else m for m in (made, wanted))
                own, same = [*own, *made], [*same, *wanted]
            for number, (one, two) in enumerate(zip(own, same, strict=True)):
                if one.dtype.is_floating_point:
                    apart = (one.double() - two.double()).abs().max() / two.double().abs().max()
                else:
                    apart = (one != two).double().mean()
                worst[name] = max(worst.get(name, 0.0), float(apart))
                if not torch.isfinite(one.double()).all():
                    worst[f"{name} {number} not finite"] = 1.0
        say(f"check, {dtype}, largest difference over the largest value", **worst)


# --- Whole rollouts, by replayed graphs.


@contextmanager
def replays() -> Generator[list[tuple[Any, Any, int]]]:
    """Collect (begin, end, steps) of blocks of steps that are replays alone."""
    spans: list[tuple[Any, Any, int]] = []
    run = StepGraphs.run

    def watched(self: StepGraphs, step: Callable[[], None], memory: object, count: int) -> None:
        if memory != self._memory:
            run(self, step, memory, count)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(self, step, memory, count)
        end.record()
        spans.append((begin, end, count))

    StepGraphs.run = watched
    try:
        yield spans
    finally:
        StepGraphs.run = run


def step_of(job: Job) -> tuple[float, float]:
    """Return milliseconds of a replayed step of a rollout, and those of the rollout."""
    PLACE.wait()
    with replays() as spans:
        start = time.perf_counter()
        job.generate()
        PLACE.wait()
        whole = (time.perf_counter() - start) * 1e3
    steps = sum(count for _, _, count in spans)
    return sum(a.elapsed_time(b) for a, b, _ in spans) / steps if steps else 0.0, whole


def work_of(rows: int, *, unequal: bool = False) -> Work:
    """Return completions of so many rows, of all agents."""
    groups: int | tuple[int, ...] = UNEQUAL[0] if unequal else 8 if not CPU else 2
    each = sum(groups) if isinstance(groups, tuple) else groups * AGENTS
    return Work(max(1, rows // each), groups, TOKENS, PROMPT)


def agents(shape: str, *, unequal: bool = False) -> tuple[Cohort, list[int], bool]:
    """Return a population over a new base, and whether its agents differ."""
    with torch.no_grad():
        base = build(shape, PLACE)
    found = *population(
        base, AGENTS, work_of(256, unequal=unequal), beta=0.0, kernels="on",
        rank=UNEQUAL[1] if unequal else 8,
    ), unequal  # fmt: skip
    say(f"built {shape}")
    return found


def rollouts(
    cohort: Cohort, slots: list[int], unequal: bool, rows: int
) -> tuple[Job, dict[str, float]]:
    """Time the steps of a rollout with kernels and without; return the job and its times."""
    times: dict[str, float] = {}
    work = work_of(rows, unequal=unequal)
    for wanted in ("on", "off"):
        cohort.engine._kernels = wanted
        start = time.time()
        job = Job(cohort, slots, work)
        first = time.time() - start
        both = [step_of(job) for _ in range(2)]
        times[f"step_{wanted}"] = min(step for step, _ in both)
        times[f"rollout_{wanted}"] = min(whole for _, whole in both)
        times[f"first_s_{wanted}"] = first
        if rows <= 64:  # what training computes for the same tokens
            metrics = cohort.learn(job.batches(), stream=("learn", wanted))
            times[f"sampler_gap_{wanted}"] = max(one["sampler_gap"] for one in metrics)
    said = cohort.base.derived.get("kernels refused")
    say(
        f"{cohort.base.name}, {job.rows} rows, {'unequal rows and ranks' if unequal else 'rank 8'}",
        **times, faster=times["step_off"] / times["step_on"] if times["step_on"] else 0.0,
        **({"REFUSED": said} if said else {}),
    )  # fmt: skip
    return job, times


# --- The parts of a step.


class Parts:
    """The parts of a step of all layers over the cache of a rollout, each callable alone.

    Args:
        job: Of the rows.
        position: Of all rows.
    """

    def __init__(self, job: Job, position: int, stack: ExitStack) -> None:
        self.base = base = job.cohort.base
        slots = job.cohort.slots
        names = tuple(job.cohort.agents[slot].adapter for slot in job.slots)
        groups = job.work.groups
        each = groups if isinstance(groups, tuple) else (groups,) * len(names)
        layout = RowLayout(names, (job.work.prompts,) * len(names))
        fused = stack.enter_context(population_forward(slots.layers, layout, frozen=True))
        weights = LlamaWeights.of(base, slots.layers)
        columns = PROMPT + TOKENS
        self.decoder = decoder = KernelDecoder(weights, fused, columns)
        count = job.work.prompts * len(names)
        ids = torch.randint(8, 100, (count, PROMPT), device=DEVICE)
        decoder.prefill(ids, torch.full((count,), PROMPT, device=DEVICE))
        repeats = torch.tensor([n for n in each for _ in range(job.work.prompts)])
        source = torch.arange(count).repeat_interleave(repeats).to(DEVICE)
        rows = self.rows = len(source)
        decoder.expand(source, columns, torch.zeros(0))
        fused.set_layout(RowLayout(names, tuple(n * job.work.prompts for n in each)))
        decoder.reserve(columns)
        for piece in (*decoder._keys, *decoder._values):
            piece.normal_()
        self.position = position
        self.positions = torch.full((rows,), position, device=DEVICE)
        self.tokens = torch.randint(8, 100, (rows,), device=DEVICE)
        d, config = weights.description, base.model.config
        self.d, self.inner = d, config.intermediate_size

        def noise(*sizes: int) -> Tensor:
            return torch.randn(rows, *sizes, device=DEVICE).to(DTYPE)

        self.x, self.normed = noise(config.hidden_size), noise(config.hidden_size)
        self.inputs = [self.normed, noise(d.heads * d.head_dim), self.normed, noise(self.inner)]
        self.q = noise(d.heads, d.head_dim)
        self.done = [
            [linear.products(x) for linear, x in zip(layer, self.inputs, strict=True)]
            for layer in decoder._linears[:2]
        ]
        self.logits = base.head(self.normed)
        self.state = self._state()

    def _state(self) -> list[Any]:
        rows = self.rows
        none = torch.zeros(rows, dtype=torch.long, device=DEVICE)
        self.draws = torch.rand(TOKENS, rows, device=DEVICE, dtype=torch.float64)
        self.ends = torch.zeros(self.base.vocabulary, dtype=torch.bool, device=DEVICE)
        self.heat = torch.ones(rows, device=DEVICE)
        out = torch.zeros(TOKENS, rows, device=DEVICE, dtype=torch.long)
        return [none.clone(), none.bool(), none.clone(), out, out.float()]

    def _layers(self) -> Generator[tuple[int, Any, list[Any]]]:
        for i, layer in enumerate(self.decoder._layers):
            linears = self.decoder._linears[i]
            yield (
                i,
                layer,
                [
                    (*products, linear.b, linear.table, linear.rank, linear.bias)
                    for products, linear in zip(self.done[i % 2], linears, strict=True)
                ],
            )

    def products(self, which: Sequence[int] = (0, 1, 2, 3)) -> None:
        """Run linear layers."""
        for layer in self.decoder._linears:
            for i in which:
                layer[i].products(self.inputs[i])

    def qkv(self) -> None:
        """Run the epilogues of q, k and v."""
        decoder, rows = self.decoder, self.decoder._rows
        for i, layer, done in self._layers():
            operators.qkv(
                *done[0], rows.tiles, self.positions, *decoder._rotations[layer.table],
                *layer.head_norms, self.q, decoder._keys[i], decoder._values[i],
            )  # fmt: skip

    def attend(self) -> None:
        """Run the attentions."""
        d, decoder = self.d, self.decoder
        for keys, values in zip(decoder._keys, decoder._values, strict=True):
            operators.attend(self.q, keys, values, self.positions, d.scale, 0)

    def add_norm(self) -> None:
        """Run both epilogues with a norm."""
        owners = self.decoder._rows.owners
        for _, layer, done in self._layers():
            operators.add_norm(*done[1], owners, self.x, *layer.norms[0], 1.0)
            operators.add_norm(*done[3], owners, self.x, *layer.norms[1], 1.0)

    def gate_up(self) -> None:
        """Run the epilogues of gate and up."""
        tiles = self.decoder._rows.tiles
        for _, _, done in self._layers():
            operators.gate_up(*done[2], tiles, self.inner, False)

    def head(self) -> None:
        """Run the head."""
        self.base.head(self.normed)

    def draw(self) -> None:
        """Draw tokens."""
        drawn, *rest = self.state
        weighed = operators.weigh_blocks(self.logits, self.heat, drawn, None, self.ends, 1.0, 0.0)
        limit = torch.full_like(drawn, TOKENS) if CPU else self.positions
        operators.draw_token(
            self.logits, weighed, self.heat, None, self.draws, None, limit, self.ends,
            torch.arange(self.rows, device=DEVICE) if CPU else self.decoder._rows.owners, 1.0, 0.0,
            drawn, *rest,
        )  # fmt: skip

    def step(self) -> None:
        """Run a whole step."""
        hidden = self.decoder.step(self.tokens, self.positions)
        self.base.head(hidden)
        self.draw()

    def least(self, rates: Rates) -> dict[str, float]:
        """Return the least milliseconds of each part: of weights, cache, adapters and logits."""
        size, rows = torch.empty(0, dtype=DTYPE).element_size(), self.rows
        flops = moved = 0.0
        products = adapters = activations = 0.0
        for layer in self.decoder._linears:
            for linear in layer:
                columns, inside = linear.weight.shape
                flops, moved = 2.0 * rows * columns * inside, size * columns * inside
                products += rates.least(flops, moved)
                adapters += rates.least(0, size * linear.b.numel())
                activations += rates.least(0, size * rows * (inside + 3 * columns))
        d, layers = self.d, len(self.decoder._layers)
        cached = 2.0 * size * rows * (self.position + 1) * d.kv_heads * d.head_dim * layers
        vocabulary, hidden = self.base.head.weight.shape
        head = rates.least(2.0 * rows * vocabulary * hidden, size * vocabulary * hidden)
        return {
            "products": products, "b": adapters, "attention": rates.least(0, cached), "head": head,
            "logits": rates.least(0, 2.0 * size * rows * vocabulary), "activations": activations,
        }  # fmt: skip


def parts(job: Job, rates: Rates) -> tuple[float, float]:
    """Time each part of a step, and show its kernels; return its ms and its share of the least."""
    with torch.no_grad(), ExitStack() as stack:
        own = Parts(job, PROMPT + TOKENS // 2, stack)
        names = ("qkv", "attend", "add_norm", "gate_up", "head", "draw")
        found = {"step": milliseconds(own.step)}
        found |= {
            f"products {n}": milliseconds(partial(own.products, (i,)))
            for i, n in enumerate(PRODUCTS)
        }
        found |= {name: milliseconds(getattr(own, name)) for name in names}
        say(f"parts, {own.base.name}, {own.rows} rows, ms", **found)
        least = own.least(rates)
        ideal = sum(v for k, v in least.items() if k != "activations")
        say(
            f"least, {own.base.name}, {own.rows} rows, ms", **least, ideal=ideal,
            share=ideal / found["step"], share_with_activations=sum(least.values()) / found["step"],
        )  # fmt: skip
        if not CPU:
            seen = kernels_of(PLACE, own.step)
            say("profile of a step", ms=1e3 * busy_seconds(seen))
            add_longest(REPORT, "Longest kernels of a step", seen, 16)
    return found["step"], ideal / found["step"]


# --- What a step should take.


def tell_expected() -> None:
    """Print what a step should take on some cards."""
    for shape in ("0.5B", "3B", "7B"):
        for rows in (64, 256, 1024):
            found = {card: 1e3 * counted(shape, card).step(rows, 128) for card in EXPECTED}
            say(f"{shape}, {rows} rows, ms", **found)


# --- All of it.


@contextmanager
def part(given: argparse.Namespace, needs: float) -> Generator[bool]:
    """Run a part if there is time left for it, and go on after a failure."""
    left = given.limit - (time.time() - BEGAN)
    try:
        yield left > needs
    except Exception as error:
        import traceback

        say("FAILED", error=repr(error)[:300])
        traceback.print_exc(limit=6, file=sys.stdout)
    if not CPU:
        torch.cuda.empty_cache()


def measured(given: argparse.Namespace, shape: str, rates: Rates) -> None:
    """Measure a shape, the most wanted first."""
    own: tuple[Cohort, list[int], bool] | None = None
    for count in (4, 2) if CPU else (64, 256, 1024) if shape == "0.5B" else (256, 64):
        with part(given, 15) as fits:
            if fits:
                own = own or agents(shape)
                parts(rollouts(*own, count)[0], rates)


def main() -> None:
    """Check the kernels, then measure the shapes."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument("--cpu", action="store_true", help="tiny, in Triton's interpreter")
    given.add_argument("--expected", action="store_true", help="what a step should take")
    given.add_argument("--limit", type=float, default=290.0, help="seconds")
    given.add_argument("--shapes", nargs="+", default=["rehearsal"] if CPU else ["0.5B", "3B"])
    given.add_argument("--leave-out", nargs="*", default=[], choices=["check", "unequal"])
    chosen = REPORT.arguments = given.parse_args()
    if chosen.expected:
        tell_expected()
        return
    name = "CPU" if CPU else torch.cuda.get_device_name()
    say("where", device=name, torch=torch.__version__, triton=triton.__version__)
    rates = Rates.measured(PLACE)
    say("the device", **rates._asdict())
    with part(chosen, 0):
        if "check" not in chosen.leave_out:
            check()
    for shape in chosen.shapes:
        measured(chosen, shape, rates)
    for shape in chosen.shapes:
        with part(chosen, 20) as fits:
            if fits and "unequal" not in chosen.leave_out:
                rollouts(*agents(shape, unequal=True), 4 if CPU else 256)
    REPORT.write()


if __name__ == "__main__":
    main()
