"""Multi-turn environments of the user, made by a function or class."""

from collections.abc import Callable, Sequence

from evo_grpo.envs import finding, loading, packages
from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv
from evo_grpo.envs.family import Family, check_call
from evo_grpo.errors import ConfigError
from evo_grpo.settings import EnvConfig

FAMILY = Family("code", multi_turn=True)

_METHODS = ("reset", "step")


def build(name: str, env: EnvConfig, seed: int) -> Callable[[], MultiTurnEnv]:
    """Return a factory that calls the user's "module:factory" with `env.args`."""
    kind, args = env.kind, env.args
    factory = loading.load_function(name, "env.kind")
    check_call(kind, args, factory)

    def make() -> MultiTurnEnv:
        game = factory(**args)
        missing = [method for method in _METHODS if not callable(getattr(game, method, None))]
        _check(kind, type(game).__name__, missing, is_trl=hasattr(game, "get_reward"))
        return game

    return packages.try_out(kind, make, seed)


def check(name: str, env: EnvConfig, seed: int) -> None:
    """Check the user's factory in the source of its module, without importing it."""
    del seed
    definition = finding.find_name(name, "env.kind")
    check_call(env.kind, env.args, definition.stand_in())
    missing = [method for method in _METHODS if definition.lacks(method)]
    _check(env.kind, name.rpartition(":")[2], missing, is_trl=not definition.lacks("get_reward"))


def _check(kind: str, got: str, missing: Sequence[str], *, is_trl: bool) -> None:
    if missing:
        trl = kind.replace("python", "trl", 1)
        hint = f'; a class with get_reward() and tools is "{trl}"' if is_trl else ""
        raise ConfigError(
            f'env.kind: "{kind}": expected an environment with reset(seed) and step(action), '
            f"got {got} without {' and '.join(missing)}{hint}"
        )
