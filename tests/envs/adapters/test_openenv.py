"""OpenEnv's environments: on a server in `make test-outside`, and by a double of its client."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import openenv_server
import pytest
from env_contract import EnvContract

from evo_grpo.envs.registry import build_multi_turn
from evo_grpo.errors import ConfigError, EngineUnavailable, RewardError
from evo_grpo.settings import EnvConfig

SECONDS = 60
DOUBLE = "http://127.0.0.1:9"
SCHEMA = {
    "action": {"properties": {"metadata": {}, "text": {}}, "required": ["text"]},
    "observation": {"properties": {"done": {}, "reward": {}, "metadata": {}, "prompt": {}}},
}


class Client:
    """What the adapter uses of GenericEnvClient, without a server."""

    reward = None

    def __init__(self, base_url, max_message_size_mb):
        self.game = openenv_server.Game()

    def sync(self):
        return self

    def close(self):
        pass

    def reset(self, **arguments):
        return self.result(self.game.reset(**arguments), None, done=False)

    def step(self, action):
        text, reward, done = self.game.step(action["text"])
        return self.result(text, reward if self.reward is None else self.reward, done=done)

    def result(self, text, reward, *, done):
        return SimpleNamespace(observation={"prompt": text}, reward=reward, done=done)


class NoServer(Exception):
    pass


@pytest.fixture
def double(monkeypatch):
    """The schema that the double answers with, for changes."""
    schema = {part: {**SCHEMA[part]} for part in SCHEMA}

    @contextmanager
    def stream(method, url, timeout):
        if url != f"{DOUBLE}/schema":
            raise NoServer("connection refused")
        text = json.dumps(schema).encode()
        parts = lambda size: (text[at : at + size] for at in range(0, len(text), size))  # noqa: E731
        yield SimpleNamespace(raise_for_status=lambda: SimpleNamespace(iter_bytes=parts))

    client = type("Client", (Client,), {})
    modules = {
        "openenv": ModuleType("openenv"),
        "openenv.core": SimpleNamespace(GenericEnvClient=client),
        "httpx": SimpleNamespace(stream=stream, HTTPError=NoServer, InvalidURL=NoServer),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(url=DOUBLE, schema=schema, client=client)


@pytest.fixture(scope="module")
def server():
    if "EVO_GRPO_OUTSIDE" not in os.environ:
        pytest.skip("openenv-core is not installed here: make test-outside")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(openenv_server.__file__)), str(port), str(SECONDS)]
    process = subprocess.Popen(command)
    for _ in range(10 * SECONDS):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield SimpleNamespace(url=f"http://127.0.0.1:{port}")
    process.terminate()
    process.wait()


@pytest.fixture(params=["server", "double"])
def there(request):
    return request.getfixturevalue(request.param)


def build(url, **args):
    return build_multi_turn(EnvConfig(kind=f"openenv:{url}", args=args), 0)


class TestOpenEnv(EnvContract):
    @pytest.fixture
    def make(self, there):
        return build(there.url)

    def act(self, seen, draw):
        return str(draw.randint(0, 2))


def test_an_episode_has_the_texts_and_rewards_of_the_server(there):
    env = build(there.url, level=5)()
    assert env.reset(seed=4) == ("A number from 0 to 10?", {})
    assert env.step("0") == ("No.", 0.0, False, False, {})
    assert env.step(" 1\n") == ("", 1.0, True, False, {})
    assert env.reset(seed=4 + 2**32) == ("A number from 0 to 10?", {})
    env.close()


def test_the_fields_of_actions_and_observations_are_found_or_named(double):
    properties = {"text": {}, "why": {}, "id": {"type": "integer"}}
    double.schema["action"] = {"properties": properties, "required": [*properties]}
    double.schema["observation"] = {"properties": {"prompt": {}, "board": {}}}
    with pytest.raises(ConfigError, match=r"env.args.action: expected .* text, why, got None"):
        build(double.url)
    with pytest.raises(ConfigError, match=r"env.args.observation: .* board, prompt, got 'text'"):
        build(double.url, action="text", observation="text")
    whole = build(double.url, action="text")()
    assert whole.reset(seed=0)[0] == '{"prompt": "A number from 0 to 2?"}'
    one = build(double.url, action="text", observation="prompt")()
    assert one.reset(seed=0)[0] == "A number from 0 to 2?"


def test_a_server_that_does_not_answer_is_named(double):
    with pytest.raises(EngineUnavailable, match=r"http://127.0.0.1:1, which did not answer"):
        build("http://127.0.0.1:1")
    double.schema["observation"]["text"] = "x" * 2**20
    with pytest.raises(EngineUnavailable, match=r"its schema \(JSONDecodeError: "):
        build(double.url)
    double.schema["observation"] = {"properties": None}
    with pytest.raises(EngineUnavailable, match=r"its schema \(AttributeError|TypeError: "):
        build(double.url)
    double.schema.clear()
    with pytest.raises(EngineUnavailable, match=r"its schema \(KeyError: 'action'\)"):
        build(double.url)


@pytest.mark.parametrize(("sent", "taken"), [(True, 1.0), (0, 0.0), (0.25, 0.25)])
def test_rewards_are_numbers(double, sent, taken):
    double.client.reward = sent
    env = build(double.url)()
    env.reset(seed=0)
    assert env.step("1")[1] == taken


def test_a_reward_that_is_no_number_is_refused(double):
    double.client.reward = "much"
    env = build(double.url)()
    env.reset(seed=0)
    with pytest.raises(RewardError, match="expected a finite reward, got 'much'"):
        env.step("1")
