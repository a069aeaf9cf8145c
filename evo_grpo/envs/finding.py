"""A name in a config is found without importing it: `evo-grpo check` runs nobody's code.

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
from evo_grpo.errors import ConfigError

_FOLLOWED = 5
"""Imports of one name from module to module that are followed."""
_MOST_STEPS = 64
"""Names, each in its module, by which the definition of one name is looked for."""
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)

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
    """Find a name of a config in the source of its module, and import nothing.

    Args:
        path: "module:function", also "package.module:object.method".
        where: The setting it stands in, for messages.

    Raises:
        ConfigError: The name has another form, the module is missing, is no Python or is one of the
            standard library, or it has no such function.
    """
    module_name, attribute = split_name(path, where)
    module = _read(module_name, path, where)
    if module is None:
        return Found(path)
    return _look_up(module, attribute.split("."), path, where, followed=0)


def is_installed(module: str) -> bool:
    """Return whether a module could be imported, also one of the current directory."""
    return not isinstance(_locate(module), str)


def module_file(name: str) -> Path | None:
    """Return the file of a module, None where it has none or is not there; nothing is imported."""
    spec = _locate(name)
    found = None if isinstance(spec, str) or not spec.has_location else spec.origin
    return None if found is None else Path(found)


def defining_files(path: str) -> dict[str, Path | None]:
    """Return the modules that a name comes from, each with its file; nothing is imported.

    What a module has from another one by `from ... import`, by `import`, or by another name for it,
    is followed to the module that defines it. What the definition itself calls is not.

    Args:
        path: "module:function", also "package.module:object.method".

    Returns:
        The module of the name first, then those on the way to its definition; None for a module
        that has no file, or is not there.
    """
    module, _, attribute = path.partition(":")
    pending: list[_Wanted] = [(module, tuple(attribute.split(".")))]
    found: dict[str, Path | None] = {}
    for name, parts in islice(pending, _MOST_STEPS):  # which grow meanwhile, `a = a.b` for ever
        found.setdefault(name, module_file(name))
        pending += [one for one in dict.fromkeys(_origins(name, parts)) if one not in pending]
    return found


@dataclass(frozen=True)
class _Source:
    """A module as its file has it."""

    name: str
    package: str
    origin: str
    tree: ast.Module


def _locate(name: str) -> ModuleSpec | str:
    """Return where a module lies, or the first part of its name that is not there."""
    importlib.invalidate_caches()
    first, *rest = name.split(".")
    # As for an import with the current directory at the end of sys.path.
    places = [*sys.path, str(Path.cwd())]
    found: ModuleSpec | None = None
    for finder in sys.meta_path:
        if finder is PathFinder:
            found = PathFinder.find_spec(first, places)
        elif hasattr(finder, "find_spec"):
            found = finder.find_spec(first, None, None)
        if found is not None:
            break
    seen = first
    for part in rest:
        if found is None or found.submodule_search_locations is None:
            break
        seen = f"{seen}.{part}"
        # By its last part alone: for a full name a namespace would ask sys.modules for its parent.
        found = PathFinder.find_spec(part, list(found.submodule_search_locations))
    return seen if found is None or seen != name else found


def _read(name: str, path: str, where: str) -> _Source | None:
    """Return the source of a module, None where it has none."""
    spec = _locate(name)
    if isinstance(spec, str):
        missing = name if spec == name or is_installed(spec) else spec
        raise no_such_module(path, where, name, missing)
    origin = spec.origin or "a folder"
    try:
        text = cast("Any", spec.loader).get_source(spec.name) if spec.loader else ""
        tree = None if text is None else _parsed(text, origin)
    except (RecursionError, MemoryError):  # deeper than a tree may be; an import may still take it
        return None
    except (SyntaxError, ValueError, ImportError, OSError) as error:
        raise ConfigError(
            f"{where}: {path!r}: expected Python in {origin}, got {type(error).__name__}: {error}"
        ) from error
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    return None if tree is None else _Source(name, package, origin, tree)


def _parsed(text: str, origin: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of code that is not ours
        tree = ast.parse(text, filename=origin)
        compile(tree, origin, "exec")  # finds what the grammar allows, such as two equal arguments
    return tree


def _look_up(
    module: _Source, parts: Sequence[str], path: str, where: str, *, followed: int
) -> Found:
    first, *rest = parts
    bound = list(_bindings(module.tree.body))
    hits = [node for name, node in bound if name == first]
    if not hits:
        if _is_open(module.tree, bound):
            return Found(path)
        raise no_such_name(path, where, module.origin, first, (name for name, _ in bound))
    for node in hits:
        if isinstance(node, ast.Import | ast.ImportFrom):
            _refuse_imported(node, first, module, path, where)
    if len(hits) > 1:
        return Found(path)
    if isinstance(hits[0], ast.ImportFrom):
        return _followed(hits[0], parts, module, path, where, followed)
    if not rest and isinstance(hits[0], ast.Constant):
        raise not_callable(path, where, hits[0].value)
    found = _found(hits[0], path)
    if rest and found.lacks(rest[0]):
        raise no_such_name(path, where, module.origin, rest[0], found.methods or ())
    return Found(path) if rest else found


def _found(node: ast.AST, path: str) -> Found:
    """Return what a name stands for by what it is bound to."""
    if isinstance(node, ast.ClassDef):
        return _of_class(node, path)
    return Found(path, signature=_signature(node))


def _bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that a module or class binds in any branch, each with what it is bound to."""
    pending: list[ast.AST] = [*reversed(body)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                value = node.value if isinstance(target, ast.Name) else None
                yield from ((name, value or node) for name in _stored(target))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], node
        else:
            within = list(ast.iter_child_nodes(node))
            pending += reversed([part for part in within if isinstance(part, _BLOCKS)])
            for part in within:
                if not isinstance(part, _BLOCKS):
                    yield from ((name, part) for name in _stored(part))


def _stored(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement or target stores into, in whatever is within it too."""
    for name in ast.walk(node):
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
            yield name.id


def _is_open(tree: ast.Module, bound: Sequence[tuple[str, ast.AST]]) -> bool:
    """Return whether a module may have names that its source does not spell out."""
    names = {name for name, _ in bound}
    called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return bool(names & {"*", "__getattr__"} or called & {"globals", "exec", "vars", "setattr"})


def _refuse_imported(
    node: ast.Import | ast.ImportFrom, name: str, module: _Source, path: str, where: str
) -> None:
    """Refuse the standard library where a module has imported it, as in "package:os.system"."""
    for alias in node.names:
        if (alias.asname or alias.name.partition(".")[0]) == name:
            origin = _imported_from(node, module) if isinstance(node, ast.ImportFrom) else None
            if is_standard(alias.name if origin is None else origin):
                raise standard_library(path, where, alias.name if origin is None else origin)


def _imported_from(node: ast.ImportFrom, module: _Source) -> str:
    """Return the full name of the module that "from ... import" names."""
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _followed(
    node: ast.ImportFrom,
    parts: Sequence[str],
    module: _Source,
    path: str,
    where: str,
    followed: int,
) -> Found:
    """Look a name up where a module has it from."""
    origin = _imported_from(node, module)
    if followed == _FOLLOWED or not origin or isinstance(_locate(origin), str):
        return Found(path)
    there = _read(origin, path, where)
    names = {alias.asname or alias.name: alias.name for alias in node.names}
    wanted = [names.get(parts[0], parts[0]), *parts[1:]]
    if there is None or wanted[0] not in dict(_bindings(there.tree.body)):
        return Found(path)  # a module of that package, or what only running would tell
    return _look_up(there, wanted, path, where, followed=followed + 1)


def _origins(name: str, parts: tuple[str, ...]) -> Iterator[_Wanted]:
    """Yield where a module may have a name from, where it does not define it itself."""
    first, *rest = parts
    if rest and module_file(f"{name}.{first}") is not None:
        yield f"{name}.{first}", tuple(rest)
    module = _readable(name)
    if module is None:
        return
    bound = list(_bindings(module.tree.body))
    hits = [node for bound_name, node in bound if bound_name == first]
    for node in hits:
        yield from _origins_of(node, first, rest, module)
    for node in () if hits else [node for bound_name, node in bound if bound_name == "*"]:
        origin = _imported_from(cast("ast.ImportFrom", node), module)
        there = _readable(origin) if _is_followed(origin) else None
        names = set() if there is None else {one for one, _ in _bindings(there.tree.body)}
        if names & {first, "*"}:
            yield origin, parts


def _origins_of(
    node: ast.AST, first: str, rest: Sequence[str], module: _Source
) -> Iterator[_Wanted]:
    """Yield where a name comes from by what its module binds it to."""
    if isinstance(node, ast.ImportFrom):
        origin = _imported_from(node, module)
        for alias in node.names:
            if (alias.asname or alias.name) == first and _is_followed(origin):
                yield origin, (alias.name, *rest)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            given = alias.asname or alias.name.partition(".")[0]
            if given == first and rest and _is_followed(alias.name):
                yield alias.name if alias.asname else given, tuple(rest)
    else:
        # Another name for it, or what a call such as functools.partial makes of it.
        for value in _made_of(node):
            if named := _dotted(value):
                yield module.name, (*named, *rest)


def _made_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the names that a value is made of: one itself, or the parts of a call."""
    if not isinstance(node, ast.Call):
        yield node
        return
    if isinstance(node.func, ast.Name):  # what torch.compile(exact) calls defines no reward
        yield node.func
    yield from node.args


def _dotted(node: ast.AST) -> tuple[str, ...]:
    """Return the parts of a name such as `scores.exact`, none for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return (node.id, *parts) if isinstance(node, ast.Name) else ()


def _is_followed(module: str) -> bool:
    """Return whether a module may define what another one imports from it."""
    return all(part.isidentifier() for part in module.split(".")) and not is_standard(module)


def _readable(name: str) -> _Source | None:
    """Return the source of a module, None where there is none that can be read."""
    try:
        return _read(name, name, "")
    except ConfigError:
        return None


def _of_class(node: ast.ClassDef, path: str) -> Found:
    functions = dict(_bindings(node.body))
    # What is set on an object, as in self.plan = ..., may be a method too.
    within = list(ast.walk(node))
    names = {*functions, *(one.attr for one in within if isinstance(one, ast.Attribute))}
    alone = not (node.bases or node.keywords or node.decorator_list)
    named = {one.id for one in within if isinstance(one, ast.Name)}
    known = alone and "__getattr__" not in functions and "setattr" not in named
    found = Found(path, is_class=True, methods=frozenset(names) if known else None)
    start = functions.get("__init__")
    if node.keywords or node.decorator_list or "__new__" in functions:
        return found
    if start is None:
        return replace(found, signature=Signature()) if alone else found
    made = _signature(start)
    if made is None or not made.parameters:
        return found
    return replace(found, signature=made.replace(parameters=list(made.parameters.values())[1:]))


def _signature(node: ast.AST) -> Signature | None:
    """Return what a function or lambda is called with, None for anything else."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if node.decorator_list:
            return None
    elif not isinstance(node, ast.Lambda):
        return None
    spelled = node.args
    positional = [*spelled.posonlyargs, *spelled.args]
    defaults = [False] * (len(positional) - len(spelled.defaults)) + [True] * len(spelled.defaults)
    parameters: list[Parameter] = []
    for number, (one, optional) in enumerate(zip(positional, defaults, strict=True)):
        only = number < len(spelled.posonlyargs)
        kind = Parameter.POSITIONAL_ONLY if only else Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(_parameter(one, kind, optional))
    if spelled.vararg is not None:
        parameters.append(_parameter(spelled.vararg, Parameter.VAR_POSITIONAL))
    for one, default in zip(spelled.kwonlyargs, spelled.kw_defaults, strict=True):
        parameters.append(_parameter(one, Parameter.KEYWORD_ONLY, default is not None))
    if spelled.kwarg is not None:
        parameters.append(_parameter(spelled.kwarg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def _parameter(spelled: ast.arg, kind: Any, optional: bool = False) -> Parameter:  # noqa: ANN401 -- inspect does not export the type of its kinds
    return Parameter(spelled.arg, kind, default=... if optional else Parameter.empty)
