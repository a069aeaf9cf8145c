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
from evo_grpo.model.sparse import selection_length
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings
from evo_grpo.settings.algorithm import AlgorithmConfig
from evo_grpo.types import Prompt

#: Rows in which nothing is left out.
BOUNDS = {
    "deepseek_v32": (architectures.deepseek_v32, 12),
    "deepseek_v4": (architectures.deepseek_v4, 12),
    "minimax_m3": (architectures.minimax_m3, 16),
}
pytestmark = pytest.mark.filterwarnings("ignore:model .tiny.. all-linear adapts:UserWarning")


def request_of(*lengths, output=40):
    prompts = [
        Prompt(i, "", tuple(tiny.ids(1, n, seed=30 + i)[0].tolist())) for i, n in enumerate(lengths)
    ]
    return RolloutRequest(0, "a0", prompts, 2, Sampling(max_output_tokens=output), 7)


def engine_of(slots):
    try:
        return NativeEngine(slots)
    except ModelError as refused:
        # What DeepSeek-V4 compresses lay in cache layers of its own, which are refused by name.
        if Version(transformers.__version__) >= Version("5.23"):
            raise
        pytest.skip(f"transformers {transformers.__version__}: {refused}")


def sampled(slots, request):
    (groups,) = engine_of(slots).rollout([request])
    return [(group.prompt, done) for group in groups for done in group.completions]


@pytest.mark.parametrize(("build", "bound"), BOUNDS.values(), ids=BOUNDS)
class TestBounds:
    def test_the_context_ends_where_a_token_would_be_left_out(self, build, bound):
        base = SharedBase(build())
        assert (base.selection, base.context_length) == (bound, bound)
        shorter = SharedBase(build(max_position_embeddings=10))
        assert (shorter.selection, shorter.context_length) == (bound, 10)

    def test_up_to_there_sampling_and_one_forward_agree(self, build, bound):
        """Completions that would go on are cut."""
        slots = tiny.population(build(), (4,))
        request = request_of(3, 8)
        rows = sampled(slots, request)
        assert max(len(p.token_ids) + len(c.token_ids) for p, c in rows) == bound
        for prompt, done in rows:
            expected = logprobs_of(slots, request, prompt, done)
            assert done.logprobs == pytest.approx(expected, abs=1e-5)

    def test_a_longer_prompt_is_not_sampled(self, build, bound):
        slots = tiny.population(build(), (4,))
        sampled(slots, request_of(bound - 1))
        with pytest.raises(PromptTooLongError, match=f"no room in the context of {bound} tokens"):
            sampled(slots, request_of(bound))

    def test_a_longer_row_is_not_trained(self, build, bound):
        base = SharedBase(build(), None, "mine")
        base.check_row(bound)
        with pytest.raises(
            ShapeError,
            match=rf"^model 'mine': expected rows of up to {bound} tokens, got {bound + 1}: of more"
            r" than .* its sparse attention leaves some out, and in transformers others in a prefix"
            rf".*; set algorithm.max_model_len to {bound} or less, or use a model without sparse",
        ):
            base.check_row(bound + 1)


def test_beyond_the_bound_a_prefix_is_computed_otherwise():
    """Why there is one. Should this fail, transformers has changed, and no bound is needed."""
    model, ids = architectures.deepseek_v32(), tiny.ids(1, 40, seed=5)
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        for length, same in ((12, True), (25, False)):
            gap = (model(input_ids=ids[:, :length]).logits - whole[:, :length]).abs().max()
            assert bool(gap < 1e-4) is same


def test_it_is_said_where_longer_rows_might_be_expected():
    for asked in (None, 13):
        settings = AgentSettings(algorithm=AlgorithmConfig(max_model_len=asked))
        with pytest.warns(
            UserWarning, match=r"have up to 12 tokens: of more .*max_model_len to 12"
        ):
            cohort = Cohort(SharedBase(architectures.deepseek_v32()), tiny.lora(), settings)
        assert cohort.context_length == 12


def test_nothing_is_said_where_rows_are_short():
    """Warnings are errors here."""
    settings = AgentSettings(algorithm=AlgorithmConfig(max_model_len=11))
    base = SharedBase(architectures.deepseek_v32(), None, "tiny")
    assert Cohort(base, tiny.lora(target_modules=["o_proj"]), settings).context_length == 11
    base = SharedBase(architectures.deepseek_v32(index_topk=64))
    base.settle_context(None)
    assert (base.selection, base.context_length) == (64, tiny.CONTEXT)


def test_an_index_that_takes_next_to_nothing_is_refused():
    with pytest.raises(
        ModelError,
        match=r"model 'mine' \(DeepseekV32Model\): expected attention to 9 tokens or more "
        r"\(index_topk .*\), got 8: .*; use a model without sparse attention$",
    ):
        SharedBase(architectures.deepseek_v32(index_topk=8), None, "mine")


def test_layers_that_choose_no_tokens_have_no_bound():
    full = architectures.minimax_m3(layer_types=["full_attention"] * 2)
    assert SharedBase(full).selection is None
    assert SharedBase(architectures.mixtral()).selection is None


def test_numbers_alone_count():
    layer = nn.Linear(2, 2)
    layer.index_topk = True
    assert selection_length(nn.Sequential(layer), "mine") is None
    layer.index_topk = 20
    other = nn.Linear(2, 2)
    other.index_topk = 15
    assert selection_length(nn.Sequential(layer, other), "mine") == 15
    other.index_topk, other.topk_blocks = None, 3
    assert selection_length(nn.Sequential(layer, other), "mine") == 20


def test_longrope_with_an_index_ends_at_the_earlier_of_both():
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    base = SharedBase(architectures.deepseek_v32(rope_parameters=rope))
    assert (base.switch, base.context_length) == (tiny.CONTEXT, 12)
    base.hold_context(40)
    assert base.context_length == 12
