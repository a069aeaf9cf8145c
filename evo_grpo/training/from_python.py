"""Continues a run that `Population.train` began with Python objects; they are passed again."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evo_grpo.envs.describing import DIGEST, environment_parts, reward_parts, source_part
from evo_grpo.envs.resolve import named_task
from evo_grpo.errors import ConfigError
from evo_grpo.model.lora.configs import read_config as read_adapter_config
from evo_grpo.model.lora.load import trainable
from evo_grpo.population.ranks.team import Team, is_one_of_several
from evo_grpo.population.rules import RoundSettings
from evo_grpo.record import files, plain, run_dir
from evo_grpo.record.folder import read_config, recorded_objects
from evo_grpo.record.observer import Observer, ObserverList, check_observer
from evo_grpo.record.records import RoundRecord
from evo_grpo.schema.validation import shown
from evo_grpo.settings import RunConfig, algorithm, trackers
from evo_grpo.settings.objects import PythonObject
from evo_grpo.training import assemble, restoring, resume_check, run
from evo_grpo.training.followers import Followers
from evo_grpo.training.strategies import check_explorer, from_object
from evo_grpo.types import Slot

STRATEGIES = (("selection", "selector", "plan"), ("exploration", "explorer", "explore"))
"""For each strategy: keyword of `Population.train`, name in `RoundSettings`, required method."""


@dataclass(frozen=True)
class FromPython:
    """The Python objects that a run uses and that its population.yaml cannot name.

    Attributes:
        env: The environment, as `Population.train` takes it; None if population.yaml names it.
        objects: Model, tokenizer and LoRA configuration.
        strategies: Selection and exploration, by their keywords of `Population.train`.
    """

    env: object = None
    objects: assemble.Objects = field(default_factory=assemble.Objects)
    strategies: Mapping[str, object] = field(default_factory=dict[str, object])

    def config_of(self, folder: Path, call: str, *, played: bool) -> RunConfig:
        """Return the settings of a run; refuse objects other than those that the run began with.

        `call` is the text of the call that takes the objects, for messages. `played` is whether a
        round is finished; its checkpoints then have the agents and their LoRA configuration.
        """
        recorded, config = recorded_objects(folder), read_config(folder)
        config = self.with_env(recorded, config, folder, call)
        recorded = {n: text for n, text in recorded.items() if n.partition(".")[0] != "env"}
        objects = self.objects
        by_name = {"model": objects.model, "tokenizer": objects.tokenizer, "lora": objects.lora}
        named = {**by_name, **self.strategies}
        present = {name: value for name, value in named.items() if value is not None}
        # A checkpoint has the LoRA configuration.
        needed = recorded.keys() - {"agents", *(("lora",) if played else ())}
        problem = ""
        if "agents" in recorded and not played:
            problem = (
                f"{folder}: expected a run with a finished round, got one of agents that had "
                "trained before, whose weights no round has recorded; call train again, with "
                "force=True for the same folder"
            )
        elif missing := sorted(needed - present.keys()):
            problem = (
                f"{folder}: expected {' and '.join(f'{name}=' for name in missing)} as at the "
                f"begin of the run, which no file can name, got none: {call}"
            )
        elif added := sorted(present.keys() - recorded.keys()):
            problem = (
                f"{added[0]}: expected none, since population.yaml names what the run was begun "
                f"with, got {shown(present[added[0]])}; leave {added[0]} out, or start another run "
                "with Population.train"
            )
        if problem:
            raise ConfigError(problem)
        return config

    def with_env(
        self, recorded: Mapping[str, str], config: RunConfig, folder: Path, call: str
    ) -> RunConfig:
        """Return the settings of a run, with the Python rows and functions of `env` filled in.

        `recorded` is the result of `recorded_objects` for the run; `call` is the text of the call
        that takes the environment, for messages.
        """
        recorded_env = recorded.get("env")
        in_settings = [part for name, part in recorded.items() if name.startswith("env.")]
        named = None if self.env is None else named_task(self.env)
        by_name = recorded_env is None and not in_settings
        if by_name and (self.env is None or named == config.env):
            return config
        if not by_name and self.env is not None and (named is None) == (recorded_env is not None):
            return config if named is None else config.replace(env=named)
        origin = recorded_env or f"settings with {', '.join(in_settings)}"
        if self.env is None:
            raise ConfigError(
                f"{folder}: expected the environment that the run was begun with, {origin}, which "
                f"no file can name, got none; give it in Python: {call}"
            )
        text, remedy = f"environment that the run was begun with, {origin}", "give that environment"
        if by_name:
            text = f"task that the run was begun with, {config.env.kind!r} of population.yaml"
            remedy = "leave env out"
        got = type(self.env).__name__ if named is None else f"the task {shown(self.env)}"
        raise ConfigError(
            f"env: expected the {text}, got {got}; {remedy}, or start another run with "
            "Population.train"
        )

    def parts(self, seed: int) -> dict[str, str]:
        """Return a text or a digest for each part of the Python objects; see `envs.describing`."""
        named = None if self.env is None else named_task(self.env)
        if named is not None:
            parts = reward_parts(
                reward.value for reward in named.rewards if isinstance(reward, PythonObject)
            )
        else:
            parts = {} if self.env is None else environment_parts(self.env, seed)
        for name, strategy in self.strategies.items():
            parts[name] = type(strategy).__name__
            parts |= source_part(f"{name}: its class", type(strategy))
        if self.objects.tokenizer is not None:
            parts["tokenizer"] = _digest_of(self.objects.tokenizer)
        return parts

    def round_settings(self, config: RunConfig, prompts: int | None = None) -> RoundSettings:
        """Return the settings of rounds, with the strategies from Python.

        `prompts` is the default of `prompts_per_step`.
        """
        settings = assemble.settings_of_rounds(config, prompts or algorithm.DEFAULT_PROMPTS)
        strategies: dict[str, Any] = {
            place: from_object(name, self.strategies[name])
            for name, place, _ in STRATEGIES
            if name in self.strategies
        }
        return replace(settings, **strategies)

    def cohort(
        self, config: RunConfig, rounds: Sequence[RoundRecord], folder: Path
    ) -> assemble.Prepared:
        """Build the base, the agents and the environment of a run; no checkpoint is loaded yet."""
        agents, objects = config.agents(), self.objects
        if objects.model is not None:
            agents = agents.replace(model=None, target_sets=agents.lora.target_sets)
        if "lora" in recorded_objects(folder) and objects.lora is None and rounds:
            place = plain.inside(folder, str(rounds[-1].agents[0].checkpoint)) / "actor"
            objects = replace(objects, lora=trainable(read_adapter_config(place)))
        check_explorer(self.round_settings(config).explorer, agents)
        cohort, start = assemble.build_cohort(agents, objects)
        slots: Sequence[Slot] = tuple(a.agent for a in rounds[0].agents) if rounds else ()
        if slots:  # not 0, 1, ... if the population was a part of another one
            added = assemble.add_agents(cohort, max(slots) + 1, "same", start)
        else:
            population = config.population
            slots = added = assemble.add_agents(cohort, population.size, population.init, start)
        for slot in sorted(set(added) - set(slots)):
            cohort.remove(slot)
        env = assemble.environment_for(cohort, config.env if self.env is None else self.env)
        cohort.open_engine()
        settings = self.round_settings(config, env.batch_size)
        return assemble.Prepared(
            cohort, env, settings, tuple(slots), objects=self.parts(config.seed)
        )


def resume_from_python(
    folder: Path,
    given: FromPython,
    *,
    rounds: int | None = None,
    allow: Sequence[str] = (),
    observer: Observer | None = None,
) -> tuple[assemble.Prepared, tuple[Slot, ...]]:
    """Continue a run in this process; return its `Prepared` and the slots of remaining agents."""
    observer = observer or Observer()
    check_observer(observer)
    if is_one_of_several():
        raise ConfigError(
            f"{folder}: expected one process, got several that train together; use "
            "evo_grpo.resume(folder), which continues a run of several processes"
        )
    call = f"evo_grpo.Population.resume({str(folder)!r}, ...)"
    with Followers() as followers, ExitStack() as stack:
        with files.reading(folder):
            opened = stack.enter_context(run_dir.RunDir.open(folder))
            resume_check.refuse_part_of_comparison(folder)
            played = opened.rounds()
            config = given.config_of(folder, call, played=bool(played))
            parts = given.parts(config.seed)
            if resume_check.is_finished(opened, rounds):
                resume_check.check_inputs(folder, config, command=call, allow=allow, objects=parts)
                prepared = given.cohort(config, played, folder)
                return prepared, restoring.restore(prepared, played, folder)
            changed = resume_check.changed_inputs(opened, config, rounds, allow, Team(), parts)
        trackers.check_trackers(changed.config.record.trackers)
        prepared = given.cohort(changed.config, played, folder)
        resume_check.record_changed(opened, changed)
        observers = ObserverList((observer, followers))
        try:
            return prepared, run.play_and_judge(changed.config, folder, opened, prepared, observers)
        except BaseException:
            prepared.cohort.close_engine()
            raise


def _digest_of(tokenizer: Any) -> str:  # noqa: ANN401 -- transformers' tokenizers
    parts = (sorted(tokenizer.get_vocab().items()), getattr(tokenizer, "chat_template", None))
    return DIGEST + hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()
