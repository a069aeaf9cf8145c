"""Every kernel in Triton's interpreter, against torch in float64."""

import os
from pathlib import Path
from types import ModuleType

import pytest
import torch

from evo_grpo.model.llama.cuda import operators

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: make test-kernels", allow_module_level=True)

from kernel_cases import LEARN_NAMES, NAMES, case_of

#: Cases of each dtype, of the kernels of a forward and those of learning; 510 and 60 of a kernel.
CASES, LEARN_CASES, PIECES = 170, 20, 10
#: Those of learning whose rows are those of agents, and those that see no other row.
OF_ROWS = ("project", "add_low", "norm_backward", "glu_backward", "qkv_backward")
ALONE = OF_ROWS[:-1]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# NaN and infinities are given on purpose, and numpy warns of them.
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch):
    monkeypatch.setattr(operators, "_SPLIT", 64)


@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES + LEARN_NAMES)
def test_a_kernel_computes_what_torch_does(name, dtype, piece):
    for seed in range(piece, CASES if name in NAMES else LEARN_CASES, PIECES):
        case_of(name, seed, dtype).check()


def damaged(case, agent):
    """The same with NaN and infinity in all that is an agent's own."""
    own = case.owners == agent
    given, written = dict(case.given), dict(case.written)
    for place in (given, written):
        for name in case.rows:
            x = place.get(name)
            if x is not None and x.dtype.is_floating_point:
                place[name] = x = x.clone()
                x[own] = float("nan")
                if x.ndim > 1 and x.shape[-1]:
                    x[own, ..., 0] = float("inf")
    if "matrix" in given:
        given["matrix"] = given["matrix"].clone()
        given["matrix"][agent] = float("nan")
    if "adapters" in given:
        given["b"] = given["b"].clone()
        for _, rank, offset in given["adapters"][agent].tolist():
            given["b"][offset : offset + 16 * rank] = float("nan")
    return type(case)(case.name, case.owners, given, written, case.rows)


def by_row(case, results):
    """Results of each row, with rows first."""
    if case.name == "draw":
        drawn, finished, tokens, out, logprobs = results
        step = case.written["drawn"]
        return [drawn, finished, tokens, *(x[step, case.given["origin"]] for x in (out, logprobs))]
    return results


@pytest.mark.parametrize("name", NAMES + OF_ROWS)
def test_a_nan_stays_with_its_agent(name):
    tried = 0
    for seed in range(25):
        case = case_of(name, seed, prefill=False)
        agents = case.owners.unique().tolist()
        if len(agents) < 2:
            continue
        tried += 1
        others = case.owners != agents[0]
        clean, dirty = (by_row(case, c.run()) for c in (case, damaged(case, agents[0])))
        for one, two in zip(clean, dirty, strict=True):
            assert torch.equal(one[others], two[others]), (name, seed)
    assert tried > 8


def test_a_nan_reaches_the_gradients_of_no_other_agent():
    for seed in range(25):
        case = case_of("outer", seed)
        sizes = [case.given[name].shape[1] for name in ("low", "x", "grad")]
        agents = len(case.given["firsts"]) - 1
        found = []
        for tried in (case, damaged(case, agent := int(case.owners[0]))):
            out = tried.run()[0][:, case.given["offset"] :]
            parts = out.split([agents * sizes[0] * size for size in sizes[1:]], 1)
            found += [part.unflatten(1, (agents, -1)) for part in parts]
        others = torch.arange(agents) != agent
        for clean, dirty in zip(found[:2], found[2:], strict=True):
            assert torch.equal(clean[:, others], dirty[:, others])
            assert dirty[:, agent].isnan().any()


@pytest.mark.parametrize("name", NAMES + ALONE)
def test_a_row_alone_gives_the_same_numbers(name):
    """To rounding: the interpreter multiplies by numpy, whose order depends on the rows."""
    for seed in range(15):
        case = case_of(name, seed, prefill=False)
        row = seed % len(case.owners)
        keep = slice(row, row + 1)
        given, written = dict(case.given), dict(case.written)
        for place in (given, written):
            place.update({k: place[k][keep] for k in case.rows if place.get(k) is not None})
        if "tiles" in given:
            given["tiles"] = torch.tensor([[0, 1, int(case.owners[row])]])
        if name == "draw":
            given["draws"], given["origin"] = (
                given["draws"][:, keep],
                torch.zeros(1, dtype=torch.long),
            )
            written["out_tokens"] = written["out_tokens"][:, keep].contiguous()
            written["out_logprobs"] = written["out_logprobs"][:, keep].contiguous()
        alone = type(case)(name, case.owners[keep], given, written, case.rows)
        whole, own = by_row(case, case.run()), by_row(alone, alone.run())
        for one, two in zip(whole, own, strict=True):
            torch.testing.assert_close(one[keep].nan_to_num(7.5), two.nan_to_num(7.5))


BROKEN = {
    "the block of another agent": ("qkv", "(agent * 3 + part) * 3", "part * 3"),
    "columns behind the last": (
        "attend", "where(visible[None, :], s", "where((c >= 0)[None, :], s",
    ),
    "ranks of the next agent": ("add_norm", "low + r, r < rank, 0.0", "low + r, r < r + 1, 0.0"),
    "a maximum that is not subtracted": (
        "draw", "return top, tl.sum(tl.exp(z - safe), 0)", "return top, tl.sum(tl.exp(z), 0)",
    ),
    "a target that counts twice": ("head_slopes", "(c < V) & (c != target)", "c < V"),
    "the matrix of another agent": (
        "add_low", "matrix + (agent * R + r[:, None]) * SIZE + c", "matrix + r[:, None] * SIZE + c",
    ),
    "tiles of the agents before": ("outer", "tl.load(firsts + agent).to", "tl.load(firsts).to"),
    "rotation not turned back": ("qkv_backward", "g1 * c + g2 * s", "g1 * c - g2 * s"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_kernel_is_seen(what, monkeypatch, tmp_path):
    name, good, bad = BROKEN[what]
    own = "_kernels" if name in NAMES else "_learn_kernels"
    text = Path(getattr(operators, own)().__file__).read_text()
    assert text.count(good) == 1
    file = tmp_path / "broken.py"
    file.write_text(text.replace(good, bad))
    broken = ModuleType("broken")
    broken.__file__ = str(file)
    exec(compile(file.read_text(), str(file), "exec"), vars(broken))
    monkeypatch.setattr(operators, own, lambda: broken)
    with pytest.raises(AssertionError):
        [case_of(name, seed).check() for seed in range(60)]


def test_offsets_beyond_two_to_the_31():
    # Three rows of 2 ** 30 numbers: a row's offset is computed in 64 bits, not its numbers read.
    stride = 1 << 30
    logits = torch.empty(0, dtype=torch.float16).new_empty(2 * stride + 64)
    logits = logits.as_strided((3, 16), (stride, 1))
    logits.copy_(torch.arange(48.0).view(3, 16))
    rows = torch.zeros(3, dtype=torch.long)
    ends = torch.zeros(16, dtype=torch.bool)
    found = operators.weigh_blocks(logits, torch.ones(3), rows, None, ends, 1.0, 0.0)
    assert found[:, 0, 0].tolist() == [15.0, 31.0, 47.0]
