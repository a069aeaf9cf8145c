"""Find the names of a configuration in source files, without importing anything.

`evo-grpo check` and the record of a run's files use it, since neither runs code that a
configuration names. A module is located as an import locates it, but level by level, because
`find_spec("a.b")` imports `a`. The syntax tree shows whether the module binds the name, and which
arguments the function or class takes. Where only running the module would show that (a compiled
module, a decorator, a base class), nothing is refused.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from inspect import Parameter, Signature
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

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
from evo_grpo.places import folders

_MOST_IMPORTS = 5
"""Most modules through which `find_name` follows `from ... import`."""
_MOST_STEPS = 64
"""Maximum pairs of module and name that `defining_files` follows; `a = a.b` would never end."""


@dataclass(frozen=True)
class Found:
    """A function or class, as described by its source.

    Attributes:
        path: The name, "module:function".
        is_class: Whether it is a class.
        signature: Its parameters, or None if only running the module would show them.
        methods: The methods of a class, or None if only running the module would show them.
    """

    path: str
    is_class: bool = False
    signature: Signature | None = None
    methods: frozenset[str] | None = None

    def lacks(self, method: str) -> bool:
        """Return whether the source shows a class without this method."""
        return self.methods is not None and method not in self.methods

    def refuses(self, args: Mapping[str, Any]) -> str:
        """Return why a call with these keyword arguments fails, or "" if it may succeed."""
        try:
            if self.signature is not None:
                self.signature.bind(**args)
        except TypeError as error:
            return str(error)
        return ""

    def stand_in(self) -> Callable[..., Any]:
        """Return an object with the same name and signature; do not call it."""
        name = self.path.rpartition(":")[2].rpartition(".")[2]
        anything = Signature([Parameter("anything", Parameter.VAR_KEYWORD)])
        signature = anything if self.signature is None else self.signature
        if self.is_class:
            return type(name, (), {"__signature__": signature})

        def stand_in(**anything: object) -> None:
            raise AssertionError(f"{self.path} was looked up in its source and not imported")

        stand_in.__name__ = name
        vars(stand_in)["__signature__"] = signature
        return stand_in


def find_function(path: str, where: str) -> Callable[..., Any]:
    """Return a stand-in for a function; accepts and refuses the same names as `load_function`."""
    return find_name(path, where).stand_in()


def find_name(path: str, where: str) -> Found:
    """Look up "module:function" in the source of its module, without importing it.

    Args:
        path: A name as `loading.load_function` takes it.
        where: The setting that holds the name, for messages.

    Raises:
        ConfigError: As `loading.load_function`, as far as the source shows it.
    """
    module, attribute = split_name(path, where)
    source, parts = _read(module, path, where), tuple(attribute.split("."))
    for _ in range(_MOST_IMPORTS + 1):
        if source is None:
            break
        bound = source.bindings(parts[0])
        if not bound and not source.may_bind_more():
            names = (name for name, _ in source.bound)
            raise no_such_name(path, where, source.origin, parts[0], names)
        for value in bound:
            if isinstance(value, _Import) and is_standard(value.module):  # "package:os.system"
                raise standard_library(path, where, value.module)
        if len(bound) != 1:
            break
        if not isinstance(bound[0], _Import):
            return _described(bound[0], parts[1:], path, where, source.origin)
        origin, name = bound[0]
        parts = (name, *parts[1:])
        source = _read(origin, path, where) if name and is_installed(origin) else None
        if source is not None and not source.bindings(name):
            break  # a module of that package, or a name that only running it would show
    return Found(path)


def is_installed(module: str) -> bool:
    """Return whether an import would find a module, in `places.folders` too."""
    return not isinstance(_locate(module), str)


def defining_files(path: str) -> dict[str, Path | None]:
    """Return the files of the modules that define a name, without importing them.

    A name that a module takes from another one, by an import or as another name for it, is followed
    to the module that defines it. Functions that the definition calls are not followed.

    Args:
        path: "module:function".

    Returns:
        Module -> file: the module of the name first, then those on the way to the definition. None
        for a module that is missing or has no file.
    """
    module, _, attribute = path.partition(":")
    pending = [(module, tuple(attribute.split(".")))]
    found: dict[str, Path | None] = {}
    for name, parts in islice(pending, _MOST_STEPS):  # the loop below appends to the list
        found.setdefault(name, _file(name))
        submodule = f"{name}.{parts[0]}"
        leads = [(submodule, parts[1:])] if _file(submodule) is not None else []
        if (source := _readable(name)) is not None:
            leads += _leads(source, *parts)
        for lead in leads:
            if all(lead) and not is_standard(lead[0]) and lead not in pending:
                pending.append(lead)
    return found


class _Import(NamedTuple):
    """A module, and the name imported from it; "" where the module itself is imported."""

    module: str
    name: str


@dataclass(frozen=True)
class _Source:
    """The syntax tree of a module.

    Attributes:
        name: The module.
        origin: Its file.
        tree: The syntax tree.
        bound: The names that it binds, each with its definition, import or value.
    """

    name: str
    origin: str
    tree: ast.Module
    bound: Sequence[tuple[str, ast.AST | _Import]]

    def bindings(self, name: str) -> list[ast.AST | _Import]:
        """Return every definition, import or value that the module binds to a name."""
        return [node for bound_name, node in self.bound if bound_name == name]

    def may_bind_more(self) -> bool:
        """Return whether the module may have names that its source does not spell out."""
        names = {name for name, _ in self.bound}
        called = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        return bool(names & {"*", "__getattr__"} or called & {"globals", "exec", "vars", "setattr"})


def _locate(name: str) -> ModuleSpec | str:
    """Return the spec of a module, or the first part of its name that is missing."""
    importlib.invalidate_caches()
    seen, *rest = name.split(".")
    # An import has these folders at the end of sys.path: see `loading.search_here`.
    places = [*sys.path, *map(str, folders())]
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
        # The last part alone: for a full name, a namespace package looks for its parent in
        # sys.modules.
        found = None if inside is None else PathFinder.find_spec(part, list(inside))
    return seen if found is None else found


def _file(name: str) -> Path | None:
    """Return the file of a module, or None if the module is missing or has no file."""
    spec = _locate(name)
    found = None if isinstance(spec, str) or not spec.has_location else spec.origin
    return None if found is None else Path(found)


def _read(name: str, path: str, where: str) -> _Source | None:
    """Return the source of a module, or None if it has none; `path` and `where` are for errors."""
    spec = _locate(name)
    if isinstance(spec, str):
        raise no_such_module(path, where, name, spec)
    origin = spec.origin or "a folder"
    try:
        if spec.has_location:
            refuse_code_of_a_run(name, origin)
        text = cast("Any", spec.loader).get_source(spec.name) if spec.loader else ""
        if text is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the user's code
            tree = ast.parse(text, filename=origin)
            compile(tree, origin, "exec")  # finds errors beyond the grammar: equal argument names
    except CodeOfARunError as error:
        raise ConfigError(f"{where}: {path!r}: {error}") from error
    except (RecursionError, MemoryError):  # nested too deep for a tree; an import may still work
        return None
    except (SyntaxError, ValueError, ImportError, OSError) as error:
        raise ConfigError(
            f"{where}: {path!r}: expected Python in {origin}, got {type(error).__name__}: {error}"
        ) from error
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    return _Source(name, origin, tree, _bindings(tree.body, package))


def _readable(name: str) -> _Source | None:
    """Return the source of a module, or None if it cannot be read."""
    try:
        return _read(name, name, "")
    except ConfigError:
        return None


def _bindings(body: Sequence[ast.stmt], package: str = "") -> list[tuple[str, ast.AST | _Import]]:
    """Return the names that statements bind, in any branch, in order."""
    bound: list[tuple[str, ast.AST | _Import]] = []
    pending: list[ast.AST] = [*reversed(body)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.append((node.name, node))
        elif isinstance(node, ast.Import):
            roots = [(one, one.name.partition(".")[0]) for one in node.names]
            bound += [
                (one.asname or root, _Import(one.name if one.asname else root, ""))
                for one, root in roots
            ]
        elif isinstance(node, ast.ImportFrom):
            origin = _imported_from(node, package)
            bound += [(one.asname or one.name, _Import(origin, one.name)) for one in node.names]
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


def _imported_from(node: ast.ImportFrom, package: str) -> str:
    """Return the full name of the module in a "from ... import" statement, "" if there is none."""
    try:
        return resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:  # above the top of the package
        return ""


def _leads(source: _Source, first: str, *rest: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the modules, and the names in them, that a module takes the name `first` from."""
    bound = source.bindings(first)
    for value in bound:
        if isinstance(value, _Import):
            yield value.module, (value.name, *rest) if value.name else rest
        # Another name, or the call that makes it: `partial(exact, 1)`, `Judge(True)`. The function
        # of a call such as torch.compile(exact) defines no reward.
        values: list[ast.AST] = [value] if isinstance(value, ast.expr) else []
        if isinstance(value, ast.Call):
            values = [*([value.func] if isinstance(value.func, ast.Name) else []), *value.args]
        for one in values:
            if isinstance(one, ast.Name | ast.Attribute):
                dotted = ast.unparse(one).split(".")
                yield source.name, (*dotted, *rest) if all(map(str.isidentifier, dotted)) else ()
    for value in [] if bound else source.bindings("*"):
        origin = cast("_Import", value).module
        there = _readable(origin) if origin and not is_standard(origin) else None
        if there is not None and (there.bindings(first) or there.bindings("*")):
            yield origin, (first, *rest)


def _described(node: ast.AST, rest: Sequence[str], path: str, where: str, origin: str) -> Found:
    """Return the description of a definition, or of the attribute `rest` of it.

    Raises:
        ConfigError: It is a plain value, or a class that shows no such attribute.
    """
    if not rest and isinstance(node, ast.Constant):
        raise not_callable(path, where, node.value)
    found = _class(node, path) if isinstance(node, ast.ClassDef) else Found(path)
    if not rest:
        return found if found.is_class else Found(path, signature=_signature(node))
    if found.lacks(rest[0]):
        raise no_such_name(path, where, origin, rest[0], found.methods or ())
    return Found(path)


def _class(node: ast.ClassDef, path: str) -> Found:
    """Return the methods of a class and the parameters of its constructor."""
    functions = dict(_bindings(node.body))
    plain = not (node.keywords or node.decorator_list)
    alone = plain and not node.bases
    methods: frozenset[str] | None = None
    if alone and "__getattr__" not in functions:
        # An attribute that a method sets, as in self.plan = ..., may be a method too.
        within = [one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)]
        methods = frozenset([*functions, *within])
    signature: Signature | None = None
    if plain and "__new__" not in functions:
        if "__init__" in functions:
            signature = _signature(functions["__init__"], bound=True)
        elif alone:
            signature = Signature()
    return Found(path, is_class=True, signature=signature, methods=methods)


def _signature(node: ast.AST | _Import, *, bound: bool = False) -> Signature | None:
    """Return the signature of a function or lambda, or None; `bound` leaves out its first one."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return None
    if not isinstance(node, ast.Lambda) and node.decorator_list:
        return None
    args = node.args
    for one in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if one is not None:
            one.annotation = None
    # A lambda with the same parameters; its defaults and its body are constants, so that nothing
    # of the user's code runs.
    args.defaults = [ast.Constant(...) for _ in args.defaults]
    args.kw_defaults = [default and ast.Constant(...) for default in args.kw_defaults]
    made = ast.fix_missing_locations(ast.Expression(ast.Lambda(args, ast.Constant(None))))
    found = inspect.signature(eval(compile(made, "<signature>", "eval")))
    if not bound:
        return found
    parameters = list(found.parameters.values())
    return found.replace(parameters=parameters[1:]) if parameters else None
