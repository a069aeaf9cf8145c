"""Models that compute long rows in another way: long rotary frequencies, sparse attention."""

import architectures
import pytest
import tiny
import torch
import transformers
from engine_contract import logprobs_of
from packaging.version import Version
from torch import nn

from evo_grpo.errors import ModelError, PromptTooLongError, ShapeError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.row_limit import selection_length, switch_length
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings
from evo_grpo.settings.algorithm import AlgorithmConfig
from evo_grpo.types import Prompt

LONG = [4.0, 3.0, 2.0, 6.0]
SWITCH = 16
ROPE = {"rope_theta": 500.0, "factor": 4.0}
pytestmark = pytest.mark.filterwarnings("ignore:model .tiny.. all-linear adapts:UserWarning")


def dynamic():
    """A Llama whose frequencies follow rows that are longer than 64 tokens."""
    return tiny.llama(rope_parameters=ROPE | {"rope_type": "dynamic"})


def gemma3(kinds=("default", "dynamic")):
    """Frequencies of one kind for local attention, and of another for the rest."""
    names = ("sliding_attention", "full_attention")
    parameters = {n: ROPE | {"rope_type": k} for n, k in zip(names, kinds, strict=True)}
    return architectures.gemma3(rope_parameters=parameters)


def always(factors):
    """The same Phi-3 with one set of factors for short and long rows."""
    parameters = dict(architectures.phi3().config.rope_parameters)
    return architectures.phi3(
        rope_parameters=parameters | {"short_factor": factors, "long_factor": factors}
    )


def hidden_alone(model, ids):
    with torch.no_grad():
        return model.model(input_ids=ids).last_hidden_state


def settled(requested):
    return AgentSettings(algorithm=AlgorithmConfig(max_model_len=requested))


class TestRotary:
    @pytest.mark.parametrize(
        ("build", "longer", "limit"),
        [
            (architectures.phi3, 20, SWITCH),
            (dynamic, 100, tiny.CONTEXT),
            (gemma3, 100, tiny.CONTEXT),
            (lambda: gemma3(("dynamic", "dynamic")), 100, tiny.CONTEXT),
        ],
    )
    def test_a_long_row_and_padding_change_no_other_row(self, build, longer, limit):
        """Plain transformers computes all rows of a batch with the long row's frequencies."""
        short = tiny.ids(1, 10, seed=4)
        padded = torch.cat([short, tiny.ids(1, longer - 10, seed=5)], dim=1)
        expected = hidden_alone(build(), short)
        assert (hidden_alone(build(), padded)[:, :10] - expected).abs().max() > 1e-2
        model = build()
        hidden_alone(model, padded)  # a row that was longer before
        base = SharedBase(model)
        with torch.no_grad():
            torch.testing.assert_close(base.hidden(padded)[:, :10], expected)
        assert base.row_limit.switch == base.context_length == limit

    @pytest.mark.parametrize("tokens", [5, 30])
    def test_longer_rows_take_the_long_factors_for_all_if_they_are_asked_for(self, tokens):
        base = SharedBase(architectures.phi3())
        ids = tiny.ids(2, tokens, seed=6)
        for requested, longest, factors in ((40, tiny.CONTEXT, LONG), (12, SWITCH, [1.0] * 4)):
            base.row_limit.hold(requested)
            assert base.context_length == longest
            with torch.no_grad():
                torch.testing.assert_close(base.hidden(ids), hidden_alone(always(factors), ids))

    def test_a_row_beyond_is_refused(self):
        base = SharedBase(architectures.phi3(), None, "tiny-phi")
        base.row_limit.check(SWITCH)
        with pytest.raises(
            ShapeError, match=r"model 'tiny-phi': expected rows of up to 16 tokens, got 17: .*; set"
        ):
            base.row_limit.check(SWITCH + 1)

    def test_the_first_switch_of_several_counts(self):
        long = dict(architectures.phi3().config.rope_parameters)
        parameters = {"sliding_attention": ROPE | {"rope_type": "dynamic"}, "full_attention": long}
        assert switch_length(architectures.gemma3(rope_parameters=parameters).model) == SWITCH

    def test_a_cohort_takes_the_requested_length_and_warns_without_one(self):
        with pytest.warns(UserWarning, match=r"up to 16 tokens: beyond them its rotary freq"):
            Cohort(SharedBase(architectures.phi3()), tiny.lora(), settled(None))
        for requested, longest in ((12, SWITCH), (40, tiny.CONTEXT)):
            base = SharedBase(architectures.phi3())
            Cohort(base, tiny.lora(), settled(requested))
            assert base.context_length == longest


def test_other_models_have_no_limit():
    for model in (tiny.llama(), architectures.mixtral()):
        before = [vars(m).keys() for m in model.modules()]
        base = SharedBase(model)
        base.row_limit.settle(None)
        base.row_limit.check(10**6)
        assert (base.row_limit.selection, base.row_limit.switch) == (None, None)
        assert [vars(m).keys() for m in model.modules()] == before


#: Rows in which nothing is left out.
BOUNDS = {
    "deepseek_v32": (architectures.deepseek_v32, 12),
    "deepseek_v4": (architectures.deepseek_v4, 12),
    "minimax_m3": (architectures.minimax_m3, 16),
}


def request_of(*lengths):
    prompts = [
        Prompt(i, "", tuple(tiny.ids(1, n, seed=30 + i)[0].tolist())) for i, n in enumerate(lengths)
    ]
    return RolloutRequest(0, "a0", prompts, 2, Sampling(max_output_tokens=40), 7)


def engine_of(slots):
    try:
        return NativeEngine(slots)
    except ModelError as refused:
        # What DeepSeek-V4 compresses lay in cache layers of its own, which are refused by name.
        if Version(transformers.__version__) >= Version("5.23"):
            raise
        pytest.skip(f"transformers {transformers.__version__}: {refused}")


@pytest.mark.parametrize(("build", "bound"), BOUNDS.values(), ids=BOUNDS)
class TestSparseAttention:
    def test_the_context_ends_where_a_token_would_be_left_out(self, build, bound):
        base = SharedBase(build(), None, "mine")
        assert (base.row_limit.selection, base.context_length) == (bound, bound)
        assert SharedBase(build(max_position_embeddings=10)).context_length == 10
        base.row_limit.check(bound)
        with pytest.raises(
            ShapeError,
            match=rf"^model 'mine': expected rows of up to {bound} tokens, got {bound + 1}: of more"
            r" than .* its sparse attention leaves some out, in transformers others in a prefix"
            rf".*; set algorithm.max_model_len to {bound} or less, or use a model without sparse",
        ):
            base.row_limit.check(bound + 1)

    def test_up_to_there_sampling_and_one_forward_agree(self, build, bound):
        """Completions that would go on are cut; a prompt without room is refused."""
        slots = tiny.population(build(), (4,))
        engine, request = engine_of(slots), request_of(3, 8)
        (groups,) = engine.rollout([request])
        rows = [(group.prompt, done) for group in groups for done in group.completions]
        assert max(len(p.token_ids) + len(c.token_ids) for p, c in rows) == bound
        for prompt, done in rows:
            expected = logprobs_of(slots, request, prompt, done)
            assert done.logprobs == pytest.approx(expected, abs=1e-5)
        with pytest.raises(PromptTooLongError, match=f"no room in the context of {bound} tokens"):
            engine.rollout([request_of(bound)])


def test_beyond_the_bound_a_prefix_is_computed_otherwise():
    """Why there is one. Should this fail, transformers has changed, and no bound is needed."""
    model, ids = architectures.deepseek_v32(), tiny.ids(1, 40, seed=5)
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        for length, same in ((12, True), (25, False)):
            gap = (model(input_ids=ids[:, :length]).logits - whole[:, :length]).abs().max()
            assert bool(gap < 1e-4) is same


def test_a_warning_says_that_rows_are_shorter_than_requested():
    for requested in (None, 13):
        with pytest.warns(
            UserWarning, match=r"have up to 12 tokens: of more .*max_model_len to 12"
        ):
            Cohort(SharedBase(architectures.deepseek_v32()), tiny.lora(), settled(requested))
    # Warnings are errors here.
    base = SharedBase(architectures.deepseek_v32(), None, "tiny")
    Cohort(base, tiny.lora(target_modules=["o_proj"]), settled(11))


def test_selected_tokens_are_read_from_integers_of_a_layer():
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    trunk = nn.Sequential(layer, other)
    layer.index_topk = True
    assert selection_length(trunk) is None
    layer.index_topk, other.index_topk = 20, 15
    assert selection_length(trunk) == 15
    other.index_topk, other.topk_blocks = None, 3
    assert selection_length(trunk) == 20
    full = architectures.minimax_m3(layer_types=["full_attention"] * 2)
    assert SharedBase(full).row_limit.selection is None


def test_rotary_switch_and_sparse_attention_end_at_the_earlier_of_both():
    base = SharedBase(architectures.deepseek_v32(rope_parameters=ROPE | {"rope_type": "dynamic"}))
    base.row_limit.hold(40)
    assert (base.row_limit.switch, base.context_length) == (tiny.CONTEXT, 12)
