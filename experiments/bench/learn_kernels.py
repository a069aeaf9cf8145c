"""Learning by kernels on a CUDA device, against what it should take and torch's operations.

    python experiments/bench/learn_kernels.py [--shapes 0.5B 3B] [--out FILE]
    python experiments/bench/learn_kernels.py --expected     what it should take, by counting
    python experiments/bench/learn_kernels.py --rehearse     a tiny model on the CPU: does it run?

Eight agents of rank 8 in bf16: 256 completions of 128 tokens and 64 of 1,024, groups of 8, prompts
of 64 tokens, all in one micro-batch; random weights. The share is of 989 TFLOP/s, where only the
products of the base count, forward and backward, and two of the head.
"""

import argparse
import statistics
import sys
import time
from typing import Any

from common import Live, Report, parser, quiet

THREADS = quiet()

import torch  # noqa: E402 -- after the threads are fixed, as what follows
from device import Place, add_longest, build, busy_seconds, kernels_of  # noqa: E402
from jobs import EXPECTED, Job, Work, counted, population  # noqa: E402
from shapes import LARGE, LARGEST  # noqa: E402

from evo_grpo.model.forward.choice import serves_head  # noqa: E402
from evo_grpo.settings.engines.declaration import Shape  # noqa: E402
from evo_grpo.settings.engines.declaration import Work as PlannedWork  # noqa: E402
from evo_grpo.training.sizing.memory import LearnBatch, saved_bytes  # noqa: E402

SHAPES = {**LARGE, **LARGEST}
#: Prompts of an agent, completions of a prompt, tokens of each.
WORKS = {"256 x 128": Work(4, 8, 128, 64), "64 x 1,024": Work(1, 8, 1024, 64)}
AGENTS, RANK, PEAK = 8, 8, 989e12


class Count:
    """Tokens, FLOPs and numbers of a learn call."""

    def __init__(self, shape: str, work: Work) -> None:
        self.shape, s = shape, SHAPES[shape]
        self.hidden, self.inner = s["hidden_size"], s["intermediate_size"]
        self.layers, self.vocabulary = s["num_hidden_layers"], s["vocab_size"]
        self.heads = s["num_attention_heads"]
        size = self.hidden // self.heads
        self.kv = s["num_key_value_heads"] * size
        assert isinstance(work.groups, int)
        self.prefixes, self.work = AGENTS * work.prompts, work
        self.rows = self.prefixes * work.groups
        self.rests = self.rows * (work.tokens - 1)
        self.tokens = self.prefixes * work.prompt_tokens + self.rests
        #: in, out and joined rank of the four linear layers.
        self.linears = (
            (self.hidden, self.hidden + 2 * self.kv, 3 * RANK), (self.hidden, self.hidden, RANK),
            (self.hidden, 2 * self.inner, 2 * RANK), (self.inner, self.hidden, RANK),
        )  # fmt: skip

    @property
    def needed(self) -> float:
        """FLOPs of the base's products, forward and backward, and of two of the head."""
        layer = sum(4.0 * self.tokens * inside * out for inside, out, _ in self.linears)
        drawn = self.rows * self.work.tokens
        return self.layers * layer + 4.0 * drawn * self.hidden * self.vocabulary

    def kept(self, *, kernels: bool) -> float:
        """Return the bytes of a token and layer that the backward needs, as the plan counts."""
        shape = Shape(
            self.layers, self.hidden, self.inner, self.hidden, self.kv, self.vocabulary, self.heads
        )
        work = PlannedWork(
            agents=AGENTS, archive=False, references=False, parameters=0, rank=RANK, rows=self.rows,
            evaluation_rows=0, prompt_tokens=self.work.prompt_tokens,
            output_tokens=self.work.tokens, kernels=kernels,
        )  # fmt: skip
        rest = self.work.tokens - 1
        batch = LearnBatch(self.rows, self.prefixes, self.work.prompt_tokens, rest)
        return saved_bytes(shape, work, batch, 2, "cuda") / batch.tokens

    def expected(self, card: str) -> float:
        """Return the milliseconds on a card, by launches, bytes and FLOPs."""
        work, found = self.work, counted(self.shape, card)
        return 1e3 * found.learn(self.rows, self.prefixes, work.prompt_tokens, work.tokens)


def tell_expected(report: Report) -> None:
    """Report what learning should take on some cards, and the bytes that it keeps."""
    for shape in SHAPES:
        for name, work in WORKS.items():
            count = Count(shape, work)
            times = {card: count.expected(card) for card in EXPECTED}
            share = count.needed / PEAK / times["h200"] * 1e3
            report.add("Expected learn call, ms", shape=shape, rows=name, **times, share=share)
        before, after = (count.kept(kernels=kernels) for kernels in (False, True))
        report.add("Bytes kept a token and layer", shape=shape, torch=before, kernels=after)


def measure(report: Report, shape: str, place: Place, repeats: int = 5) -> None:
    """Measure learn calls by kernels and by torch's operations, in pairs, on the same rows."""
    for name, work in WORKS.items() if shape in SHAPES else [("4 x 4", Work(1, 4, 4))]:
        base = build(shape, place)
        cohort, slots = population(base, AGENTS, work, beta=0.0, max_tokens_per_microbatch=1 << 17)
        job = Job(cohort, slots, work)
        found: dict[str, list[float]] = {}
        peaks: dict[str, float | None] = {}

        for turn in range(repeats + 1):
            for way in ("auto", "off"):
                base.kernels = way
                base.head_kernels = serves_head(base)
                place.reset_peak()
                start = time.perf_counter()
                job.learn()
                host = time.perf_counter() - start
                place.wait()
                found.setdefault(way, []).append(time.perf_counter() - start)
                found.setdefault(f"{way}, host", []).append(host)
                allocated = place.peaks()
                peaks[way] = allocated and allocated[0] / 2**20
            if not turn:
                found.clear()  # compiling
        times = {way: statistics.median(values) for way, values in found.items()}
        values: dict[str, Any] = {"rows": name, **times}
        values |= {"MiB": peaks["auto"], "MiB off": peaks["off"]}
        if shape in SHAPES:
            count = Count(shape, work)
            values["share"] = count.needed / PEAK / times["auto"]
            values["expected"] = count.expected("h200") / 1e3
            aim = 0.3 if shape == "0.5B" else 0.4
            report.at_least(f"learn, share of 989 TFLOP/s, {shape}, {name}", values["share"], aim)
        report.add(f"Learn by kernels and by torch, {shape}", **values)
        if place.is_cuda:
            base.kernels = "auto"
            seen = kernels_of(place, job.learn)
            report.add(f"Busy in learn, {shape}", ms=1e3 * busy_seconds(seen))
            add_longest(report, f"Longest kernels of learn, {shape}", seen, 16)
        del base, cohort, job


def main() -> int:
    """Count, or measure each shape."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.5B", "3B"])
    given.add_argument("--expected", action="store_true", help="what it should take, by counting")
    given.add_argument("--rehearse", action="store_true", help=argparse.SUPPRESS)
    chosen = given.parse_args()
    report = Live("learn_kernels", chosen)
    if chosen.expected:
        tell_expected(report)
    elif chosen.rehearse:
        measure(report, "rehearsal", Place(torch.device("cpu"), torch.float32), 1)
    elif not torch.cuda.is_available():
        print("not measured: no CUDA device")
    else:
        for shape in chosen.shapes:
            measure(report, shape, Place.on_cuda())
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
