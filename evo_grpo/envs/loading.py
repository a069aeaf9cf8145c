"""Load the user's code and rewards, and refuse the code of a run folder.

Commands that run the code of a configuration call `load_function`; `envs.finding` looks up a name
without importing anything.

A run folder may come from a stranger, and its digests then match the stranger's code. Modules in
run folders are therefore refused, except for packages that are installed in a Python environment.
"""

import importlib
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, cast, final

from evo_grpo.envs.messages import listed, nearest
from evo_grpo.envs.rewards.functions import RewardFunction, Scorer, unknown_reward
from evo_grpo.envs.rewards.watch import current_modes, restore
from evo_grpo.errors import ConfigError
from evo_grpo.escaping import error_text, shorten
from evo_grpo.places import folders
from evo_grpo.record.folder import run_containing
from evo_grpo.settings.env import EnvConfig
from evo_grpo.settings.objects import PythonObject
from evo_grpo.settings.rewards import JudgeReward, ModelReward


class CodeOfARunError(ImportError):
    """A module lies in a run folder, directly or through a link."""


def refuse_code_of_a_run(name: str, file: str | Path) -> None:
    """Refuse a module whose file lies in a run folder."""
    if _is_installed(str(file)):
        return
    run = run_containing(Path(file))
    if run is not None:
        raise CodeOfARunError(
            f"{file}: expected the module {name!r} outside of any run folder, got one in {run}: "
            "what lies there may have come with the folder, and is never imported; read it, and "
            "move it out of there",
            name=name,
        )


def guard_imports() -> None:
    """Refuse every later import of a module that lies in a run folder."""
    if _GUARD not in sys.meta_path:
        finders = sys.meta_path
        # Before the finder that searches sys.path, and after those of the modules built into
        # Python.
        place = finders.index(PathFinder) if PathFinder in finders else 0
        finders.insert(place, _GUARD)


def is_guard(finder: object) -> bool:
    """Return whether `finder`, an entry of `sys.meta_path`, was added by `guard_imports`."""
    return finder is _GUARD


@final
class _Guard(MetaPathFinder):
    """A finder that refuses modules in a run folder and finds no others."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        places = sys.path if path is None else path
        if all(_is_installed(place) for place in places if isinstance(place, str)):  # pyright: ignore[reportUnnecessaryIsInstance] -- anybody may put other things there
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.has_location and spec.origin is not None:
            refuse_code_of_a_run(fullname, spec.origin)
        return None


_GUARD = _Guard()


@cache
def _is_installed(place: str) -> bool:
    path = Path(place)
    return any(path.is_relative_to(folder) for folder in _installed_in())


@cache
def _installed_in() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders_of_python = [sysconfig.get_path(name) for name in names]
    return tuple(folder for folder in (*folders_of_python, site.getusersitepackages()) if folder)


Loader = Callable[[str, str], Callable[..., Any]]
"""Turns a name and the setting that holds it into a function: `load_function`, or
`finding.find_function`, which returns a stand-in."""

REWARD = "env.reward"
_EXAMPLES = {
    REWARD: 'the function reward in my_rewards.py of this folder is "my_rewards:reward"',
    "evolve.selection": 'the class Mine in my_selection.py of this folder is "my_selection:Mine"',
    "evolve.exploration": 'the class Mine in my_steps.py of this folder is "my_steps:Mine"',
}
_OTHER = 'the class Game in my_game.py of this folder is "my_game:Game"'


def load_function(path: str, where: str = REWARD) -> Callable[..., Any]:
    """Import the function that `path` names, such as "package.module:object.method".

    `where` is the setting with this name, for errors. An installed module takes precedence over one
    in `places.folders`.
    """
    module_name, attribute = split_name(path, where)
    module = _import(module_name, path, where)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            origin = getattr(module, "__file__", None) or "built in"
            raise no_such_name(path, where, origin, part, dir(value))
        value = getattr(value, part)
        _refuse_imported(value, path, where)
    if not callable(value):
        raise not_callable(path, where, value)
    return value


def split_name(path: str, where: str) -> tuple[str, str]:
    """Split "module:function" in two; refuse other forms, and modules of the standard library."""
    module_name, colon, attribute = path.partition(":")
    if (
        not colon
        or not attribute
        or not all(part.isidentifier() for part in module_name.split("."))
    ):
        raise ConfigError(
            f'{where}: expected "module:function", got {path!r}; {_EXAMPLES.get(where, _OTHER)}'
        )
    if is_standard(module_name):
        raise standard_library(path, where, module_name)
    return module_name, attribute


def is_standard(module: str) -> bool:
    """Return whether a module belongs to the standard library, by its name."""
    root = module.partition(".")[0]
    return root in sys.stdlib_module_names or root == "test"


def standard_library(path: str, where: str, module: str) -> ConfigError:
    """Return the error for a setting that names code of the standard library."""
    root = module.partition(".")[0]
    rename = f"; rename {root}.py of this folder" if Path(f"{root}.py").exists() else ""
    return ConfigError(
        f"{where}: {path!r}: expected a function of yours or of an installed package, got one of "
        f"{root!r}, a module of Python's standard library, which may run any command; write a "
        f"function that does what you need: {_EXAMPLES.get(where, _OTHER)}{rename}"
    )


def no_such_name(
    path: str, where: str, origin: str, part: str, there: Iterable[str]
) -> ConfigError:
    """Return the error for a `path` whose module exists but lacks the attribute."""
    module_name, _, attribute = path.partition(":")
    return ConfigError(
        f"{where}: {path!r}: the module {module_name!r} ({origin}) has no {attribute!r}."
        f"{nearest(part, (name for name in there if not name.startswith('_')))}"
    )


def no_such_module(path: str, where: str, name: str, missing: str) -> ConfigError:
    """Return the error for a missing module; `missing` is the module or a package above it."""
    near = nearest(name, (file.stem for folder in folders() for file in folder.glob("*.py")))
    places = " or ".join(map(str, folders()))
    return ConfigError(
        f"{where}: {path!r}: no module {missing!r}, neither installed nor in {places}.{near}"
    )


def not_callable(path: str, where: str, value: object) -> ConfigError:
    """Return the error for a value that cannot be called."""
    expected = "a function" if where == REWARD else "a class or a function"
    return ConfigError(
        f"{where}: expected {path!r} to be {expected}, got {type(value).__name__} {value!r}"
    )


def _refuse_imported(value: object, path: str, where: str) -> None:
    """Refuse what a module imports from the standard library, such as os in "package:os.system"."""
    if isinstance(value, ModuleType):
        module = value.__name__
    elif isinstance(value, FunctionType | BuiltinFunctionType | MethodType | type):
        module = cast("str | None", getattr(value, "__module__", None)) or ""
    else:
        return
    if is_standard(module):
        raise standard_library(path, where, module)


def search_here() -> None:
    """Add `places.folders` to the end of `sys.path`, and refuse later imports from run folders."""
    guard_imports()
    # At the end, so that a file such as random.py hides no installed module. They stay there,
    # because a function may import other modules of a folder when it is called.
    sys.path += [str(folder) for folder in folders() if str(folder) not in sys.path]
    importlib.invalidate_caches()


def _differ(known: Path, file: Path) -> bool:
    try:
        return known.read_bytes() != file.read_bytes()
    except OSError:  # a compiled module, or a file that is gone
        return False


def _refuse_other(name: str, path: str, where: str) -> None:
    """Refuse a module if this process has imported other code under its name."""
    root = name.partition(".")[0]
    imported = getattr(sys.modules.get(root), "__file__", None)
    spec = PathFinder.find_spec(root, sys.path) if imported else None
    if imported is None or spec is None or spec.origin is None:
        return
    file = Path(spec.origin)
    if Path(imported).resolve() == file.resolve() or not _differ(Path(imported), file):
        return
    place = file.parent.parent if spec.submodule_search_locations else file.parent
    if place in folders():
        raise ConfigError(
            f"{where}: {path!r}: expected the module {root!r} in {file}, but this process has "
            f"imported another one of that name from {imported}; rename one of the two, or start "
            "another process"
        )


def _import(name: str, path: str, where: str) -> ModuleType:
    search_here()
    _refuse_other(name, path, where)
    working_folder = current_modes()[:1]
    try:
        module = importlib.import_module(name)
        if changed := restore(working_folder):
            raise ConfigError(f"{where}: {path!r}: importing {name!r} left {changed}")
        return module
    except ConfigError:
        raise
    except Exception as error:  # the module is the user's code and may raise anything
        why = f"importing {name!r} raised {error_text(error)}"
        if isinstance(error, CodeOfARunError):
            why = str(error)
        elif isinstance(error, ModuleNotFoundError):
            missing = error.name or ""
            if missing and (name == missing or name.startswith(f"{missing}.")):
                raise no_such_module(path, where, name, missing) from error
            why = f"importing {name!r} failed: {shorten(str(error))}; install what it imports"
        raise ConfigError(f"{where}: {path!r}: {why}") from error


def configured_rewards(
    env: EnvConfig, load: Loader = load_function, own: Sequence[RewardFunction] = ()
) -> tuple[RewardFunction, ...]:
    """Load the reward functions that a configuration names; return () if it names none.

    If it names none but has a mapping `env.reward_weights`, return `own`, the reward functions of
    the task, with these weights.
    """
    if env.reward:
        return as_rewards(env.rewards, env.reward_weights, env.reward_style, load)
    if env.reward_weights is None:
        return ()
    if not own or not isinstance(env.reward_weights, Mapping):
        raise ConfigError("env.reward_weights: expected env.reward beside it, got none")
    return as_rewards(own, env.reward_weights)


def as_rewards(
    given: object,
    weights: Sequence[float] | Mapping[str, float] | None = None,
    style: Literal["trl"] | None = None,
    load: Loader = load_function,
) -> tuple[RewardFunction, ...]:
    """Turn one reward, or a list of at least one, into `RewardFunction`s with weights.

    A reward is a function, its name, a `RewardFunction`, a `ModelReward`, a `JudgeReward`, or a
    mapping as in `env.reward`. `weights` has one weight per reward, or maps names to weights; a
    reward that is not named keeps its weight (1 for a plain function). `style` is the
    `env.reward_style` of the user's functions.
    """
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    items = list(cast("Sequence[object]", given)) if is_list else [given]
    if not items:
        raise ConfigError("reward_fn: expected a function or a list of at least one, got []")
    for item in items:
        if isinstance(item, str):
            split_name(item, REWARD)  # before any of them is imported
    rewards: list[RewardFunction] = []
    for fn in [_loaded(item, load) for item in items]:
        is_wrapped = isinstance(fn, RewardFunction)
        fn_style = None if isinstance(fn.fn if is_wrapped else fn, Scorer) else style
        reward = fn if is_wrapped else RewardFunction(_name_of(fn), fn, style=fn_style)
        twins = sum(other.name.split("#")[0] == reward.name for other in rewards)
        name = f"{reward.name}#{twins + 1}" if twins else reward.name  # distinguishes two lambdas
        rewards.append(replace(reward, name=name, style=reward.style or fn_style))
    names = [reward.name for reward in rewards]
    by_name = weights if isinstance(weights, Mapping) else {}
    row = [by_name.get(reward.name, reward.weight) for reward in rewards]
    if weights is not None and not isinstance(weights, Mapping):
        row = list(weights)
    problem = ""
    if unknown := [name for name in by_name if name not in names]:
        problem = unknown_reward(unknown[0], names)
    elif len(row) != len(names):
        problem = f"expected one per reward function, that is {len(names)}, got {len(row)}"
    elif not any(row):
        problem = f"expected one that is not 0, got 0 for each of {listed(names)}"
    if problem:
        raise ConfigError(f"reward_weights: {problem}")
    return tuple(
        replace(reward, weight=weight) for reward, weight in zip(rewards, row, strict=True)
    )


def _loaded(given: object, load: Loader) -> Any:  # noqa: ANN401 -- what a user gave as a function
    """Load a function by its name, or build the scorer that settings describe.

    The value of a `PythonObject` and all other values are returned as they are.
    """
    if isinstance(given, str):
        return load(given, REWARD)
    if isinstance(given, PythonObject):
        return given.value
    if isinstance(given, Mapping):
        (given,) = EnvConfig(kind="dataset", reward=cast("Any", given)).rewards
    if isinstance(given, ModelReward | JudgeReward):
        # Imported here: it loads asyncio, and most runs have no such reward.
        from evo_grpo.envs.rewards.scorers import Judge, RewardModel

        return RewardModel(given) if isinstance(given, ModelReward) else Judge(given)
    return given


def _name_of(fn: object) -> str:
    inner = getattr(fn, "func", fn)  # of functools.partial
    return getattr(inner, "__name__", type(inner).__name__)
