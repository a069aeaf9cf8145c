"""Calls from Python: their keywords become settings and objects; `run` and `resume`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.describing import recorded_task
from evo_grpo.envs.resolve import named_task
from evo_grpo.errors import ConfigError, EvoGrpoError
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.protocols import Explorer
from evo_grpo.evolve.select.halving import NoSelection
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.evolve.start import Start, described_start, start_problems
from evo_grpo.places import searching
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.state import rank_alpha
from evo_grpo.population.ranks.ranks import sharing_early_errors
from evo_grpo.population.ranks.team import is_silent_rank
from evo_grpo.record.folder import beside, code_folder
from evo_grpo.record.history import resolved_start
from evo_grpo.record.observer import Observer, ObserverList, check_observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.view import view_of
from evo_grpo.schema.group import Group
from evo_grpo.schema.hparams import RankAlpha
from evo_grpo.schema.problems import Problem, Problems
from evo_grpo.schema.search_space import warn_if_nothing_mutates
from evo_grpo.settings import (
    AgentSettings,
    DoubtfulSetting,
    EvolveConfig,
    ModelConfig,
    PopulationConfig,
    RecordConfig,
    RunConfig,
)
from evo_grpo.settings import run as run_settings
from evo_grpo.settings.evaluations import settled
from evo_grpo.settings.keywords import TRAIN_KEYWORDS, agent_settings
from evo_grpo.settings.model import begins_outside
from evo_grpo.settings.without_effect import KnownSettings, WithoutEffect, without_effect
from evo_grpo.settings.yaml import as_config
from evo_grpo.training.assemble import Objects, Prepared
from evo_grpo.training.from_python import STRATEGIES, FromPython
from evo_grpo.training.run import resume as continue_run
from evo_grpo.training.run import run as play_run
from evo_grpo.training.starting import lora_config
from evo_grpo.training.strategies import from_object
from evo_grpo.types import Slot

if TYPE_CHECKING:
    from evo_grpo.readers.terminal.progress import RunProgress

_NAMED_MODEL_ONLY = ("config", "trust_remote_code", "adapter")


def separated(given: Mapping[str, Any], kind: str) -> tuple[AgentSettings, Objects]:
    """Separate the keywords of a constructor into settings and Python objects.

    Args:
        given: Keywords of a constructor by the names of `AGENT_KEYWORDS`, and `tokenizer`.
        kind: The algorithm: "grpo", "gspo" or "cispo".
    """
    keywords: dict[str, Any] = {**given}
    tokenizer = keywords.pop("tokenizer", None)
    model, lora = keywords.get("model"), keywords.get("lora")
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise _problem(
            "tokenizer",
            f"expected a transformers tokenizer, got {type(tokenizer).__name__}; load one with "
            "AutoTokenizer.from_pretrained, or omit it: a model by name has its own",
        )
    # Imported here: before `evo_grpo.errors`, PEFT's import of bitsandbytes would print a warning.
    from peft import LoraConfig

    peft = lora if isinstance(lora, LoraConfig) else None
    if peft is not None:
        # The adapter's adapter_config.json stores PEFT's object.
        del keywords["lora"]
    if isinstance(model, ModelConfig):
        keywords.update({**dict(model), "model": model.name})
        del keywords["name"]
    if model is None or isinstance(model, str | ModelConfig):
        return _checked(agent_settings(keywords, kind=kind), Objects(None, tokenizer, peft))
    _check_module(model, keywords)
    dropped = ("model", "lora", *_NAMED_MODEL_ONLY)
    settings = agent_settings({n: v for n, v in keywords.items() if n not in dropped}, kind=kind)
    if peft is None and lora is not None:
        # Validate `lora` as for a named model; a module needs PEFT's object.
        model_settings: dict[str, Any] = {"name": "object", "lora": lora}
        adapter = ModelConfig(**model_settings).lora
        settings = settings.replace(target_sets=adapter.target_sets)
        peft = None if adapter.is_default else lora_config(adapter)
    return _checked(settings, Objects(model, tokenizer, peft))


def adapter_of(settings: AgentSettings, objects: Objects) -> RankAlpha:
    """Return the rank and alpha of the adapters."""
    return settings.lora.rank_alpha if objects.lora is None else rank_alpha(objects.lora)


def _checked(settings: AgentSettings, objects: Objects) -> tuple[AgentSettings, Objects]:
    """Return the arguments; refuse initial rank or alpha out of range, except a start adapter's."""
    is_named_model = settings.model is not None and settings.model.adapter is None
    if objects.lora is not None or is_named_model:
        adapter, above = adapter_of(settings, objects), ("hyperparameters",)
        for name, text in begins_outside(settings.search_space(), adapter, above):
            raise ConfigError(f"lora.{name}: {text}")
    return settings, objects


def checked_start(population: PopulationConfig, settings: AgentSettings, objects: Objects) -> Start:
    """Return the checked `population.init`, with hyperparameters in place of the runs it names."""
    size, space = population.size, settings.search_space()
    hparams = settings.algorithm.first_hparams(space, adapter_of(settings, objects))
    init = resolved_start(population.init, hparams, space, size, settings.seed)
    if problems := list(start_problems(hparams, space, size, init)):
        raise Problems(*problems).below("init")
    return init


def warn_of_settings(settings: AgentSettings, init: Start = "same") -> None:
    """Warn about each setting that was passed and has no effect, and about doubtful settings."""
    for finding in run_settings.without_effect_of_agents(settings, init):
        warnings.warn(str(finding), WithoutEffect, stacklevel=4)
    for doubt in run_settings.doubts_of_agents(settings, init):
        warnings.warn(doubt, DoubtfulSetting, stacklevel=4)


def _check_module(model: object, given: dict[str, Any]) -> None:
    if not (hasattr(model, "config") and hasattr(model, "get_output_embeddings")):
        raise _problem(
            "model",
            "expected the name of a model or a transformers causal language model, got "
            f"{type(model).__name__}; load one with AutoModelForCausalLM.from_pretrained",
        )
    for name in _NAMED_MODEL_ONLY:
        if given.get(name):
            raise _problem(
                name,
                f"expected only with the name of a model, got {given[name]!r} beside a "
                f"{type(model).__name__}; configure the module itself",
            )


def _problem(name: str, text: str) -> Problems:
    return Problems(Problem((name,), text))


def in_groups(
    given: Mapping[str, Any], *, size: int, played: int
) -> tuple[PopulationConfig, EvolveConfig, RecordConfig, dict[str, Any]]:
    """Sort the keywords of `train` into groups of settings.

    `size` is the number of agents in the first round, `played` the number of finished rounds. The
    last returned value has the strategies that are objects, by their names in `RoundSettings`.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, path in TRAIN_KEYWORDS.items():
        groups.setdefault(str(path[0]), {})[str(path[-1])] = given[name]
    evolve, strategies = groups["evolve"], dict[str, Any]()
    for name, field, method in STRATEGIES:
        if hasattr(evolve[name], method) and not isinstance(evolve[name], Group):
            strategies[field] = from_object(name, evolve.pop(name))
    if size == 1 and evolve.get("selection") == TournamentSelection():
        evolve["selection"] = NoSelection()  # one agent has no competitors
    population = PopulationConfig(size=size, **groups["population"])
    population = population.replace(rounds=played + population.rounds)
    record = RecordConfig(**groups["record"])
    for name in ("storage", "trackers"):
        if getattr(record, name) and given["out"] is None:
            raise ConfigError(
                f"{name}: expected out= too, since the rounds are read from the log in a run "
                f"folder; give out=, or omit {name}"
            )
    return population, EvolveConfig(**evolve), record, strategies


def check_out(out: Path, cohort: Cohort, played: int) -> None:
    """Raise ConfigError if `train` cannot write a run folder; `played` rounds are finished."""
    problem = ""
    if cohort.team.size > 1:
        problem = (
            f"out: expected one process, got {cohort.team.size} that train together; omit out, or "
            "use evo_grpo.run(config), which records a run of several processes"
        )
    elif played:
        problem = (
            f"out={str(out)!r}: expected a population without rounds, got one that has played "
            f"{played}; give out= at the first call, or omit it. A run that is in a folder "
            "continues with Population.resume(folder, env)"
        )
    if problem:
        raise ConfigError(problem)


def going_on(
    population: PopulationConfig,
    evolve: EvolveConfig,
    cohort: Cohort,
    slots: Sequence[Slot],
    past: tuple[Sequence[RoundRecord], PopulationConfig | None],
) -> tuple[PopulationConfig, EvolveConfig]:
    """Return the settings of a call of `train`, with `decisions` and `sizes` filled in if missing.

    `past` has the finished rounds, and the settings of the previous call (None after `load`).
    Missing values are taken from the previous call, and continued as in a run that is extended.
    After `load`, they are taken from the finished rounds. Without a selection, no agent leaves.
    """
    rounds, earlier = past
    selects = evolve.selects
    decided = [n for n, record in enumerate(rounds, start=1) if not record.between]
    played = [len(record.agents) for record in rounds]
    if rounds and earlier is not None:
        if population.decisions is None:
            population = population.replace(decisions=earlier.decisions)
        if population.sizes is None and selects:
            population = population.replace(sizes=earlier.sizes)
    if not rounds and cohort.hp_config and len({cohort.agents[s].hparams for s in slots}) == 1:
        population = population.replace(init="same")
    if decided and population.decisions is None:
        population = population.replace(decisions=decided)
    if len(set(played)) > 1 and population.sizes is None and selects:
        population = population.replace(sizes=played)
    return settled(population, evolve, cohort.settings.algorithm, cohort.hp_config)


def warn_of_inert_mutations(
    cohort: Cohort,
    slots: Sequence[int],
    explorer: Explorer | None,
    prompts: int,
    population: PopulationConfig | None = None,
    evolve: EvolveConfig | None = None,
) -> None:
    """Warn about settings without effect in `train` of which the constructor has not warned.

    `explorer` is None for the default; `prompts` is P, the prompts of a GRPO step.
    """
    settings, hp_config = cohort.settings, cohort.hp_config
    known_settings = KnownSettings(
        settings.algorithm,
        hp_config,
        settings.engine,
        [cohort.agents[slot].hparams for slot in slots],
        prompts=prompts,
        population=population,
        evolve=evolve,
        own_exploration=explorer is not None and not hasattr(explorer, "kind"),
    )
    for finding in without_effect(known_settings):
        if finding not in run_settings.without_effect_of_agents(settings):
            warnings.warn(str(finding), WithoutEffect, stacklevel=3)
    if isinstance(explorer, Mutations):
        warn_if_nothing_mutates(explorer.rl_hp, hp_config)


def recorded_config(prepared: Prepared, name: str, env: object) -> RunConfig:
    """Return the settings of a call of `train` as a `RunConfig`, without Python objects."""
    cohort, rounds = prepared.cohort, prepared.round_settings
    settings = cohort.settings
    start_hparams = [cohort.agents[slot].hparams for slot in prepared.slots]
    adapter = rank_alpha(cohort.slots.config)
    default_hparams = settings.algorithm.first_hparams(cohort.hp_config, adapter)
    init = described_start(start_hparams, default_hparams, cohort.hp_config, cohort.seed)
    return RunConfig(
        name=name,
        seed=settings.seed,
        model=settings.model or ModelConfig(name=cohort.base.name, lora=settings.lora),
        env=named_task(env) or recorded_task(env, prepared.env.name),
        population=rounds.population.replace(init=init),
        algorithm=settings.algorithm,
        evolve=rounds.evolve.replace(hyperparameters=settings.hyperparameters),
        engine=settings.engine,
        record=rounds.record,
    )


def unnamed_objects(
    cohort: Cohort, slots: Sequence[Slot], env: object, strategies: Mapping[str, Any]
) -> list[str]:
    """Return the names of the objects in a call of `train` that no file can name.

    `Population.resume` needs these objects again. `strategies` has the strategies that are objects,
    by their names in `RoundSettings`.
    """
    names = [*cohort.objects, *(name for name, field, _ in STRATEGIES if field in strategies)]
    task = named_task(env)
    names += [f"env ({type(env).__name__})"] if task is None else task.objects()
    trained = any(cohort.agents[slot].steps for slot in slots)
    if trained or list(slots) != list(range(len(slots))):
        names.append("agents that had trained before")
    return names


def given_objects(
    cohort: Cohort, keywords: Mapping[str, Any], strategies: Mapping[str, Any]
) -> FromPython:
    """Return the Python objects of a call of `train`; for `strategies` see `unnamed_objects`."""
    named = {name: keywords[name] for name, field, _ in STRATEGIES if field in strategies}
    tokenizer = cohort.base.tokenizer if "tokenizer" in cohort.objects else None
    return FromPython(keywords["env"], Objects(tokenizer=tokenizer), named)


def shown_progress(
    wanted: bool | None, title: str = "", names: Sequence[str] = ()
) -> AbstractContextManager[RunProgress | None]:
    """Return a context that shows progress; `wanted` is `progress` of `Population.train`."""
    if wanted is False:
        return nullcontext()
    from evo_grpo.readers.terminal.live import progress  # loads rich

    return progress(title=title, hyperparameters=names, anywhere=wanted is True)


class RunFolder(type(Path())):
    """The path of a run folder; a notebook displays it as the result of the run."""

    def _repr_html_(self) -> str | None:
        from evo_grpo.readers.report.run_page import as_html

        try:
            return as_html(view_of(Path(self)), f"run folder: {self}")
        except EvoGrpoError:  # shown like any other path
            return None


def run(
    config: RunConfig | str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    force: bool = False,
    observer: Observer | None = None,
    progress: bool | None = None,
) -> Path:
    """Train and evolve a population from its first round to its last.

    Requests of `evo-grpo steer` are carried out between two rounds. After `stop-after-round` the
    function returns before the last round; the folder then has no summary and can be resumed.

    Args:
        config: Settings of the run: a `RunConfig`, the path of a YAML file, or a mapping as in
            such a file, in which `env.train`, `env.validation` and `env.test` may be rows (a list
            of mappings, a pandas frame, a datasets.Dataset or DatasetDict) and `env.reward` may be
            functions. Files and modules that a YAML file names are found in the working folder or
            beside the YAML file.
        out: Run folder; None creates `runs/<name>-<n>`.
        force: Replace an existing run.
        observer: Gets the progress.
        progress: Whether to show progress and the result. None shows them in a terminal or a
            notebook unless there is an observer, True also in a pipe or a file, False nowhere.

    Returns:
        The run folder.

    Raises:
        EvoGrpoError: Any subclass. Most bad input is reported before the first round.
    """
    check_observer(observer or Observer())
    with sharing_early_errors():
        settings = as_config(config)
    place = beside(config)
    if not is_silent_rank():
        for finding in run_settings.without_effect_of_run(settings):
            warnings.warn(str(finding), WithoutEffect, stacklevel=2)
        for doubt in run_settings.doubts_of_run(settings):
            warnings.warn(doubt, DoubtfulSetting, stacklevel=2)

    def play(audience: Observer) -> Path:
        with searching(place):
            return play_run(settings, out=out, force=force, observer=audience)

    return _watched(play, progress, observer, settings.model.name)


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    allow: Sequence[str] = (),
    code: str | Path | None = None,
    observer: Observer | None = None,
    progress: bool | None = None,
) -> Path:
    """Continue a stopped run after its last whole round; leave a finished run unchanged.

    Adapter, reference, AdamW moments, hyperparameters and step counts of an agent are read from its
    last checkpoint; its member and history are read from rounds.jsonl. The selection and mutation
    that the last round recorded are then applied. Random streams are derived from the seed, so no
    generator state is stored.

    Args:
        folder: The run folder.
        rounds: Rounds of the whole run, in place of population.rounds. A finished run continues up
            to this number, with the result of a run that had this number from the start. The
            earlier summary is kept as summary.rounds-N.json.
        allow: Files of yours that may have changed since the run began, named as in the error
            message, such as "env.reward: my_rewards:score".
        code: A further folder to search for the files and modules that the run names.
        observer: Gets the progress.
        progress: As for `run`.

    Returns:
        The run folder.

    Raises:
        RunDirError: `Population.train` recorded the run with objects that no file can name.
        ConfigError: The settings or files of the run have changed, or `rounds` is less than the
            finished rounds.
        CheckpointError: A file of the run is missing or was changed.
    """
    check_observer(observer or Observer())

    def play(audience: Observer) -> Path:
        with searching(code_folder(code), is_code=True):
            return continue_run(folder, rounds=rounds, allow=allow, observer=audience)

    return _watched(play, progress, observer, str(folder))


def _watched(
    play: Callable[[Observer], Path], progress: bool | None, observer: Observer | None, loaded: str
) -> RunFolder:
    """Call `play` with an observer that shows the progress and calls `observer`.

    `loaded` is the name of what is loaded first, for the display.
    """
    # Only the process of rank 0 shows the run: others may not see the folder.
    if is_silent_rank() or (progress is None and observer is not None):
        progress = False
    audience = observer or Observer()
    with shown_progress(progress) as screen:
        if screen is None:
            return RunFolder(play(audience))
        screen.loading(loaded)
        path = play(ObserverList((screen, audience)))
        screen.show_ending(view_of(path))
    return RunFolder(path)
