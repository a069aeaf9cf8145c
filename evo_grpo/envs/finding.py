"""Find what a config names in the source of its module: `evo-grpo check` runs nobody's code.

The file of the module is looked for where an import would, level by level, since `find_spec` of
"a.b" imports a. Its syntax tree says whether the name is there, and what it is called with. Where
only running would tell (a compiled module, a decorator, a base class), nothing is objected to.
"""

from __future__ import annotations

import ast
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from inspect import Parameter, Signature
from itertools import islice
from pathlib import Path
from typing import Any, cast

from evo_grpo.envs.loading import (
    is_standard,
    no_such_module,
    no_such_name,
    not_callable,
    split_name,
    standard_library,
)
from evo_grpo.envs.run_code import CodeOfARunError, is_guard, refuse_code_of_a_run
from evo_grpo.errors import ConfigError

_FOLLOWED = 5
"""Imports of one name from module to module that are followed."""
_MOST_STEPS = 64
"""Names, each in its module, by which the definition of one name is looked for."""

_Bound = list[tuple[str, ast.AST]]
"""Names, each with the definition, import or value that it is bound to."""
_Wanted = tuple[str, tuple[str, ...]]
"""A module, and a name in it by its parts."""


@dataclass(frozen=True)
class Found:
    """What a name in a config stands for, as far as the source says.

    Attributes:
        path: The name, "module:function".
        is_class: Whether it is a class.
        signature: What it is called with, None where only running would tell.
        methods: Of a class, the functions in it; None where only running would tell.
    """

    path: str
    is_class: bool = False
    signature: Signature | None = None
    methods: frozenset[str] | None = None

    def lacks(self, method: str) -> bool:
        """Return whether it is known to be a class without a method."""
        return self.methods is not None and method not in self.methods

    def refuses(self, args: Mapping[str, Any]) -> str:
        """Return why it is known not to be called with keyword arguments, empty where it may be."""
        try:
            if self.signature is not None:
                self.signature.bind(**args)
        except TypeError as error:
            return str(error)
        return ""

    def stand_in(self) -> Callable[..., Any]:
        """Return something with its name and signature, which is not to be called."""
        name = self.path.rpartition(":")[2].rpartition(".")[2]
        anything = Signature([Parameter("anything", Parameter.VAR_KEYWORD)])
        signature = anything if self.signature is None else self.signature
        if self.is_class:
            return type(name, (), {"__signature__": signature})

        def never(**anything: object) -> None:
            raise NotImplementedError(f"{self.path} was found, not loaded")

        never.__name__ = name
        vars(never)["__signature__"] = signature
        return never


def find_function(path: str, where: str) -> Callable[..., Any]:
    """Return a stand-in for a function; takes and refuses what `loading.load_function` does."""
    return find_name(path, where).stand_in()


def find_name(path: str, where: str) -> Found:
    """Find a name that `load_function` takes in the source of its module, and import nothing.

    `where` is the setting it stands in, for messages.

    Raises:
        ConfigError: As `loading.load_function`, as far as the source says.
    """
    module_name, attribute = split_name(path, where)
    module = _read(module_name, path, where)
    if module is None:
        return Found(path)
    return _look_up(module, attribute.split("."), path, where, _FOLLOWED)


def is_installed(module: str) -> bool:
    """Return whether a module could be imported, also one of the current directory."""
    return not isinstance(_locate(module), str)


def defining_files(path: str) -> dict[str, Path | None]:
    """Return the modules that a name ("module:function") comes from; nothing is imported.

    What a module has from another one by `from ... import`, by `import`, or by another name for it,
    is followed to the module that defines it. What the definition itself calls is not.

    Returns:
        The file of the module of the name, then of those on the way to its definition; None for
        one that has no file, or is not there.
    """
    module, _, attribute = path.partition(":")
    pending: list[_Wanted] = [(module, tuple(attribute.split(".")))]
    found: dict[str, Path | None] = {}
    for name, parts in islice(pending, _MOST_STEPS):  # which grow meanwhile, `a = a.b` for ever
        found.setdefault(name, _file(name))
        pending += [one for one in dict.fromkeys(_origins(name, parts)) if one not in pending]
    return found


@dataclass(frozen=True)
class _Source:
    """A module as its file has it."""

    name: str
    package: str
    origin: str
    tree: ast.Module
    bound: _Bound

    def bindings(self, name: str) -> list[ast.AST]:
        """Return all that the module binds a name to."""
        return [node for bound_name, node in self.bound if bound_name == name]

    def imported_from(self, node: ast.ImportFrom) -> str:
        """Return the full name of the module that "from ... import" names."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        above = parts[: len(parts) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])


def _locate(name: str) -> ModuleSpec | str:
    """Return where a module lies, or the first part of its name that is not there."""
    importlib.invalidate_caches()
    seen, *rest = name.split(".")
    # As for an import with the current directory at the end of sys.path.
    places = [*sys.path, str(Path.cwd())]
    found: ModuleSpec | None = None
    for finder in sys.meta_path:
        if finder is PathFinder:
            found = PathFinder.find_spec(seen, places)
        elif hasattr(finder, "find_spec") and not is_guard(finder):
            found = finder.find_spec(seen, None, None)
        if found is not None:
            break
    for part in rest:
        if found is None:
            break
        seen = f"{seen}.{part}"
        inside = found.submodule_search_locations
        # By its last part alone: for a full name a namespace would ask sys.modules for its parent.
        found = None if inside is None else PathFinder.find_spec(part, list(inside))
    return seen if found is None else found


def _file(name: str) -> Path | None:
    spec = _locate(name)
    found = None if isinstance(spec, str) or not spec.has_location else spec.origin
    return None if found is None else Path(found)


def _read(name: str, path: str, where: str) -> _Source | None:
    """Return the source of a module, None where it has none."""
    spec = _locate(name)
    if isinstance(spec, str):
        raise no_such_module(path, where, name, spec)
    origin = spec.origin or "a folder"
    try:
        if spec.has_location:
            refuse_code_of_a_run(name, origin)
        text = cast("Any", spec.loader).get_source(spec.name) if spec.loader else ""
        tree = None if text is None else _parsed(text, origin)
    except CodeOfARunError as error:
        raise ConfigError(f"{where}: {path!r}: {error}") from error
    except (RecursionError, MemoryError):  # deeper than a tree may be; an import may still take it
        return None
    except (SyntaxError, ValueError, ImportError, OSError) as error:
        raise ConfigError(
            f"{where}: {path!r}: expected Python in {origin}, got {type(error).__name__}: {error}"
        ) from error
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    return None if tree is None else _Source(name, package, origin, tree, _bindings(tree.body))


def _parsed(text: str, origin: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of code that is not ours
        tree = ast.parse(text, filename=origin)
        compile(tree, origin, "exec")  # finds what the grammar allows, such as two equal arguments
    return tree


def _look_up(module: _Source, parts: Sequence[str], path: str, where: str, follow: int) -> Found:
    first, *rest = parts
    hits = module.bindings(first)
    if not hits:
        if _is_open(module):
            return Found(path)
        raise no_such_name(path, where, module.origin, first, (name for name, _ in module.bound))
    origins = [one for node in hits for one in _imports_of(node, first, module)]
    for origin, _ in origins:
        if is_standard(origin):  # as in "package:os.system"
            raise standard_library(path, where, origin)
    if len(hits) > 1 or isinstance(hits[0], ast.Import):
        return Found(path)
    if isinstance(hits[0], ast.ImportFrom):
        origin, name = origins[0]
        there = _read(origin, path, where) if follow and origin and is_installed(origin) else None
        if there is None or not there.bindings(name):
            return Found(path)  # a module of that package, or what only running would tell
        return _look_up(there, [name, *rest], path, where, follow - 1)
    if not rest and isinstance(hits[0], ast.Constant):
        raise not_callable(path, where, hits[0].value)
    found = _found(hits[0], path)
    if rest and found.lacks(rest[0]):
        raise no_such_name(path, where, module.origin, rest[0], found.methods or ())
    return Found(path) if rest else found


def _bindings(body: Sequence[ast.stmt]) -> _Bound:
    """Return the names that a module or class binds in any branch, in their order."""
    bound: _Bound = []
    pending: list[ast.AST] = [*reversed(body)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.append((node.name, node))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound += [(one.asname or one.name.partition(".")[0], node) for one in node.names]
        elif isinstance(node, ast.Name):
            bound += [(node.id, node)] if isinstance(node.ctx, ast.Store) else []
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [one.id for one in targets if isinstance(one, ast.Name)]
            bound += [(name, node.value or node) for name in names]
            pending += [one for one in targets if not isinstance(one, ast.Name)]
        else:
            pending += reversed(list(ast.iter_child_nodes(node)))
    return bound


def _is_open(module: _Source) -> bool:
    """Return whether a module may have names that its source does not spell out."""
    names = {name for name, _ in module.bound}
    called = {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)}
    return bool(names & {"*", "__getattr__"} or called & {"globals", "exec", "vars", "setattr"})


def _imports_of(node: ast.AST, name: str, module: _Source) -> Iterator[tuple[str, str]]:
    """Yield the modules that a statement imports a name from, and the name there.

    That name is empty where the module itself is imported.
    """
    if isinstance(node, ast.ImportFrom):
        origin = module.imported_from(node)
        yield from ((origin, one.name) for one in node.names if (one.asname or one.name) == name)
    elif isinstance(node, ast.Import):
        for one in node.names:
            if one.asname == name:
                yield one.name, ""
            elif one.asname is None and one.name.partition(".")[0] == name:
                yield name, ""


def _origins(name: str, parts: tuple[str, ...]) -> Iterator[_Wanted]:
    """Yield where a module may have a name from, where it does not define it itself."""
    first, *rest = parts
    if rest and _file(f"{name}.{first}") is not None:
        yield f"{name}.{first}", tuple(rest)
    module = _readable(name)
    if module is None:
        return
    hits = module.bindings(first)
    for node in hits:
        for origin, named in _imports_of(node, first, module):
            wanted = (named, *rest) if named else tuple(rest)
            if wanted and origin and not is_standard(origin):
                yield origin, wanted
        # Another name for it, or what a call such as functools.partial makes of it.
        for value in _made_of(node):
            if dotted := _dotted(value):
                yield name, (*dotted, *rest)
    for node in [] if hits else module.bindings("*"):
        origin = module.imported_from(cast("ast.ImportFrom", node))
        there = _readable(origin) if origin and not is_standard(origin) else None
        if there is not None and (there.bindings(first) or there.bindings("*")):
            yield origin, parts


def _made_of(node: ast.AST) -> list[ast.expr]:
    """Return what a value is made of: itself, or what a call calls and is given."""
    if isinstance(node, ast.Call):
        # What torch.compile(exact) calls defines no reward.
        return [*([node.func] if isinstance(node.func, ast.Name) else []), *node.args]
    return [node] if isinstance(node, ast.expr) else []


def _dotted(node: ast.AST) -> tuple[str, ...]:
    """Return the parts of a name such as `scores.exact`, none for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return (node.id, *parts) if isinstance(node, ast.Name) else ()


def _readable(name: str) -> _Source | None:
    """Return the source of a module, None where there is none that can be read."""
    try:
        return _read(name, name, "")
    except ConfigError:
        return None


def _found(node: ast.AST, path: str) -> Found:
    if not isinstance(node, ast.ClassDef):
        return Found(path, signature=_signature(node))
    functions = dict(_bindings(node.body))
    alone = not (node.bases or node.keywords or node.decorator_list)
    methods: frozenset[str] | None = None
    if alone and "__getattr__" not in functions:
        # What is set on an object, as in self.plan = ..., may be a method too.
        within = [one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)]
        methods = frozenset([*functions, *within])
    found = Found(path, is_class=True, methods=methods)
    if node.keywords or node.decorator_list or "__new__" in functions:
        return found
    if "__init__" not in functions:
        return replace(found, signature=Signature()) if alone else found
    made = _signature(functions["__init__"])
    if made is None or not made.parameters:
        return found
    return replace(found, signature=made.replace(parameters=list(made.parameters.values())[1:]))


def _signature(node: ast.AST) -> Signature | None:
    """Return what a function or lambda is called with, None for anything else."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return None
    if not isinstance(node, ast.Lambda) and node.decorator_list:
        return None
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    optional = {one.arg for one in positional[len(positional) - len(given.defaults) :]}
    by_name = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    optional |= {one.arg for one, default in by_name if default is not None}
    kinds = (
        (Parameter.POSITIONAL_ONLY, given.posonlyargs),
        (Parameter.POSITIONAL_OR_KEYWORD, given.args),
        (Parameter.VAR_POSITIONAL, [given.vararg] if given.vararg else []),
        (Parameter.KEYWORD_ONLY, given.kwonlyargs),
        (Parameter.VAR_KEYWORD, [given.kwarg] if given.kwarg else []),
    )
    parameters = [
        Parameter(one.arg, kind, default=... if one.arg in optional else Parameter.empty)
        for kind, ones in kinds
        for one in ones
    ]
    return Signature(parameters)
