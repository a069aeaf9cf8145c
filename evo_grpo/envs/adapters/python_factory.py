"""The user's own multi-turn environments, made by a function or class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from evo_grpo.envs.adapters.helpers import check_call, try_out
from evo_grpo.envs.finding import find_name
from evo_grpo.envs.loading import load_function
from evo_grpo.errors import ConfigError

if TYPE_CHECKING:
    from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv
    from evo_grpo.settings import EnvConfig

_METHODS = ("reset", "step")


def build(name: str, env: EnvConfig, seed: int) -> Callable[[], MultiTurnEnv]:
    """Return a factory that calls the user's "module:factory" with `env.args`."""
    kind, args = env.kind, env.args
    factory = load_function(name, "env.kind")
    check_call(kind, args, factory)

    def make() -> MultiTurnEnv:
        game = factory(**args)
        missing = [method for method in _METHODS if not callable(getattr(game, method, None))]
        if missing:
            is_trl = hasattr(game, "get_reward")
            raise _incomplete(kind, name, type(game).__name__, missing, is_trl=is_trl)
        return game

    return try_out(kind, make, seed)


def check(name: str, env: EnvConfig, seed: int) -> None:
    """Check the user's factory in the source of its module, without importing it."""
    del seed
    found = find_name(name, "env.kind")
    check_call(env.kind, env.args, found.stand_in())
    if missing := [method for method in _METHODS if found.lacks(method)]:
        is_trl = not found.lacks("get_reward")
        raise _incomplete(env.kind, name, name.rpartition(":")[2], missing, is_trl=is_trl)


def _incomplete(
    kind: str, name: str, got: str, missing: Sequence[str], *, is_trl: bool
) -> ConfigError:
    hint = f'; a class with get_reward() and tools is "trl:{name}"' if is_trl else ""
    return ConfigError(
        f'env.kind: "{kind}": expected an environment with reset(seed) and step(action), '
        f"got {got} without {' and '.join(missing)}{hint}"
    )
