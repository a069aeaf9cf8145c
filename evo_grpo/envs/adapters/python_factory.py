"""The user's own multi-turn environment: a function or class that is called for each new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.adapters.helpers import check_call, try_out
from evo_grpo.envs.loading import load_function
from evo_grpo.errors import ConfigError

if TYPE_CHECKING:
    from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv


def build(seed: int, path: str, args: Mapping[str, Any]) -> Callable[[], MultiTurnEnv]:
    """Return a factory that calls the user's.

    Args:
        seed: Seed of the episode that tries it out.
        path: "module:factory", a function or a class.
        args: What it is called with.

    Raises:
        ConfigError: It cannot be loaded, takes other arguments, returns something that is no
            environment, or the same one twice.
        EngineUnavailable: What it returns does not begin an episode.
    """
    kind = f"python:{path}"
    factory = load_function(path, "env.kind")
    check_call(kind, args, factory)

    def make() -> MultiTurnEnv:
        env = factory(**args)
        missing = [name for name in ("reset", "step") if not callable(getattr(env, name, None))]
        if missing:
            hint = (
                f'; a class with get_reward() and tools is "trl:{path}"'
                if hasattr(env, "get_reward")
                else ""
            )
            raise ConfigError(
                f'env.kind: "{kind}": expected an environment with reset(seed) and step(action), '
                f"got {type(env).__name__} without {' and '.join(missing)}{hint}"
            )
        return env

    try_out(kind, make, seed)
    pair = make(), make()
    for env in pair:
        close = getattr(env, "close", None)
        if close is not None:
            close()
    if pair[0] is pair[1]:
        raise ConfigError(
            f'env.kind: "{kind}": expected a new environment from each call, got the same one '
            "twice; episodes that are played side by side would mix"
        )
    return make
