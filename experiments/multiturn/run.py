"""Train a population on the game of game.py, once per seed, and print a row per round.

python experiments/multiturn/run.py --seeds 10 11 12
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from evo_grpo import run
from evo_grpo import settings as configuration
from evo_grpo.errors import EvoGrpoError
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.records import RoundRecord

HERE = Path(__file__).resolve().parent
TITLES = ("seed", "round", "mean return", "best return", "in training", "turns", "dropped")


def play(seed: int, out: Path, overrides: list[str]) -> list[RoundRecord]:
    """Play one run and print its rounds as rows of a table."""
    # The game is a module of this folder.
    sys.path.insert(0, str(HERE))
    config = configuration.load(HERE / "population.yaml", [f"seed={seed}", *overrides])
    folder = run(config, out=out, force=True)
    rounds = read_rounds(folder)
    for record in rounds:
        scores = [a.score.mean for a in record.agents if a.score is not None]
        metrics = [a.metrics for a in record.agents]
        cells = (
            str(seed),
            str(record.round + 1),
            f"{statistics.mean(scores):.2f}",
            f"{max(scores):.2f}",
            f"{statistics.mean(m['reward'] for m in metrics):.2f}",
            f"{statistics.mean(m['turns'] for m in metrics):.2f}",
            f"{sum(m['dropped'] for m in metrics):.0f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    base, best = summary["base"], summary["best"]
    print(
        f"seed {seed}, {summary['wall_seconds']:.0f} s: on {base['n']} test episodes the base "
        f"earns {base['mean']:.2f} +- {base['se']:.2f}, the best agent {best['mean']:.2f} +- "
        f"{best['se']:.2f}",
        file=sys.stderr,
    )
    return rounds


def main() -> int:
    """Run the experiment; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--out", type=Path, default=Path("runs/multiturn"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    print(f"| {' | '.join(TITLES)} |\n|{' --- |' * len(TITLES)}")
    try:
        for seed in given.seeds:
            play(seed, given.out / f"seed-{seed}", given.set)
    except EvoGrpoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
