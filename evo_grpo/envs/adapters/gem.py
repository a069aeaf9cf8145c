"""Environments of GEM (package gem-llm), such as games, questions and code, by their GEM IDs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from evo_grpo.envs.episodes.multi_turn import check_step, check_text, close
from evo_grpo.envs.family import Family, check_arguments, check_name
from evo_grpo.envs.packages import PrivateGenerators, entry_point, load_package, quiet, try_out
from evo_grpo.settings import EnvConfig

FAMILY = Family("name", multi_turn=True)
PACKAGE = "gem-llm"
REMEDY = "pip install gem-llm (it pins reasoning-gym, so better into an environment of its own)"


def build(name: str, env: EnvConfig, seed: int) -> Callable[[], GemEnv]:
    """Return a factory of the GEM environment `name`, with `env.args` as its settings.

    An ID without a variant, such as "game:GuessTheNumber-v0", uses the default settings of its
    class.
    """
    entry, settings = _find(env.kind, name)
    check_arguments(env.kind, env.args, entry)
    make = partial(GemEnv, partial(entry, **{**settings, **env.args}), env.kind, seed)
    return try_out(env.kind, make, seed)


class GemEnv:
    """A GEM environment that draws from private random generators.

    GEM seeds the global generators, through which two environments would affect each other.
    """

    draws_globally = True

    def __init__(self, make: Callable[[], Any], kind: str, seed: int) -> None:
        self._kind = kind
        self._make = make
        self._generators = PrivateGenerators(seed)
        with self._generators.swapped_in(), quiet():
            self._env = make()

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; the same seed begins the same episode."""
        episode_seed = self._generators.start(seed)
        with self._generators.swapped_in(), quiet():
            if self._kind.startswith("gem:rg:"):
                # A new one, because an old one changes its questions after some hundred resets.
                self._env = self._make()
            text, info = self._env.reset(seed=episode_seed)
        return _shown(text, info), dict(info)

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Play one turn."""
        with self._generators.swapped_in():
            returned = self._env.step(action)
        text, reward, terminated, truncated, info = check_step(self._kind, returned)
        if not (terminated or truncated):
            text = _shown(check_text(self._kind, text), info)
        return text, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment; further calls do nothing."""
        close(self._env)


def _shown(text: str, info: Mapping[str, Any]) -> str:
    # In the order of GEM's own observation wrapper; the suffix holds a game's board.
    body = text if not text or text.endswith("\n") else f"{text}\n"
    return f"{info.get('prefix', '')}{body}{info.get('suffix', '')}"


def _find(kind: str, name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    registered = load_package(kind, "gem.envs.registration", PACKAGE, REMEDY).ENV_REGISTRY
    variants = [env_id for env_id in registered if env_id.startswith(f"{name}-")]
    if name not in registered and variants and re.search(r"-v\d+$", name):
        spec, settings = registered[variants[0]], {}
    else:
        check_name(kind, "GEM", name, registered)
        spec = registered[name]
        settings = dict(spec.kwargs)
    return entry_point(kind, spec, PACKAGE), settings
