"""The memory plan against measured peaks: sampling and learning, each shape in a fresh process.

    python experiments/bench/plan.py [--quick] [--out FILE]

Each shape runs in a fresh process on one thread: N agents sample and learn twice, and the peak
resident memory is held against what `evo_grpo.training.sizing.memory` predicts from shapes and
settings.
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
#: Agents, completions of each prompt, prompts, tokens of a completion, LoRA rank.
CASES: dict[str, dict[str, Any]] = {
    "embedded": {"agents": 8, "groups": 8, "prompts": 8, "tokens": 16, "rank": 8},
    "135M": {"agents": 8, "groups": 8, "prompts": 1, "tokens": 24, "rank": 16},
    "135M, modules": {"agents": 4, "groups": 4, "prompts": 1, "tokens": 24, "rank": 16},
    "0.5B": {"agents": 2, "groups": 4, "prompts": 1, "tokens": 24, "rank": 8},
}  # fmt: skip


def run(job: Mapping[str, Any]) -> dict[str, float]:
    """Child: one population; tell the measured peaks and the prediction, in MiB."""
    quiet()
    from jobs import Job, Work, load_base, population

    from evo_grpo.settings import EngineConfig
    from evo_grpo.training.sizing.memory import Work as Planned
    from evo_grpo.training.sizing.memory import predict, total
    from evo_grpo.training.sizing.model_size import from_config

    shape = job["shape"].partition(",")[0]
    process = memory("VmRSS")
    base = load_base(shape)
    base.specialized = "modules" not in job["shape"]
    reset_peak()
    loaded = memory("VmRSS")
    work = Work(job["prompts"], job["groups"], job["tokens"])
    cohort, slots = population(base, job["agents"], work, rank=job["rank"], beta=0.0)
    one = Job(cohort, slots, work)
    one.both()  # the moments of AdamW come with the first step
    reset_peak()
    own = memory("VmRSS")
    one.generate()
    sampling = memory("VmHWM")
    reset_peak()
    one.learn()
    learning = memory("VmHWM")
    rows = job["agents"] * job["groups"] * job["prompts"]
    adapter = cohort.slots.parameters(cohort.agents[slots[0]].adapter)
    plan = predict(
        from_config(job["shape"], base.model.config.to_dict()),
        Planned(
            agents=job["agents"], archive=False, references=False,
            parameters=sum(p.numel() for p in adapter),
            rank=job["rank"], rows=rows, evaluation_rows=0, prompt_tokens=work.prompt_tokens,
            output_tokens=job["tokens"], specialised=base.specialized,
        ),
        EngineConfig(max_decode_rows=4096), dtype="float32", device="cpu",
    )  # fmt: skip
    assert plan is not None
    # No round is played here, so nothing is being written.
    held = sum(p.bytes for p in plan.held if p.name != "checkpoints being written")
    mib = 1 / 2**20
    return {
        "process": process, "base": loaded - process, "agents": own - loaded,
        "sampling": sampling - own, "learning": learning - own, "peak": max(sampling, learning),
        "plan base": plan.held[1].bytes * mib, "plan agents": plan.held[2].bytes * mib,
        "plan sampling": total(plan.sampling) * mib, "plan learning": total(plan.learning) * mib,
        "plan peak": (held + max(total(plan.sampling), total(plan.learning))) * mib,
    }  # fmt: skip


def main() -> int:
    """Measure every case in a process of its own, or tell one's numbers."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    arguments = given.parse_args()
    if arguments.child is not None:
        tell(run(arguments.child))
        return 0
    del arguments.child
    report = Report("plan", arguments)
    repeats = arguments.repeats or (1 if arguments.quick else 3)
    for shape, case in CASES.items():
        told = [child(SCRIPT, {"shape": shape, **case}) for _ in range(repeats)]
        found = {name: statistics.median(one[name] for one in told) for name in told[0]}
        report.add("Measured and planned (MiB)", shape=shape, **found)
        off = abs(found["plan peak"] / found["peak"] - 1)
        report.at_most(f"plan against peak, {shape}", off, 0.2)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
