"""A name in a config becomes a function: "module:function"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from evo_grpo.envs.messages import nearest
from evo_grpo.errors import ConfigError
from evo_grpo.printable import cut, raised

_REWARD = "env.reward"
_EXAMPLES = {
    _REWARD: 'the function reward in my_rewards.py of this folder is "my_rewards:reward"',
    "evolve.selection": 'the class Mine in my_selection.py of this folder is "my_selection:Mine"',
    "evolve.exploration": 'the class Mine in my_steps.py of this folder is "my_steps:Mine"',
}
_OTHER = 'the class Game in my_game.py of this folder is "my_game:Game"'


def load_function(path: str, where: str = _REWARD) -> Callable[..., Any]:
    """Import a function by its name.

    Args:
        path: "module:function", also "package.module:object.method". Modules of the current
            directory are found too, after the installed ones.
        where: The setting it stands in, for messages.

    Raises:
        ConfigError: The name has another form, the module is missing or fails to import, or it has
            no such function.
    """
    module_name, colon, attribute = path.partition(":")
    if (
        not colon
        or not attribute
        or not all(part.isidentifier() for part in module_name.split("."))
    ):
        raise ConfigError(
            f'{where}: expected "module:function", got {path!r}; {_EXAMPLES.get(where, _OTHER)}'
        )
    module = _import(module_name, path, where)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            origin = getattr(module, "__file__", None) or "built in"
            raise ConfigError(
                f"{where}: {path!r}: the module {module_name!r} ({origin}) has no {attribute!r}."
                f"{nearest(part, (name for name in dir(found) if not name.startswith('_')))}"
            )
        found = getattr(found, part)
    if not callable(found):
        wanted = "a function" if where == _REWARD else "a class or a function"
        raise ConfigError(
            f"{where}: expected {path!r} to be {wanted}, got {type(found).__name__} {found!r}"
        )
    return found


def search_here() -> str:
    """Let modules of the current directory be imported, after the installed ones; return it."""
    here = str(Path.cwd())
    # At the end, so that a file such as random.py in this folder hides no installed module; and to
    # stay, because the function may import its neighbours when it is called.
    if here not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    return here


def _import(name: str, path: str, where: str) -> ModuleType:
    here = search_here()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            near = nearest(name, (file.stem for file in Path.cwd().glob("*.py")))
            raise ConfigError(
                f"{where}: {path!r}: no module {error.name!r}, neither installed nor in "
                f"{here}.{near}"
            ) from error
        raise ConfigError(
            f"{where}: {path!r}: importing {name!r} failed: {cut(str(error))}; install what it "
            "imports"
        ) from error
    except Exception as error:  # the module is the user's code and may raise anything
        raise ConfigError(
            f"{where}: {path!r}: importing {name!r} raised {raised(error)}"
        ) from error
