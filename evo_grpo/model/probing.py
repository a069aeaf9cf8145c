"""Checks a model's behaviour on a few tokens when it is loaded.

The population forward, the loss and the decode loop assume that a hidden state depends only on the
tokens of its row up to its position, and that the model draws no random numbers. Other models would
silently sample and train on wrong numbers, so this is checked with two rows of a few tokens.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from evo_grpo.errors import ModelError
from evo_grpo.model.origin import class_from_libraries, forward_change, is_plain_linear
from evo_grpo.model.out_of_memory import is_out_of_memory

#: Dtypes that `in_float32` converts. Smaller dtypes need separate scales.
HALF = (torch.bfloat16, torch.float16)
#: Rows and tokens of a probe. A head of unknown code may differ at late positions only.
ROWS, _COLUMNS, _LATE = 2, 6, 96
#: Exceptions of a model that cannot be run on token ids.
CANNOT_RUN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
#: Errors relative to the root mean square of the values. Rounding in bfloat16 reaches a few per
#: cent; a wrong token or position gives tens of per cent.
EXACT, _TENSOR_CORES, _HALF = 1e-4, 1e-2, 0.1
#: Tolerance for the logits of two heads on the same hidden states, which is smaller.
_LOGITS = 1e-2


def tolerance(like: Tensor) -> float:
    """Return the relative tolerance for two computations of the same hidden states."""
    if like.dtype.itemsize < torch.float32.itemsize:
        return _HALF
    return EXACT if like.device.type == "cpu" else _TENSOR_CORES


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest relative RMS error of a token's hidden state (..., H).

    In 16 bits, return the median over the tokens, because rounding may send a few tokens to other
    experts.
    """
    is_half = theirs.dtype.itemsize < torch.float32.itemsize
    ours, theirs = ours.detach().float(), theirs.detach().float()
    size = theirs.pow(2).mean(-1).sqrt().clamp_min(1e-9)
    errors = ((ours - theirs).pow(2).mean(-1).sqrt() / size).flatten()
    if not bool(errors.isfinite().all()):
        return float("inf")
    return float(errors.median() if is_half else errors.max())


def probe_ids(
    vocabulary: int, rows: int = ROWS, columns: int = _COLUMNS, avoid: tuple[int, ...] = ()
) -> Tensor:
    """Return ids (rows, columns) int64 that differ from row to row, without those of `avoid`."""
    count = rows * columns
    plain = [i for i in range(min(vocabulary, 4 * count + len(avoid))) if i not in avoid] or [0]
    # A stride that is coprime to most vocabulary sizes, so that adjacent ids are not consecutive.
    picked = [plain[(7 * i + 3) % len(plain)] for i in range(count)]
    return torch.tensor(picked).view(rows, columns)


@contextmanager
def own_generator(device: torch.device) -> Generator[None]:
    """Open a context without gradients; its end restores the state of the global generators."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        yield


@contextmanager
def in_float32(trunk: nn.Module) -> Generator[None]:
    """Make a model of half precision compute in float32 in a `with` block, layer by layer.

    In bfloat16, rounding changes a hidden state by some per cent, as much as an error such as wrong
    positions of padded rows does; in float32, by a millionth. The model is not copied: a layer's
    weights are converted when it is entered, and restored when it is left, so that one more layer
    has to fit into memory. Of embeddings, only the output is converted, since a table may be larger
    than any layer.
    """
    originals: list[list[tuple[Tensor, Tensor]]] = []
    hooks: list[Any] = []

    def enter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, whole: bool
    ) -> tuple[Any, Any]:
        # Stored before it is filled, so that it is restored if memory runs out in the middle.
        originals.append([])
        for tensor in (*module.parameters(recurse=whole), *module.buffers(recurse=whole)):
            if tensor.dtype in HALF:  # a shared layer may be converted already
                data = tensor.data
                tensor.data = data.float()
                originals[-1].append((tensor, data))
        return _widen(args), _widen(kwargs)

    def leave(*_: object) -> None:
        for tensor, data in originals.pop():
            tensor.data = data

    with torch.no_grad():
        try:
            for module, whole in _units(trunk):
                if isinstance(module, nn.Embedding):
                    hooks.append(module.register_forward_hook(lambda *call: _widen(call[-1])))
                    continue
                begin = partial(enter, whole=whole)
                hooks += [
                    module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
                    module.register_forward_hook(leave),
                ]
            yield
        finally:
            for hook in hooks:
                hook.remove()
            while originals:  # after an exception, the exit hooks of the modules have not run
                leave()


def _units(trunk: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield each module, and whether the weights of its submodules are converted with it.

    True for the layers of the outermost ModuleLists, because some layers read a submodule's weights
    without calling it; False for the modules around these layers.
    """
    for module in trunk.children():
        if isinstance(module, nn.ModuleList):
            yield from ((layer, True) for layer in module)
        else:
            yield from _units(module)
    yield trunk, False


def _widen(given: Any) -> Any:  # noqa: ANN401 -- inputs and outputs of layers
    """Return tensors of half precision as float32, within tuples, lists and dicts too."""
    if isinstance(given, Tensor):
        return given.float() if given.dtype in HALF else given
    if type(given) in (tuple, list):
        return type(given)(_widen(part) for part in given)
    if type(given) is dict:
        return {name: _widen(part) for name, part in given.items()}
    return given


def watch_linear_inputs(
    model: nn.Module, trunk: nn.Module, run: Callable[[Tensor], Tensor], ids: Tensor
) -> tuple[Tensor, dict[str, str]]:
    """Return hidden states (2, T, H) of rows, and the input layout of each linear layer by name.

    `run` maps ids (2, T) of two different rows to hidden states. A layout is "rows" for (B, ...,
    F); "flat" for (B * n, ..., F), rows one after another; "unseen" if no token reached the layer;
    else a description of the input.
    """
    inside = {id(module) for module in trunk.modules()}
    watched = {
        name: module
        for name, module in model.named_modules()
        if id(module) in inside and isinstance(module, nn.Linear | Conv1D)
    }
    hidden, inputs = _inputs(watched, run, ids)
    kinds = {name: _kind([tuple(x.shape) for x in xs], ids) for name, xs in inputs.items()}
    flat = {name: watched[name] for name, kind in kinds.items() if kind == "flat"}
    # Flat rows may lie in any order. With the rows swapped, the inputs must be swapped.
    swapped = _inputs(flat, run, ids.flip(0))[1] if flat else {}
    for name, swapped_inputs in swapped.items():
        same = len(inputs[name]) == len(swapped_inputs) and all(
            x.shape == x_swapped.shape
            and relative_error(by_rows(x, len(ids)).flip(0), by_rows(x_swapped, len(ids)))
            <= tolerance(x)
            for x, x_swapped in zip(inputs[name], swapped_inputs, strict=True)
        )
        if not same:
            kinds[name] = "tokens in an order of their own"
    return hidden, kinds


def by_rows(x: Tensor, rows: int) -> Tensor:
    """View (B * n, ..., F), rows one after another, as (B, tokens, F)."""
    return x.reshape(rows, -1, x.shape[-1])


def _inputs(
    modules: Mapping[str, nn.Module], run: Callable[[Tensor], Tensor], ids: Tensor
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return the hidden states of rows, and the inputs of modules by name.

    Inputs (B, ..., F) are on the meta device. A scalar stands for a call of another kind, such as a
    router's, which returns a tuple.
    """
    inputs: dict[str, list[Tensor]] = {name: [] for name in modules}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401 -- of any layer
        x: Any = args[0] if args else None
        is_product = isinstance(x, Tensor) and isinstance(result, Tensor)
        if is_product:
            features = getattr(module, "out_features", result.shape[-1])
            is_product = result.shape == (*x.shape[:-1], features)
        x = x.detach() if is_product else torch.zeros(())
        inputs[name].append(x.to("meta") if x.ndim > 1 and len(x) == len(ids) else x.clone())

    hooks = [m.register_forward_hook(partial(note, name)) for name, m in modules.items()]
    try:
        return run(ids), inputs
    finally:
        for hook in hooks:
            hook.remove()


def _kind(shapes: list[tuple[int, ...]], ids: Tensor) -> str:
    if not shapes:
        return "unseen"
    if all(len(shape) > 1 and shape[0] == len(ids) for shape in shapes):
        return "rows"
    if all(len(shape) > 1 and shape[0] % ids.numel() == 0 for shape in shapes):
        return "flat"
    return "a call of its own" if () in shapes else f"inputs of shape {shapes[0]}"


def columns_of_probe(model: Any, context: int) -> int:  # noqa: ANN401 -- of any transformers architecture
    """Return the length of the rows on which `check_forward` tests a model.

    Rows are longer if modules around the trunk run code that is from neither torch nor
    transformers. A `context` of 0 is no limit.
    """
    head = model.get_output_embeddings()
    plain = (
        class_from_libraries(type(model))
        and forward_change(model) is None
        and is_plain_linear(head)
    )
    columns = _COLUMNS if plain else _LATE
    return min(columns, context or columns)


def check_causal(
    what: str,
    trunk: nn.Module,
    run: Callable[[Tensor], Tensor],
    ids: Tensor,
    hidden: Tensor,
    firsts: Sequence[Tensor],
) -> None:
    """Refuse a model whose hidden states depend on later tokens or on other rows.

    `hidden` (B, T, H) is `run` of `ids` (B, T). Each of `firsts` (1, ..., H) is `run` of a
    beginning of the first row. Half precision is checked in float32 too, because rounding hides a
    small dependence. A model that cannot run in float32, or has too little memory for it, passes.
    """

    def compare(hidden: Tensor, firsts: Sequence[Tensor]) -> float:
        error = max(relative_error(hidden[:1, : states.shape[1]], states) for states in firsts)
        return error if error > tolerance(hidden) else 0.0

    error = compare(hidden, firsts)
    if not error and hidden.dtype in HALF:
        with suppress(*CANNOT_RUN), own_generator(ids.device), in_float32(trunk):
            error = compare(run(ids), [run(ids[:1, : states.shape[1]]) for states in firsts])
    if error:
        raise ModelError(
            f"{what}: expected a causal model, whose tokens see their own row up to themselves; "
            f"more tokens and rows change the hidden states before by {error:.2g} of their size; "
            "load an encoder with is_decoder=True, or use a decoder-only language model"
        )


@torch.no_grad()
def check_forward(
    name: str,
    model: Any,  # noqa: ANN401 -- of any transformers architecture
    trunk: nn.Module,
    run: Callable[[Tensor], Tensor],
    logits: Callable[[Tensor], Tensor],
    ids: Tensor,
) -> dict[str, str]:
    """Check the assumptions about a model on two different rows of ids (2, T); return the layouts.

    `run` maps ids to the trunk's hidden states (B, T, H), and `logits` maps hidden states to
    logits. Layouts are those of `watch_linear_inputs`. ModelError is raised for a model that needs
    more than token ids, draws random numbers, mixes rows, depends on later tokens, or has a head of
    an unknown kind.
    """
    subject = f"model {name!r} ({type(model).__name__})"
    beginning = ids[:1, :-1]
    with own_generator(ids.device):
        # Global generator because a forward that draws random numbers uses it.
        state = torch.get_rng_state()
        try:
            expected = model(input_ids=beginning).logits.float()
            hidden, layouts = watch_linear_inputs(model, trunk, run, ids)
            first_states = run(beginning)
            # In another order, since a head must not depend on positions.
            got = logits(first_states.flip(1)).flip(1)
        except CANNOT_RUN as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(
                f"{subject}: it does not run as a causal language model on token ids alone "
                f"({type(error).__name__}: {error}); use a decoder-only language model"
            ) from error
        # Global generator because the forward may have drawn from it.
        draws = not torch.equal(state, torch.get_rng_state())
    # A cap of 30 changes logits of 1, as random weights give, by only 4e-4.
    near = min(_LOGITS, tolerance(first_states))
    same = got.shape == expected.shape and torch.allclose(expected, got, atol=near, rtol=near)
    if draws:
        why = "its forward draws random numbers, so that no log-prob is the same twice;"
    elif not bool((expected < float("inf")).all()):  # NaN too; -inf excludes a token
        why = f"its logits are not finite, since {_broken_weight(model)};"
    elif not same:
        gap = (expected - got).abs().max().item() if got.shape == expected.shape else float("inf")
        why = (
            f"its logits differ from head(trunk(ids)) by {gap:.3g}, so its head is of an unknown "
            "kind; expected a linear head, optionally scaled or soft-capped:"
        )
    else:
        check_causal(subject, trunk, run, ids, hidden, [first_states])
        return layouts
    raise ModelError(f"{subject}: {why} use another model")


def _broken_weight(model: nn.Module) -> str:
    """Return the cause of logits that are not finite, found by reading all weights."""
    for name, weight in model.state_dict().items():
        if bad := int((~weight.isfinite()).sum()):
            return f"{bad:,} of the {weight.numel():,} numbers of its weight {name} are not"
    return "its sums overflow (choose another dtype)"
