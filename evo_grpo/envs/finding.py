"""Looks up in source files, without an import, the functions and classes of a configuration.

A module is located as an import locates it, but level by level, because `find_spec("a.b")` imports
`a`. The module's syntax tree shows whether the name exists, and which arguments a function or class
takes. If only running the code would show the arguments (of an imported name, in a compiled module,
under a decorator, with a base class), any arguments are accepted.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from inspect import Signature
from pathlib import Path
from typing import Any, NamedTuple, cast

from evo_grpo.envs import loading
from evo_grpo.errors import ConfigError
from evo_grpo.places import folders

_BINDS_MORE = re.compile(r"\b(globals|exec|vars|setattr|__getattr__)\b")
"""Matches the text of a module that may bind names which the text does not spell out."""


@dataclass(frozen=True)
class Definition:
    """A function or class, as described by its source.

    Attributes:
        path: The name, "module:function".
        signature: Its parameters, or None if only running the module would show them.
        methods: The methods of a class, or None if only running the module would show them.
    """

    path: str
    signature: Signature | None = None
    methods: frozenset[str] | None = None

    def lacks(self, method: str) -> bool:
        """Return whether the source shows that this is a class without the method `method`."""
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
        """Return a function with the same name and signature, which raises an error when called."""

        def stand_in(**anything: object) -> None:
            raise AssertionError(f"{self.path} was looked up in its source and not imported")

        stand_in.__name__ = self.path.rpartition(":")[2].rpartition(".")[2]
        vars(stand_in)["__signature__"] = self.signature or inspect.signature(stand_in)
        return stand_in


def find_function(path: str, where: str) -> Callable[..., Any]:
    """Return a stand-in for the function that `load_function` would import from `path`."""
    return find_name(path, where).stand_in()


def find_name(path: str, where: str) -> Definition:
    """Look up a "module:function" in the source of the module; `where` names the setting."""
    module, attribute = loading.split_name(path, where)
    first, *rest = attribute.split(".")
    if (source := _read(module, path, where)) is None:
        return Definition(path)
    bound = source.bound.get(first, [])
    if not bound and source.is_complete:
        raise loading.no_such_name(path, where, source.origin, first, source.bound)
    for origin_module, _ in _import_chain(module, first):
        if loading.is_standard(origin_module):  # "package:os.system"
            raise loading.standard_library(path, where, origin_module)
    if len(bound) != 1 or isinstance(bound[0], _Import):
        return Definition(path)
    return _described(bound[0], rest, path, where, source.origin)


def is_installed(module: str) -> bool:
    """Return whether an import would find a module, in `places.folders` too."""
    return not isinstance(_locate(module), str)


def defining_files(path: str) -> dict[str, Path | None]:
    """Return the files of a "module:function" and of the modules it imports the function from.

    `from .scores import exact as score` is followed to `scores`. `import *`, assignments such as
    `score = exact` and functions that the function calls are not followed. Nothing is imported.

    Returns:
        Module -> file, the module in `path` first; None for a module that is missing or has no
        file.
    """
    module, _, attribute = path.partition(":")
    files: dict[str, Path | None] = {}
    for origin_module, _ in _import_chain(module, attribute.partition(".")[0]):
        if not loading.is_standard(origin_module):
            spec = _locate(origin_module)
            file = None if isinstance(spec, str) or not spec.has_location else spec.origin
            files[origin_module] = None if file is None else Path(file)
    return files


def _import_chain(module: str, name: str) -> Sequence[_Import]:
    """Return the chain of imports behind the name `name` in `module`.

    It begins with this pair; each further pair is a module and a name that an earlier pair imports.
    """
    chain = [_Import(module, name)]
    for link in chain:  # the loop appends to the list
        with suppress(ConfigError):  # the module cannot be read
            source = None if loading.is_standard(link.module) else _read(link.module, name, "")
            bound = [] if source is None else source.bound.get(link.name, [])
            chain += [item for item in bound if isinstance(item, _Import) and item not in chain]
    return chain


class _Import(NamedTuple):
    """A module, and the name imported from it; `name` is "" if the module itself is imported."""

    module: str
    name: str


class _Source(NamedTuple):
    """The file of a module, the nodes that bind each name, and whether its text shows all names."""

    origin: str
    bound: Mapping[str, Sequence[ast.AST | _Import]]
    is_complete: bool


def _locate(name: str) -> ModuleSpec | str:
    """Return the spec of a module, or the first part of its name that is missing."""
    importlib.invalidate_caches()
    prefix, *rest = name.split(".")
    # An import has these folders at the end of sys.path: see `loading.search_here`.
    places = [*sys.path, *map(str, folders())]
    specs: Iterator[ModuleSpec | None] = (
        finder.find_spec(prefix, places if finder is PathFinder else None)
        for finder in sys.meta_path
        if hasattr(finder, "find_spec") and not loading.is_guard(finder)
    )
    spec = next(filter(None, specs), None)
    for part in rest:
        if spec is None:
            break
        prefix = f"{prefix}.{part}"
        paths = spec.submodule_search_locations
        # The last part alone: for a full name, a namespace package looks for its parent in
        # sys.modules.
        spec = None if paths is None else PathFinder.find_spec(part, list(paths))
    return prefix if spec is None else spec


def _read(name: str, path: str, where: str) -> _Source | None:
    """Return the source of a module, or None if it has none; `path` and `where` are for errors."""
    spec = _locate(name)
    if isinstance(spec, str):
        raise loading.no_such_module(path, where, name, spec)
    origin = spec.origin or "a folder"
    try:
        if spec.has_location:
            loading.refuse_code_of_a_run(name, origin)
        text = cast("Any", spec.loader).get_source(spec.name) if spec.loader else ""
        if text is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the user's code
            tree = ast.parse(text, filename=origin)
            compile(tree, origin, "exec")  # finds errors beyond the grammar: equal argument names
    except (RecursionError, MemoryError):  # nested too deep for a tree; an import may still work
        return None
    except (SyntaxError, ValueError, ImportError, OSError) as error:
        why = f"expected Python in {origin}, got {type(error).__name__}: {error}"
        if isinstance(error, loading.CodeOfARunError):
            why = str(error)
        raise ConfigError(f"{where}: {path!r}: {why}") from error
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    bound = _bindings(tree.body, package)
    return _Source(origin, bound, "*" not in bound and not _BINDS_MORE.search(text))


def _bindings(body: Sequence[ast.stmt], package: str = "") -> dict[str, list[ast.AST | _Import]]:
    """Return each name that statements bind in any branch, with the nodes or imports that do so."""
    bound: dict[str, list[ast.AST | _Import]] = defaultdict(list)
    pending: list[ast.AST] = [*body]
    for node in pending:  # the loop appends to the list
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bound[node.name].append(node)
            case ast.Import():
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    bound[name].append(_Import(alias.name, ""))
            case ast.ImportFrom():
                with suppress(ImportError):  # above the top of the package
                    origin = resolve_name("." * node.level + (node.module or ""), package)
                    for alias in node.names:
                        bound[alias.asname or alias.name].append(_Import(origin, alias.name))
            case ast.Name(ctx=ast.Store()):
                bound[node.id].append(node)
            case ast.Assign(targets=[ast.Name(id=name)]):
                bound[name].append(node.value)
            case _:
                pending += ast.iter_child_nodes(node)
    return bound


def _described(
    node: ast.AST, rest: Sequence[str], path: str, where: str, origin: str
) -> Definition:
    if not rest and isinstance(node, ast.Constant):
        raise loading.not_callable(path, where, node.value)
    if not isinstance(node, ast.ClassDef):
        return Definition(path, None if rest else _signature(node))
    definition = _class(node, path)
    if rest and definition.lacks(rest[0]):
        raise loading.no_such_name(path, where, origin, rest[0], definition.methods or ())
    return Definition(path) if rest else definition


def _class(node: ast.ClassDef, path: str) -> Definition:
    if node.keywords or node.decorator_list:
        return Definition(path)
    functions = _bindings(node.body)
    signature = None if node.bases else Signature()
    if "__init__" in functions:
        signature = _signature(functions["__init__"][-1], bound=True)
    if "__new__" in functions:
        signature = None
    methods: frozenset[str] | None = None
    if not node.bases and "__getattr__" not in functions:
        # An attribute that a method sets, as in self.plan = ..., may be a method too.
        attributes = [child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)]
        methods = frozenset([*functions, *attributes])
    return Definition(path, signature, methods)


def _signature(node: ast.AST | _Import, *, bound: bool = False) -> Signature | None:
    """Return the signature of an undecorated function or lambda, or None; `bound` drops self."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return None
    if getattr(node, "decorator_list", ()):
        return None
    args = node.args
    all_arguments = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
    for argument in filter(None, all_arguments):
        argument.annotation = None
    # A lambda with the same parameters; its defaults and its body are constants, so that nothing
    # of the user's code runs.
    args.defaults = [ast.Constant(...) for _ in args.defaults]
    args.kw_defaults = [default and ast.Constant(...) for default in args.kw_defaults]
    bare_lambda = ast.fix_missing_locations(ast.Expression(ast.Lambda(args, ast.Constant(None))))
    signature = inspect.signature(eval(compile(bare_lambda, "<signature>", "eval")))
    if not bound:
        return signature
    parameters = list(signature.parameters.values())
    return signature.replace(parameters=parameters[1:]) if parameters else None
