"""The learn pass's share of the machine, and what it saves by computing a group's prompt once.

    python experiments/bench/learn.py [--quick] [--shape 135M] [--out FILE]

The first is its FLOP rate over that of a large fp32 matmul. Counted are 4 FLOPs per base parameter
and token: 2 forward and 2 for the gradient of the activations; the base's weights have none. Not
counted, though done: the adapters (2% of it) and the attention. The head is counted for generated
tokens alone, the last token of a row, which predicts nothing, not at all. beta = 0: a KL term would
add a forward pass.

The second runs the embedded model on prompts of 256 tokens, G=8, T=16, with the prompts shared and
with every row carrying its own.

The third counts the tokens that micro-batches compute, padding included and a group's prompt once,
over those of their rows, for completions of unequal length: 1 in 20 is eight times the median, or
the lengths are geometric.
"""

import sys
from itertools import product
from unittest import mock

from common import Report, interleaved, median, parser, quiet, ratio

THREADS = quiet()

import numpy as np  # noqa: E402 -- after the threads are fixed, as what follows
import torch  # noqa: E402
from jobs import Job, Work, load_base, population, too_large  # noqa: E402
from shapes import LARGE, SHAPES  # noqa: E402

from evo_grpo.learn import packing as batch  # noqa: E402
from evo_grpo.learn.packing import pack  # noqa: E402
from evo_grpo.learn.rows import Row  # noqa: E402

TURNS = 4
"""Large matmuls per sample."""
PADDED = (8, 6, 8, 8192), (8, 32, 64, 16384), (8, 64, 256, 8192), (32, 32, 64, 16384)
"""Agents, tokens of a prompt, median tokens of a completion, and the token budget."""


def shared_prompts(report: Report, repeats: int, *, prompt: int) -> None:
    """Compare one prompt per group with one per row."""
    work = Work(1, 8, 16, prompt_tokens=prompt)
    cohort, slots = population(load_base("embedded"), 8, work)
    job = Job(cohort, slots, work)

    def every_row() -> None:
        with mock.patch.object(batch, "find_shared_prefixes", return_value=None):
            job.learn()

    samples = interleaved({"shared": job.learn, "every row": every_row}, repeats)
    report.add(
        "Learn with long prompts, embedded model, 8 agents, G=8, T=16",
        prompt_tokens=prompt, shared=median(samples, "shared"),
        every_row=median(samples, "every row"), faster=ratio(samples, "every row", "shared"),
    )  # fmt: skip


def padding(report: Report, agents: int, prompt: int, middle: int, budget: int) -> None:
    """Count padding for 4 prompts and groups of 8."""
    for kind in ("tail", "geometric"):
        draw, pairs = np.random.default_rng(0), list[tuple[int, Row]]()
        for agent, start in product(range(agents), range(4)):
            for number in range(8):
                long = kind == "tail" and draw.random() < 1 / 20
                body = draw.integers(middle // 2, 3 * middle // 2 + 1)
                own = min(draw.geometric(1 / middle), 8 * middle) if kind != "tail" else body
                ids = np.full(prompt + (8 * middle if long else int(own)), start)
                mask = np.arange(len(ids)) >= prompt
                pairs.append((agent, Row(ids, mask, number=8 * start + number)))
        buckets = pack(pairs, budget)
        report.add(
            f"Padding of micro-batches, {kind}", agents=agents, prompt_tokens=prompt, median=middle,
            budget=budget, micro_batches=len(buckets),
            share=sum(map(computed, buckets)) / sum(len(row.token_ids) for _, row in pairs) - 1,
        )  # fmt: skip


def computed(bucket: list[tuple[int, Row]]) -> int:
    """Return the tokens that a micro-batch computes, by the cheaper of its two plans."""
    rows = [row for _, row in bucket]
    prompts = {(agent, row.token_ids[~row.mask].tobytes()) for agent, row in bucket}
    before, after = (max(int((side ^ row.mask).sum()) for row in rows) for side in (True, False))
    return min(len(rows) * max(len(r.token_ids) for r in rows),
               len(prompts) * before + len(rows) * after)  # fmt: skip


def main() -> int:
    """Measure one shape, then long prompts."""
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument(
        "--shape", choices=[*SHAPES, *LARGE], default="135M", help="0.5B and 3B are Qwen2.5's"
    )
    given = arguments.parse_args()
    quick = given.quick
    shape = "1M" if quick else given.shape
    report = Report("learn", given)
    if (why := too_large(shape, copies=3)) is not None:
        report.at_least(f"learn FLOP rate over a large matmul's, {shape}", None, 0.5, why)
        return report.finish()
    work = Work(1, 4, 16 if quick else 128, prompt_tokens=2)
    agents = 4
    cohort, slots = population(load_base(shape), agents, work, beta=0.0)
    job = Job(cohort, slots, work)
    size = 512 if quick else 3072
    left = torch.randn(size, size)
    samples = interleaved(
        {
            "learn": job.learn,
            "matmul": lambda: [left @ left for _ in range(TURNS)],
        },
        given.repeats or (2 if quick else 5),
    )
    head = cohort.base.head.weight.numel()
    base = sum(value.numel() for value in cohort.base.weights().values())
    rows = job.rows
    flops = 4 * rows * ((base - head) * (work.tokens + work.prompt_tokens - 1) + head * work.tokens)
    reference = 2 * size**3 * TURNS
    rate = ratio(samples, "matmul", "learn") * flops / reference
    report.add(
        f"Learn, {shape}, fp32, {THREADS} threads",
        agents=agents, rows=rows, tokens=rows * (work.tokens + work.prompt_tokens),
        seconds=median(samples, "learn"),
        learn_gflops=flops / median(samples, "learn") / 1e9,
        matmul_gflops=reference / median(samples, "matmul") / 1e9,
        share=rate,
    )  # fmt: skip
    report.at_least(f"learn FLOP rate over a large matmul's, {shape}", rate, 0.5)
    shared_prompts(report, given.repeats or (2 if quick else 5), prompt=32 if quick else 256)
    for some, prompt, middle, budget in PADDED:
        padding(report, some, prompt, middle, budget)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
