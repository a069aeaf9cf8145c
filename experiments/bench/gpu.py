"""Measures a card: its rates, plans against measurements, a real model, a round, TRL, speed.

    python experiments/bench/gpu.py [--minutes 10] [--parts ...] [--vllm PYTHON] [--trl PYTHON]
    python experiments/bench/gpu.py --rehearse     all of it without a card, with tiny models

card      the row of the card for the table of `evo_grpo.training.sizing.cards`, and a launch
plan      memory and seconds of 8 agents, predicted and measured
real      examples/real_model in fp32, in bf16, and by vLLM with --vllm, beside the CPU's curve
round     a whole round of a run: the share of the time in which the device computes, and the gaps
trl       generate and learn of 8 agents beside 8 steps of TRL, one after another
steps     a decode step by kernels; see decode_kernels.py
speed     8 agents at once beside one by one, transformers and vLLM
launches  what a call of each phase asks of the device
memory    as `plan`, without seconds, for 1 and 32 agents

Each part has a process of its own and a share of the time; numbers are printed at once. Models have
random weights of the shapes of Qwen2.5: a matmul costs the same whatever it multiplies.

A machine without network that has torch with Triton, transformers, and pytest for --rehearse, needs
as wheels what else pyproject.toml requires, for `trl` also trl and datasets, and for `real` the
folder `~/.cache/evo-grpo` of a machine on which `evo-grpo fetch smollm2` ran.
"""

import argparse
import os
import signal
import sys
import time

from common import BEGAN, HERE, ChildError, Report, parser, say, told

from evo_grpo.training.sizing.cards import cuda_devices

#: Part -> its share of the time.
PARTS = {
    "card": 2, "plan": 5, "real": 5, "round": 4, "trl": 5, "steps": 5, "speed": 8, "launches": 3,
    "memory": 4,
}  # fmt: skip
#: Seconds that a part has at least, many of which import, and with which none is started.
LEAST, SHORTEST = 40, 5


def arguments() -> argparse.Namespace:
    """Read the command line."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument("--shapes", nargs="+", choices=["0.5B", "3B"], default=["0.5B", "3B"])
    given.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    given.add_argument("--minutes", type=float, help="of all parts; 10, or 3 with --rehearse")
    given.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    given.add_argument("--trl", metavar="PYTHON", help="one that has TRL; default: this one")
    given.add_argument("--rehearse", action="store_true", help="tiny models, without a card")
    found = given.parse_args()
    found.quick = found.quick or found.rehearse
    return found


def has_card() -> bool:
    """Return whether this machine has a CUDA device."""
    if cuda_devices():  # without torch, which takes seconds to import
        return True
    import torch

    return torch.cuda.is_available()


def main() -> int:
    """Measure each part in a process of its own."""
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and so its child too
    report = Report("gpu", given)
    if not given.rehearse and not has_card():
        print("not measured: no CUDA device")
        return report.finish()
    ends = BEGAN + 60 * (given.minutes or (3 if given.rehearse else 10))
    job = {**vars(given), "out": None}
    parts = [part for part in PARTS if part in given.parts]
    for place, part in enumerate(parts):
        left = ends - time.time()
        share = PARTS[part] / sum(PARTS[other] for other in parts[place:])
        limit = min(left, max(LEAST, left * share))
        if limit < SHORTEST:
            say(f"{part}: not started", why="no time is left; see --minutes")
            continue
        say(part, most_seconds=limit)
        if given.rehearse and part == "steps":
            os.environ["TRITON_INTERPRET"] = "1"
        try:
            for found in told(HERE / "gpu_parts.py", {**job, "part": part}, limit=limit, echo=True):
                report.take(found)
                report.write()
        except ChildError as error:
            say(f"{part}: not finished", why=str(error).strip().splitlines()[-1])
        if part == "card" and (rates := report.rows.get("card, rates")):
            job["rates"] = {name: rates[0][name] for name in ("flops", "read", "copy", "launch")}
        os.environ.pop("TRITON_INTERPRET", None)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
