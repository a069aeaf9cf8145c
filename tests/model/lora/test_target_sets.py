"""Sets of layers by name: what they hold of a model, and what is refused."""

import pytest
import tiny

from evo_grpo.errors import ConfigError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.targets import TargetSets

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def sets(declared, model=None, **changes):
    return TargetSets(
        SharedBase(model or tiny.llama(), name="tiny"), tiny.lora(**changes), declared
    )


def ends(modules):
    return {name.rpartition(".")[2] for name in modules}


def test_a_set_has_names_a_pattern_or_all_linear_layers_without_those_that_are_excluded():
    declared = {"some": ["q_proj", "mlp.up_proj"], "second": r".*\.1\..*_proj", "all": "all-linear"}
    found = sets(declared, exclude_modules=["k_proj"])
    assert ends(found.modules("some")) == {"q_proj", "up_proj"}
    assert len(found.modules("some")) == 4
    assert len(found.modules("second")) == 6
    assert len(found.modules("all")) == 12
    assert "k_proj" not in ends(found.modules("all"))
    assert found.name_of(found.modules("second")) == "second"
    assert found.name_of({"model.layers.0.self_attn.q_proj"}) is None
    gpt2 = sets({"all": "all-linear"}, tiny.gpt2())
    assert ends(gpt2.modules("all")) == {"c_attn", "c_proj", "c_fc"}


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (
            {"mlp": ["gate_proj", "up_prj"]},
            r"target_sets\.mlp: expected layers of tiny, got 'up_prj', which it lacks\. "
            "Did you mean 'up_proj'",
        ),
        ({"mlp": ["dense"]}, r"got 'dense', which it lacks\. It has down_proj, gate_proj, k_proj"),
        ({"mlp": "up_proj"}, r"got 'up_proj', which matches none; write \[up_proj\]"),
        ({"head": ["lm_head"]}, r"target_sets\.head: expected layers of tiny, got 'lm_head'"),
        ({"head": ".*"}, r"target_sets\.head: expected linear layers, and not the output head"),
        ({"keys": ["k_proj"]}, "target_sets.keys: expected layers beside those of exclude_modules"),
        (
            {"all": "all-linear", "each": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
             "down_proj"]},
            "expected sets that differ, got 'all' and 'each', which are the same layers of tiny",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(declared, text):
    with pytest.raises(ConfigError, match=text):
        sets(declared, exclude_modules=["k_proj"]).check()


def test_a_name_that_is_not_declared():
    with pytest.raises(
        ConfigError, match=r"one of model\.lora\.target_sets: attention, got 'atention'"
    ):
        sets({"attention": ATTENTION}).modules("atention")
