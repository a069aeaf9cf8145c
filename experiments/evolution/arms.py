"""What is compared: tasks, arms, and the plan that gives every arm of a task the same rows.

A row is one sampled completion. A task's budget is what its reference arm samples in training and
in the evaluations between rounds; the evaluation on the test split at the end is the same for all
arms and is not counted. An arm that evaluates less trains more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from evo_grpo.seeding import generator

REFERENCE = "tournament-constant"
"""The arm whose rows are the budget of all."""
DEFAULT_LR = 1e-3
"""lr of `algorithm`, where a run of the package begins when nobody says otherwise."""

#: Where agents begin and may go, wherever an arm searches a name. The collapse lies inside.
RANGES: dict[str, dict[str, float]] = {
    "lr": {"min": 1e-5, "max": 3e-2},
    "beta": {"min": 0.0, "max": 0.1},
    "clip_coef": {"min": 0.05, "max": 0.5},
    "group_size": {"min": 4, "max": 16},
    "temperature": {"min": 0.5, "max": 1.5},
}
#: The weight of the shaping reward of `sums-shaped`, wherever an arm searches it.
WEIGHT = "reward_weights.digits"
#: Names that agents choose from.
CHOICES: dict[str, dict[str, list[str]]] = {
    "loss_type": {"choices": ["grpo", "dr_grpo", "dapo", "cispo"]},
    "adv_norm": {"choices": ["mean_std", "mean_only"]},
}
#: Names that were searched later, each alone but for the two of AdamW.
BETAS = ("adam_beta1", "adam_beta2")
LATER: dict[str, dict[str, Any]] = {
    "entropy_coef": {"min": 0.0, "max": 0.02},
    "max_output_tokens": {"min": 2, "max": 8},
    "adam_beta1": {"min": 0.5, "max": 0.98},
    "adam_beta2": {"min": 0.9, "max": 0.9995},
}
RANK = "lora.r"
RANK_LR = 3e-3
"""lr of the arms that differ in rank."""
LAYERS = "lora.target_modules"
#: Sets of layers with an adapter: what PEFT takes for most models, the MLP, and all.
LAYER_SETS: dict[str, Any] = {
    "qv": ["q_proj", "v_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
    "all": "all-linear",
}
#: Prompts of the task `smollm2-prompts`: two that fit the model, and two that do not.
PROMPTS = {
    "plain": "{question}",
    "calculator": "You are a calculator.\n{question}",
    "quoted": '"{question}" The answer is',
    "steps": "Think step by step.\n{question}\n",
}
PROMPT_LR = 4e-4
"""lr of the arms that differ in the prompt."""
SEARCHED: dict[str, dict[str, Any]] = {
    **RANGES,
    WEIGHT: {"min": 0.03, "max": 3.0},
    RANK: {"min": 1, "max": 16},
    LAYERS: {"choices": [*LAYER_SETS]},
    "prompt": {"choices": [*PROMPTS]},
    **CHOICES,
    **LATER,
}


@dataclass(frozen=True)
class Task:
    """A task at the size at which arms are compared.

    Attributes:
        name: Of the results file.
        size: N, agents of the reference arm.
        rounds: Of every arm that selects.
        steps: GRPO steps per round of the reference arm.
        prompts: P, prompts of a step of one of N agents.
        group: G, completions per prompt.
        validation: Fewest validation prompts behind a fitness, one completion each.
        settings: The rest of the run's settings, by dotted path.
        arms: The arms, or groups of them, that run when none are named.
    """

    name: str
    size: int
    rounds: int
    steps: int
    prompts: int
    group: int
    validation: int
    settings: Mapping[str, Any]
    arms: tuple[str, ...] = ("main", "ablations")

    def quick(self) -> Task:
        """Return the task at a size that shows whether everything works, and nothing else."""
        small = {"evolve.fitness.test_prompts": 32, "evolve.fitness.test_samples": 1}
        return replace(self, rounds=2, steps=2, validation=16, settings={**self.settings, **small})


_COMMON: dict[str, Any] = {
    "model.lora.r": 8,
    "algorithm.update_epochs": 2,
    "evolve.fitness.samples": 1,
    "evolve.fitness.test_samples": 4,
    "engine.device": "cpu",
    "engine.threads": 1,
    "record.completions": 0,
    "record.checkpoints": "last",
    "record.optuna": False,
}
_SUMS = {
    **_COMMON,
    "model.name": "tiny-sums",
    "env.kind": "sums",
    "evolve.fitness.test_prompts": 500,
}
#: A layer whose update of rank 1 changes little, at any lr.
_NARROW = {**_SUMS, "model.lora.target_modules": r".*layers\.2\.mlp\.down_proj"}
_FOODS = {
    **_COMMON,
    "model.name": "tiny-foods",
    "env.kind": "foods",
    "env.args": {"validation_size": 512},
    "evolve.fitness.test_prompts": 256,
}
_SMOLLM2 = {
    **_COMMON,
    "model.name": "smollm2",
    "env.kind": "reasoning_gym:chain_sum",
    "env.args": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "env.prompt": "{question}",
    "algorithm.update_epochs": 1,
    "algorithm.max_output_tokens": 6,
    "evolve.fitness.test_prompts": 64,
}

#: More problems, each once: over 64 of them, four times each, half of an arm's deviation was the
#: test's.
_ASKED = {
    **_SMOLLM2,
    "env.args": {**_SMOLLM2["env.args"], "test_size": 480},
    "evolve.fitness.test_prompts": 256,
    "evolve.fitness.test_samples": 1,
}

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("sums", 8, 6, 8, 4, 8, 64, _SUMS),
        Task("sums-long", 8, 12, 8, 4, 8, 64, _SUMS, arms=("main",)),
        Task("sums-shaped", 8, 6, 8, 4, 8, 64, _SUMS, arms=("weights",)),
        Task("sums-narrow", 8, 6, 8, 4, 8, 64, _NARROW, arms=("ranks",)),
        Task("foods", 8, 6, 1, 2, 8, 64, _FOODS),
        # The reference of foods spends four fifths of its rows on evaluations, here half of them.
        Task("foods-16", 8, 6, 1, 2, 8, 16, _FOODS, arms=("main",)),
        Task("smollm2", 8, 6, 8, 2, 8, 32, _SMOLLM2, arms=("random", "new", "one-third")),
        Task("smollm2-prompts", 4, 3, 4, 2, 8, 32, _ASKED, arms=("prompts",)),
    )
}


@dataclass(frozen=True)
class Arm:
    """One way to spend a task's rows.

    Attributes:
        name: Of the arm.
        note: What it is, for the table of arms.
        overrides: What it sets, by dotted path; nothing else differs from the package's defaults.
        searches: The hyperparameters that agents may differ in, each within its range.
        lr: lr of `algorithm`; None draws it from the range, once per seed, since agent 0 begins
            with it.
        alone: One agent gets all rows: N times the prompts of a step.
        once: Evaluated at the end alone: one round of all steps.
        places: What becomes of N places over the rounds: all stay, or half leave each round down
            to so many.
        candidates: Policies that are evaluated after the last round.
        driver: What runs it: the package's own loop, or Optuna's over runs of one agent.
        schedule: lr follows a schedule over all steps of an agent.
        against: The arm that searches nothing under the same conditions.
    """

    name: str
    note: str
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    searches: tuple[str, ...] = ("lr",)
    lr: float | None = None
    alone: bool = False
    once: bool = False
    places: Literal["constant", 2, 1] = "constant"
    candidates: int = 0
    driver: Literal["run", "tpe"] = "run"
    schedule: bool = False
    against: str = "search-nothing"


#: Nobody leaves, nobody is copied, nothing changes.
_STILL: dict[str, Any] = {
    "evolve.selection": "none",
    "evolve.exploration": "none",
    "evolve.significance": None,
    "evolve.archive": False,
    "evolve.dead_steps": None,
    "evolve.fitness.final_samples": 0,
}
#: The defaults of evo-grpo 0.2, all named, since those of the package have changed since.
_OLD: dict[str, Any] = {
    "population.init": "sample",
    "evolve.selection": {"kind": "tournament", "size": 2, "elitism": True},
    "evolve.exploration": {
        "kind": "mutate",
        "no_mutation": 0.2,
        "rl_hp": 0.8,
        "mutate_elite": False,
        "copies_only": False,
    },
    "evolve.hyperparameters": {
        "lr": {**RANGES["lr"], "shrink_factor": 0.8, "grow_factor": 1.2},
    },
    "evolve.significance": None,
    "evolve.archive": False,
    "evolve.dead_steps": None,
    "evolve.fitness.final_samples": 0,
}
_HALVING = {**_STILL, "evolve.selection": "halving"}
NEW_CANDIDATES = 4
"""Evaluations after the last round of a run with the package's defaults, as planned."""


def _alone(name: str, note: str, lr: float) -> Arm:
    return Arm(name, note, _STILL, searches=(), lr=lr, alone=True, once=True)


def _new(name: str, note: str, **overrides: Any) -> Arm:
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return Arm(name, note, given, places=2, candidates=NEW_CANDIDATES)


def _searching(*names: str, **changes: Any) -> Arm:
    """Return the package's defaults with other names searched, at the default lr without it.

    `changes` are fields of the arm that differ.
    """
    note = f"the defaults, searching {' and '.join(names) or 'nothing'}"
    title = "all" if len(names) == len(RANGES) else "-".join(names) or "nothing"
    arm = Arm(
        f"search-{title}",
        "the defaults, searching all five" if title == "all" else note,
        searches=names,
        lr=None if "lr" in names else DEFAULT_LR,
        places=2,
        candidates=NEW_CANDIDATES,
    )
    return replace(arm, **changes)


MAIN = (
    Arm(
        "default-8",
        "eight agents at the default lr, no evolution",
        _STILL,
        searches=(),
        lr=DEFAULT_LR,
        once=True,
    ),
    _alone("one", "one agent with all rows, at the default lr", DEFAULT_LR),
    _alone("one-third", "one agent with all rows, at a third of the default lr", DEFAULT_LR / 3),
    _alone("one-triple", "one agent with all rows, at three times the default lr", DEFAULT_LR * 3),
    _alone("one-low", "one agent with all rows, at a tenth of the default lr", DEFAULT_LR / 10),
    _alone("one-high", "one agent with all rows, at ten times the default lr", DEFAULT_LR * 10),
    Arm(
        "random",
        "random search: eight agents, evaluated once, at the end",
        {**_STILL, "population.init": "sample"},
        once=True,
    ),
    Arm(
        "tpe",
        "Optuna: TPE proposes lr, median pruning stops trials of one agent",
        _STILL,
        searches=(),
        driver="tpe",
    ),
    Arm(REFERENCE, "the tournament of evo-grpo 0.2: eight places in every round", _OLD),
    Arm(
        "truncation",
        "population-based training: the worst quarter copies the best and mutates",
        {
            **_OLD,
            "evolve.selection": {"kind": "truncation", "share": 0.25},
            "evolve.exploration": {
                "kind": "mutate",
                "no_mutation": 0.0,
                "rl_hp": 1.0,
                "copies_only": True,
            },
        },
    ),
    Arm(
        "halving-2",
        "successive halving: the better half stays, down to two; nothing is copied",
        {**_HALVING, "population.init": "sample"},
        places=2,
    ),
    Arm(
        "halving-1",
        "the same down to one, with the archive that the package asks for then",
        {**_HALVING, "population.init": "sample", "evolve.archive": True},
        places=1,
    ),
    _new("new", "the package's defaults: a tournament over ever fewer places"),
)
ABLATIONS = (
    Arm(
        "random-spread",
        "random search from a Latin hypercube",
        {**_STILL, "population.init": "latin_hypercube"},
        once=True,
    ),
    _new("new-no-archive", "the defaults without the archive", evolve__archive=False),
    _new(
        "new-no-significance",
        "the defaults without the paired test: the better mean wins",
        evolve__significance=None,
    ),
    _new("new-no-mutation", "the defaults without mutation", evolve__exploration="none"),
    _new("new-init-same", "the defaults, all agents at one drawn lr", population__init="same"),
)
BEYOND_LR = (
    _searching(),
    *(_searching(name) for name in RANGES),
    _searching(*RANGES),
    *(_searching(name) for name in CHOICES),
    _searching("lr", "loss_type"),
)
#: Half of the largest beta of RANGES, so that there is a KL to shape.
_BETA: dict[str, Any] = {"algorithm.beta": 0.05}
_AT_BETA, _AT_SCHEDULE = "search-nothing-at-beta", "search-nothing-scheduled"
NAMES = (
    _searching("entropy_coef"),
    # The first agent begins with the limit of the task, as all of search-nothing have it.
    _searching("max_output_tokens", overrides={"algorithm.max_output_tokens": 4}),
    _searching(*BETAS, name="search-adam_betas"),
    _searching(
        name=_AT_BETA,
        note="the defaults, searching nothing, at beta 0.05 and with a penalty",
        overrides=_BETA,
        against=_AT_BETA,
    ),
    _searching(
        name=_AT_SCHEDULE,
        note="the defaults, searching nothing, with a schedule of lr that warms up for 5%",
        schedule=True,
        against=_AT_SCHEDULE,
    ),
)
#: Rewards of 1 for the right sum, and of up to 1 for its digits in any order, which can be hacked.
_SHAPED: dict[str, Any] = {
    "env.reward": [f"evo_grpo.envs.builtin.sums:{name}" for name in ("exact", "digits")],
    "evolve.fitness.reward": "exact",
}
WEIGHTS = (
    Arm(
        "weights-evolved",
        "the defaults, searching lr and the weight of a shaping reward",
        _SHAPED,
        searches=("lr", WEIGHT),
        places=2,
        candidates=NEW_CANDIDATES,
    ),
    Arm(
        "weights-equal",
        "the defaults, searching lr; right sums and the shaping reward weigh 1 each",
        _SHAPED,
        places=2,
        candidates=NEW_CANDIDATES,
    ),
    Arm(
        "weights-exact",
        "the defaults, searching lr; the shaping reward weighs 0",
        {**_SHAPED, "env.reward_weights": {"digits": 0.0}},
        places=2,
        candidates=NEW_CANDIDATES,
    ),
    Arm(
        "weights-random",
        "random search over lr and the weight: eight agents, evaluated once, at the end",
        {**_SHAPED, **_STILL},
        searches=("lr", WEIGHT),
        once=True,
    ),
)


def _rank(rank: int) -> Arm:
    return Arm(
        f"rank-{rank}",
        f"the defaults, searching nothing, at rank {rank}",
        {"model.lora.r": rank},
        searches=(),
        lr=RANK_LR,
        places=2,
        candidates=NEW_CANDIDATES,
    )


RANKS = (
    Arm(
        "rank-evolved",
        "the defaults, searching the rank",
        searches=(RANK,),
        lr=RANK_LR,
        places=2,
        candidates=NEW_CANDIDATES,
    ),
    *(_rank(rank) for rank in (1, 4, 16)),
    Arm(
        "rank-random",
        "random search over ranks: eight agents, evaluated once, at the end",
        _STILL,
        searches=(RANK,),
        lr=RANK_LR,
        once=True,
    ),
)


def _layers(name: str) -> Arm:
    return Arm(
        f"layers-{name}",
        f"the defaults, searching nothing, with adapters on the layers of {name}",
        {"model.lora.target_modules": LAYER_SETS[name]},
        searches=(),
        lr=DEFAULT_LR,
        places=2,
        candidates=NEW_CANDIDATES,
    )


_SETS: dict[str, Any] = {
    "model.lora.target_modules": "all-linear",
    "model.lora.target_sets": LAYER_SETS,
}
WHERE = (
    Arm(
        "layers-evolved",
        "the defaults, searching the layers",
        _SETS,
        searches=(LAYERS,),
        lr=DEFAULT_LR,
        places=2,
        candidates=NEW_CANDIDATES,
    ),
    *(_layers(name) for name in LAYER_SETS),
    Arm(
        "layers-random",
        "random search over layers: eight agents, evaluated once, at the end",
        {**_STILL, **_SETS},
        searches=(LAYERS,),
        lr=DEFAULT_LR,
        once=True,
    ),
)


def _asking(*names: str) -> dict[str, Any]:
    return {"env.prompts": {name: {"prompt": PROMPTS[name]} for name in names}}


def _prompt(name: str) -> Arm:
    return Arm(
        f"prompt-{name}",
        f"the defaults, searching nothing, under the prompt {name}",
        _asking(name),
        searches=(),
        lr=PROMPT_LR,
        places=2,
        candidates=NEW_CANDIDATES,
    )


ASKING = (
    Arm(
        "prompt-evolved",
        "the defaults, searching the prompt",
        _asking(*PROMPTS),
        searches=("prompt",),
        lr=PROMPT_LR,
        places=2,
        candidates=NEW_CANDIDATES,
    ),
    *(_prompt(name) for name in PROMPTS),
    Arm(
        "prompt-random",
        "random search over prompts: each agent keeps its own and is evaluated once, at the end",
        {**_STILL, **_asking(*PROMPTS)},
        searches=("prompt",),
        lr=PROMPT_LR,
        once=True,
    ),
)
GROUPS: dict[str, tuple[Arm, ...]] = {
    "main": MAIN,
    "ablations": ABLATIONS,
    "beyond-lr": BEYOND_LR,
    "names": NAMES,
    "all": (*MAIN, *ABLATIONS, *BEYOND_LR, *NAMES),
    "weights": WEIGHTS,
    "ranks": RANKS,
    "layers": WHERE,
    "prompts": ASKING,
}
ARMS: dict[str, Arm] = {
    arm.name: arm for arm in (*GROUPS["all"], *WEIGHTS, *RANKS, *WHERE, *ASKING)
}
QUICK_ARMS = ("random", REFERENCE, "new")


@dataclass(frozen=True)
class Plan:
    """How an arm spends the budget of a task.

    Attributes:
        agents: N of the first round.
        rounds: Rounds.
        steps: GRPO steps per round.
        prompts: P, prompts of a step of one of N agents.
        validation: Validation prompts behind a fitness.
        places: Agents that play each round.
        training: Rows sampled in training.
        evaluation: Rows sampled in evaluations.
    """

    agents: int
    rounds: int
    steps: int
    prompts: int
    validation: int
    places: tuple[int, ...]
    training: int
    evaluation: int

    @property
    def rows(self) -> int:
        """All of them."""
        return self.training + self.evaluation


#: (task, arm) -> share of the budget's rows that makes its sampled tokens equal to the reference's,
#: for arms that equal rows leave more than 2% off: agents that collapse may stop at once, or never.
#: The inverse of the ratio that run.py prints.
RATIOS: dict[tuple[str, str], float] = {}


def budget(task: Task, arm: Arm | None = None) -> int:
    """Return the rows of a task: what its reference arm trains on, and evaluates with.

    Args:
        task: Which.
        arm: The arm to spend them, whose completions may be longer or shorter; see `RATIOS`.
    """
    step = task.size * task.prompts * task.group
    rows = task.rounds * (task.steps * step + task.size * task.validation)
    return round(rows * RATIOS.get((task.name, arm.name), 1.0)) if arm else rows


def plan(task: Task, arm: Arm) -> Plan:
    """Spend the budget: as many whole steps per round as leave enough for the evaluations.

    What no whole step is left for goes into more validation prompts.

    Raises:
        ValueError: The evaluations alone cost more than the budget.
    """
    agents = 1 if arm.alone or arm.driver == "tpe" else task.size
    rounds = 1 if arm.once else task.rounds
    places = _places(agents, rounds, arm.places)
    evaluations = sum(places) + arm.candidates
    rows = budget(task, arm)
    if arm.driver == "tpe":
        # As many trials as the reference has agents, were none pruned.
        rows, evaluations = rows // task.size, rounds
    prompts = task.prompts * (task.size if arm.alone else 1)
    step = agents * prompts * task.group
    steps = (rows - evaluations * task.validation) // (rounds * step)
    training = rounds * steps * step
    validation = (rows - training) // evaluations
    if steps < 1:
        raise ValueError(f"{task.name}, {arm.name}: {rows} rows leave none for training")
    trials = task.size if arm.driver == "tpe" else 1
    return Plan(
        agents,
        rounds,
        steps,
        prompts,
        validation,
        places,
        trials * training,
        trials * evaluations * validation,
    )


def _places(agents: int, rounds: int, last: Literal["constant", 2, 1]) -> tuple[int, ...]:
    if last == "constant":
        return (agents,) * rounds
    return tuple(max(last, agents >> round) for round in range(rounds))


def start_lr(seed: int) -> float:
    """Draw the lr that agent 0 of a searching arm begins with: log-uniform over the range."""
    low, high = (math.log(RANGES["lr"][end]) for end in ("min", "max"))
    return math.exp(generator(seed, "experiment", "lr").uniform(low, high))


def overrides(task: Task, arm: Arm, seed: int) -> dict[str, Any]:
    """Return all settings of a run, by dotted path.

    Args:
        task: What is learnt.
        arm: How.
        seed: Of the run; the lr of agent 0 follows from it too, where the arm searches lr.
    """
    made = plan(task, arm)
    lr = start_lr(seed) if arm.lr is None else arm.lr
    settings = {
        **task.settings,
        "name": f"{task.name}-{arm.name}",
        "seed": seed,
        "population.size": made.agents,
        "population.rounds": made.rounds,
        "population.steps_per_round": made.steps,
        "algorithm.lr": lr,
        "algorithm.group_size": task.group,
        "algorithm.prompts_per_step": made.prompts,
        "evolve.fitness.prompts": made.validation,
        "evolve.hyperparameters": {name: SEARCHED[name] for name in arm.searches},
    }
    if arm.schedule:
        settings["algorithm.lr_schedule"] = {"steps": made.rounds * made.steps}
    if arm.places == "constant":
        settings["population.sizes"] = "constant"
    elif arm.places == 1:
        settings["population.sizes"] = sorted(set(made.places), reverse=True)
    return {**settings, **arm.overrides}


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted path as population.yaml nests them."""
    top: dict[str, Any] = {}
    for path, value in settings.items():
        here = top
        *groups, name = path.split(".")
        for group in groups:
            here = here.setdefault(group, {})
        here[name] = value
    return top


def chosen(names: tuple[str, ...] | list[str]) -> list[Arm]:
    """Return arms by their names or those of groups, each once.

    Raises:
        ValueError: Nothing is called so.
    """
    found: dict[str, Arm] = {}
    for name in names:
        if name not in GROUPS and name not in ARMS:
            known = ", ".join([*GROUPS, *ARMS])
            raise ValueError(f"--arms: expected some of {known}, got {name!r}")
        for arm in GROUPS.get(name, (ARMS.get(name),)):
            assert arm is not None
            found[arm.name] = arm
    return list(found.values())
