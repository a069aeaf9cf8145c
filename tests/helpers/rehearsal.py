"""A device without hardware: it computes on the CPU, refuses what CUDA refuses, and counts.

`rehearsal` is the device that torch leaves to backends outside of it, implemented by tensors that
hold one of the CPU. A tensor of the CPU that has dimensions cannot meet one of the device in an
operation, as on CUDA. What decides speed there is counted: kernels that are launched, waits of the
host for the device, and copies. Graphs, streams, rounding and the limits of a memory are not
rehearsed. A copy to the device is counted apart, though one that blocks waits on CUDA too.
"""

import gc
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from evo_grpo.model.llama import departures
from evo_grpo.settings import AgentSettings, EngineConfig, RunConfig

NAME = "rehearsal"

#: Operations that tell the host a number or a size.
WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount",
    "_unique2", "unique_dim", "unique_consecutive",
}  # fmt: skip
#: Operations that run no kernel, besides views.
FREE = {
    "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "_local_scalar_dense",
    "_has_compatible_shallow_copy_type",
}  # fmt: skip
#: Operations that move numbers between devices.
MOVES = {"copy_", "_to_copy", "_foreach_copy_"}
#: Operations whose indices may be on the CPU; CUDA copies them.
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}


@dataclass
class Counts:
    """What happened inside `counting`, where equal `entries` could be one CUDA graph.

    Attributes:
        launches: Kernels by operation.
        syncs: Waits of the host by function of the library.
        copies: Copies to the device by function of the library.
        moved: Bytes of both.
        entries: The operations with their numbers and the shapes and storages of their tensors.
            Storages that were made inside are numbered, since a graph has its own for them.
    """

    launches: Counter = field(default_factory=Counter)
    syncs: Counter = field(default_factory=Counter)
    copies: Counter = field(default_factory=Counter)
    moved: int = 0
    entries: list = field(default_factory=list)
    _made: dict = field(default_factory=dict)
    _kept: list = field(default_factory=list)  # so that none is made where another was

    def totals(self):
        return {name: getattr(self, name).total() for name in ("launches", "syncs", "copies")}

    def note(self, name, leaves):
        self.entries.append((name, *map(self._shown, leaves)))

    def make(self, made):
        for tensor in (x for x in tree_flatten(made)[0] if isinstance(x, torch.Tensor)):
            self._kept.append(storage := tensor.untyped_storage())
            self._made.setdefault(storage._cdata, len(self._made))

    def _shown(self, leaf):
        if not isinstance(leaf, torch.Tensor):
            return str(leaf)
        self._kept.append(storage := held_by(leaf).untyped_storage())
        where = self._made.get(storage._cdata, ("before", storage._cdata))
        return tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), where


_counting: list[Counts] = []


@contextmanager
def counting():
    _counting.append(counts := Counts())
    try:
        yield counts
    finally:
        _counting[:] = [other for other in _counting if other is not counts]


def _count(kind, what=None, moved=0):
    for counts in _counting:
        getattr(counts, kind)[what or _caller()] += 1
        counts.moved += moved


def _caller():
    """The innermost function of the library on the stack, or that of a test."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        for folder in ("/evo_grpo/", "/tests/test_", "/tests/device/"):
            if folder in name:
                return f"{name[name.index(folder) + 1 :]} {frame.f_code.co_name}"
        frame = frame.f_back
    return "backward"


class OnDevice(torch.Tensor):
    """A tensor of the device; `held` is the one of the CPU that has its numbers."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=f"{NAME}:0",
        )  # fmt: skip
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatched(func, args, kwargs or {})

    # With these, `Module.to` swaps parameters for those of another class.
    def __tensor_flatten__(self):
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return OnDevice(inner["held"])

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        if not isinstance(value, OnDevice):
            _move(self, value)
            return
        torch.Tensor.data.__set__(self, value)
        self.held = value.held

    def data_ptr(self):
        return self.held.data_ptr()

    def untyped_storage(self):
        return self.held.untyped_storage()

    def tolist(self):
        return self.cpu().tolist()


def _move(parameter, value):
    """Set the `data` of a parameter to a tensor of another device, as torch does for CUDA."""
    moved = nn.Parameter(value, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, moved)


def _set_data(parameter, value):
    if isinstance(value, OnDevice):
        _move(parameter, value)
    else:
        torch.Tensor.data.__set__(parameter, value)


def bytes_in_use():
    """Bytes of the storages of all tensors of the device."""
    gc.collect()
    alive = [x.held for x in gc.get_objects() if type(x) is OnDevice]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in alive}
    return sum(storages.values())


def held_by(x):
    return x.held if isinstance(x, OnDevice) else x


@cache
def _facts(func):
    """Name of an operation, whether it makes a view, and the places and names that it writes."""
    schema = func._schema
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    writes = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return schema.name.removeprefix("aten::"), view, writes


def _refuse(name, tensors):
    hosts = [x for x in tensors if isinstance(x, torch.Tensor) and not isinstance(x, OnDevice)]
    if any(x.ndim for x in hosts):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{NAME}:0 and cpu! (when checking arguments of {name})"
        )


def _dispatched(func, args, kwargs):
    name, view, writes = _facts(func)
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    hosts = [x for x in tensors if not isinstance(x, OnDevice)]
    if name not in MOVES:
        _refuse(name, (args[0], *args[2:3]) if name in INDEXES else hosts)
    for counts in _counting:
        counts.note(name, leaves)
    on_cpu = [torch.device("cpu") if isinstance(x, torch.device) else held_by(x) for x in leaves]
    given, named = tree_unflatten(on_cpu, spec)
    result = func(*given, **named)
    to = kwargs.get("device")
    away = to is not None and torch.device(to).type == "cpu"
    _note(name, view, args, hosts, result, away=away)
    if writes:
        targets = [kwargs[key] if key in kwargs else args[place] for place, key in writes]
        for target in targets:
            if isinstance(target, OnDevice) and target.shape != target.held.shape:
                torch.Tensor.data.__set__(target, OnDevice(target.held))  # an out of another size
        wanted = len(func._schema.returns)
        return targets[0] if wanted == 1 else tuple(targets[:wanted]) or None
    if away:
        return result
    if not view:
        for counts in _counting:
            counts.make(result)
    return tree_map_only(torch.Tensor, OnDevice, result)


def _note(name, view, args, hosts, result, *, away):
    """Count one operation that has run."""
    if name in MOVES and away | bool(hosts):
        source = args[1 if name != "_to_copy" else 0]
        sources = source if isinstance(source, (list, tuple)) else [source]
        for one in sources:
            kind = "syncs" if isinstance(one, OnDevice) else "copies"
            _count(kind, moved=one.numel() * one.element_size())
        return
    if name in INDEXES:
        for one in hosts:
            _count("copies", moved=one.numel() * one.element_size())
        alone = name != "index" and args[2].numel() == 1  # a masked fill
        if not alone and any(x is not None and x.dtype == torch.bool for x in args[1]):
            _count("syncs")
    if name in WAITS or (name == "repeat_interleave" and result.ndim and len(args) == 1):
        _count("syncs")
    if not view and name not in FREE:
        _count("launches", name)


class _OneKernel(torch.autograd.Function):
    """Counts an operation that is one kernel on CUDA, and another one in the backward, as such.

    Torch would compute it by its parts here. The backward computes the forward again.
    """

    @staticmethod
    def forward(ctx, call, *tensors):
        _refuse(call.__name__, tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors)
        made = call(*map(held_by, tensors))
        _count("launches", call.__name__)
        for counts in _counting:
            counts.note(call.__name__, tensors)
            counts.make(made)
        return OnDevice(made)

    @staticmethod
    def backward(ctx, grad):
        tensors = [held_by(x).detach() for x in ctx.saved_tensors]
        needs = ctx.needs_input_grad[1:]
        wanted = [x.requires_grad_() for x, need in zip(tensors, needs, strict=True) if need]
        with torch.enable_grad():
            found = iter(torch.autograd.grad(ctx.call(*tensors), wanted, held_by(grad)))
        _count("launches", f"{ctx.call.__name__}_backward")
        return None, *(OnDevice(next(found)) if need else None for need in needs)


def _in_one_kernel(func):
    def kernel(*args, **kwargs):
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

        def call(*tensors):
            for i, tensor in zip(places, tensors, strict=True):
                leaves[i] = tensor
            given, named = tree_unflatten(leaves, spec)
            return func(*given, **named)

        call.__name__ = _facts(func)[0]
        return _OneKernel.apply(call, *(leaves[i] for i in places))

    return kernel


def _made(make):
    """A kernel that makes a tensor without one of the device among its arguments."""

    def kernel(*args, device=None, pin_memory=None, layout=None, **kwargs):
        made = make(*args, **kwargs)
        for counts in _counting:
            counts.make(made)
        return OnDevice(made)

    return kernel


def _copy_from(source, target, non_blocking=False):
    """The kernel of copies where torch has switched `__torch_dispatch__` off."""
    _count(
        "copies" if isinstance(target, OnDevice) else "syncs",
        moved=source.numel() * source.element_size(),
    )
    held_by(target).copy_(held_by(source))
    return target


class _Module(_DummyBackendModule):
    """What torch asks of `torch.rehearsal`."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


def _type(x):
    """The type, that of a parameter on CUDA for one of the device."""
    return nn.Parameter if isinstance(x, OnDevice) and isinstance(x, nn.Parameter) else type(x)


@cache
def _registered():
    """Register the device, which torch does not undo."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    # What torch asks before it takes one kernel for all parameters of an optimizer.
    _foreach_supported_types.append(OnDevice)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _made(torch.empty), "PrivateUse1")
    library.impl("empty_strided", _made(torch.empty_strided), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    for func in (torch.ops.aten.rms_norm, torch.ops.aten.scaled_dot_product_attention):
        library.impl(func.__name__, _in_one_kernel(func.default), "AutogradPrivateUse1")
    return library


@contextmanager
def known():
    """Let torch and the settings know the device."""
    _registered()
    try:
        torch.ones((), device=NAME).requires_grad_().clone().backward()
    except RuntimeError:  # its threads, one a device, start once
        pytest.skip("autograd ran in this process before the device was known: make test-device")
    with pytest.MonkeyPatch.context() as patch:
        # The layers of the Llama family are joined where their weights are plain parameters.
        patch.setattr(departures, "type", _type, raising=False)
        data = property(torch.Tensor.data.__get__, _set_data)
        patch.setattr(nn.Parameter, "data", data, raising=False)
        groups = (EngineConfig, AgentSettings, RunConfig)
        try:
            patch.setattr(EngineConfig.model_fields["device"], "metadata", [])
            for group in groups:
                group.model_rebuild(force=True)
            yield
        finally:
            patch.undo()
            for group in groups:
                group.model_rebuild(force=True)
