"""Tokens per second of the engine built in, over those of vLLM as evo-grpo runs it.

    python experiments/bench/engines.py --python PYTHON [--quick] [--shapes ...] [--out FILE]

8 adapters, the same prompts and sampling, exactly T tokens each, in turns. PYTHON has vLLM; its
process is fed over a socket, as in a run. Every sample comes after an update: all adapters have new
weights, which vLLM is handed and loads within the measured time.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT, Report, interleaved, median, parser, quiet, ratio

THREADS = quiet()

from jobs import Job, Work, load_base, population, sampling, too_large  # noqa: E402
from shapes import LARGE, SHAPES  # noqa: E402

from evo_grpo.population.cohort.cohort import Cohort  # noqa: E402
from evo_grpo.rollout.engine import RolloutEngine, RolloutRequest  # noqa: E402
from evo_grpo.rollout.vllm.vllm_engine import VLLMEngine  # noqa: E402

ADAPTERS = 8


def side(cohort: Cohort, engine: RolloutEngine, job: Job, work: Work) -> Callable[[], float]:
    """Return what samples once after an update, in seconds."""
    requests = [
        RolloutRequest(
            slot, cohort.agents[slot].adapter, job.prompts, int(work.groups), sampling(work.tokens),
            slot,
        )
        for slot in job.slots
    ]  # fmt: skip

    def once() -> float:
        for slot in job.slots:
            cohort.slots.mark_changed(cohort.agents[slot].adapter)
        start = time.perf_counter()
        groups = engine.rollout(requests)
        seconds = time.perf_counter() - start
        lengths = {len(c.token_ids) for mine in groups for g in mine for c in g.completions}
        assert lengths == {work.tokens}, f"{lengths} tokens, expected {work.tokens}"
        return seconds

    return once


def compare(report: Report, shape: str, work: Work, repeats: int, python: str) -> None:
    """Measure both engines over one base and its adapters."""
    settings: dict[str, Any] = {"vllm": {"python": python}, "threads": THREADS}
    cohort, slots = population(load_base(shape), ADAPTERS, work, **settings)
    job = Job(cohort, slots, work)
    start = time.perf_counter()
    vllm = VLLMEngine(cohort.slots, cohort.settings)
    started = time.perf_counter() - start
    try:
        samples = interleaved(
            {
                "native": side(cohort, cohort.engine, job, work),
                "vllm": side(cohort, vllm, job, work),
            },
            repeats,
            warmup=2,
        )
    finally:
        vllm.close()
    rows = ADAPTERS * work.prompts * int(work.groups)
    faster = ratio(samples, "vllm", "native")
    report.at_least(f"native tokens/s over vLLM's on a CPU, {shape}", faster, 1.0)
    report.add(
        f"Two engines: {ADAPTERS} adapters",
        model=shape, rows=rows, prompt_tokens=work.prompt_tokens, tokens=work.tokens,
        native_tokens_per_second=rows * work.tokens / median(samples, "native"),
        vllm_tokens_per_second=rows * work.tokens / median(samples, "vllm"),
        native_over_vllm=faster,
        vllm_starts_in_seconds=started,
    )  # fmt: skip


def arguments() -> argparse.Namespace:
    """Read the command line."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument(
        "--python", type=Path, default=ROOT / ".vllm" / "bin" / "python",
        help="a Python with vLLM; default: that of make test-vllm",
    )  # fmt: skip
    given.add_argument(
        "--shapes", nargs="+", choices=["embedded", *SHAPES, *LARGE], default=["embedded", "10M"]
    )
    given.add_argument("--rows-per-adapter", type=int, default=32)
    given.add_argument("--tokens", type=int, default=24)
    given.add_argument("--prompt-tokens", type=int, default=6)
    return given.parse_args()


def main() -> int:
    """Run all comparisons."""
    given = arguments()
    report = Report("engines", given)
    for shape in ("embedded",) if given.quick else given.shapes:
        why = None if shape == "embedded" else too_large(shape, copies=2)
        if why is not None:
            report.add(f"Two engines: {ADAPTERS} adapters", model=f"{shape}: not measured: {why}")
            continue
        work = Work(1, 2, 4) if given.quick else Work(
            4, given.rows_per_adapter // 4, given.tokens, given.prompt_tokens
        )  # fmt: skip
        compare(report, shape, work, given.repeats or (1 if given.quick else 7), str(given.python))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
