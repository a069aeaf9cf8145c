"""The learn pass's share of the machine, and what it saves by computing a group's prompt once.

    python experiments/bench/learn.py [--quick] [--shape 135M] [--out FILE]

The first is its FLOP rate over that of a large fp32 matmul. Counted are 4 FLOPs per base parameter
and token: 2 forward and 2 for the gradient of the activations; the base's weights have none. Not
counted, though done: the adapters (2% of it), the attention, and the head once more in the
backward, which recomputes its logits chunk by chunk. The head is counted for generated tokens
alone, the last token of a row, which predicts nothing, not at all. beta = 0: a KL term would add a
forward pass.

The second runs the embedded model on prompts of 256 tokens, G=8, T=16, with the prompts shared and
with every row carrying its own.
"""

import sys
from unittest import mock

from common import Report, interleaved, median, parser, quiet, ratio

THREADS = quiet()

import torch  # noqa: E402 -- after the threads are fixed, as what follows
from jobs import Job, Work, load_base, population, too_large  # noqa: E402
from shapes import LARGE, SHAPES  # noqa: E402

from evo_grpo.learn import rows as batch  # noqa: E402

TURNS = 4
"""Large matmuls per sample."""


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
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
