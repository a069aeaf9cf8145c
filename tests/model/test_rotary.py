import copy

import architectures
import pytest
import tiny
import torch

from evo_grpo.errors import ShapeError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.rotary import hold_frequencies, switch_length
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.settings import AgentSettings
from evo_grpo.settings.algorithm import AlgorithmConfig

LONG = [4.0, 3.0, 2.0, 6.0]
SWITCH = 16


def dynamic(**changes):
    """A Llama whose frequencies follow rows that are longer than 64 tokens."""
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    return tiny.llama(rope_parameters=rope, **changes)


def always(factors):
    """The same Phi-3 with one set of factors for short and long rows."""
    parameters = dict(architectures.phi3().config.rope_parameters)
    return architectures.phi3(
        rope_parameters=parameters | {"short_factor": factors, "long_factor": factors}
    )


def hidden_alone(model, ids):
    with torch.no_grad():
        return model.model(input_ids=ids).last_hidden_state


class TestLongrope:
    def test_a_long_row_moves_no_other_one(self):
        """Plain transformers computes all rows of a batch with the long row's frequencies."""
        base = SharedBase(architectures.phi3())
        short = tiny.ids(1, 10, seed=4)
        expected = hidden_alone(architectures.phi3(), short)
        padded = torch.cat([short, tiny.ids(1, 20, seed=5)], dim=1)
        moved = hidden_alone(architectures.phi3(), padded)[:, :10]
        assert (moved - expected).abs().max() > 1e-2
        with torch.no_grad():
            torch.testing.assert_close(base.hidden(padded)[:, :10], expected)

    def test_rows_end_at_the_switch_unless_more_is_asked_for(self):
        base = SharedBase(architectures.phi3())
        assert (base.switch, base.context_length) == (SWITCH, SWITCH)
        base.hold_context(40)
        assert base.context_length == tiny.CONTEXT
        for asked in (12, SWITCH):
            base.hold_context(asked)
            assert base.context_length == SWITCH

    @pytest.mark.parametrize("tokens", [5, 30])
    def test_longer_rows_take_the_long_factors_for_all(self, tokens):
        base = SharedBase(architectures.phi3())
        base.hold_context(40)
        ids = tiny.ids(2, tokens, seed=6)
        with torch.no_grad():
            torch.testing.assert_close(base.hidden(ids), hidden_alone(always(LONG), ids))
            base.hold_context(None)
            torch.testing.assert_close(base.hidden(ids), hidden_alone(always([1.0] * 4), ids))

    def test_a_row_beyond_is_refused(self):
        base = SharedBase(architectures.phi3(), None, "tiny-phi")
        base.check_row(SWITCH)
        with pytest.raises(
            ShapeError, match=r"model 'tiny-phi': expected rows of up to 16 tokens, .* got 17; set"
        ):
            base.check_row(SWITCH + 1)
        SharedBase(tiny.llama()).check_row(10**6)

    def test_it_is_said_where_nothing_was_asked_for(self):
        settings = AgentSettings()
        with pytest.warns(UserWarning, match=r"up to 16 tokens, beyond which its rotary freq"):
            Cohort(SharedBase(architectures.phi3()), tiny.lora(), settings)

    @pytest.mark.parametrize(("asked", "context"), [(12, SWITCH), (40, tiny.CONTEXT)])
    def test_a_cohort_takes_what_is_asked_for(self, asked, context):
        settings = AgentSettings(algorithm=AlgorithmConfig(max_model_len=asked))
        base = SharedBase(architectures.phi3())
        Cohort(base, tiny.lora(), settings)
        assert base.context_length == context


class TestDynamic:
    def test_padding_beyond_the_context_changes_nothing(self):
        base = SharedBase(dynamic())
        ids = tiny.ids(1, 20, seed=4)
        padded = torch.cat([ids, torch.zeros(1, 80, dtype=torch.long)], dim=1)
        expected = hidden_alone(dynamic(), ids)
        assert (hidden_alone(dynamic(), padded)[:, :20] - expected).abs().max() > 1e-2
        with torch.no_grad():
            torch.testing.assert_close(base.hidden(padded)[:, :20], expected)
        assert base.context_length == base.switch == tiny.CONTEXT

    @pytest.mark.parametrize("kinds", [("default", "dynamic"), ("dynamic", "dynamic")])
    def test_layers_of_several_kinds(self, kinds):
        """Gemma 3 has frequencies of one kind for local attention and of another for the rest."""

        def gemma3():
            names = ("sliding_attention", "full_attention")
            rope = {"rope_theta": 500.0, "factor": 4.0}
            return architectures.gemma3(
                rope_parameters={
                    n: rope | {"rope_type": k} for n, k in zip(names, kinds, strict=True)
                }
            )

        base = SharedBase(gemma3())
        ids = tiny.ids(1, 20, seed=4)
        padded = torch.cat([ids, torch.zeros(1, 80, dtype=torch.long)], dim=1)
        expected = hidden_alone(gemma3(), ids)
        assert (hidden_alone(gemma3(), padded)[:, :20] - expected).abs().max() > 1e-2
        with torch.no_grad():
            torch.testing.assert_close(base.hidden(padded)[:, :20], expected)
        assert base.switch == tiny.CONTEXT

    def test_the_first_switch_of_several_counts(self):
        rope = {"rope_theta": 500.0, "factor": 4.0}
        long = dict(architectures.phi3().config.rope_parameters)
        model = architectures.gemma3(
            rope_parameters={
                "sliding_attention": rope | {"rope_type": "dynamic"},
                "full_attention": long,
            }
        )
        assert switch_length(model.model) == SWITCH


def test_other_models_are_left_alone():
    model = tiny.llama()
    before = copy.deepcopy(vars(model.model.rotary_emb))
    assert switch_length(model.model) is None
    hold_frequencies(model.model, 10)
    assert vars(model.model.rotary_emb).keys() == before.keys()
    base = SharedBase(tiny.gpt2())
    base.settle_context(None)
    assert (base.switch, base.context_length) == (None, tiny.CONTEXT)


def test_a_row_that_was_longer_before_leaves_nothing():
    ids = tiny.ids(1, 20, seed=4)
    model = dynamic()
    with torch.no_grad():
        expected = hidden_alone(dynamic(), ids)
        model(input_ids=tiny.ids(1, 100, seed=5))
        torch.testing.assert_close(SharedBase(model).hidden(ids), expected)
