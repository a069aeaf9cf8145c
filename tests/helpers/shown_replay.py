"""A replay as values, without a model: what files, terminals and cards show of it."""

import numpy as np

from evo_grpo.record.arms import WINNER, Difference
from evo_grpo.record.names import REPLAYED
from evo_grpo.record.replay import Replay, ReplayArm, Schedule, ScheduledRound, trainings
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Score

#: Eight agents give way to four and two: the rows of the line grow.
ROUNDS = (
    ScheduledRound(0, 3, Hparams(lr=4e-3, group_size=4), 64, 256, 512),
    ScheduledRound(1, 3, Hparams(lr=4e-3, group_size=4), 128, 512, 512),
    ScheduledRound(2, 9, Hparams(lr=2e-3, group_size=5), 260, 1040, 520),
)


def schedule(rounds=ROUNDS, **more) -> Schedule:
    given = {"kind": "last", "member": rounds[-1].member, "checkpoint": "checkpoints/best"}
    rows = sum(one.run_rows for one in rounds)
    given |= {
        "steps": 4,
        "mutable": ("lr", "temperature"),
        "run_rows": rows,
        "run_tokens": 4 * rows,
    }
    return Schedule(**{**given, **more}, rounds=tuple(rounds))


def scored(*per_prompt: float) -> Score:
    mean = sum(per_prompt) / len(per_prompt)
    error = float(np.std(per_prompt, ddof=1)) / len(per_prompt) ** 0.5 if per_prompt[1:] else np.nan
    return Score(mean, error, len(per_prompt), per_prompt)


EVEN = scored(*(0.0, 1.0) * 8)
BETTER = scored(*(0.5, 1.0) * 8)


def replay(tests=None, made: Schedule | None = None, repeats: int = 3) -> Replay:
    """A replay whose trainings got the given rewards, all of a kind the same, or a list of them."""
    made = made or schedule()
    tests = {**dict.fromkeys((*REPLAYED, WINNER), EVEN), **(tests or {})}
    tests = {
        name: tuple(found) if isinstance(found, list) else (found,) * repeats
        for name, found in tests.items()
    }
    tests[WINNER] = tests[WINNER][:1]
    trained = tuple(
        ReplayArm(
            plan.name,
            4 * plan.rows,
            tests[plan.name],
            plan.prompts,
            plan.rows,
            0,
        )
        for plan in trainings(made)
    )
    pairs = [REPLAYED, *((one.name, WINNER) for one in trained)]
    differences = tuple(Difference.between(a, tests[a], b, tests[b]) for a, b in pairs)
    return Replay(made, 11, repeats, trained, tests[WINNER][0], differences, 2.5)
