"""Memory: what each further agent costs, and what the learn pass holds at a large vocabulary.

    python experiments/bench/memory.py [--quick] [--out FILE]

Every number comes from a fresh process. All populations of the first table learn from the same
number of rows, so that what grows with N is what an agent owns: the adapter, its gradient and
AdamW's two moments, four times the adapter's bytes, five with a reference adapter. The second
table lets every agent bring its own rows. The third is one learn pass at a vocabulary, with the
chunked log-probs and with whole logits: peak minus what was resident before.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import Report, child, memory, parser, quiet, reset_peak, tell

SCRIPT = Path(__file__)
SHAPE = "135M"
ROWS = 16


def stand_up(job: Mapping[str, Any]) -> dict[str, float]:
    """Child: build N agents, generate and learn twice, and tell the peak in MiB."""
    quiet()
    from jobs import Job, Work, load_base, population

    base = load_base(job["shape"])
    reset_peak()
    resident = memory("VmRSS")
    size = job["agents"]
    # The same rows whatever N is: an agent of N has ROWS / N of them.
    work = Work(1, job["rows"] // (size if job["shared_rows"] else 1), job["tokens"])
    cohort, slots = population(base, size, work, rank=job["rank"])
    if job["reference"]:
        for slot in slots:
            cohort.add_reference(slot)
    adapter = sum(p.numel() * 4 for p in cohort.slots.parameters(cohort.agents[slots[0]].adapter))
    reset_peak()
    one = Job(cohort, slots, work)
    for _ in range(2):
        one.both()
    return {"peak": memory("VmHWM"), "base": resident, "adapter": adapter / 2**20}


def whole_logits(base: Any) -> None:  # noqa: ANN401 -- a SharedBase, which is not imported here
    """Replace the chunked log-probs of a base by the plain ones over (M, V) logits."""
    import torch
    from torch import Tensor

    def plain(hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(base.logits(hidden) / temperature[:, None], dim=-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, targets[:, None])[:, 0], entropy

    base.token_logprobs = plain


def learn_pass(job: Mapping[str, Any]) -> dict[str, float]:
    """Child: one learn pass at a vocabulary; tell its peak over what was resident, in MiB."""
    quiet()
    from jobs import Job, Work, load_base, population

    base = load_base(job["shape"], vocab_size=job["vocabulary"], **job["model"])
    work = Work(1, 2, job["tokens"])
    cohort, slots = population(base, 2, work, beta=0.0)
    short = Job(cohort, slots, work)
    if not job["chunked"]:
        whole_logits(base)
    reset_peak()
    before = memory("VmRSS")
    short.learn()
    return {"over": memory("VmHWM") - before, "resident": before}


def agents(report: Report, sizes: tuple[int, ...], job: Mapping[str, Any], repeats: int) -> None:
    """Report the peak over N, and hold the slope against the theory."""
    peaks: dict[tuple[int, bool], float] = {}
    adapter = 0.0
    for shared in (True, False):
        title = "the same rows in all" if shared else "each agent brings its own rows"
        for size in sizes:
            # Alternating processes would not help here: each is alone, and memory does not drift.
            told = [
                child(SCRIPT, {**job, "kind": "agents", "agents": size, "shared_rows": shared})
                for _ in range(repeats)
            ]
            adapter = told[0]["adapter"]
            peaks[size, shared] = statistics.median(one["peak"] for one in told)
            report.add(
                f"Peak over N, {job['shape']}, rank {job['rank']}, {title} (MiB)",
                N=size, peak=peaks[size, shared], base=told[0]["base"], adapter=adapter,
            )  # fmt: skip
    first, last = sizes[0], sizes[-1]
    slope = (peaks[last, True] - peaks[first, True]) / (last - first)
    copies = 5 if job["reference"] else 4
    report.add(
        "Each further agent (MiB)",
        measured=slope, theory=copies * adapter, of="adapter, gradient, two moments"
        + (", reference" if job["reference"] else ""),
    )  # fmt: skip
    what = f"memory per agent over adapter + gradient + Adam, {job['shape']}"
    report.at_most(what, slope / (copies * adapter), 1.2)


def logits(report: Report, vocabularies: tuple[int, ...], job: Mapping[str, Any], n: int) -> None:
    """Report the learn pass with and without chunks at each vocabulary."""
    for vocabulary in vocabularies:
        over: dict[bool, float] = {}
        for chunked in (True, False):
            asked = {**job, "kind": "logits", "vocabulary": vocabulary, "chunked": chunked}
            told = [child(SCRIPT, asked) for _ in range(n)]
            over[chunked] = statistics.median(one["over"] for one in told)
        report.add(
            f"Learn pass, T={job['tokens']}, 4 rows (MiB above what was resident)",
            vocabulary=vocabulary, chunked=over[True], whole_logits=over[False],
            share=over[True] / over[False],
        )  # fmt: skip
        if vocabulary == vocabularies[-1]:
            what = f"learn peak at V={vocabulary}, T={job['tokens']}, chunked over whole logits"
            report.at_most(what, over[True] / over[False], 0.35)


def answer(job: Mapping[str, Any]) -> int:
    """Do a child's job."""
    tell(stand_up(job) if job["kind"] == "agents" else learn_pass(job))
    return 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return given.parse_args()


def main() -> int:
    """Run every measurement in processes of their own."""
    given = arguments()
    if given.child is not None:
        return answer(given.child)
    del given.child
    quick = given.quick
    report = Report("memory", given)
    n = given.repeats or (1 if quick else 3)
    shape = "10M" if quick else SHAPE
    sizes = (1, 4) if quick else (1, 2, 4, 8)
    job = {"shape": shape, "rows": ROWS, "tokens": 8, "rank": 16, "reference": False}
    agents(report, sizes, job, n)
    vocabularies = (32_000,) if quick else (32_000, 152_064)
    small = {"shape": shape, "tokens": 32 if quick else 256, "model": {"num_hidden_layers": 4}}
    logits(report, vocabularies, small, n)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
