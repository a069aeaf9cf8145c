"""Search on a small model and train its recipe on a large one, against searching on the large one.

    python experiments/recipe/run.py --large sums-192 --seeds 40-47
    python experiments/recipe/run.py --report

A finished run is a line of results/sums.jsonl and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import evo_grpo
from evo_grpo import settings
from evo_grpo.errors import EvoGrpoError
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.summary import read_summary
from evo_grpo.training.sizing.model_size import read_model_size

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "sums.jsonl"
sys.path.insert(0, str(HERE.parent / "evolution"))
from stats import Estimate, bootstrap, paired  # noqa: E402 -- beside this folder

SMALL = "tiny-sums"
LEARN, FORWARD, EPOCHS = 6, 2, 2
"""FLOPs per token and parameter, and the passes over the rows of a step."""
AGENTS, ROUNDS, STEPS, PROMPTS, GROUP, VALIDATION = 8, 6, 8, 4, 8, 64
LOW, HIGH = 1e-5, 1e-2
TARGET = 0.85
"""Validation accuracy for the FLOPs to the same accuracy."""
EXPONENTS = {"recipe": 0.5, "recipe-same-lr": 0.0, "recipe-muP": 1.0}
"""Arm -> power of the ratio of widths that lr is multiplied by."""


def search(model: str, seed: int) -> settings.RunConfig:
    """Return the default tournament from an lr that is unknown within three powers of ten."""
    ends = math.log(LOW), math.log(HIGH)
    lr = math.exp(np.random.default_rng(seed).uniform(*ends))
    return settings.from_dict(
        {
            "seed": seed,
            "model": model,
            "env": "sums",
            "population": {"size": AGENTS, "rounds": ROUNDS, "steps_per_round": STEPS},
            "algorithm": {"lr": lr, "prompts_per_step": PROMPTS, "group_size": GROUP},
            "evolve": {
                "hyperparameters": {"lr": {"min": LOW, "max": HIGH}},
                "fitness": {"prompts": VALIDATION, "test_prompts": 500},
            },
            "engine": {"device": "cpu", "threads": 1},
            "record": {"completions": 0, "checkpoints": "last", "optuna": False},
        }
    )


def measured(config: settings.RunConfig, folder: Path, spent: float = 0.0) -> dict[str, Any]:
    """Train a run, and return its test accuracy with its FLOPs; `spent` FLOPs came before."""
    started = time.perf_counter()
    evo_grpo.run(config, out=folder, progress=False)
    rounds, summary = read_rounds(folder), read_summary(folder)
    assert summary is not None, "the run is finished"
    parameters = read_model_size(config.model.name).parameters
    assert parameters is not None, "the weights are there"
    learned = (FORWARD + LEARN * EPOCHS) * parameters
    flops, curve = spent, list[tuple[float, float]]()
    for record in rounds:
        flops += learned * sum(agent.tokens for agent in record.agents)
        flops += FORWARD * parameters * record.evaluation_tokens
        best = max(agent.score.mean for agent in record.agents if agent.score is not None)
        curve.append((flops, best))
    flops += FORWARD * parameters * summary["final_tokens"]
    return {
        "test": summary["best"]["mean"],
        "base": summary["base"]["mean"],
        "flops": flops,
        "curve": curve,
        "winner": summary["best"]["kind"],
        "seconds": round(time.perf_counter() - started, 1),
    }


def rounds_for(budget: float, prompts: int, parameters: int) -> int:
    """Return the rounds of one agent that cost `budget` FLOPs; four tokens are a completion."""
    row = 4 * parameters
    each = STEPS * prompts * GROUP * (FORWARD + LEARN * EPOCHS) + VALIDATION * FORWARD
    return max(1, round(budget / (row * each)))


def scaled(config: settings.RunConfig, large: str, power: float) -> settings.RunConfig:
    """Return a recipe with every lr multiplied by a power of the ratio of widths."""
    old, new = read_model_size(SMALL).shape, read_model_size(large).shape
    assert old is not None, "it is embedded"
    assert new is not None, "it is embedded"
    factor, data = (old.hidden / new.hidden) ** power, config.model_dump(mode="json")
    data["algorithm"]["lr"] *= factor
    for entry in data["evolve"]["exploration"].get("rounds", ()):
        if "lr" in entry:
            entry["lr"] *= factor
    if (span := data["evolve"]["hyperparameters"].get("lr")) is not None:
        for name in ("min", "max"):
            span[name] *= factor
    return settings.from_dict(data)


def of_seed(seed: int, large: str, arms: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the line of each arm of a seed."""
    parameters = read_model_size(large).parameters
    assert parameters is not None, "the weights are there"
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if "large" in arms:
            yield {"arm": "large", **measured(search(large, seed), place / "large")}
        if not set(arms) & {"small", *EXPONENTS}:
            return
        small = measured(search(SMALL, seed), place / "small")
        yield {"arm": "small", **small}
        # What the same search costs on the large model, less what it has cost on the small one.
        own = read_model_size(SMALL).parameters or 0
        budget = small["flops"] * (parameters / own - 1)
        for arm in (one for one in EXPONENTS if one in arms):
            file = place / f"{arm}.yaml"
            evo_grpo.recipe(place / "small", file, model=large)
            prompts = settings.load(file).algorithm.prompts_per_step or 1
            rounds = rounds_for(budget, prompts, parameters)
            evo_grpo.recipe(place / "small", file, model=large, rounds=rounds, force=True)
            config = scaled(settings.load(file), large, EXPONENTS[arm])
            found = measured(config, place / arm, small["flops"])
            yield {"arm": arm, **found, "lr": config.algorithm.lr, "rounds": rounds}


def lines() -> list[dict[str, Any]]:
    """Return the finished runs."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def run(seeds: Sequence[int], large: str, arms: Sequence[str]) -> None:
    """Run what is missing; a seed whose search on the small model is repeated gives equal lines."""
    torch.set_num_threads(1)
    RESULTS.parent.mkdir(exist_ok=True)
    warnings.simplefilter("ignore")
    for seed in seeds:
        done = {one["arm"] for one in lines() if one["seed"] == seed}
        missing = [arm for arm in arms if arm not in done]
        if not missing:
            continue
        try:
            for one in of_seed(seed, large, missing):
                if one["arm"] not in done:
                    with RESULTS.open("a") as file:
                        file.write(json.dumps({"seed": seed, **one}) + "\n")
                    print(seed, one["arm"], one["test"], f"{one['seconds']} s", flush=True)
        except EvoGrpoError as error:
            print(seed, "failed:", error, flush=True)


def shown(found: Estimate | None, sign: str = "") -> str:
    """Return a mean with its interval."""
    if found is None:
        return ""
    return f"{found.mean:{sign}.3f} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"


def reached(curve: Sequence[Sequence[float]]) -> float:
    """Return the FLOPs after the first round with the target accuracy; infinite if none has it."""
    return next((flops for flops, fitness in curve if fitness >= TARGET), math.inf)


def report() -> str:
    """Return the results as a table."""
    found = lines()
    arms = ["large", *EXPONENTS, "small"]
    by: dict[str, Mapping[int, dict[str, Any]]] = {
        arm: {one["seed"]: one for one in found if one["arm"] == arm} for arm in arms
    }
    rows = [
        "| arm | seeds | test | worst | arm − large | ahead | TFLOPs | TFLOPs to "
        f"{TARGET} | reached it |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    reference = {seed: one["test"] for seed, one in by["large"].items()}
    for arm, own in by.items():
        if not own:
            continue
        tests = {seed: one["test"] for seed, one in own.items()}
        difference = paired(tests, reference) if arm not in ("large", "small") else None
        to = [reached(one["curve"]) / 1e12 for one in own.values()]
        total = float(np.mean([one["flops"] for one in own.values()])) / 1e12
        ahead = "" if difference is None else f"{difference.ahead:g} of {difference.seeds}"
        median = float(np.median(to))
        rows.append(
            f"| {arm} | {len(own)} | {shown(bootstrap(list(tests.values())))} | "
            f"{min(tests.values()):.3f} | {shown(difference, '+')} | {ahead} | {total:.2f} | "
            f"{'never' if math.isinf(median) else f'{median:.2f}'} | "
            f"{sum(map(math.isfinite, to))} of {len(to)} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Run the missing runs, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", help="folder of the large model")
    parser.add_argument("--seeds", default="40-47", help="such as 40-47")
    parser.add_argument("--arms", nargs="+", default=["large", "recipe"])
    parser.add_argument("--report", action="store_true", help="print the table")
    given = parser.parse_args()
    if given.report:
        print(report())
        return
    first, _, last = given.seeds.partition("-")
    run(range(int(first), int(last or first) + 1), given.large, given.arms)


if __name__ == "__main__":
    main()
