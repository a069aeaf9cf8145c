"""A model is as it was after a refusal: frozen by nobody, with frequencies of its own."""

from functools import partial

import architectures
import pytest
import tiny
import torch

from evo_grpo import GRPO
from evo_grpo.errors import EvoGrpoError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.refusal import unchanged_if_refused


def dynamic():
    """A Llama whose frequencies follow rows that are longer than 64 tokens."""
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    return tiny.llama(rope_parameters=rope)


def as_training(model):
    """Give a model a state of its own: training but for one module, one parameter frozen."""
    model.train()
    model.get_output_embeddings().eval()
    next(model.parameters()).requires_grad_(False)
    return model


def state(model):
    return (
        [(name, type(m), m.training, sorted(vars(m))) for name, m in model.named_modules()],
        [(name, p.requires_grad) for name, p in model.named_parameters()],
        [getattr(m, "rope_type", None) for m in model.modules()],
        [(name, b.tolist()) for name, b in model.named_buffers(remove_duplicate=False)],
    )


@pytest.mark.filterwarnings("ignore:model .* prompt and completion have up to:UserWarning")
@pytest.mark.parametrize("build", [tiny.llama, architectures.phi3, dynamic])
@pytest.mark.parametrize(
    ("given", "several"),
    [
        ({"lora": {"alpha": 0}}, False),
        ({"lora": {"target_modules": ["nowhere"]}}, True),
        ({"lora": {"target_modules": ["q_proj", "lm_head"]}}, False),
    ],
)
def test_a_model_is_as_it_was_after_a_refusal(build, given, several):
    model = as_training(build())
    before = state(model)
    make = partial(GRPO.population, size=2) if several else GRPO
    with pytest.raises(EvoGrpoError):
        make(model=model, device="cpu", max_output_tokens=4, **given)
    assert state(model) == before


def test_so_it_is_where_the_base_itself_is_refused():
    model = as_training(architectures.phi3())
    model.generation_config.eos_token_id = 999
    before = state(model)
    with pytest.raises(EvoGrpoError, match="its end token has id 999"):
        SharedBase(model)
    assert state(model) == before


def refused(model, ids, expected):
    with unchanged_if_refused(model):
        SharedBase(model)
        assert (model(input_ids=ids).logits - expected).abs().max() > 1e-2
        raise RuntimeError("of mine")


@torch.no_grad()
@pytest.mark.parametrize("build", [architectures.phi3, dynamic])
def test_long_rows_have_their_frequencies_back(build):
    ids = tiny.ids(1, 100 if build is dynamic else 30, seed=5)
    model = build()
    expected = build()(input_ids=ids).logits
    with pytest.raises(RuntimeError, match="of mine"):
        refused(model, ids, expected)
    torch.testing.assert_close(model(input_ids=ids).logits, expected)


def test_what_is_built_stays_frozen():
    model = as_training(tiny.llama())
    with unchanged_if_refused(model):
        SharedBase(model)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_what_is_no_model_is_left_alone():
    with pytest.raises(RuntimeError, match="of mine"), unchanged_if_refused(None):
        raise RuntimeError("of mine")
