"""Compare ways to spend the same tokens on two goals: varied answers, and few tokens.

    python experiments/evolution/two_goals.py --seeds 32-39
    python experiments/evolution/two_goals.py --quick

Every finished arm of a seed is a line of results/foods-goals.jsonl and is not run again. The last
thing printed is the table of README.md, which says what the arms are and what came out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# One thread: the embedded models gain nothing from more. Before numpy and torch.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from arms import nested
from lines import Line, append, circumstances, read
from run import seeds
from stats import Estimate, bootstrap, paired

if TYPE_CHECKING:
    from evo_grpo.record.records import AgentRecord
    from evo_grpo.settings import RunConfig

HERE = Path(__file__).resolve().parent
TOKENS = 60_000
"""Tokens of an arm, sampled in training and in the evaluations between rounds."""
STEPS = 12
"""GRPO steps of a round."""
REFERENCE = (0.0, 17.0)
"""The reference point of the hypervolume: the variety, and the tokens of an answer, that every
point has to beat. No answer has more than 16 tokens."""
BEST_TOKENS = 1.0
"""Tokens of the shortest answer: the end token alone."""
TEST_PROMPTS, TEST_SAMPLES = 256, 2

_COMMON: dict[str, Any] = {
    "model.name": "tiny-foods",
    "model.lora.r": 8,
    "env.kind": "foods",
    "env.args": {"validation_size": 64},
    "env.reward": ["goal_rewards:variety", "goal_rewards:brevity"],
    "population.size": 8,
    "population.rounds": 100,
    "population.steps_per_round": STEPS,
    "algorithm.prompts_per_step": 2,
    "algorithm.group_size": 8,
    "algorithm.update_epochs": 2,
    "algorithm.lr": 1e-3,
    "evolve.hyperparameters": {
        "lr": {"min": 1e-4, "max": 1e-2},
        "reward_weights.brevity": {"min": 0.1, "max": 3.0},
    },
    "evolve.fitness.prompts": 32,
    "evolve.fitness.test_prompts": 1,
    "evolve.fitness.test_samples": 1,
    "engine.device": "cpu",
    "engine.threads": 1,
    "record.completions": 0,
    "record.checkpoints": "all",
    "record.optuna": False,
}
_GOALS = [{"name": "variety"}, {"name": "tokens", "direction": "minimize"}]


def _one_goal(reward: str) -> dict[str, Any]:
    """Return a run with the package's defaults for one goal, on half of the tokens."""
    return {"evolve.fitness.reward": reward, "population.stop": {"tokens": TOKENS // 2}}


#: Arm -> the settings of each of its runs, beside those that all have.
ARMS: dict[str, tuple[dict[str, Any], ...]] = {
    "pareto": (
        {
            "evolve.selection": "pareto",
            "evolve.exploration": "resample",
            "evolve.fitness.objectives": _GOALS,
            "population.sizes": "constant",
            "population.stop": {"tokens": TOKENS},
        },
    ),
    # Nobody is compared between rounds, so the evaluations are as small as they can be.
    "random": (
        {
            "evolve.selection": "none",
            "evolve.exploration": "none",
            "evolve.significance": None,
            "evolve.archive": False,
            "evolve.dead_steps": None,
            "evolve.fitness.reward": "variety",
            "evolve.fitness.prompts": 1,
            "evolve.fitness.final_samples": 0,
            "population.stop": {"tokens": TOKENS},
        },
    ),
    "one-goal-each": (_one_goal("variety"), _one_goal("brevity")),
}


def settings(arm: str, seed: int, tokens: int) -> list[dict[str, Any]]:
    """Return the settings of the runs of an arm, by dotted path."""
    found: list[dict[str, Any]] = []
    for own in ARMS[arm]:
        share = own["population.stop"]["tokens"] / TOKENS
        stop = {"tokens": round(tokens * share)}
        found.append({**_COMMON, **own, "population.stop": stop, "seed": seed})
    return found


def volume(points: Sequence[tuple[float, float]]) -> float:
    """Return the hypervolume of (variety, tokens) points, in [0, 1].

    It is the area of what the points dominate on the side of `REFERENCE`, as a share of the area
    between `REFERENCE` and a variety of 1 at `BEST_TOKENS`.
    """
    area, reached = 0.0, REFERENCE[0]
    for variety, tokens in sorted(points, key=lambda one: one[1]):
        # From the fewest tokens on, each point adds the strip by which its variety is greater.
        if variety > reached and tokens < REFERENCE[1]:
            area += (variety - reached) * (REFERENCE[1] - tokens)
            reached = variety
    return area / ((1.0 - REFERENCE[0]) * (REFERENCE[1] - BEST_TOKENS))


def measure(arm: str, seed: int, tokens: int) -> Line:
    """Run an arm with a seed, and judge its agents on the test prompts."""
    from evo_grpo import run
    from evo_grpo import settings as configuration
    from evo_grpo.record.family import front
    from evo_grpo.record.folder import read_rounds

    began, spent, points = time.perf_counter(), [0, 0], list[dict[str, Any]]()
    rounds_played: list[int] = []
    with tempfile.TemporaryDirectory() as place:
        for number, given in enumerate(settings(arm, seed, tokens)):
            folder = Path(place) / str(number)
            config = configuration.from_dict(nested(given))
            run(config, out=folder)
            rounds = read_rounds(folder)
            rounds_played.append(len(rounds))
            for record in rounds:
                spent[0] += sum(agent.tokens for agent in record.agents)
                spent[1] += record.evaluation_tokens
            # The front where a run knows one; otherwise every agent as it was last.
            last = {a.agent: a for record in rounds for a in record.agents if a.score is not None}
            chosen = front(rounds) or list(last.values())
            points += [
                {"run": number, "agent": a.agent, "round": a.round, **_judged(folder, config, a)}
                for a in chosen
            ]
    return {
        "arm": arm,
        "seed": seed,
        "tokens_planned": tokens,
        "volume": volume([(one["variety"], one["tokens"]) for one in points]),
        "points": points,
        "rounds": rounds_played,
        "training_tokens": spent[0],
        "evaluation_tokens": spent[1],
        "wall_seconds": time.perf_counter() - began,
    }


def _judged(folder: Path, config: RunConfig, agent: AgentRecord) -> dict[str, float]:
    """Return the variety and the tokens of an agent on the test prompts."""
    from evo_grpo.analysis.sampling.answers import loaded
    from evo_grpo.population.evaluate import evaluate
    from evo_grpo.schema.hparams import Hparams
    from evo_grpo.settings.evolve import ObjectiveConfig

    goal = ObjectiveConfig(name="tokens", direction="minimize")
    adapter = folder / str(agent.checkpoint) / "actor"
    with loaded(config, adapter, Hparams(), with_env=True) as policy:
        assert policy.env is not None, "it was asked for"
        (result,) = evaluate(
            policy.cohort,
            policy.env,
            [policy.slot],
            policy.env.prompts("test", TEST_PROMPTS),
            samples=TEST_SAMPLES,
            temperature=1.0,
            stream=("test",),
            reward="variety",
            further=[goal],
        )
    return {"variety": result.score.mean, "tokens": result.score.further[0].mean}


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the lines of the table of README.md: volumes, and what pareto is ahead by, paired."""
    volumes = {
        arm: {one["seed"]: one["volume"] for one in lines if one["arm"] == arm} for arm in ARMS
    }
    yield "| arm | seeds | hypervolume | worst | pareto − arm | ahead | points | tokens |"
    yield "|---|---|---|---|---|---|---|---|"
    for arm, own in volumes.items():
        if not own:
            continue
        mine = [one for one in lines if one["arm"] == arm]
        points = sum(len(one["points"]) for one in mine) / len(mine)
        spent = sum(one["training_tokens"] + one["evaluation_tokens"] for one in mine) / len(mine)
        gap = None if arm == "pareto" else paired(volumes["pareto"], own)
        ahead = "" if gap is None else f"{gap.ahead:g} of {gap.seeds}"
        yield (
            f"| {arm} | {len(own)} | {_shown(bootstrap(list(own.values())))} | "
            f"{min(own.values()):.3f} | {'' if gap is None else _shown(gap)} | {ahead} | "
            f"{points:.1f} | {spent / 1000:.1f}k |"
        )


def _shown(found: Estimate) -> str:
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def main(given: Sequence[str] | None = None) -> int:
    """Run what has no line yet, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=seeds, default=list(range(32, 40)), help="such as 32-39")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--out", type=Path, help="folder of the results; default: results/")
    parser.add_argument("--quick", action="store_true", help="one seed, few tokens, into runs/")
    options = parser.parse_args(given)
    out = options.out or (Path("runs/evolution-quick") if options.quick else HERE / "results")
    file = out / "foods-goals.jsonl"
    tokens = TOKENS // 20 if options.quick else TOKENS
    wanted = options.seeds[:1] if options.quick else options.seeds
    sys.path.insert(0, str(HERE))  # of goal_rewards
    shared = circumstances(1)
    for seed in wanted:
        for arm in options.arms:
            settled = settings(arm, seed, tokens)
            if any(
                (one["arm"], one["seed"], one["overrides"]) == (arm, seed, settled)
                for one in read(file)
            ):
                continue
            line = {**measure(arm, seed, tokens), "overrides": settled, **shared}
            append(file, line)
            print(
                f"{arm}, seed {seed}: {line['volume']:.3f}, {line['wall_seconds']:.1f} s",
                flush=True,
            )
    print("\n".join(table(read(file))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
