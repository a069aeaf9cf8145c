"""AgileRL itself on the task sums: its population, tournament and mutations, at the same tokens.

    python experiments/evolution/agilerl_sums.py --seeds 0-2

Shape, prompts, rewards and the lrs that agents begin with are those of our reference arm with the
same seed. One JSON line per seed is printed and appended to results/agilerl-sums.jsonl; a seed that
has its line is not run again. A few minutes a seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from arms import ARMS, RANGES, REFERENCE, TASKS, Task, nested, overrides, plan
from common import MARK
from lines import append, circumstances, read
from peers import python_of
from run import seeds

from evo_grpo import settings as configuration
from evo_grpo.training.assemble import prepare
from evo_grpo.types import Prompt

HERE = Path(__file__).resolve().parent
FILE = "agilerl-sums.jsonl"


def job(task: Task, seed: int) -> dict[str, Any]:
    """Return what AgileRL is to do: what our reference arm does with this seed."""
    arm = ARMS[REFERENCE]
    made = plan(task, arm)
    config = configuration.from_dict(nested(overrides(task, arm, seed)))
    prepared = prepare(config)
    env = prepared.env

    def rows(prompts: list[Prompt]) -> list[tuple[str, str]]:
        return [(prompt.text, prompt.columns["answer"]) for prompt in prompts]

    steps = [rows(env.batch(n, made.prompts)) for n in range(made.rounds * made.steps)]
    return {
        "seed": seed,
        "lrs": [prepared.cohort.agents[slot].hparams.lr for slot in prepared.slots],
        "range": RANGES["lr"],
        "prompts": made.prompts,
        "group": task.group,
        "tokens": prepared.cohort.max_output_tokens,
        "train": [steps[r * made.steps : (r + 1) * made.steps] for r in range(made.rounds)],
        "validation": rows(env.prompts("validation", made.validation)),
        "test": rows(env.prompts("test", task.settings["evolve.fitness.test_prompts"])),
        "test_samples": task.settings["evolve.fitness.test_samples"],
    }


def train(task: Task, seed: int) -> dict[str, Any]:
    """Run AgileRL with a seed and return its line.

    Raises:
        SystemExit: It stopped; with its last line.
    """
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="evolution-agilerl-") as folder:
        environment["TMPDIR"] = folder
        file, log = Path(folder) / "job.json", Path(folder) / "stderr"
        file.write_text(json.dumps(job(task, seed)), encoding="utf-8")
        command = [str(python_of("agilerl")), str(HERE / "agilerl_side.py"), str(file)]
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    rounds.append(json.loads(line[len(MARK) :]))
                    print(f"seed {seed}: {_told(rounds[-1])}", file=sys.stderr, flush=True)
        if process.returncode:
            said = log.read_text(errors="replace").strip().splitlines()
            raise SystemExit(f"agilerl stopped with {process.returncode}: {said[-1:] or 'silent'}")
    facts, *rounds = rounds
    last = rounds[-1]
    return {
        "arm": "agilerl",
        "task": task.name,
        "seed": seed,
        "test": {"mean": last["test"], "se": last["test_se"]},
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "rounds": rounds,
        "peer": facts["versions"],
    }


def _told(line: dict[str, Any]) -> str:
    if "round" not in line:
        return "agents stand"
    return (
        f"round {line['round']}, {line['seconds']:.0f} s, {line['tokens']} tokens, best "
        f"{line['validation']:.3f} on validation, {line['test']:.3f} on test"
    )


def main() -> int:
    """Run the seeds that have no line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=seeds, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--quick", action="store_true", help="two rounds of two steps")
    options = parser.parse_args()
    task = TASKS["sums"].quick() if options.quick else TASKS["sums"]
    done = {line["seed"] for line in read(options.out / FILE)}
    for seed in options.seeds:
        if seed in done:
            continue
        line = {**train(task, seed), **circumstances(1)}
        append(options.out / FILE, line)
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
