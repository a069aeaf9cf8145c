"""Stand-ins for packages that may be missing here: the calls that the adapters make, and no more.

They are not the packages. The contract runs against the real ones too wherever they are installed.
"""

import asyncio
import inspect
import random
from types import ModuleType, SimpleNamespace

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError  # noqa: F401 -- raised by verifiers


def module(name, **members):
    made = ModuleType(name)
    vars(made).update(members)
    return made


# --- GEM 0.1.0: reset seeds the global generators, __init__ resets, unknown settings are swallowed


class GuessTheNumber:
    def __init__(self, min_number=1, max_number=20, max_turns=20, **_):
        self.low, self.high, self.max_turns = min_number, max_number, max_turns
        self.reset()

    def reset(self, seed=None):
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002 -- as GEM does
        self.number, self.turn = random.randint(self.low, self.high), 0
        return f"A number from {self.low} to {self.high}, in {self.max_turns}.", {
            "suffix": "Enter your next guess."
        }

    def step(self, action):
        self.turn += 1
        guess = int(action.removeprefix("\\boxed{").removesuffix("}"))
        info = {"suffix": "Enter your next guess."}
        if guess == self.number:
            return "Congratulations!", 1, True, False, info
        if self.turn >= self.max_turns:
            reward = 1 - abs(guess - self.number) / (self.high - self.low)
            return "Out of turns.", reward, True, True, info
        return f"{guess} is not it.", 0.0, False, False, info


def gem():
    entry = "gem.envs.game_env.guess_the_number:GuessTheNumberEnv"
    registry = {
        f"game:GuessTheNumber-v0-{name}": SimpleNamespace(entry_point=entry, kwargs=kwargs)
        for name, kwargs in {
            "hard": {"min_number": 1, "max_number": 50, "max_turns": 7},
            "easy": {"min_number": 1, "max_number": 10, "max_turns": 4},
        }.items()
    }
    game = module("gem.envs.game_env.guess_the_number", GuessTheNumberEnv=GuessTheNumber)
    modules = {
        "gem.envs.registration": module("gem.envs.registration", ENV_REGISTRY=registry),
        "gem.envs.game_env.guess_the_number": game,
    }
    for name in ("gem", "gem.envs", "gem.envs.game_env"):
        modules[name] = module(name, __path__=[])
    return modules


# --- verifiers 0.4.0, v1: Taskset -> Task -> Env.run(task, agents) over Trace and Episode ---------


class Record(BaseModel):
    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)


class Trace(Record):
    def __init__(self, **given):
        super().__init__(nodes=[], rewards={}, metrics={}, info={}, **given)

    @property
    def reward(self):
        return sum(self.rewards.values())

    @property
    def last_reply(self):
        return [node.message.content for node in self.nodes if node.sampled][-1]

    def record_reward(self, name, value, weight=1.0):
        self.rewards[name] = float(value) * weight


class TaskData(Record):
    def __init__(self, prompt=None, system_prompt=None, idx=None, name=None, **given):
        super().__init__(prompt=prompt, system_prompt=system_prompt, idx=idx, name=name, **given)

    @property
    def prompt_text(self):
        return self.prompt or ""


class Task:
    NEEDS_CONTAINER = False
    key = hash = "x"

    def __class_getitem__(cls, _):
        return cls

    def __init__(self, data, config=None):
        self.data, self.config = data, config or SimpleNamespace(judges=[])

    async def setup(self, trace, runtime):
        return None

    async def finalize(self, trace, runtime):
        return None

    @classmethod
    def toolsets(cls, config):
        return []

    def hooks(self, attr):
        names = (name for name in dir(type(self)) if hasattr(getattr(type(self), name), attr))
        return [getattr(self, name) for name in names]

    async def score(self, trace):
        rewards = self.hooks("reward")
        for fn, value in zip(
            rewards, await asyncio.gather(*(fn(self.data, trace) for fn in rewards)), strict=True
        ):
            trace.record_reward(fn.__name__, value, fn._vf_weight)


class TasksetConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str = ""

    @property
    def task(self):
        return SimpleNamespace(judges=[])


class Taskset:
    def __class_getitem__(cls, parameters):
        cls_with = type(cls.__name__, (cls,), {"made_by": parameters[1]})
        return cls_with

    def __init__(self, config):
        self.config = config

    def __iter__(self):
        for idx, task in enumerate(self.load()):
            task.data.idx = idx
            yield task

    @classmethod
    def toolsets(cls, config):
        return []


class EnvConfig:
    pass


class Env:
    def __class_getitem__(cls, parameter):
        return type(cls.__name__, (cls,), {"configured_by": parameter})

    async def setup(self, agents):
        return None

    async def finalize(self, task, episode):
        return None


class SingleAgentEnv(Env):
    configured_by = SimpleNamespace(agent=SimpleNamespace())

    async def run(self, task, agents):
        await agents.agent.run(task)


def _load_environment(config):
    import importlib

    name = config["taskset"]["id"]
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise ModuleNotFoundError(f"taskset {name!r} not found") from error
        raise
    public = [getattr(found, name) for name in found.__all__]
    taskset = next(cls for cls in public if issubclass(cls, Taskset))
    env = next((cls for cls in public if issubclass(cls, Env)), SingleAgentEnv)()
    env.taskset = taskset(taskset.made_by(**config["taskset"]))
    env.config = env.configured_by
    return env


def _tag(attr, **extra):
    def tag(fn):
        for name, value in {attr: True, **extra}.items():
            setattr(fn, name, value)
        return fn

    return tag


def verifiers():
    async def call_hook(hook, available):
        result = hook(next(iter(available.values())))
        return await result if inspect.isawaitable(result) else result

    def agent_config_fields(config):
        return {
            name: value
            for name, value in inspect.getmembers(config)
            if isinstance(value, SimpleNamespace)
        }

    agent = module("verifiers.v1.configs.agent", agent_config_fields=agent_config_fields)
    session = module(
        "verifiers.v1.session", call_hook=call_hook, hook_boundary=lambda hook, **_: Trace
    )
    v1 = module(
        "verifiers.v1",
        **{name: Record for name in ("AgentInfo", "MessageNode", "TraceTask", "TaskConfig")},
        **{name: Record for name in ("AssistantMessage", "UserMessage", "State")},
        AgentConfig=SimpleNamespace,
        Episode=lambda task: Record(task=task, traces=[]),
        Segment=lambda messages, terminated=False: SimpleNamespace(
            messages=messages,
            terminated=terminated,
            last_reply=messages[-1].content if messages else "",
        ),
        Task=Task,
        TaskData=TaskData,
        Taskset=Taskset,
        TasksetConfig=TasksetConfig,
        Trace=Trace,
        Env=Env,
        EnvConfig=EnvConfig,
        reward=lambda fn=None, weight=1.0: (
            _tag("reward", _vf_weight=weight)(fn) if fn else _tag("reward", _vf_weight=weight)
        ),
        stop=lambda fn: _tag("stop")(fn),
        load_environment=_load_environment,
        resolve_env_config=dict,
        state=module("verifiers.v1.state", state_cls=lambda _: Record),
        configs=module("verifiers.v1.configs", agent=agent, __path__=[]),
        session=session,
        __path__=[],
    )
    return {
        "verifiers": module("verifiers", v1=v1, __path__=[]),
        "verifiers.v1": v1,
        "verifiers.v1.tasksets": module("verifiers.v1.tasksets", __path__=[]),
    }
