import re
from functools import partial

import architectures
import pytest
import tiny
import torch
from fused_cases import all_hidden, assert_close, fused_gradients, inputs, one_at_a_time, scores
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import DbrxConfig, GptOssConfig, JetMoeConfig, Lfm2Config, Mamba2Config

from evo_grpo.errors import ConfigError, ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.choice import ModuleForward
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.model.lora.targets import resolve_targets

LAYOUT = RowLayout(("a0", "a1"), (1, 2))
EXPERTS = "ignore:model .tiny.. all-linear adapts:UserWarning"


def assert_exact(slots):
    """One fused pass against PEFT's own forward, one agent at a time."""
    input_ids, weights = inputs(LAYOUT.rows)
    hidden, ours = fused_gradients(slots, LAYOUT, input_ids, weights)
    expected, theirs = one_at_a_time(slots, LAYOUT, input_ids, weights)
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
    assert_close(ours, theirs)


def leaves(slots):
    return {name.rpartition(".")[2] for name in slots.layers}


def jetmoe():
    config = JetMoeConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=32, intermediate_size=48, kv_channels=8,
        num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4, pad_token_id=0,
        eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    return tiny.of(config)


def mamba2():
    config = Mamba2Config(
        vocab_size=tiny.VOCABULARY, hidden_size=32, num_heads=4, head_dim=16, state_size=8,
        n_groups=1, num_hidden_layers=2, chunk_size=4, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return tiny.of(config)


def gpt_oss():
    config = GptOssConfig(
        **architectures.WIDTHS, head_dim=8, num_local_experts=4, num_experts_per_tok=2
    )
    return tiny.of(config)


def dbrx():
    """Experts of a layer in one matrix, below one another."""
    config = DbrxConfig(
        vocab_size=tiny.VOCABULARY, d_model=tiny.HIDDEN, n_heads=4, n_layers=2,
        max_seq_len=tiny.CONTEXT, eos_token_id=tiny.EOS, pad_token_id=0,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        # Older releases of transformers run with this width alone.
        ffn_config={"ffn_hidden_size": tiny.HIDDEN, "moe_num_experts": 4, "moe_top_k": 2},
    )  # fmt: skip
    return tiny.of(config)


def experts_of_linear_layers():
    """Layers of their own can carry adapters, or are named one by one."""
    model = tiny.llama()
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("Experts", (type(mlp),), {})
    return model


def lfm2():
    """A convolution, whose weight has three dimensions."""
    layers = ["conv", "full_attention"]
    return tiny.of(Lfm2Config(**architectures.WIDTHS, head_dim=8, layer_types=layers))


class TestFlattenedRows:
    def test_default_adapters_of_opt(self):
        slots = tiny.population(architectures.opt(), (4, 2))
        assert {"fc1", "fc2", "q_proj"} <= leaves(slots)
        assert_exact(slots)

    def test_dropout_masks_follow_the_row(self):
        slots = tiny.population(architectures.opt(), (4, 2), lora_dropout=0.4)
        input_ids, _ = inputs(3)
        step = ModuleForward(slots)
        whole = (11, 12, 13)
        with torch.no_grad(), step.rows(LAYOUT, whole):
            together = all_hidden(step, input_ids)
        with torch.no_grad(), step.rows(RowLayout(("a1",), (1,)), (13,)):
            alone = all_hidden(step, input_ids[2:])
        torch.testing.assert_close(together[2:], alone, atol=1e-5, rtol=1e-5)

    @pytest.mark.filterwarnings(EXPERTS)
    @pytest.mark.parametrize(
        "build",
        [architectures.qwen2_moe, partial(architectures.qwen3_moe, mlp_only_layers=[0])],
    )
    def test_a_shared_expert_and_dense_layers_beside_experts(self, build):
        assert_exact(tiny.population(build(), (4, 2)))


class TestExperts:
    def test_default_adapters_go_into_the_attention_with_one_warning(self, recwarn):
        slots = tiny.population(architectures.mixtral(), (4, 2))
        assert leaves(slots) == {"q_proj", "k_proj", "v_proj", "o_proj"}
        assert_exact(slots)
        slots.add("more")
        (warning,) = [str(w.message) for w in recwarn if "all-linear adapts" in str(w.message)]
        assert re.search("all-linear adapts .*q_proj.* here, without .*experts", warning)

    @pytest.mark.parametrize(
        ("build", "adapted", "warning"),
        [
            # All linear layers are adapted, and most of the model's weights are not among them.
            (
                architectures.qwen2_moe,
                {"q_proj", "gate_proj", "shared_expert_gate"},
                "adapts down_proj, .* here, without experts that share one parameter, which are no",
            ),
            *((build, set(), "here, without .*experts that share") for build in (gpt_oss, dbrx)),
            (jetmoe, {"kv_proj"}, "without .*experts that share one parameter"),
            # PEFT would load adapters of dense layers into the experts of the other layers.
            (
                partial(architectures.qwen3_moe, mlp_only_layers=[0]),
                {"q_proj", "k_proj", "v_proj", "o_proj"},
                r"adapts k_proj, .* without down_proj, gate_proj, up_proj",
            ),
            # PEFT reads the weight of a Mamba's output past the module.
            (mamba2, {"in_proj"}, r"all-linear adapts in_proj here, without out_proj"),
        ],
    )
    def test_what_is_left_out_is_named(self, build, adapted, warning):
        with pytest.warns(UserWarning, match=warning):
            slots = tiny.population(build(), (4, 2))
        assert adapted <= leaves(slots)

    @pytest.mark.parametrize("build", [lfm2, experts_of_linear_layers])
    def test_other_weights_are_no_experts(self, build, recwarn):
        tiny.population(build(), (4,))
        assert not [w for w in recwarn if "experts" in str(w.message)]

    def test_what_is_saved_peft_loads_for_the_same_layers(self, tmp_path):
        with pytest.warns(UserWarning, match="all-linear"):
            slots = tiny.population(architectures.qwen3_moe(), (4,))
        tiny.save(slots, "a0", tmp_path)
        from peft import PeftModel

        theirs = PeftModel.from_pretrained(architectures.qwen3_moe(), str(tmp_path))
        input_ids, _ = inputs(2)
        slots.activate("a0")
        with torch.no_grad():
            torch.testing.assert_close(
                theirs(input_ids=input_ids).logits, slots.base.model(input_ids=input_ids).logits
            )

    @pytest.mark.parametrize("targets", [["q_proj", "gate_proj"], ["gate_proj", "up_proj"]])
    def test_names_of_experts_are_refused_and_the_model_is_as_it_was(self, targets):
        base = SharedBase(architectures.qwen3_moe(), None, "tiny")
        before = tiny.shape_of(base.model)
        slots = AdapterSlots(base, tiny.lora(target_modules=targets))
        with pytest.raises(
            ConfigError, match=r"lora.target_modules=\[.*PEFT takes some of these for the experts"
        ):
            slots.add("a0")
        assert tiny.shape_of(base.model) == before

    def test_the_configuration_that_was_given_stays_as_it_was(self):
        config = tiny.lora()
        base = SharedBase(architectures.mixtral(), None, "tiny")
        with pytest.warns(UserWarning, match="all-linear adapts"):
            settled = resolve_targets(base, config)
        assert config.target_modules == "all-linear"
        assert len(settled.target_modules) == 8


def test_what_no_token_reaches_is_left_out_without_a_word_and_named_does_nothing(recwarn):
    slots = tiny.population(architectures.bart(), (4, 2))
    assert not [w for w in recwarn if "all-linear" in str(w.message)]
    assert leaves(slots) >= {"q_proj", "fc1"}
    assert not any("encoder_attn" in name for name in slots.layers)
    assert_exact(slots)
    slots = tiny.population(architectures.bart(), (4, 2), target_modules=["q_proj"])
    assert any("encoder_attn" in name for name in slots.layers)


class TestLayersOutOfOrder:
    def test_named_they_are_refused(self):
        base = SharedBase(tiny.llama(), None, "tiny")
        name = next(n for n in base.linear_inputs if n.endswith("0.mlp.up_proj"))
        base.linear_inputs[name] = "inputs of shape (3, 32)"
        slots = AdapterSlots(base, tiny.lora(target_modules=["q_proj", "up_proj"]))
        with pytest.raises(
            ModelError,
            match=r"'model.layers.0.mlp.up_proj' of 'tiny': expected inputs with one row "
            r"per completion, got inputs of shape \(3, 32\); leave it out",
        ):
            slots.add("a0")

    def test_by_default_they_are_left_out(self):
        base = SharedBase(tiny.llama(), None, "tiny")
        for name in base.linear_inputs:
            if name.endswith("up_proj"):
                base.linear_inputs[name] = "inputs of shape (3, 32)"
        slots = AdapterSlots(base, tiny.lora())
        with pytest.warns(UserWarning, match=r"here, without up_proj, which are not supported"):
            slots.add("a0")
        assert "up_proj" not in leaves(slots)
        assert {"q_proj", "down_proj"} <= leaves(slots)

    def test_no_layer_at_all(self):
        base = SharedBase(tiny.llama(), None, "tiny")
        base.linear_inputs.update(dict.fromkeys(base.linear_inputs, "unseen"))
        with pytest.raises(ModelError, match="expected linear layers whose rows can be told apart"):
            AdapterSlots(base, tiny.lora()).add("a0")


def test_scores_are_what_is_compared():
    """`assert_exact` sees an adapter that does nothing."""
    slots = tiny.population(architectures.opt(), (4, 2))
    input_ids, _ = inputs(1)
    slots.activate("a0")
    with torch.no_grad():
        adapted = scores(slots.base, slots.base.hidden(input_ids), input_ids)
        with slots.peft.disable_adapter():
            plain = scores(slots.base, slots.base.hidden(input_ids), input_ids)
    assert (adapted - plain).abs().max() > 1e-2


class TestNoTargets:
    """A LoraConfig that names no modules means what it means to PEFT."""

    def test_they_are_those_that_peft_adapts(self):
        model = tiny.llama()
        slots = AdapterSlots(SharedBase(model), LoraConfig(r=2))
        slots.add("only")
        theirs = get_peft_model(tiny.llama(), LoraConfig(r=2, task_type="CAUSAL_LM"))
        adapted = {
            n for n, m in theirs.base_model.model.named_modules() if isinstance(m, LoraLayer)
        }
        assert set(slots.lora_config("only").target_modules) == {"q_proj", "v_proj"}
        assert len(slots.layers) == len(adapted)

    def test_a_type_that_peft_does_not_know_is_named(self):
        model = tiny.llama()
        model.config.model_type = "unheard"
        with pytest.raises(ConfigError, match=r"for a model of type 'unheard'.*all-linear"):
            AdapterSlots(SharedBase(model), LoraConfig(r=2)).add("only")
