import itertools

import architectures
import pytest
import tiny
import torch

from evo_grpo.model import logprobs as module
from evo_grpo.model.base import SharedBase
from evo_grpo.model.logprobs import linear_logprobs, module_logprobs

M, H, V = 11, 8, 17


@pytest.fixture
def pieces():
    generator = torch.Generator().manual_seed(3)
    return {
        "hidden": tiny.noise((M, H), 1),
        "weight": tiny.noise((V, H), 2),
        "targets": torch.randint(0, V, (M,), generator=generator),
        "temperature": torch.rand(M, generator=generator) + 0.5,
    }


def slow(hidden, weight, targets, temperature, *, bias=None, scale=1.0, softcap=0.0):
    """The definition, in float64 and with the whole matrix of logits."""
    logits = (hidden.double() * scale) @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    table = torch.log_softmax(logits / temperature.double()[:, None], dim=-1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


TWISTS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 3.0},
    "all": {"bias": True, "scale": 1.7, "softcap": 5.0},
}


def twisted(twist):
    return {k: tiny.noise((V,), 4) if k == "bias" else v for k, v in twist.items()}


@pytest.fixture
def cut(monkeypatch):
    """Sets rows and columns of a block; None for whole rows, as on a GPU."""

    def set_block(rows, columns):
        if columns is None:
            monkeypatch.setattr(module, "_block", lambda weight: (rows, len(weight)))
            monkeypatch.setattr(module, "_whole_rows", lambda head: head[1:] == (None, 0.0))
            return
        monkeypatch.setattr(module, "CPU_COLUMNS", columns)
        monkeypatch.setattr(module, "CPU_ELEMENTS", rows * min(columns, V))

    return set_block


@pytest.mark.parametrize("block", [(1, 2), (3, 5), (M, V)])
def test_a_token_with_a_bias_of_minus_infinity_leaves_the_others_finite(pieces, block, cut):
    cut(*block)
    kept = [token for token in range(V) if token not in (0, 1, 4)]  # a whole block, and a part
    bias = torch.full((V,), -torch.inf)
    bias[kept] = tiny.noise((V,), 4)[kept]
    pieces["targets"] = torch.tensor(kept)[pieces["targets"] % len(kept)]
    hidden = pieces.pop("hidden").requires_grad_()
    reference = hidden.detach().double().requires_grad_()
    ours = linear_logprobs(hidden, **pieces, bias=bias)
    places = torch.tensor([kept.index(token) for token in pieces["targets"].tolist()])
    rest = {"weight": pieces["weight"][kept], "targets": places, "bias": bias[kept]}
    theirs = slow(reference, temperature=pieces["temperature"], **rest)
    for out, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    sum(out.sum() for out in ours).backward()
    sum(out.sum() for out in theirs).backward()
    torch.testing.assert_close(hidden.grad.double(), reference.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("twist", "block"),
    [
        *(("all", block) for block in [(1, V), (2, V), (5, V), (M, 1), (1, 1), (M, V - 1)]),
        *((twist, (3, 5)) for twist in TWISTS),
        *((twist, (3, None)) for twist in TWISTS),
    ],
)
def test_values_and_gradients_equal_the_definition(pieces, twist, block, cut):
    cut(*block)
    twist = twisted(TWISTS[twist])
    weights = tiny.noise((M,), 5), tiny.noise((M,), 6)
    hidden = pieces.pop("hidden").requires_grad_()
    reference = hidden.detach().double().requires_grad_()
    ours = linear_logprobs(hidden, **pieces, **twist)
    expected = slow(reference, **pieces, **twist)
    # The log-probs alone, the entropies alone, and both.
    for used in ((0,), (1,), (0, 1)):
        torch.testing.assert_close(
            *(
                torch.autograd.grad(
                    sum((out[i] * weights[i]).sum() for i in used), leaf, retain_graph=True
                )[0].float()
                for out, leaf in ((ours, hidden), (expected, reference))
            ),
            atol=1e-5,
            rtol=1e-5,
        )
    for value, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(value, wanted.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("output", [0, 1], ids=["logprobs", "entropies"])
@pytest.mark.parametrize("twist", TWISTS.values(), ids=TWISTS)
def test_gradients_equal_finite_differences(pieces, twist, output):
    """Against the definition in float64, so that neither side is autograd's."""
    twist = twisted(twist)
    hidden = pieces.pop("hidden")
    leaf = hidden.clone().requires_grad_()
    linear_logprobs(leaf, **pieces, **twist)[output].sum().backward()
    step = 1e-5
    for row, column in itertools.product((0, 4, M - 1), range(H)):
        sides = []
        for sign in (1, -1):
            moved = hidden.double().clone()
            moved[row, column] += sign * step
            sides.append(slow(moved, **pieces, **twist)[output].sum())
        difference = ((sides[0] - sides[1]) / (2 * step)).item()
        assert leaf.grad[row, column].item() == pytest.approx(difference, abs=1e-4)


@pytest.mark.parametrize("columns", [5, None])
def test_far_apart_logits_keep_their_precision(pieces, cut, columns):
    """A block whose maximum is lower by hundreds, before and after the one that decides."""
    cut(M, columns)
    pieces["weight"][:5] *= 300
    pieces["weight"][10:] *= 300
    hidden = pieces.pop("hidden")
    values, entropies = linear_logprobs(hidden, **pieces)
    expected, expected_entropies = slow(hidden, **pieces)
    torch.testing.assert_close(values, expected.float(), atol=1e-2, rtol=1e-4)
    torch.testing.assert_close(entropies, expected_entropies.float(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("columns", [V, 5, None])
def test_blocks_do_not_change_a_bit_of_what_they_do_not_hold(pieces, cut, columns):
    pieces["hidden"][4] = float("nan")
    cut(3, columns)
    hidden = pieces.pop("hidden").requires_grad_()
    values, entropies = linear_logprobs(hidden, **pieces)
    (values + entropies).sum().backward()
    for tensor in (values, entropies, hidden.grad):
        bad = torch.isnan(tensor if tensor.ndim == 1 else tensor.sum(-1))
        assert bad.nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize(("rows", "columns", "blocks"), [(2, V, 6), (3, 5, 4 * 4)])
def test_never_holds_all_logits(pieces, cut, monkeypatch, rows, columns, blocks):
    cut(rows, columns)
    largest = []
    original = module._logits

    def watched(*args):
        out = original(*args)
        largest.append(out.numel())
        return out

    monkeypatch.setattr(module, "_logits", watched)
    hidden = pieces.pop("hidden").requires_grad_()
    sum(linear_logprobs(hidden, **pieces)).sum().backward()
    assert len(largest) == blocks
    assert max(largest) <= rows * columns


def test_a_row_whose_entropy_has_no_weight_has_the_gradient_of_its_logprob_to_the_bit(pieces):
    hidden = pieces.pop("hidden").requires_grad_()
    weight = torch.arange(M) % 2
    values, entropies = linear_logprobs(hidden, **pieces)
    plain = torch.autograd.grad(values.sum(), hidden, retain_graph=True)[0]
    mixed = torch.autograd.grad((values + weight * entropies).sum(), hidden)[0]
    assert [torch.equal(*rows) for rows in zip(mixed, plain, strict=True)] == [
        w == 0 for w in weight.tolist()
    ]


def test_the_head_gets_no_gradient(pieces):
    pieces["weight"].requires_grad_()
    hidden = pieces.pop("hidden").requires_grad_()
    sum(linear_logprobs(hidden, **pieces)).sum().backward()
    assert pieces["weight"].grad is None


def test_a_token_that_is_never_sampled_has_no_part_in_the_entropy():
    """A head may set the logit of a token to -inf."""
    never = torch.tensor([0.0, -torch.inf, 0.0, 0.0])
    head = tiny.noise((4, H), 2)
    hidden = tiny.noise((M, H), 1).requires_grad_()
    found = []
    for places in ([0, 1, 2, 3], [0, 2, 3]):
        _, entropies = module_logprobs(
            lambda x, places=places: (x @ head.T + never)[:, places],
            hidden,
            torch.zeros(M, dtype=torch.long),
            torch.ones(M),
            len(places),
        )
        found.append((entropies.detach(), *torch.autograd.grad(entropies.sum(), hidden)))
    for ours, without in zip(*found, strict=True):
        torch.testing.assert_close(ours, without, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_in_and_float32_comes_out(pieces, dtype):
    pieces |= {name: pieces[name].to(dtype) for name in ("hidden", "weight")}
    hidden = pieces.pop("hidden").requires_grad_()
    values, entropies = linear_logprobs(hidden, **pieces)
    expected, _ = slow(hidden.detach(), **pieces)
    assert values.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(values, expected.float(), atol=0.05, rtol=0.05)
    values.sum().backward()
    assert hidden.grad.dtype == dtype


def test_a_loss_scale_keeps_float16_gradients_of_confident_tokens_exact():
    """Slopes of 1 - p = 2e-5 are below the numbers that float16 holds well."""
    weight = tiny.noise((V, H), 2)
    targets = torch.arange(M) % V
    hidden = 11 * torch.nn.functional.normalize(weight[targets]) / weight.norm(dim=1)[targets, None]
    for _ in range(3):  # nearer to certainty
        hidden = (
            hidden * (1 + 0.1 * (slow(hidden, weight, targets, torch.ones(M))[0] < -2e-5))[:, None]
        )
    hidden, weight = hidden.half(), weight.half()
    leaf, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    (linear_logprobs(leaf, weight, targets, torch.ones(M))[0].sum() * 2.0**14).backward()
    (slow(exact, weight, targets, torch.ones(M))[0].sum() * 2.0**14).backward()
    error = (leaf.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 0.01


def test_no_tokens(pieces):
    hidden = torch.zeros(0, H, requires_grad=True)
    empty = torch.zeros(0)
    values, entropies = linear_logprobs(hidden, pieces["weight"], empty.long(), empty)
    values.sum().backward()
    assert values.shape == entropies.shape == (0,)


def cohere():
    from transformers import CohereConfig, CohereForCausalLM

    return tiny._built(0, CohereForCausalLM, CohereConfig(**tiny._settings(logit_scale=0.3)))


def gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    settings = tiny._settings(final_logit_softcapping=2.0, head_dim=8)
    return tiny._built(0, Gemma2ForCausalLM, Gemma2Config(**settings))


def phi():
    from transformers import PhiConfig, PhiForCausalLM

    model = tiny._built(0, PhiForCausalLM, PhiConfig(**tiny._settings()))
    model.lm_head.bias.data = tiny.noise((tiny.VOCABULARY,), 8)
    return model


@pytest.mark.parametrize(
    "build", [tiny.llama, tiny.gpt2, tiny.qwen2, architectures.granite, cohere, gemma2, phi]
)
def test_a_models_own_logits_give_the_same(build):
    base = SharedBase(build())
    input_ids = tiny.ids(2, 6)
    with torch.no_grad():
        logits = base.model(input_ids=input_ids).logits
        hidden = base.hidden(input_ids)
        torch.testing.assert_close(base.logits(hidden), logits, atol=1e-5, rtol=1e-5)
        table = torch.log_softmax(logits[:, :-1].flatten(0, 1) / 0.7, dim=-1)
        targets = input_ids[:, 1:].flatten()
        values, _ = base.token_logprobs(
            hidden[:, :-1].flatten(0, 1), targets, torch.full((10,), 0.7)
        )
    expected = table.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_is_called_gives_the_same(dtype, monkeypatch):
    """Log-probs, entropies and gradients, over several blocks of rows."""
    monkeypatch.setattr("evo_grpo.model.logprobs.CALLED_ELEMENTS", 100)
    head = torch.nn.Linear(8, 30, bias=True, dtype=dtype).requires_grad_(False)
    found = []
    for called in (True, False):
        hidden = tiny.noise((11, 8), 1).to(dtype).requires_grad_()
        targets = torch.arange(11) % 30
        temperature = torch.linspace(0.5, 1.5, 11)
        if called:
            out = module_logprobs(lambda x: head(x).float(), hidden, targets, temperature, 30)
        else:
            out = linear_logprobs(hidden, head.weight, targets, temperature, bias=head.bias)
        (out[0] * tiny.noise((11,), 2) + out[1] * tiny.noise((11,), 3)).sum().backward()
        found.append((out[0].detach(), out[1].detach(), hidden.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(
            ours, theirs, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0
        )
