"""Defines recipe(run, out), which writes a run's winner as a configuration for another run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from evo_grpo import settings
from evo_grpo.errors import ConfigError, RunDirError
from evo_grpo.escaping import printable
from evo_grpo.evolve.explore.on_copy import NoExploration
from evo_grpo.evolve.explore.schedule import ROUND, ScheduleExploration
from evo_grpo.evolve.select.halving import NoSelection
from evo_grpo.record.files import atomic_write
from evo_grpo.record.folder import read_config
from evo_grpo.record.names import CONFIG
from evo_grpo.record.replay import Schedule, read_schedule
from evo_grpo.record.summary import read_summary, score_of
from evo_grpo.schema.hparams import CLIP_ENDS, LORA, AgentFields, Hparams, Value
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter, values_of
from evo_grpo.schema.validation import whole
from evo_grpo.settings.algorithm import AlgorithmConfig
from evo_grpo.training.sizing.machine import LIMITS


def recipe(
    run: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    rounds: int | None = None,
    steps: int | None = None,
    force: bool = False,
) -> Path:
    """Write the settings and the schedule of a run's winner as a YAML file for another run.

    One agent trains with the hyperparameters of the winner's line of ancestors, round by round; the
    line is stretched or shortened to `rounds` rounds. Everything else is as in the run, even for
    another model; `evo-grpo check` says whether the memory suffices for that model.

    Args:
        run: Folder of a finished run.
        out: The file to write.
        model: Name of another model, as in `model.name`; None keeps the run's model.
        rounds: Number of rounds, >= 1; None takes the number in the winner's line.
        steps: GRPO steps per round, >= 1; None takes the run's number.
        force: Replace an existing file.

    Raises:
        RunDirError: The run is not finished, its winner trained for a single round, or it was
            recorded with objects that no file can name.
        ConfigError: The file exists, or an argument is out of range.
    """
    for name, number in (("rounds", rounds), ("steps", steps)):
        if number is not None:
            whole(1).check(name, number)
    path, folder = Path(out), Path(run)
    if path.exists() and not force:
        raise ConfigError(
            f"{path}: already exists; choose another name, or replace it with --force"
        )
    schedule, config = read_schedule(run), read_config(folder)
    run_of_one = recipe_settings(
        config,
        schedule,
        rounds or len(schedule.rounds),
        steps or schedule.steps,
        model=None if model == config.model.name else model,
    )
    summary = cast("dict[str, Any]", read_summary(folder))
    best, base = score_of(summary["best"]).mean, score_of(summary["base"]).mean
    heading = (
        f"A recipe from the winner of {folder}: member {schedule.member} over {config.model.name}",
        f"It scored {best:.3f} on the test prompts, the base {base:.3f}. Its line has "
        f"{len(schedule.rounds)} rounds of {schedule.steps} steps.",
        "algorithm has the values of its first round, and as many prompts as it had in its last.",
        "evolve has the values of its later rounds, each from its share of the rounds on.",
        f"All others are as in {folder / CONFIG}",
    )
    text = "".join(f"# {printable(line)}\n" for line in heading)
    atomic_write(path, f"{text}\n{settings.to_yaml(run_of_one)}", "recipe")
    return path


def recipe_settings(
    config: settings.RunConfig, schedule: Schedule, rounds: int, steps: int, *, model: str | None
) -> settings.RunConfig:
    """Return the settings of a recipe: one agent for `rounds` rounds of `steps` GRPO steps."""
    played = schedule.rounds
    line = [played[round * len(played) // rounds].hparams for round in range(rounds)]
    ranges = _ranges(line, config.search_space())
    share = rounds * steps / (config.population.rounds * config.population.steps_per_round)
    return config.replace(
        name=f"{config.name}-recipe",
        model=_model(config.model, line[0], list(ranges), model),
        env=_env(config.env, line[0], list(ranges)),
        population=config.population.replace(
            size=1,
            rounds=rounds,
            steps_per_round=steps,
            init="latin_hypercube",
            sizes=None,
            stop=settings.StopConfig(no_signal=config.population.stop.no_signal),
        ),
        algorithm=_algorithm(config.algorithm, schedule, line[0], share),
        evolve=_evolve(config.evolve, line, ranges),
        engine=config.engine if model is None else config.engine.replace(**dict.fromkeys(LIMITS)),
    )


def _values(hparams: Hparams, name: str, space: HyperparameterConfig) -> list[Value]:
    """Return a hyperparameter's value, a clip pair's two distances from 1, or the max for None."""
    values = values_of(hparams, name)
    if not values and name in space.names() and space[name].choices is None:
        return [space[name].max]
    return values


def _ranges(line: Sequence[Hparams], space: HyperparameterConfig) -> dict[str, RLParameter]:
    """Return the range of each hyperparameter that changes between the rounds of `line`."""
    names = [*space.names(), *_set_by_hand(line, space)]
    ranges: dict[str, RLParameter] = {}
    for name in names:
        values = [_values(hparams, name, space) for hparams in line]
        # A changed rank takes alpha with it, unless alpha is searched.
        follows = name == f"{LORA}alpha" and _differs(line, f"{LORA}r")
        if all(of_round == values[0] for of_round in values) and not follows:
            continue
        distinct = list(dict.fromkeys(value for of_round in values for value in of_round))
        numbers = [value for value in distinct if not isinstance(value, str)]
        has_choices = name in space.names() and space[name].choices is not None
        if not numbers or has_choices or len(distinct) == 1:
            ranges[name] = RLParameter(choices=distinct)
        else:
            ranges[name] = RLParameter(min=min(numbers), max=max(numbers))
    return ranges


def _set_by_hand(line: Sequence[Hparams], space: HyperparameterConfig) -> list[str]:
    """Return the hyperparameters that change in `line` although the run has no range for them."""
    searched = {*space.names(), *(CLIP_ENDS if "clip_coef" in space.names() else ())}
    if searched & set(CLIP_ENDS):
        searched.add("clip_coef")
    return [name for name in line[0].named() if name not in searched and _differs(line, name)]


def _differs(line: Sequence[Hparams], name: str) -> bool:
    return any(hparams.named().get(name) != line[0].named().get(name) for hparams in line)


def _entries(line: Sequence[Hparams], ranges: dict[str, RLParameter]) -> list[dict[str, Any]]:
    """Return the changes from round to round of `line` as the entries of a schedule."""
    space, entries = HyperparameterConfig(**ranges), list[dict[str, Any]]()
    for number in range(1, len(line)):
        before, after = line[number - 1], line[number]
        changes = {name: value for name in ranges for name, value in _change(name, before, after)}
        for name, value in changes.items():
            if value is None and name not in space.names():
                raise RunDirError(
                    f"{name}: expected a number in every round of the winner's line, got none in "
                    "some, set by hand without a range; write the settings of this run by hand"
                )
            changes[name] = space[name].max if value is None else value
        if changes:
            entries.append({ROUND: number + 1, **changes})
    return entries


def _change(name: str, before: Hparams, after: Hparams) -> list[tuple[str, Value | None]]:
    """Return the changes of a hyperparameter between two rounds; a clip pair as its two ends."""
    pair = any(isinstance(hparams.clip_coef, tuple) for hparams in (before, after))
    names = CLIP_ENDS if name == "clip_coef" and pair else (name,)
    return [(key, after.get(key)) for key in names if before.get(key) != after.get(key)]


def _algorithm(
    own: AlgorithmConfig, schedule: Schedule, first: Hparams, share: float
) -> AlgorithmConfig:
    """Return the recipe's group `algorithm`; the steps of its lr schedule are scaled by `share`."""
    # These hyperparameters of an agent are None unless the run searches them.
    searched = ("loss_type", "importance_sampling_level", "adv_norm", "max_output_tokens")
    values = {name: getattr(first, name) for name in (*AgentFields.model_fields, *searched)}
    changes = {name: v for name, v in values.items() if name not in searched or v is not None}
    if own.lr_schedule is not None:
        steps = max(1, round(own.lr_schedule.steps * share))
        changes["lr_schedule"] = own.lr_schedule.replace(steps=steps)
    prompts = schedule.prompts_per_step(schedule.rounds[-1])
    return own.replace(**changes, prompts_per_step=max(1, round(prompts)))


def _model(
    model: settings.ModelConfig, first: Hparams, searched: Sequence[str], name: str | None
) -> settings.ModelConfig:
    """Return the recipe's group `model`, with the LoRA rank and alpha of the line's first round.

    If `name` names another model, `trust_remote_code` is off.
    """
    lora = _lora(model.lora, first)
    if "lora.target_modules" not in searched:
        lora = _with_layers(lora, first)
    if name is None:
        return model.replace(lora=lora)
    if model.adapter is not None:
        raise ConfigError(
            f"--model: expected a run whose agents start from their base, got model.adapter "
            f"{model.adapter}, which fits only {model.name}; leave --model out, and set model.name "
            "and model.adapter in the recipe"
        )
    return model.replace(name=name, lora=lora, trust_remote_code=False)


def _with_layers(lora: settings.LoraSettings, first: Hparams) -> settings.LoraSettings:
    """Return LoRA settings that have the layers of the first round in place of sets of layers."""
    name, sets = first.lora_target_modules, lora.target_sets
    targets = lora.target_modules if name is None else sets[name]
    return lora.replace(target_modules=targets, target_sets={})


def _lora(lora: settings.LoraSettings, first: Hparams) -> settings.LoraSettings:
    if first.lora_r is None and first.lora_alpha is None:
        return lora
    rank, alpha = first.lora_r or lora.r, first.lora_alpha
    if alpha is None and lora.alpha is not None:
        # As in training, alpha follows the rank unless the scale divides by its square root.
        alpha = lora.alpha if lora.use_rslora else lora.alpha * rank / lora.r
    elif alpha is None and lora.use_rslora:
        alpha = lora.rank_alpha.alpha
    return lora.replace(r=rank, alpha=alpha)


def _env(env: settings.EnvConfig, first: Hparams, searched: Sequence[str]) -> settings.EnvConfig:
    """Return the recipe's group `env`, with the prompt and the reward weights of the winner."""
    changes: dict[str, Any] = {}
    if first.prompt is not None and env.prompts is not None and "prompt" not in searched:
        changes["prompts"] = {first.prompt: env.prompts[first.prompt]}
    if first.reward_weights:
        if isinstance(env.reward_weights, list):
            raise RunDirError(
                "env.reward_weights: expected a mapping of names to weights, since the recipe has "
                f"weights by name, got a list, {env.reward_weights}; write the settings of this "
                "run by hand"
            )
        changes["reward_weights"] = {**(env.reward_weights or {}), **first.reward_weights}
    return env.replace(**changes) if changes else env


def _evolve(
    evolve: settings.EvolveConfig, line: Sequence[Hparams], ranges: dict[str, RLParameter]
) -> settings.EvolveConfig:
    """Return the recipe's group `evolve`, for one agent: a schedule, and no selection."""
    entries = _entries(line, ranges)
    return evolve.replace(
        selection=NoSelection(),
        exploration=ScheduleExploration(rounds=entries) if entries else NoExploration(),
        hyperparameters=ranges,
        archive=False,  # restoring it would halve lr, and miss entries of the schedule
        fitness=evolve.fitness.replace(objectives=[], reward=evolve.fitness.counted),
    )
