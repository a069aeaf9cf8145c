import asyncio

import pytest
from env_contract import EnvContract

from evo_grpo.envs.registry import build_multi_turn
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.settings import EnvConfig

SUMS = """
import verifiers.v1 as vf

__all__ = ["Sums"]

class Data(vf.TaskData):
    answer: str

class Config(vf.TasksetConfig):
    count: int = 5

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def digit(self, task, trace) -> float:
        return float(trace.last_reply.isdigit())

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for n in range(self.config.count):
            yield Sum(Data(prompt=f"{n}+1=", system_prompt="Add.", answer=str(n + 1)))
"""
# Several turns, driven by the taskset's own environment, which draws from the global generator.
GUESS = """
import random
import verifiers.v1 as vf

__all__ = ["Guess", "GuessEnv"]

class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "stop"

class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        number = random.randint(1, 9)
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for turn in range(6):
                if segment.terminated or segment.last_reply == str(number):
                    break
                segment = await interaction.turn(f"not {segment.last_reply}")
        trace = interaction.trace
        trace.record_reward("found", segment.last_reply == str(number), 2.0)

class Guess(vf.Taskset[Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        n = 0
        while True:
            yield Task(vf.TaskData(prompt=f"Game {n}: a number from 1 to 9?"))
            n += 1
"""


def build(name="vf_sums", seed=0, **args):
    return build_multi_turn(EnvConfig(kind=f"verifiers:{name}", args=args), seed)


@pytest.fixture(params=["real", "double"])
def verifiers(request, install, write_module):
    install("verifiers", request.param)
    write_module("vf_sums", SUMS)
    write_module("vf_guess", GUESS)


class TestOneTurn(EnvContract):
    @pytest.fixture
    def make(self, verifiers):
        return build()

    def act(self, seen, draw):
        return str(draw.randint(1, 5))


class TestSeveralTurns(EnvContract):
    @pytest.fixture
    def make(self, verifiers):
        return build("vf_guess", tasks=20)

    def act(self, seen, draw):
        return str(draw.randint(1, 9))


@pytest.mark.usefixtures("verifiers")
def test_a_task_is_asked_and_scored_as_weighted():
    env = build(count=1)()
    text, info = env.reset(seed=0)
    assert text == "Add.\n\n0+1="
    assert info == {"task": 0, "name": None}
    assert env.step("1")[:4] == ("", 1.5, True, False)
    env.reset(seed=0)
    assert env.step("7")[:4] == ("", 0.5, True, False)


@pytest.mark.usefixtures("verifiers")
def test_a_taskset_with_its_own_environment_is_driven_turn_by_turn():
    env = build("vf_guess", tasks=1)()
    text, _ = env.reset(seed=0)
    assert text == "Game 0: a number from 1 to 9?"
    for guess in range(1, 10):
        text, reward, terminated, *_ = env.step(str(guess))
        if terminated:
            break
        assert (text, reward) == (f"not {guess}", 0.0)
    assert reward == 2.0 or guess == 7
    env.close()


@pytest.mark.usefixtures("verifiers")
def test_a_stop_of_the_task_ends_the_exchange():
    env = build("vf_guess", tasks=1)()
    env.reset(seed=0)
    assert env.step("stop")[:4] == ("", 0.0, True, False)


@pytest.mark.usefixtures("verifiers")
def test_it_runs_inside_an_event_loop():
    async def notebook():
        env = build(count=1)()
        env.reset(seed=0)
        return env.step("1")[1]

    assert asyncio.run(notebook()) == 1.5


@pytest.mark.usefixtures("verifiers")
def test_an_exception_of_the_task_reaches_the_caller(write_module):
    write_module("vf_broken", SUMS.replace("trace.last_reply == task.answer", "1 / 0"))
    env = build("vf_broken")()
    env.reset(seed=0)
    with pytest.raises(Exception, match="division by zero"):
        env.step("1")
    env.close()
    assert env.reset(seed=0)[0]
    env.close()


@pytest.mark.usefixtures("verifiers")
@pytest.mark.parametrize(
    ("name", "args", "error", "message"),
    [
        ("vf_sms", {}, ConfigError, '"verifiers:vf_sms": taskset .vf_sms. not found'),
        ("vf_sums", {"cont": 1}, ConfigError, "refuses these settings: .*cont: Extra inputs"),
        ("vf_sums", {"count": 0}, ConfigError, "expected at least one task"),
        ("vf_sums", {"tasks": 0}, ConfigError, "env.args.tasks: expected an integer >= 1"),
        ("vf_boxed", {}, EngineUnavailable, "needs a container"),
        ("vf_runtime", {}, EngineUnavailable, "needs a sandbox .a reward with runtime"),
        ("vf_setup", {}, EngineUnavailable, "needs a sandbox .setup or finalize"),
        ("vf_two", {}, EngineUnavailable, "needs one agent and not 2"),
        ("vf_import", {}, EngineUnavailable, "imports 'nowhere', which is not installed"),
    ],
)
def test_what_cannot_be_played_is_named(write_module, name, args, error, message):
    body = "class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):"
    write_module("vf_boxed", SUMS.replace(body, f"{body}\n    NEEDS_CONTAINER = True"))
    write_module("vf_runtime", SUMS.replace("digit(self, task, trace)", "digit(self, runtime)"))
    setup = "async def setup(self, trace, runtime): runtime.write()"
    write_module("vf_setup", SUMS.replace(body, f"{body}\n    {setup}"))
    player = "player: vf.AgentConfig = vf.AgentConfig()"
    write_module("vf_two", GUESS.replace(player, f"{player}\n    user: {player[8:]}"))
    write_module("vf_import", f"import nowhere\n{SUMS}")
    with pytest.raises(error, match=message):
        build(name, **args)
