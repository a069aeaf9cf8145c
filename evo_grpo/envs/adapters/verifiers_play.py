"""One episode of a verifiers task as a coroutine that stops where its agent is to speak.

The classes here stand in for verifiers' `Agents`, `Agent` and `Interaction`, which call a model
server; nothing else of verifiers is replaced.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any


class TaskEpisode:
    """One episode: `until_asked`, `answer`, and again, until there is no question.

    Args:
        source: A `verifiers.v1.Env` with one agent.
        task: The task to play.
        role: The agent's name.
    """

    def __init__(self, source: Any, task: Any, role: str) -> None:  # noqa: ANN401 -- an extra
        about = _vf().TraceTask(
            type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
        )
        self._record = _vf().Episode(task=about)
        self._loop = asyncio.new_event_loop()
        self._questions: asyncio.Queue[str] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._episode = self._loop.create_task(self._run(source, task, role))

    @property
    def traces(self) -> list[Any]:
        """The finished traces, scored."""
        return self._record.traces

    async def ask(self, text: str) -> str:
        """Hand a message to the agent and wait for its completion."""
        self._questions.put_nowait(text)
        return await self._answers.get()

    def answer(self, text: str) -> None:
        """Give the completion that the last question waits for."""
        self._answers.put_nowait(text)

    def until_asked(self) -> str | None:
        """Run until the next question and return it, or None at the end of the episode."""
        return self._driven(self._next())

    def close(self) -> None:
        """Abandon what is left of the episode; may be called twice."""
        if self._loop.is_closed():
            return
        self._episode.cancel()
        self._driven(asyncio.wait([self._episode]))
        if not self._episode.cancelled():
            self._episode.exception()  # looked at, or asyncio warns that it was never retrieved
        self._loop.close()

    async def _run(self, source: Any, task: Any, role: str) -> None:  # noqa: ANN401 -- an extra
        agents = _Agents(role, _PolicyAgent(self, source, role))
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
        self._episode.result()  # raises what the episode raised
        return None

    def _driven(self, coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 -- what it returns
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(coroutine)
        # In a notebook, whose thread runs a loop of its own.
        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(self._loop.run_until_complete, coroutine).result()


class _Agents:
    """verifiers' `Agents` of one role."""

    def __init__(self, role: str, agent: _PolicyAgent) -> None:
        self._role = role
        self._agent = agent

    def __getattr__(self, name: str) -> _PolicyAgent:
        if name != self._role:
            raise AttributeError(f"no agent {name!r}; this environment has {self._role!r}")
        return self._agent


class _PolicyAgent:
    """verifiers' `Agent`, answered by the policy that is trained instead of a model server."""

    trainable = True

    def __init__(self, play: TaskEpisode, source: Any, role: str) -> None:  # noqa: ANN401 -- an extra
        self._play = play
        self.config = getattr(source.config, role)
        self.name = role

    async def run(self, task: Any, **_: object) -> Any:  # noqa: ANN401 -- a verifiers Trace
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: object) -> AsyncGenerator[_Interaction]:  # noqa: ANN401
        interaction = _Interaction(self._play, task, self)
        yield interaction
        trace = interaction.trace
        await task.score(trace)
        trace.ok = trace.is_completed = True
        self._play.traces.append(trace)


class _Interaction:
    """verifiers' `Interaction`: one completion per turn."""

    def __init__(self, play: TaskEpisode, task: Any, agent: _PolicyAgent) -> None:  # noqa: ANN401 -- an extra
        vf, data = _vf(), task.data
        about = vf.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash)
        self.trace = vf.Trace(
            task=about,
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
            self._over |= bool(await vf.session.call_hook(stop, {vf.Trace: self.trace}))
        return vf.Segment(messages=[reply])

    def _append(self, message: Any, *, sampled: bool) -> None:  # noqa: ANN401 -- an extra
        nodes = self.trace.nodes
        parent = len(nodes) - 1 if nodes else None
        nodes.append(_vf().MessageNode(parent=parent, message=message, sampled=sampled))


def _vf() -> Any:  # noqa: ANN401 -- an extra, not there when types are checked
    return importlib.import_module("verifiers.v1")
