"""GEM's environments (package gem-llm): games, questions and code, by the ID that GEM gives."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from evo_grpo.envs.adapters.helpers import (
    OTHER_REMEDY,
    check_arguments,
    check_name,
    finite,
    load_package,
    quiet,
    try_out,
)
from evo_grpo.envs.adapters.isolated_rng import PrivateGenerators

if TYPE_CHECKING:
    from evo_grpo.settings import EnvConfig

PACKAGE = "gem-llm"
REMEDY = "pip install gem-llm (it pins reasoning-gym, so better into an environment of its own)"


def build(name: str, env: EnvConfig, seed: int) -> Callable[[], GemEnv]:
    """Return a factory of one of GEM's environments.

    Args:
        name: GEM's ID, e.g. "game:GuessTheNumber-v0-easy". Without the last part, as in
            "game:GuessTheNumber-v0", the game has the default settings of its class.
        env: Its `args` are settings of the environment's class, instead of those of the ID.
        seed: Seed of the episodes that are begun without a seed.

    Raises:
        ConfigError: GEM has no such environment, or it has no such setting.
        EngineUnavailable: GEM is not installed, or the environment wants a download.
    """
    kind, args = env.kind, env.args
    entry, settings = _find(kind, name)
    check_arguments(kind, args, entry)

    def make() -> GemEnv:
        return GemEnv(lambda: entry(**{**settings, **args}), kind, seed)

    try_out(kind, make, seed)
    return make


class GemEnv:
    """One of GEM's environments with generators of its own.

    GEM seeds and draws from the global generators; here each environment has its own, so that
    others neither change its episodes nor are changed by them.

    Args:
        make: Makes GEM's environment.
        kind: What messages call it.
        seed: Seed of the episodes that are begun without a seed.
    """

    def __init__(self, make: Callable[[], Any], kind: str, seed: int) -> None:
        self._kind = kind
        self._make = make
        self._generators = PrivateGenerators(seed)
        with self._generators.swapped_in(), quiet():
            self._env = make()

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; the same seed begins the same one."""
        small = self._generators.start(seed)
        with self._generators.swapped_in(), quiet():
            if self._kind.startswith("gem:rg:"):
                # It counts its resets, and goes on to other questions after some hundreds.
                self._env = self._make()
            text, info = self._env.reset(seed=small)
        return _shown(text, info), dict(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn."""
        with self._generators.swapped_in():
            text, reward, terminated, truncated, info = self._env.step(action)
        ended = bool(terminated or truncated)
        return (
            text if ended else _shown(text, info),
            finite(self._kind, reward),
            bool(terminated),
            bool(truncated),
            dict(info),
        )

    def close(self) -> None:
        """Free what the environment holds; may be called twice."""
        close = getattr(self._env, "close", None)
        if callable(close):
            close()


def _shown(text: str, info: Mapping[str, Any]) -> str:
    # As GEM's own observation wrapper puts them together: a game's board is in the suffix.
    body = text if not text or text.endswith("\n") else f"{text}\n"
    return f"{info.get('prefix', '')}{body}{info.get('suffix', '')}"


def _find(kind: str, name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    registered = load_package(kind, "gem.envs.registration", PACKAGE, REMEDY).ENV_REGISTRY
    variants = [known for known in registered if known.startswith(f"{name}-")]
    if name not in registered and variants and re.search(r"-v\d+$", name):
        spec, settings = registered[variants[0]], {}
    else:
        check_name(kind, "GEM", name, registered)
        spec = registered[name]
        settings = dict(spec.kwargs)
    entry = spec.entry_point
    if not callable(entry):
        # An environment's own imports may be missing while GEM itself is there.
        load_package(kind, entry.partition(":")[0], PACKAGE, OTHER_REMEDY)
        entry = pkgutil.resolve_name(entry)
    return entry, settings
