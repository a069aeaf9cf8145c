"""Environments of OpenEnv (package openenv-core): sessions on a server with a given address."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from evo_grpo.envs.episodes.multi_turn import check_flag, check_reward
from evo_grpo.envs.family import Family
from evo_grpo.envs.messages import listed
from evo_grpo.envs.packages import load_package, try_out
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.settings import EnvConfig

FAMILY = Family("name", multi_turn=True)
PACKAGE = "openenv-core"
REMEDY = "pip install openenv-core"

MOST_MIB = 1.0
"""Size of the longest message that a server may send, in MiB."""
_PART, MOST_PARTS = 2**16, 16
"""Bytes of a part of a schema, and the number of parts that are read."""
_SEEDS = 2**32  # as numpy takes them on a server
_NOT_TEXT = ("done", "reward", "metadata")

_Fields: TypeAlias = dict[str, bool]


def build(name: str, env: EnvConfig, seed: int) -> Callable[[], OpenEnv]:
    """Return a factory of sessions on the OpenEnv server at the address `name`.

    In `env.args`, `action` names the field of the server's actions that gets the completion; the
    default is the required field. `observation` names the field of the server's observations that
    the agent reads; the default is the only field, or all fields as JSON. All other keys of
    `env.args` are arguments of the server's `reset`.
    """
    kind, args = env.kind, dict(env.args)
    client = load_package(kind, "openenv.core", PACKAGE, REMEDY).GenericEnvClient
    schema = _schema(kind, name)
    required = [name for name, is_required in schema["action"].items() if is_required]
    action = _field("action", args.pop("action", None), required, schema["action"])
    observation, shown = args.pop("observation", None), schema["observation"]
    if observation is not None or len(shown) == 1:
        observation = _field("observation", observation, [*shown], shown)

    connect = partial(client, base_url=name, max_message_size_mb=MOST_MIB)
    make = partial(OpenEnv, connect, kind, action, observation, args, seed)
    return try_out(kind, make, seed)


class OpenEnv:
    """A session on an OpenEnv server, which plays one episode at a time.

    Args:
        connect: Returns a client of the server.
        kind: Name in messages.
        action: The field of an action that holds the completion.
        observation: The field of an observation that is shown; None shows all as JSON.
        begin: Arguments of the server's `reset`.
        seed: Seed of the episodes that are begun without a seed.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        kind: str,
        action: str,
        observation: str | None,
        begin: Mapping[str, Any],
        seed: int,
    ) -> None:
        self._session = connect().sync()
        self._place = f'environment "{kind}"'
        self._action, self._observation = action, observation
        self._begin = begin
        self._seeds = random.Random(seed)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; the server decides what a seed means."""
        episode_seed = self._seeds.randrange(_SEEDS) if seed is None else seed % _SEEDS
        result = self._session.reset(seed=episode_seed, **self._begin)
        return self._text(result.observation), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn; the reward is 0 if the server sends none."""
        result = self._session.step({self._action: action})
        done = check_flag(self._place, "done", result.done)
        reward = check_reward(self._place, result.reward or 0.0)
        return self._text(result.observation), reward, done, False, {}

    def close(self) -> None:
        """End the session."""
        self._session.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        content: Any = {key: observation[key] for key in observation if key not in _NOT_TEXT}
        if self._observation is not None:
            content = content.get(self._observation, "")
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _schema(kind: str, url: str) -> dict[str, _Fields]:
    """Ask a server for the fields of its actions and observations."""
    httpx = load_package(kind, "httpx", PACKAGE, REMEDY)
    try:
        with httpx.stream("GET", f"{url.rstrip('/')}/schema", timeout=10) as answer:
            # What is longer is cut, and then no JSON.
            parts = islice(answer.raise_for_status().iter_bytes(_PART), MOST_PARTS)
            schema = json.loads(b"".join(parts))
        return {part: _fields(schema[part]) for part in ("action", "observation")}
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise EngineUnavailable(
            f'env.kind: "{kind}" needs an OpenEnv server at {url}, which did not answer with its '
            f"schema ({type(error).__name__}: {error}): start it, or give the address of another"
        ) from error


def _fields(schema: Mapping[str, Any]) -> _Fields:
    """Return the fields of a JSON schema that hold text: name -> whether it is required."""
    required = schema.get("required", ())
    return {
        name: name in required
        for name, field in schema["properties"].items()
        if name not in _NOT_TEXT and field.get("type", "string") == "string"
    }


def _field(part: str, chosen: object, candidates: Sequence[str], fields: _Fields) -> str:
    """Return `chosen`, which must be in `fields`; for None, return the only candidate."""
    if chosen is None and len(candidates) == 1:
        return candidates[0]
    if not isinstance(chosen, str) or chosen not in fields:
        raise ConfigError(
            f"env.args.{part}: expected the field of the server's {part}s that holds text, one of "
            f"{listed(fields)}, got {chosen!r}"
        )
    return chosen
