"""Compiles the kernels for cards that are not here, as a launch there would."""

import os
import subprocess
import tempfile
from collections import Counter

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from evo_grpo.model.llama.cuda import kernels, learn_kernels, operators

#: Kibibytes of shared memory that a program may have, by compute capability.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
#: hidden, query heads, key heads, head size, inner features, vocabulary
SHAPES = {
    "0.5B": (896, 14, 2, 64, 4864, 151936),
    "3B": (2048, 16, 2, 128, 11008, 151936),
    "7B": (3584, 28, 4, 128, 18944, 152064),
    "gemma": (1152, 4, 1, 256, 6912, 262144),
    "odd": (96, 4, 2, 24, 100, 1000),
}
_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
    torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


class Recorder:
    """Takes the place of a kernel, and keeps the arguments of its launches."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, num_warps, num_stages=3, launch_pdl=False, **constants):
            del launch_pdl
            self.launches.append((self.kernel, args, constants, num_warps, num_stages))

        return launch


def source_of(kernel, args, constants):
    """What is compiled for a launch: types, constants, and what the compiler may assume."""
    signature, attrs, known = {}, {}, dict(constants)
    names = [p.name for p in kernel.params if not p.is_constexpr]
    for place, (name, value) in enumerate(zip(names, args, strict=True)):
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            aligned = value.data_ptr() % 16 == 0
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value == 1:
                signature[name], known[name] = "constexpr", 1
            aligned = value % 16 == 0 and value != 1
        else:
            signature[name], aligned = "fp32", False
        if aligned:
            attrs[(place,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    ordered = {p.name: signature[p.name] for p in kernel.params}
    return ASTSource(fn=kernel, signature=ordered, constexprs=known, attrs=attrs)


def resources(compiled):
    """Registers, and bytes of spills, of a compiled kernel."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    line = next(x for x in said.splitlines() if "REG" in x)
    numbers = {k: int(v) for k, v in (x.split(":") for x in line.split() if x.count(":") == 1) if v}
    return numbers["REG"], numbers["LOCAL"] + numbers["STACK"]


def compiled_for(capability, launch):
    kernel, args, constants, warps, stages = launch
    options = {"num_warps": warps, "num_stages": stages}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source_of(kernel, args, constants), target=target, options=options)


def launches(shape, dtype, rank, monkeypatch, *, minimum=True, norms=False, agents=4, rows=5):
    """The launches of a layer, a first norm and a draw at a shape, each once."""
    found = []
    for name in operators.LAUNCHES.keys() & vars(kernels).keys():
        monkeypatch.setattr(kernels, name, Recorder(getattr(kernels, name), found))
    monkeypatch.setattr(operators, "_exact", lambda x: x.dtype == torch.float32)
    hidden, heads, kv, size, inner, vocabulary = SHAPES[shape]
    count = agents * rows

    def zeros(*sizes, kind=dtype):
        return torch.zeros(sizes, dtype=kind)

    table = zeros(agents, 3, 3, kind=torch.long)
    tiles = zeros(agents, 3, kind=torch.long)
    owners, x = zeros(count, kind=torch.long), zeros(count, hidden)
    width = (heads + 2 * kv) * size

    def adapted(columns):
        z = zeros(count, -(-(columns + 3 * rank * agents) // 64) * 64)
        return z, z[:, columns:], zeros(64), table, -(-rank // 16) * 16

    weight, q = zeros(hidden), zeros(count, heads, size)
    cache = zeros(count, kv, 64, size)
    turn = zeros(64, size // 2), zeros(64, size // 2)
    own = (zeros(size), zeros(size)) if norms else (None, None)
    operators.embed_norm(owners, zeros(vocabulary, hidden), weight, 1.5, 1e-6)
    for rows_of_cache in (count, count // 5):  # of a step, and of a prefill
        operators.qkv(
            *adapted(width), zeros(width), tiles, owners, *turn, *own, 1e-6, 1e-6, q,
            cache[:rows_of_cache], cache[:rows_of_cache].clone(),
        )  # fmt: skip
    operators.attend(q, cache, cache, owners, 0.125, 0)
    operators.attend(q, cache, cache, owners, 0.125, 32)
    long = zeros(count, kv, 8192, size)
    operators.join_splits(*operators.attend_splits(q, long, long, owners, 0.125, 4096), q)
    operators.add_norm(*adapted(hidden), None, owners, x, None, 0.0, weight, 1e-6, 1.0)
    operators.add_norm(*adapted(hidden), weight, owners, x, weight, 1e-6, weight, 1e-6, 0.5)
    operators.gate_up(*adapted(2 * inner), None, tiles, inner, False)
    operators.gate_up(*adapted(2 * inner), zeros(2 * inner), tiles, inner, True)
    logits, floats = zeros(count, vocabulary), zeros(count, kind=torch.float32)
    least, flags = (owners if minimum else None), zeros(count, kind=torch.bool)
    ends, draws = zeros(vocabulary, kind=torch.bool), zeros(8, count, kind=torch.float64)
    weighed = operators.weigh_blocks(logits, floats, owners, least, ends, 1.0, 0.0)
    out = zeros(8, count, kind=torch.long), zeros(8, count, kind=torch.float32)
    operators.draw_token(
        logits, weighed, floats, flags if minimum else None, draws, least, owners, ends, owners,
        1.0, 30.0 if norms else 0.0, owners.clone(), flags.clone(), owners.clone(), *out,
    )  # fmt: skip
    operators.head_slopes(
        owners, floats, 2, logits, logits.clone(), zeros(count, 4, kind=torch.float32)
    )
    return found


def launches_of_learning(shape, dtype, rank, monkeypatch, *, norms=False, agents=4, rows=32):
    """The launches of a learn layer beside those of a forward, each once."""
    found = []
    for name in operators.LAUNCHES.keys() & vars(learn_kernels).keys():
        monkeypatch.setattr(learn_kernels, name, Recorder(getattr(learn_kernels, name), found))
    monkeypatch.setattr(operators, "_exact", lambda x: x.dtype == torch.float32)
    hidden, heads, kv, size, inner, _ = SHAPES[shape]
    count, width = agents * rows, (heads + 2 * kv) * size

    def zeros(*sizes, kind=dtype):
        return torch.zeros(sizes, dtype=kind)

    tiles, firsts = zeros(agents, 3, kind=torch.long), zeros(agents + 1, kind=torch.long)
    x, weight, scale = zeros(count, hidden), zeros(hidden), zeros(agents, 2 * rank).float()
    a, b = zeros(agents, 2 * rank, hidden), zeros(agents, 2 * rank, 2 * inner)
    both, splits = zeros(count, 2 * inner), zeros(2, a.numel() + b.numel(), kind=torch.float32)
    low = operators.project(x, a, scale, tiles)
    operators.project(both, b, scale, tiles)
    operators.add_low(low, b, tiles, both)
    operators.outer(low, x, low, both, tiles, firsts, 0, splits)
    operators.norm_backward(x, x, x, weight, 1e-6)
    operators.glu_backward(False, both, zeros(count, inner))
    operators.glu_backward(True, both, zeros(count, inner))
    positions, turn = zeros(count, kind=torch.long), (zeros(64, size // 2), zeros(64, size // 2))
    own = (zeros(size), zeros(size)) if norms else (None, None)
    q, k, joined = zeros(count, heads, size), zeros(count, kv, size), zeros(count, width)
    operators.qkv(
        joined, joined, joined, tiles, 0, None, tiles, positions, *turn, *own, 1e-6, 1e-6, q, k,
        k.clone(),
    )  # fmt: skip
    more = [q[: count // 2], k[: count // 2], k[: count // 2]]
    operators.qkv_backward(
        q, k, k, more, positions[: count // 2], joined if norms else None, positions, *turn, *own,
        1e-6, 1e-6,
    )  # fmt: skip
    sums = zeros(heads, count, kind=torch.float32)
    operators.join_parts(q[: count // 2], q, sums, sums[:, : count // 2].contiguous())
    return found


def named(found):
    """Launches by a name of each."""
    times = Counter()
    for launch in found:
        name = launch[0].__name__
        times[name] += 1
        yield f"{name} {times[name]}", launch
