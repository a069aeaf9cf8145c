"""Does the final comparison choose the right finalist?

    python experiments/evolution/finalists.py --task sums sums-long foods --seeds 0-15

Runs the package's defaults (the arm `new`), keeps what each finalist scored on validation prompts,
and evaluates all of them on the test split. Two rules then choose from the same scores: the
greatest validation score, with the archive only where it is significantly better; and the rule of
the package, by which the mean of two survivors wins a tie. README.md has the answer.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy and torch

from arms import TASKS
from one_run import measure, quiet
from run import HERE, seeds
from stats import bootstrap

from evo_grpo.evolve.compare import compare
from evo_grpo.population.evaluate import evaluate
from evo_grpo.training import judge
from evo_grpo.training.assemble import Prepared
from evo_grpo.types import Member, Score, Slot

LEVEL = 0.1
"""`evolve.significance` of the runs."""


def finalists_of(task: str, seed: int) -> list[dict[str, Any]]:
    """Run the defaults once; return each finalist: its kind, rewards per prompt, and test score."""
    found: list[dict[str, Any]] = []
    plain = judge.choose

    def choose(prepared: Prepared, candidates: Sequence[judge.Finalist]) -> judge.Choice:
        choice, fitness = plain(prepared, candidates), prepared.round_settings.evolve.fitness
        tested = evaluate(
            prepared.cohort,
            prepared.env,
            [one.slot for one in candidates],
            prepared.env.prompts("test", fitness.test_prompts),
            samples=fitness.per_prompt(fitness.test_samples),
            temperature=fitness.temperature,
            reward=fitness.reward,
            stream=("test",),
        )
        for one, score, result in zip(candidates, choice.scores, tested, strict=True):
            rewards = None if score is None else list(score.per_prompt)
            found.append({"kind": one.kind, "validation": rewards, "test": result.score.mean})
        return choice

    with mock.patch.object(judge, "choose", choose):
        measure(task, "new", seed)
    return found


def greatest(finalists: Sequence[dict[str, Any]]) -> int:
    """Return the finalist with the greatest score; the archive only if significantly better."""
    scores = [_score(one) for one in finalists]
    order = sorted(range(len(scores)), key=lambda i: (-scores[i].mean, i))
    fresh = [i for i in order if finalists[i]["kind"] != "archive"]
    if finalists[order[0]]["kind"] != "archive" or not fresh:
        return order[0]
    ahead = compare(scores[order[0]], scores[fresh[0]])
    return order[0] if ahead.significant(LEVEL) else fresh[0]


def of_package(finalists: Sequence[dict[str, Any]]) -> int:
    """Return the finalist that the package chooses."""
    agent, member = Slot(0), Member(0, Slot(0))
    made = [judge.Finalist(one["kind"], agent, member, agent, 0.0, None) for one in finalists]
    return judge.best_finalist(made, [_score(one) for one in finalists], LEVEL)


def _score(one: dict[str, Any]) -> Score:
    rewards = one["validation"]
    return Score(sum(rewards) / len(rewards), 0.0, len(rewards), tuple(rewards))


def main(given: Sequence[str] | None = None) -> int:
    """Run what has no line yet, and print what each rule is worth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=["sums-long"])
    parser.add_argument("--seeds", type=seeds, default=list(range(16)), help="such as 0-15")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "finalists.jsonl")
    args = parser.parse_args(given)
    quiet()
    text = args.out.read_text(encoding="utf-8") if args.out.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    known = {(line["task"], line["seed"]) for line in lines}
    for task in args.task:
        for seed in args.seeds:
            if (task, seed) not in known:
                line = {"task": task, "seed": seed, "finalists": finalists_of(task, seed)}
                lines.append(line)
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    for task in args.task:
        runs = [
            line["finalists"]
            for line in lines
            if line["task"] == task and line["seed"] in args.seeds
        ]
        compared = [run for run in runs if len(run) > 1]
        alone = [run[0]["test"] for run in runs if len(run) == 1]
        before = [run[greatest(run)]["test"] for run in compared] + alone
        now = [run[of_package(run)]["test"] for run in compared] + alone
        gain = bootstrap([new - old for new, old in zip(now, before, strict=True)])
        print(
            f"{task}, {len(runs)} seeds: greatest score {sum(before) / len(before):.4f}, the mean "
            f"wins ties {sum(now) / len(now):.4f}, difference {gain.mean:+.4f} [{gain.low:+.4f}, "
            f"{gain.high:+.4f}], worst {min(before):.3f} and {min(now):.3f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
