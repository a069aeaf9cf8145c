"""The learn pass's share of the machine: its FLOP rate over that of a large fp32 matmul.

    python experiments/bench/learn.py [--quick] [--out FILE]

Counted are 4 FLOPs per base parameter and token: 2 forward and 2 for the gradient of the
activations; the base's weights have none. Not counted, though done: the adapters (2% of it), the
attention, and the head once more in the backward, which recomputes its logits chunk by chunk. The
head is counted for generated tokens alone. beta = 0: a KL term would add a forward pass.
"""

import sys

from common import Report, interleaved, median, parser, quiet, ratio

THREADS = quiet()

import torch  # noqa: E402 -- after the threads are fixed, as what follows
from jobs import Job, Work, load_base, population  # noqa: E402

TURNS = 4
"""Large matmuls per sample."""


def main() -> int:
    """Measure one shape."""
    given = parser(__doc__.partition("\n")[0]).parse_args()
    quick = given.quick
    shape = "1M" if quick else "135M"
    report = Report("learn", given)
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
    flops = 4 * rows * ((base - head) * (work.tokens + work.prompt_tokens) + head * work.tokens)
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
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
