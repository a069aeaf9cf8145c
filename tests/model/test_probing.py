import architectures
import pytest
import tiny
import torch
from torch import nn
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    T5Config,
    T5ForConditionalGeneration,
    XLMConfig,
    XLMWithLMHeadModel,
    XLNetConfig,
    XLNetLMHeadModel,
)
from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig
from transformers.models.musicgen.modeling_musicgen import MusicgenForCausalLM

from evo_grpo.errors import ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.probing import (
    HALF,
    by_rows,
    in_float32,
    probe_ids,
    relative_error,
    tolerance,
    watch_linear_inputs,
)


def altered_norm(change):
    """Build a Llama whose last norm gets other hidden states."""

    def build():
        model = tiny.llama()
        original = model.model.norm.forward
        model.model.norm.forward = lambda x: original(change(x))
        return model

    return build


def xlm():
    config = XLMConfig(
        vocab_size=tiny.VOCABULARY, emb_dim=32, n_layers=2, n_heads=4, pad_index=0,
        pad_token_id=0, eos_index=1, bos_index=2, max_position_embeddings=tiny.CONTEXT,
    )  # fmt: skip
    return XLMWithLMHeadModel(config).eval()


def xlnet():
    config = XLNetConfig(vocab_size=tiny.VOCABULARY, d_model=32, n_layer=1, n_head=2, d_inner=32)
    return XLNetLMHeadModel(config).eval()


def musicgen():
    config = MusicgenDecoderConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        ffn_dim=32, num_codebooks=2, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    return MusicgenForCausalLM(config).eval()


def t5():
    config = T5Config(
        vocab_size=tiny.VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
    )
    return T5ForConditionalGeneration(config).eval()


def llama4():
    config = Llama4TextConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=tiny.HIDDEN, intermediate_size=48,
        intermediate_size_mlp=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=tiny.CONTEXT,
        pad_token_id=0, eos_token_id=tiny.EOS, bos_token_id=2,
    )  # fmt: skip
    return Llama4ForCausalLM(config).eval()


HEAD = "so its head is of an unknown kind"
CAUSAL = (
    r"expected a causal model, .*load an encoder with is_decoder=True, or use a decoder-only "
    r"language model$"
)
NO_TRUNK = r"base_model_prefix, got '{}', which it does not have; {}use a decoder-only"


class TestRefusedModels:
    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (altered_norm(lambda x: x + x.roll(-1, 1)), CAUSAL),
            (altered_norm(lambda x: x + x.mean(0, keepdim=True)), CAUSAL),
            (xlm, CAUSAL),
            (altered_norm(lambda x: x + 0.0 * torch.rand(())), "forward draws random numbers"),
            (architectures.bert, HEAD),
            (lambda: architectures.bert(is_decoder=True), HEAD),
            (musicgen, r"\(MusicgenForCausalLM\): expected a head with one matrix .* ModuleList;"),
            (lambda: tiny.llama().model, "expected a head with one matrix .*, got NoneType"),
            (xlnet, r"\(XLNetLMHeadModel\): .*; (use|load) "),
            (t5, NO_TRUNK.format("transformer", "")),
            (llama4, NO_TRUNK.format("language_model", "set .*'model' .*, or ")),
        ],
    )
    def test_what_it_is_and_what_to_use_instead_is_named(self, build, message):
        model, state = build(), torch.get_rng_state()
        with pytest.raises(ModelError, match=rf"^model .*{message}"):
            SharedBase(model, None, "mine")
        assert torch.equal(state, torch.get_rng_state())

    def test_a_part_below_the_head_is_taken_once_it_is_named(self):
        model = llama4()
        model.base_model_prefix = "model"
        assert SharedBase(model).trunk is model.model

    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    def test_a_model_that_looks_ahead_by_less_than_half_precision_shows(self, dtype):
        model = tiny.llama().to(dtype)
        SharedBase(model)
        norm = model.model.norm
        original = norm.forward
        norm.forward = lambda x: original(x + 0.03 * x.roll(-1, 1))
        with pytest.raises(ModelError, match="expected a causal model, whose tokens see their own"):
            SharedBase(model)

    def test_a_cap_that_moves_small_logits_a_little(self):
        """Drawn weights give logits of a few units, which a cap of 80 moves by a thousandth."""
        model = tiny.llama()
        original = model.forward
        moved = []

        def capped(*args, **kwargs):
            out = original(*args, **kwargs)
            plain, out.logits = out.logits, 80 * torch.tanh(out.logits / 80)
            moved.append(float((out.logits - plain).abs().max()))
            return out

        model.forward = capped
        with pytest.raises(ModelError, match="so its head is of an unknown kind"):
            SharedBase(model)
        assert 1e-3 < max(moved) < 1e-2

    @pytest.mark.parametrize("error", [AttributeError, IndexError, TypeError, NotImplementedError])
    def test_what_it_raises_is_named(self, error):
        model = tiny.llama()

        def failing(*_, **__):
            raise error("no such thing")

        model.model.norm.forward = failing
        with pytest.raises(
            ModelError,
            match=rf"does not run as a causal language model on token ids alone \({error.__name__}",
        ):
            SharedBase(model)

    def test_too_little_memory_is_no_fault_of_the_model(self):
        model = tiny.llama()

        def failing(*_, **__):
            raise torch.OutOfMemoryError("CUDA out of memory")

        model.model.norm.forward = failing
        with pytest.raises(torch.OutOfMemoryError):
            SharedBase(model)

    @pytest.mark.parametrize("bad", [tiny.VOCABULARY, -1])
    def test_an_end_or_padding_token_outside_of_the_vocabulary(self, bad):
        with pytest.raises(ModelError, match=rf"its padding token has id {bad}, expected one in"):
            SharedBase(tiny.llama(), tiny.fake_tokenizer(pad=bad))
        model = tiny.llama()
        model.generation_config.eos_token_id = [1, bad]
        with pytest.raises(
            ModelError,
            match=rf"model 'mine': its end token has id {bad}, expected one in \[0, 40\).*resize",
        ):
            SharedBase(model, None, "mine")


def layouts(trunk):
    table = tiny.noise((tiny.VOCABULARY, 4), 3)
    run, ids = lambda ids: trunk(table[ids]), probe_ids(tiny.VOCABULARY)
    return watch_linear_inputs(trunk, trunk, run, ids)[1]


class TestLinearInputs:
    def test_a_llama_keeps_its_rows(self):
        kinds = SharedBase(tiny.llama()).linear_inputs
        assert set(kinds.values()) == {"rows"}
        assert len(kinds) == 14
        assert "lm_head" not in kinds

    def test_flattened_rows_and_what_no_token_reaches(self):
        kinds = SharedBase(architectures.opt()).linear_inputs
        flat = {name.rpartition(".")[2] for name, kind in kinds.items() if kind == "flat"}
        assert flat == {"fc1", "fc2"}
        kinds = SharedBase(architectures.bart()).linear_inputs
        unseen = {name for name, kind in kinds.items() if kind == "unseen"}
        assert unseen
        assert all("encoder_attn" in name for name in unseen)

    @pytest.mark.parametrize(
        ("taken", "kind"),
        [
            # Routed tokens: as many of either row by chance.
            (lambda x: x[:, :2].reshape(-1, 4), "inputs of shape (4, 4)"),
            (lambda x: x[:, 0], "rows"),
            (lambda x: x[0, :, :], "inputs of shape (6, 4)"),
            (lambda x: x[0, 0], "inputs of shape (4,)"),
            (lambda x: x.reshape(-1, 4), "flat"),
            # The first token of every row, then the second.
            (lambda x: x.transpose(0, 1).reshape(-1, 4), "tokens in an order of their own"),
        ],
    )
    def test_what_a_layer_sees_has_a_name(self, taken, kind):
        class Taking(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 4)

            def forward(self, x):
                self.layer(taken(x))
                return x

        assert layouts(Taking()) == {"layer": kind}

    def test_a_single_vector_of_as_many_features_as_rows(self):
        trunk = torch.nn.Sequential(torch.nn.Linear(2, 2))
        _, kinds = watch_linear_inputs(
            trunk, trunk, lambda ids: trunk(ids[:, 0].float()), probe_ids(tiny.VOCABULARY)
        )
        assert kinds == {"0": "inputs of shape (2,)"}

    def test_a_linear_layer_that_returns_more_than_a_product(self):
        class Router(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x), x

        class Routed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.router = Router(4, 2)

            def forward(self, x):
                self.router(x)
                return x

        assert layouts(Routed()) == {"router": "a call of its own"}

    def test_nothing_of_it_stays(self):
        model = architectures.opt()
        SharedBase(model)
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
        assert not any(m.training for m in model.modules())


def test_ids_are_plain_and_rows_differ():
    ids = probe_ids(40, 2, 6, avoid=(0, 1))
    assert ids.shape == (2, 6)
    assert not {0, 1} & set(ids.flatten().tolist())
    assert not torch.equal(ids[0], ids[1])
    assert probe_ids(3, 2, 6, avoid=(0, 1)).tolist() == [[2] * 6] * 2
    assert probe_ids(1, 2, 2, avoid=(0,)).tolist() == [[0, 0]] * 2


def test_rows_of_flat_tokens():
    x = torch.arange(24.0).view(6, 4)
    assert torch.equal(by_rows(x, 2), x.view(2, 3, 4))


def test_errors_are_relative_and_a_single_token_counts_in_full_precision_alone():
    theirs = torch.ones(5, 3)
    ours = theirs.clone()
    ours[2] = 1.5
    assert relative_error(100 * ours, 100 * theirs) == pytest.approx(0.5)
    assert relative_error(ours.bfloat16(), theirs.bfloat16()) == 0.0
    assert relative_error(ours * float("nan"), theirs) == float("inf")
    assert tolerance(theirs) == tolerance(theirs.double()) < tolerance(theirs.bfloat16())
    assert relative_error(ours.double(), theirs.double()) == pytest.approx(0.5)


WIDENED = (tiny.llama, tiny.gpt2, architectures.mpt, architectures.gemma3, architectures.mixtral)


def state_of(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (t.data_ptr(), t.dtype, t.clone()) for name, t in tensors}


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name][:2] == other[name][:2] and torch.equal(one[name][2], other[name][2])
        for name in one
    )


def trunk_of(model):
    return getattr(model, model.base_model_prefix)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("build", WIDENED)
def test_it_computes_what_a_copy_in_float32_does_and_leaves_the_weights(build, dtype):
    model = build().to(dtype)
    trunk, before = trunk_of(model), state_of(model)
    ids = tiny.ids(2, 9)
    with torch.no_grad():
        own = trunk(input_ids=ids).last_hidden_state
        with in_float32(trunk):
            ours = trunk(input_ids=ids).last_hidden_state
        assert same(state_of(model), before)
        torch.testing.assert_close(trunk(input_ids=ids).last_hidden_state, own, rtol=0, atol=0)
        wide = trunk_of(model.float())(input_ids=ids).last_hidden_state
    assert (ours.dtype, own.dtype) == (torch.float32, dtype)
    # A factor of Gemma's embeddings is rounded with the table: for every row alike.
    close = 5e-2 if build is architectures.gemma3 else 1e-5
    torch.testing.assert_close(ours, wide, rtol=close, atol=close)
    assert not torch.allclose(own.float(), wide, rtol=1e-5, atol=1e-5)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_one_layer_at_a_time_is_widened():
    model = tiny.gpt2().bfloat16()
    seen = []
    for layer in model.transformer.h:
        layer.register_forward_hook(
            lambda *_: seen.append([layer.mlp.c_fc.weight.dtype for layer in model.transformer.h])
        )
    with in_float32(model.transformer), torch.no_grad():
        model.transformer(input_ids=tiny.ids(1, 3))
        assert model.transformer.wte.weight.dtype == torch.bfloat16
    assert seen == [[torch.float32, torch.bfloat16], [torch.bfloat16, torch.float32]]


def test_weights_are_put_back_when_a_layer_raises():
    model = tiny.gpt2().bfloat16()
    before = state_of(model)
    model.transformer.h[1].mlp.forward = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError), in_float32(model.transformer):
        model.transformer(input_ids=tiny.ids(1, 3))
    assert same(state_of(model), before)


def test_a_layer_that_is_called_within_itself_and_what_is_no_half():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4).bfloat16()])
            self.layers.append(self.layers[0])
            self.table = nn.Buffer(torch.arange(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Twice()
    before = state_of(model)
    x = tiny.noise((2, 4), 3)
    with in_float32(model), torch.no_grad():
        out = model(x.bfloat16())
    wide = nn.Linear(4, 4)
    wide.load_state_dict({k: v.float() for k, v in model.layers[0].state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(out, wide(wide(x.bfloat16().float())))
    assert same(state_of(model), before)
