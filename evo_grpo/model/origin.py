"""Checks whether a module runs unmodified code of torch and transformers.

A forward set on the instance, a hook, a replaced function or a patched class can change the results
of a module, possibly only at late positions, which a probe of a few tokens does not reach. So the
origin of the code is checked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel

#: Attributes of an instance that shadow the forward of its class, or the methods that call it.
_SHADOWS = frozenset({"forward", "_call_impl", "_wrapped_call_impl", "_slow_forward"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Hooks by module and name that change no number: transformers adds them to return hidden states,
#: and to train adapters under gradient checkpointing.
_OBSERVERS = (
    ("transformers.utils.output_capturing", "output_capturing_hook"),
    ("transformers.modeling_utils", "make_inputs_require_grads"),
    ("torch.utils.module_tracker", ""),
)


def _folder(function: Any, levels: int) -> str:  # noqa: ANN401 -- any function
    """Return a package's folder: `parents[levels]` of the file that defines its `function`."""
    return str(Path(function.__code__.co_filename).parents[levels]) + "/"


#: Folders of torch and transformers, as the compiled code of functions names them.
_LIBRARIES = (
    _folder(nn.Module.register_forward_hook, 2),
    _folder(PreTrainedModel.get_input_embeddings, 0),
)


def from_libraries(function: object) -> bool:
    """Return whether a function, and all functions it wraps, are code of torch or transformers."""
    depth = 0
    while function is not None and depth < 16:  # a wrapper may name itself
        if isinstance(function, BuiltinFunctionType):
            return True
        code = getattr(function, "__code__", None)
        # Check the code, since functools.wraps copies module and name of the wrapped function.
        if code is None or not code.co_filename.startswith(_LIBRARIES):
            return False
        function = getattr(function, "__wrapped__", None)
        depth += 1
    return True


def class_from_libraries(kind: type) -> bool:
    """Return whether a class of modules, and all its bases, runs code of torch or transformers."""
    has_library_bases = all(
        base is object or base.__module__.split(".", 1)[0] in ("torch", "transformers", "peft")
        for base in kind.__mro__
        if issubclass(base, nn.Module)
    )
    return has_library_bases and all(
        map(from_libraries, (kind.forward, kind.__call__, kind._call_impl))  # pyright: ignore[reportPrivateUsage] -- what `__call__` calls
    )


def foreign_functions(namespace: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a Python module's functions that are not from torch or transformers."""
    for name, value in namespace.items():
        # torch.compile stores functions compiled for other models of the process under names with
        # two underscores; `dataclass` is called when a module is imported.
        is_function = isinstance(value, FunctionType) and not name.startswith("__")
        if is_function and value is not dataclass and not from_libraries(value):
            yield name


def forward_change(module: nn.Module) -> str | None:
    """Return how a module changes the forward of its class: by another forward or a hook; or None.

    Submodules are not checked.
    """
    attributes = vars(module)
    if not attributes.keys().isdisjoint(_SHADOWS):
        return "has a forward of its own"
    hook = _hook(attributes)
    return None if hook is None else f"has a {hook}"


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies by its weight, adds its bias, and does no more."""
    return (
        type(module).forward is nn.Linear.forward
        and class_from_libraries(nn.Linear)
        and forward_change(module) is None
    )


def global_hook() -> str | None:
    """Return the kind of a hook on all modules of the process, or None without one."""
    return _hook(vars(torch_modules), "_global")


def _hook(holder: Mapping[str, Any], prefix: str = "") -> str | None:
    for name in _HOOKS:
        hooks = holder[prefix + name]
        if hooks and not all(map(_observes, hooks.values())):
            return f"{prefix}{name}"[1:].removesuffix("s").replace("_", " ")
    return None


def _observes(hook: object) -> bool:
    function = getattr(hook, "func", hook)
    origin = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "")
    return from_libraries(getattr(function, "__func__", function)) and any(
        origin == module and name.endswith(suffix) for module, suffix in _OBSERVERS
    )
