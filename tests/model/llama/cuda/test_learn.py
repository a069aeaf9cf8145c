"""The learn pass by kernels: in Triton's interpreter, or each computed by torch where it is not."""

import os
import warnings
from contextlib import nullcontext
from functools import partial

import architectures
import kernel_reference
import numpy as np
import pytest
import tiny
import torch
from fused_cases import take_gradients
from tiny_cohort import PLAIN, build_cohort, learn, make_rows, perturb

from evo_grpo.model.forward import choice
from evo_grpo.model.forward import prefix as prefixes
from evo_grpo.model.forward.choice import open_forward
from evo_grpo.model.forward.prefix import find_shared_prefixes
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.llama.cuda import operators, segments
from evo_grpo.model.llama.cuda.learn import KernelForward
from evo_grpo.model.llama.train import LlamaForward

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.kernels] if INTERPRETED else []
#: The interpreter takes seconds for one; EVO_GRPO_LEARN_CASES=500 tries all of them there.
ALL = "EVO_GRPO_LEARN_CASES" in os.environ or not INTERPRETED
CASES = int(os.environ.get("EVO_GRPO_LEARN_CASES", 500 if ALL else 16))
in_full = pytest.mark.skipif(not ALL, reason="long in the interpreter: set EVO_GRPO_LEARN_CASES")
PIECES = 12
#: `make test` tries half of the cases, `make test-slow` the other half.
HALF = [*range(6), *(pytest.param(piece, marks=pytest.mark.slow) for piece in range(6, PIECES))]
CPU = torch.device("cpu")
WIDE = {"sliding_window": 64}
AT_ONCE = ("qwen3", "granite", "gemma3", "short windows")
MODELS = {
    "llama": tiny.llama,
    "qwen2": tiny.qwen2,
    "qwen3": architectures.FAMILIES["qwen3"],
    "smollm3": architectures.FAMILIES["smollm3"],
    "granite": architectures.FAMILIES["granite"],
    "gemma3": lambda: architectures.FAMILIES["gemma3"](**WIDE),
    "mistral": lambda: tiny.mistral(**WIDE),
    "short windows": architectures.FAMILIES["gemma3"],
    "a short window of all": lambda: tiny.mistral(sliding_window=4),
    "a window of two": lambda: tiny.mistral(sliding_window=2),
    "bias in the MLP": lambda: tiny.llama(mlp_bias=True),
    "one key head": lambda: tiny.llama(num_key_value_heads=1),
}
#: `make test-slow` has those that differ in one step only.
FAMILIES = [
    pytest.param(name, marks=() if name in AT_ONCE else pytest.mark.slow) for name in MODELS
]
MODULES = ("all-linear", "all-linear", ["q_proj"], ["k_proj", "up_proj"], ["o_proj", "down_proj"])


@pytest.fixture(autouse=True)
def _by_torch_without_an_interpreter():
    with kernel_reference.instead(*(kernel_reference.FLASH if INTERPRETED else ())):
        yield


class Case:
    """Agents and their rows; some have no adapter, no rows, or rows that predict nothing."""

    def __init__(self, seed, dtype=torch.float32):
        rng = self.rng = np.random.default_rng(seed)
        names = list(MODELS)
        agents = int(rng.integers(1, 4))
        ranks = [int(rng.choice([1, 2, 4, 7, 17])) for _ in range(agents)]
        build, modules = MODELS[names[seed % len(names)]], MODULES[rng.integers(len(MODULES))]
        model = build().to(dtype)
        self.slots = tiny.population(model, tuple(ranks), target_modules=modules)
        self.names = list(tiny.names(agents))
        if agents > 1 and rng.integers(0, 4) == 0:
            self.names[int(rng.integers(agents))] = None
        positions, whole = [], []
        for agent in range(agents):
            for _ in range(rng.integers(0 if agent else 1, 3)):
                head = rng.integers(2, tiny.VOCABULARY, rng.integers(2, 9))
                for _ in range(rng.integers(1, 5)):
                    tail = rng.integers(2, tiny.VOCABULARY, rng.integers(0, 6))
                    whole.append((head, tail))
                    positions.append(agent)
        width = max(2, *(len(head) + len(tail) for head, tail in whole))
        ids, masks = np.zeros((len(whole), width), np.int64), np.zeros((len(whole), width), bool)
        for i, (head, tail) in enumerate(whole):
            ids[i, : len(head) + len(tail)] = np.r_[head, tail]
            masks[i, len(head) : len(head) + len(tail)] = True
        self.positions, self.ids, self.masks = np.array(positions), ids, masks
        rows, places = np.nonzero(masks)
        self.wanted = list(zip(rows.tolist(), (places - 1).tolist(), strict=True))
        self.weights = tiny.noise((len(rows), tiny.HIDDEN), seed + 1)
        self.shared = bool(rng.integers(0, 3))

    def gradients(self, kind, *, recompute=False):
        """Hidden states and gradients by a kind of forward."""
        step = kind(self.slots, self.names, recompute=recompute)
        present = sorted(set(self.positions.tolist()))
        places = np.searchsorted(present, self.positions)
        layout = RowLayout(
            tuple(self.names[p] for p in present), tuple(np.bincount(places).tolist())
        )
        prefix = find_shared_prefixes(places, self.ids, self.masks, CPU) if self.shared else None
        where = [row * self.ids.shape[1] + column for row, column in self.wanted]
        with step.rows(layout):
            given = torch.tensor(self.ids), torch.tensor(where, dtype=torch.long)
            hidden = step.hidden_at(*given, prefix)
            (hidden * self.weights.to(hidden.dtype)).sum().backward()
        step.collect_gradients()
        return hidden.detach(), take_gradients(self.slots, self.names)

    def row_by_row(self):
        """The same in float64 by the model's own modules, each row for itself."""
        slots, out, sums = self.slots, [], {}
        slots.base.model.double()
        for row, agent in enumerate(self.positions.tolist()):
            chosen = [i for i, (r, _) in enumerate(self.wanted) if r == row]
            if not chosen:
                continue
            name = self.names[agent]
            if name is not None:
                slots.activate(name)
            columns = [self.wanted[i][1] for i in chosen]
            with nullcontext() if name is not None else slots.peft.disable_adapter():
                hidden = slots.base.hidden(torch.tensor(self.ids[row : row + 1]))[0, columns]
            out.append(hidden.detach())
            if name is None:
                continue
            (hidden * self.weights[chosen].double()).sum().backward()
            grads = [
                torch.zeros_like(p) if p.grad is None else p.grad for p in slots.parameters(name)
            ]
            take_gradients(slots, [name])
            before = sums.get(name)
            sums[name] = (
                grads if before is None else [a + b for a, b in zip(before, grads, strict=True)]
            )
        return torch.cat(out), sums


def compare(found, wanted, most):
    hidden, gradients = found
    assert (hidden - wanted[0]).abs().max() <= most * wanted[0].abs().max()
    for name, theirs in wanted[1].items():
        top = max(float(g.abs().max()) for g in theirs)
        for own, other in zip(gradients[name], theirs, strict=True):
            own = torch.zeros_like(other) if own is None else own
            assert (own - other).abs().max() <= most * max(top, 1e-3), name


@pytest.mark.parametrize("piece", HALF)
def test_gradients_are_those_of_each_row_for_itself(piece, monkeypatch):
    monkeypatch.setattr(prefixes, "MIN_SAVED_SHARE", -9.0)
    for seed in range(piece, CASES, PIECES):
        case = Case(seed)
        if not case.wanted:
            continue
        found = case.gradients(KernelForward, recompute=seed % 3 == 0)
        compare(found, case.gradients(LlamaForward), 1e-5)
        compare(found, case.row_by_row(), 1e-5)


@pytest.mark.parametrize("piece", HALF)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 0.02), (torch.bfloat16, 0.1)])
def test_gradients_in_half_precision(dtype, most, piece):
    for seed in range(piece, 60 if ALL else 3, PIECES):
        case = Case(seed, dtype)
        if case.wanted:
            compare(case.gradients(KernelForward), case.row_by_row(), most)


def learned(kernels, rows, hparams=PLAIN, build=tiny.llama, broken=None, **settings):
    """The adapters of agents that have learned, and their metrics."""
    cohort = build_cohort(len(rows), hparams, model=build(), **settings)
    base = cohort.slots.base
    base.kernels, base.head_kernels = kernels, kernels == "on"
    if broken is not None:
        perturb(cohort, broken, float("nan"))
    metrics = learn(cohort, list(cohort.agents), rows)
    weights = [
        torch.cat([p.detach().flatten() for p in cohort.slots.parameters(state.adapter)])
        for state in cohort.agents.values()
    ]
    return weights, metrics


@pytest.fixture
def on(monkeypatch):
    """Take the kernels as if Triton were there."""
    monkeypatch.setattr("evo_grpo.model.forward.choice._refusal", lambda base: None)


@pytest.mark.usefixtures("on")
@in_full
@pytest.mark.parametrize("family", FAMILIES)
def test_agents_learn_the_same_in_micro_batches(family):
    rows = [make_rows(slot, groups=2, prompt=(4, 9)) for slot in range(3)]
    hparams = PLAIN.replace(beta=0.1, update_epochs=2, batch_size=6)
    parts = {"max_output_tokens": 8, "max_tokens_per_microbatch": 40}
    ours, metrics = learned("on", rows, hparams, MODELS[family], **parts)
    wanted, others = learned("off", rows, hparams, MODELS[family], **parts)
    for one, two in zip(ours, wanted, strict=True):
        # AdamW moves a weight whose gradient is near 0 by the sign of that.
        assert (one - two).abs().mean() < 1e-5
    for one, two in zip(metrics, others, strict=True):
        assert one == pytest.approx(two, rel=1e-3, abs=1e-5)


@pytest.mark.usefixtures("on")
def test_two_equal_calls_are_equal_to_the_bit():
    rows = [make_rows(slot) for slot in range(2)]
    first, second = (learned("on", rows)[0] for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.usefixtures("on")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_stays_with_its_agent():
    rows = [make_rows(slot) for slot in range(3)]
    clean, dirty = (learned("on", rows, broken=broken)[0] for broken in (None, 1))
    assert dirty[1].isnan().any()
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[2], dirty[2])


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", ["project", "head_slopes", "glu_backward"])
def test_a_kernel_that_fails_is_left_to_torch_and_named_once(name, monkeypatch):
    """One of the forward, that of the head, and one that is first launched in the backward."""
    rows = [make_rows(slot) for slot in range(2)]
    wanted, _ = learned("off", rows)

    def fails(*given):
        raise FileNotFoundError(2, "Python.h")

    monkeypatch.setitem(operators.LAUNCHES, name, fails)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, _ = learned("on", rows, PLAIN)
    assert all(map(torch.equal, found, wanted))
    (line,) = [str(one.message) for one in said if "engine.kernels" in str(one.message)]
    assert "Python.h" in line


@pytest.mark.usefixtures("on")
def test_what_kernels_do_not_serve_takes_todays_path(recwarn):
    slots = tiny.population(architectures.FAMILIES["olmo2"](), (4,))
    for wanted, kind in (("off", LlamaForward), ("auto", LlamaForward), ("on", LlamaForward)):
        slots.base.kernels = wanted
        assert type(open_forward(slots, slots.names)) is kind


def scale_of_its_own(call, *given):
    return call(*given[:-1], given[6].shape[-1] ** -0.5)


def far_keys_forgotten(call, *given):
    dq, dk, dv = call(*given)
    dk[130:150] = 0.0
    return dq, dk, dv


#: Launches that compute something else; the last of flash attention, whose versions vary.
WRONG = [
    ("project", lambda call, x, matrix, scale, tiles: call(x, matrix, scale * 2, tiles)),
    ("add_low", lambda call, low, matrix, tiles, y: None),
    ("norm_backward", lambda call, more, grad, *rest: call(None, grad, *rest)),
    ("join_parts", lambda call, more, out, sums, more_sums: None),
    ("glu_backward", lambda call, gelu, both, grad: call(True, both, grad)),
    ("flash_backward", lambda call, *given: tuple(x * float("nan") for x in call(*given))),
    ("flash_backward", scale_of_its_own),
    ("flash_backward", far_keys_forgotten),
]


@in_full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "wrong"), [("", None), *WRONG])
def test_wrong_gradients_on_a_card_are_seen_before_the_first_step(name, wrong, dtype, monkeypatch):
    # Its scale of the scores is not that of the size of a head.
    build = partial(MODELS["granite"], max_position_embeddings=256, num_hidden_layers=3)
    slots = tiny.population(build().to(dtype), (4, 4))
    before = [p.detach().clone() for agent in slots.names for p in slots.parameters(agent)]
    if name:
        launch = operators.LAUNCHES[name]
        monkeypatch.setitem(operators.LAUNCHES, name, partial(wrong, launch))
    difference = choice.differs(slots, (None, *slots.names))
    assert (difference is not None) == bool(name)
    after = [p for agent in slots.names for p in slots.parameters(agent)]
    assert all(p.grad is None for p in after)
    assert all(map(torch.equal, before, after))


def shared_prefix(rows):
    """The shared prefixes of rows of one agent."""
    width = max(len(row.token_ids) for row in rows)
    ids = [np.r_[row.token_ids, np.zeros(width - len(row.mask), np.int64)] for row in rows]
    masks = [np.r_[row.mask, np.zeros(width - len(row.mask), bool)] for row in rows]
    return find_shared_prefixes(np.zeros(len(rows), np.int64), np.stack(ids), np.stack(masks), CPU)


def test_rows_of_a_prefix_that_lie_apart_have_no_segments():
    one, two = (make_rows(seed, groups=1, prompt=(6, 7)) for seed in (1, 2))
    assert shared_prefix([*one, *two]).segments is not None
    prefix = shared_prefix([row for pair in zip(one, two, strict=True) for row in pair])
    assert prefix.segments is None
    assert prefix.rows == ()


@pytest.mark.parametrize("in_order", [True, False])
def test_the_order_of_sums_is_set_for_the_backward_alone(in_order, monkeypatch):
    modes = []

    def watched(call, *given):
        modes.append(torch.get_deterministic_debug_mode())
        return call(*given)

    monkeypatch.setattr(segments, "flash_backward", partial(watched, segments.flash_backward))
    prefix = shared_prefix(make_rows(1, groups=2, prompt=(6, 7)))
    plan = segments.Segments(prefix, prefix.ids, in_order=in_order)
    tokens = prefix.ids.numel() + prefix.rest.numel()
    q, kv = (tiny.noise(shape, 1).detach() for shape in ((tokens, 2, 8), (2, tokens, 1, 8)))
    out, kept = plan.attend(q, kv, 0.3)
    plan.gradients(out, q, kv, out, kept, 0.3)
    # A mode of 1 would only warn, and flash attention would keep to no order.
    assert modes == [2 if in_order else 0] * 2
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.utils.deterministic.fill_uninitialized_memory
