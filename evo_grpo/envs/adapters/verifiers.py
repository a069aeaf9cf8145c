"""Tasksets of the package verifiers (its v1 API), played as text without model server or sandbox.

The unchanged `Env.run` of verifiers gets an agent whose completions come from `step`, for one turn
or several. Only `Agents`, `Agent` and `Interaction`, which call a model server, are replaced.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError

from evo_grpo.envs.episodes.multi_turn import check_flag, check_reward
from evo_grpo.envs.family import Family
from evo_grpo.envs.finding import is_installed
from evo_grpo.envs.loading import is_standard, search_here, standard_library
from evo_grpo.envs.messages import nearest
from evo_grpo.envs.packages import PrivateGenerators, load_package, quiet, try_out
from evo_grpo.envs.rewards.watch import in_a_thread
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.schema.validation import whole
from evo_grpo.settings import EnvConfig

FAMILY = Family("name", multi_turn=True)
PACKAGE = "verifiers"
REMEDY = 'pip install "verifiers>=0.4"'
TASKS = 1000


def build(name: str, env: EnvConfig, seed: int) -> Callable[[], VerifiersEnv]:
    """Return a factory of environments that play the tasks of a taskset.

    `name` is the ID of a taskset in the package verifiers or in another module. Of `env.args`,
    `tasks` is the number of tasks that are read (default 1000); all other arguments are settings of
    the taskset.
    """
    kind, args = env.kind, env.args
    _module(kind, name)  # refuses the standard library
    vf = load_package(kind, "verifiers.v1", PACKAGE, REMEDY)
    count = args.get("tasks", TASKS)
    whole(1).check("env.args.tasks", count)
    settings = {key: value for key, value in args.items() if key != "tasks"}
    generators = PrivateGenerators(seed)
    with generators.swapped_in(), quiet():
        source = _load(vf, kind, name, settings)
        tasks = list(itertools.islice(source.taskset, count))
    if not tasks:
        raise ConfigError(f'env.kind: "{kind}": expected at least one task, got none')
    role = _checked_role(vf, kind, source, tasks[0])

    make = partial(VerifiersEnv, source, tasks, role, kind=kind, seed=seed)
    return try_out(kind, make, seed)


def check(name: str, env: EnvConfig, seed: int) -> None:
    """Check that the package and the taskset's module are installed, without importing them."""
    del seed
    module = _module(env.kind, name)
    whole(1).check("env.args.tasks", env.args.get("tasks", TASKS))
    about = f'env.kind: "{env.kind}"'
    if not is_installed("verifiers.v1"):
        raise EngineUnavailable(
            f"{about} needs verifiers.v1 of the package {PACKAGE}, which is not installed: {REMEDY}"
        )
    if not any(map(is_installed, (f"verifiers.v1.tasksets.{module}", module))):
        raise ConfigError(
            f"{about}: no taskset {name!r}, neither one of verifiers nor a module {module!r} that "
            "is installed or in the current directory"
        )


class VerifiersEnv:
    """Plays one task of a verifiers `Env` per episode; the episode's seed chooses the task."""

    draws_globally = True

    def __init__(
        self,
        source: Any,  # noqa: ANN401 -- an extra
        tasks: list[Any],
        role: str,
        *,
        kind: str = "verifiers",
        seed: int = 0,
    ) -> None:
        self._source = source
        self._tasks = tasks
        self._role = role
        self._kind = kind
        self._generators = PrivateGenerators(seed)
        self._play: _TaskEpisode | None = None

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode: the system prompt, if any, and the task's prompt."""
        self.close()
        episode_seed = self._generators.start(seed)
        task = self._tasks[episode_seed % len(self._tasks)]
        self._play = _TaskEpisode(self._source, task, self._role)
        with self._generators.swapped_in(), quiet():
            text = self._play.until_asked()
        if text is None:
            raise RuntimeError(f'"{self._kind}" ended task {task.data.idx} without asking anything')
        return text, {"task": task.data.idx, "name": task.data.name}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer the pending message; an episode's last step returns verifiers' weighted reward."""
        play = self._play
        assert play is not None, "step without an episode: call reset first"
        with self._generators.swapped_in(), quiet():
            play.answers.put_nowait(action)
            text = play.until_asked()
        if text is not None:
            return text, 0.0, False, False, {}
        trace = play.traces[-1]
        total_reward = sum(trace.reward for trace in play.traces)
        reward = check_reward(f'environment "{self._kind}"', total_reward)
        self.close()
        return "", reward, True, False, {"metrics": dict(trace.metrics), **trace.info}

    def close(self) -> None:
        """End the current episode; further calls do nothing."""
        if self._play is not None:
            self._play.close()
            self._play = None


class _TaskEpisode:
    """One episode: `until_asked` returns each question, and an item of `answers` answers it."""

    def __init__(self, source: Any, task: Any, role: str) -> None:  # noqa: ANN401 -- an extra
        self._record = _vf().Episode(task=_about(task))
        self._loop = asyncio.new_event_loop()
        self._questions: asyncio.Queue[str] = asyncio.Queue()
        self.answers: asyncio.Queue[str] = asyncio.Queue()
        self.traces: list[Any] = self._record.traces  # the finished ones, scored
        self._episode = self._loop.create_task(self._run(source, task, role))

    async def ask(self, text: str) -> str:
        """Post a message for the policy, and wait for its completion."""
        self._questions.put_nowait(text)
        return await self.answers.get()

    def until_asked(self) -> str | None:
        """Run until the next question and return it, or None at the end of the episode."""
        return self._run_to_end(self._next())

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._episode.cancel()
        self._run_to_end(asyncio.wait([self._episode]))
        if not self._episode.cancelled():
            self._episode.exception()  # or asyncio warns that it was never retrieved
        self._loop.close()

    async def _run(self, source: Any, task: Any, role: str) -> None:  # noqa: ANN401 -- an extra
        # In place of verifiers' `Agents`.
        agents = SimpleNamespace(**{role: _PolicyAgent(self, source, role)})
        await source.setup(agents)
        await source.run(task, agents)
        if not self.traces:
            raise RuntimeError(f"{type(source).__name__}.run() ran no agent")
        await source.finalize(task, self._record)

    async def _next(self) -> str | None:
        question = asyncio.ensure_future(self._questions.get())
        await asyncio.wait({question, self._episode}, return_when=asyncio.FIRST_COMPLETED)
        if question.done():
            return question.result()
        question.cancel()
        self._episode.result()  # raises the exception of the episode
        return None

    def _run_to_end(self, coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 -- what it returns
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(coroutine)
        # In a notebook, the thread already runs a loop.
        return in_a_thread("verifiers", lambda: self._loop.run_until_complete(coroutine)).result()


class _PolicyAgent:
    """Replaces the `Agent` of verifiers: asks the policy instead of a model server."""

    trainable = True

    def __init__(self, play: _TaskEpisode, source: Any, role: str) -> None:  # noqa: ANN401 -- an extra
        self._play = play
        self.config = getattr(source.config, role)
        self.name = role

    async def run(self, task: Any, **_: object) -> Any:  # noqa: ANN401 -- a verifiers Trace
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: object) -> AsyncGenerator[_Interaction]:  # noqa: ANN401 -- theirs
        interaction = _Interaction(self._play, task, self)
        yield interaction
        trace = interaction.trace
        await task.score(trace)
        trace.ok = trace.is_completed = True
        self._play.traces.append(trace)


class _Interaction:
    """Replaces the `Interaction` of verifiers: takes one completion per turn."""

    def __init__(self, play: _TaskEpisode, task: Any, agent: _PolicyAgent) -> None:  # noqa: ANN401 -- an extra
        vf, data = _vf(), task.data
        self.trace = vf.Trace(
            task=_about(task),
            state=vf.state.state_cls(type(task))(),
            agent=vf.AgentInfo(config=agent.config, name=agent.name),
        )
        self._play = play
        self._task = task
        self._opening = [part for part in (data.system_prompt, data.prompt_text) if part]
        self._over = False

    async def turn(self, message: str | None = None) -> Any:  # noqa: ANN401 -- a verifiers Segment
        vf = _vf()
        if self._over:
            return vf.Segment(messages=[], terminated=True)
        text = "\n\n".join([*self._opening, *([message] if message else [])])
        self._opening = []
        self._append(vf.UserMessage(content=text), sampled=False)
        reply = vf.AssistantMessage(content=await self._play.ask(text))
        self._append(reply, sampled=True)
        for stop in self._task.hooks("stop"):
            stops = await vf.session.call_hook(stop, {vf.Trace: self.trace})
            # verifiers itself reads None as False.
            name = f"{type(self._task).__name__}: a stop"
            self._over |= stops is not None and check_flag(name, "its result", stops)
        return vf.Segment(messages=[reply])

    def _append(self, message: Any, *, sampled: bool) -> None:  # noqa: ANN401 -- an extra
        nodes = self.trace.nodes
        parent = len(nodes) - 1 if nodes else None
        nodes.append(_vf().MessageNode(parent=parent, message=message, sampled=sampled))


def _load(vf: Any, kind: str, name: str, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401 -- an extra
    search_here()
    try:
        return vf.load_environment(vf.resolve_env_config({"taskset": {**settings, "id": name}}))
    except ModuleNotFoundError as error:
        missing = getattr(error.__cause__, "name", None) or error.name or ""
        if missing.rpartition(".")[2] not in ("", _module(kind, name)):
            raise EngineUnavailable(
                f'env.kind: "{kind}" imports {missing!r}, which is not installed; install it'
            ) from error
        tasksets = importlib.import_module("verifiers.v1.tasksets")
        taskset_ids = [module.name for module in iter_modules(tasksets.__path__)]
        raise ConfigError(f'env.kind: "{kind}": {error}{nearest(name, taskset_ids)}') from error
    except ImportError as error:
        raise EngineUnavailable(f'env.kind: "{kind}": {error}') from error
    except (AttributeError, TypeError, ValueError) as error:
        why = f'env.kind: "{kind}" is no taskset: {error}'
        if isinstance(error, ValidationError):
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            why = f'env.args: "{kind}" refuses these settings: {wrong}'
        raise ConfigError(why) from error


def _module(kind: str, name: str) -> str:
    """Return the module of a taskset's ID, as verifiers does: `owner/my-sums@1` is my_sums."""
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    if is_standard(module):
        raise standard_library(kind, "env.kind", module)
    return module


def _checked_role(vf: Any, kind: str, source: Any, task: Any) -> str:  # noqa: ANN401 -- an extra
    """Return an environment's only role; refuse a task that needs more than text and Python."""
    roles = list(vf.configs.agent.agent_config_fields(source.config))
    taskset, task_type = source.taskset, type(task)
    needs = {
        f"one agent and not {len(roles)} ({', '.join(roles)})": len(roles) != 1,
        "a container": task_type.NEEDS_CONTAINER,
        "a sandbox (setup or finalize)": task_type.setup is not vf.Task.setup
        or task_type.finalize is not vf.Task.finalize,
        "a sandbox (a reward with runtime)": any(
            (runtime := inspect.signature(hook).parameters.get("runtime")) is not None
            and runtime.default is inspect.Parameter.empty
            for hook in task.hooks("reward")
        ),
        "a model server (a stop on requests)": any(
            vf.session.hook_boundary(hook, allow_trace=True) is not vf.Trace
            for hook in task.hooks("stop")
        ),
        "tool servers": task_type.toolsets(task.config) or type(taskset).toolsets(taskset.config),
        "a judge model": task.config.judges,
    }
    unmet = [need for need, is_needed in needs.items() if is_needed]
    if unmet:
        raise EngineUnavailable(
            f'env.kind: "{kind}" needs {", ".join(unmet)}; only tasks of text, scored in Python, '
            "are played here"
        )
    return roles[0]


def _about(task: Any) -> Any:  # noqa: ANN401 -- an extra
    kind = type(task).__name__
    return _vf().TraceTask(type=kind, data=task.data, key=task.key, hash=task.hash)


def _vf() -> Any:  # noqa: ANN401 -- an extra, not there when types are checked
    return importlib.import_module("verifiers.v1")
