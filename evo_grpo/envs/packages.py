"""Runs other packages' code: quiet imports, trial episodes, private random generators."""

import contextlib
import importlib
import io
import logging
import pkgutil
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TextIO, TypeVar, cast

import numpy as np

from evo_grpo.envs.episodes.multi_turn import MultiTurnEnv, close
from evo_grpo.envs.messages import excerpt
from evo_grpo.errors import EngineUnavailable, EvoGrpoError
from evo_grpo.escaping import shorten

EnvT = TypeVar("EnvT", bound=MultiTurnEnv)
_SEEDS = 2**32
# Keeps environments in two threads from drawing from each other's generators.
_LOCK = threading.RLock()
# Colours and rows of stars, as in NLTK's message about a missing word list.
_ORNAMENTS = re.compile(r"\x1b\[[0-9;]*m|\*+")


def load_package(kind: str, module: str, package: str, remedy: str) -> ModuleType:
    """Import a module of another package; hide its prints and warnings, undo its logging set-up.

    If the import fails, EngineUnavailable is raised with `remedy`.
    """
    try:
        with quiet():
            return importlib.import_module(module)
    except (ImportError, SyntaxError) as error:  # a package may be written for a newer Python
        raise EngineUnavailable(
            f'env.kind: "{kind}" needs {module} of the package {package}, which fails to import '
            f"({type(error).__name__}: {excerpt(str(error))}): {remedy}"
        ) from error


def entry_point(kind: str, spec: Any, package: str) -> Callable[..., Any]:  # noqa: ANN401 -- of a package without types
    """Return the class or factory of an environment, which a package registered as `spec`."""
    entry = spec.entry_point
    if not callable(entry):
        # An environment's own imports may be missing although the package is installed.
        remedy = "install what it imports, or choose another environment"
        load_package(kind, entry.partition(":")[0], package, remedy)
        entry = pkgutil.resolve_name(entry)
    return entry


@contextmanager
def quiet() -> Generator[None]:
    """Hide what this thread prints in a `with` block.

    In the main thread, warnings are hidden too, and changes of the root logger are undone.
    """
    with contextlib.redirect_stdout(cast("TextIO", _Muted())):
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        root = logging.getLogger()
        handlers, level = list(root.handlers), root.level
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            finally:
                root.handlers[:] = handlers
                root.setLevel(level)


class _Muted:
    """Standard output that drops the prints of the thread that made it, and passes on all else."""

    def __init__(self) -> None:
        self._thread, self._dropped = threading.get_ident(), io.StringIO()
        self._real = sys.stdout or self._dropped  # None after `>&-`

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- an attribute of a stream
        is_own_thread = threading.get_ident() == self._thread
        return getattr(self._dropped if is_own_thread else self._real, name)


def try_out(kind: str, make: Callable[[], EnvT], seed: int) -> Callable[[], EnvT]:
    """Begin one episode of `make()`, so that errors are raised before the run; return `make`."""
    try:
        env = make()
        try:
            env.reset(seed=seed)
        finally:
            close(env)
    except EvoGrpoError:
        raise
    except Exception as error:  # another package's code may raise anything
        message = " ".join(_ORNAMENTS.sub(" ", str(error)).split())
        raise EngineUnavailable(
            f'env.kind: "{kind}" does not begin an episode here: {type(error).__name__}: '
            f"{shorten(message)}; install or download what it asks for, or choose another"
        ) from error
    return make


@contextmanager
def global_generators_kept() -> Generator[None]:
    """Restore Python's and numpy's global generators at the end of a `with` block."""
    with _LOCK:
        before = _states()
        try:
            yield
        finally:
            _set(before)


class PrivateGenerators:
    """Random generators of one environment, which replace the global ones while it runs.

    Only one such environment of the process runs at a time. The environment's class sets
    `draws_globally = True`, so that a gym does not count the wait for another environment as part
    of a call. `seed`, any int, seeds draws before the first episode, and episodes that are begun
    without a seed.
    """

    def __init__(self, seed: int) -> None:
        self._episodes = random.Random(seed)
        self.start(self._episodes.randrange(_SEEDS))

    def start(self, seed: int | None) -> int:
        """Seed the generators for an episode and return the seed in [0, 2**32), the range of numpy.

        With None, the episode's seed is drawn from the generator that `__init__` seeded.
        """
        episode_seed = self._episodes.randrange(_SEEDS) if seed is None else seed % _SEEDS
        # RandomState, because the global generator takes its state.
        self._own = (
            random.Random(episode_seed).getstate(),
            np.random.RandomState(episode_seed).get_state(),
        )
        return episode_seed

    @contextmanager
    def swapped_in(self) -> Generator[None]:
        """Make these generators the global ones in a `with` block."""
        with global_generators_kept():
            _set(self._own)
            try:
                yield
            finally:
                self._own = _states()  # where the next block continues


def _states() -> tuple[Any, Any]:
    # Global generator because it is only read here, to be put back.
    return random.getstate(), np.random.get_state()  # noqa: NPY002 -- kept, not drawn from


def _set(states: tuple[Any, Any]) -> None:
    # Global generator because another package's code draws from it.
    random.setstate(states[0])
    # Global generator because another package's code draws from it.
    np.random.set_state(states[1])  # noqa: NPY002 -- a state that was kept
