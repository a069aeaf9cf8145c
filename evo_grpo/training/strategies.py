"""Creates the task and the strategies that settings name, without importing torch."""

from collections.abc import Sequence
from typing import Any

from evo_grpo.envs.data.tables import SPLITS, require_columns
from evo_grpo.envs.finding import find_name
from evo_grpo.envs.loading import Loader, load_function
from evo_grpo.envs.registry import build_task, is_multi_turn
from evo_grpo.envs.rewards.weights import check_rewards
from evo_grpo.envs.task import Task
from evo_grpo.errors import ConfigError
from evo_grpo.evolve.kinds import Exploration, Selection, UserStrategy
from evo_grpo.evolve.protocols import Explorer, Selector
from evo_grpo.evolve.start import with_first_choices
from evo_grpo.schema.validation import shown
from evo_grpo.settings import AgentSettings, EvolveConfig, RunConfig


def selector(selection: Selection, significance: float | None = None) -> Selector:
    """Return the selector: `selection` itself, or an instance of the class that it names.

    `significance` is `evolve.significance`, the level at which `pareto` tests dominance.
    """
    if isinstance(selection, UserStrategy):
        return _instance(selection, "evolve.selection", "plan")
    with_tests = getattr(selection, "at", None)
    return selection if with_tests is None else with_tests(significance)


def explorer(exploration: Exploration) -> Explorer:
    """Return the explorer: `exploration` itself, or an instance of the class that it names."""
    if isinstance(exploration, UserStrategy):
        return _instance(exploration, "evolve.exploration", "explore")
    return exploration


def check_strategies(evolve: EvolveConfig) -> None:
    """Check the user's selection and exploration classes by their source, without importing them.

    Each class has to exist, accept the arguments in the settings, and have its method: `plan` for
    selection, `explore` for exploration.
    """
    strategies = (
        ("selection", "plan", evolve.selection),
        ("exploration", "explore", evolve.exploration),
    )
    for name, method, strategy in strategies:
        if not isinstance(strategy, UserStrategy):
            continue
        where = f"evolve.{name}"
        source = find_name(strategy.kind, where)
        if wrong := source.refuses(strategy.args):
            raise _refused_arguments(strategy, where, f"TypeError: {wrong}")
        if source.lacks(method):
            raise _without_method(strategy, where, method, "an object without it")


def task_of(config: RunConfig, load: Loader = load_function) -> Task | None:
    """Build the single-turn task of a run; return None if its episodes have several turns.

    With `finding.find_function` as `load`, no code that the settings name is imported.
    """
    if is_multi_turn(config.env.kind):
        return None
    task = build_task(config.env, config.seed, load)
    weights = {reward.name: reward.weight for reward in task.rewards}
    fitness = config.evolve.fitness
    check_columns(task, config.record.columns)
    stop = config.population.stop.rewards
    check_rewards(weights, config.search_space(), fitness.reward, fitness.objectives, stop)
    return task


def check_columns(task: object, names: Sequence[str]) -> None:
    """Refuse `record.columns` if rows of the task lack a column that it names."""
    if not names:
        return
    if not isinstance(task, Task):
        raise ConfigError(
            "record.columns: expected a task of one turn, whose prompts are rows, got one of "
            "several; leave it out"
        )
    for split in SPLITS:
        require_columns(task.splits[split], dict.fromkeys(names, "record.columns"), split)


def check_explorer(explorer: Explorer, settings: AgentSettings) -> None:
    """Let an exploration check the ranges of hyperparameters before a run; see `Explorer`."""
    check = getattr(explorer, "check", None)
    if check is not None:
        space = settings.search_space()
        first = settings.algorithm.first_hparams(space, settings.lora.rank_alpha)
        check(with_first_choices(first, space), space)


def from_object(name: str, given: object) -> Any:  # noqa: ANN401 -- of the user's class
    """Return a strategy that keyword `name` passes as an object; raise ConfigError for a class."""
    if isinstance(given, type):
        call = f"{name}={given.__name__}()"
        raise ConfigError(
            f"{name}: expected an object, got the class {given.__name__}; give {call}"
        )
    return given


def _instance(setting: UserStrategy, where: str, method: str) -> Any:  # noqa: ANN401 -- of the user's class
    factory = load_function(setting.kind, where)
    try:
        strategy = factory(**setting.args)
    except Exception as error:  # the class is the user's code and may raise anything
        raise _refused_arguments(setting, where, f"{type(error).__name__}: {error}") from error
    if not callable(getattr(strategy, method, None)):
        raise _without_method(setting, where, method, shown(strategy))
    return strategy


def _refused_arguments(setting: UserStrategy, where: str, why: str) -> ConfigError:
    return ConfigError(
        f"{where}: {setting.kind} refuses the arguments {setting.args}: {why}; set {where}.args"
    )


def _without_method(setting: UserStrategy, where: str, method: str, got: str) -> ConfigError:
    return ConfigError(
        f"{where}: expected {setting.kind!r} to make an object with a method {method}, got "
        f"{got}; see evo_grpo.{'Selector' if method == 'plan' else 'Explorer'}"
    )
