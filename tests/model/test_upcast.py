import architectures
import pytest
import tiny
import torch
from torch import nn

from evo_grpo.model.probing import in_float32

HALF = (torch.bfloat16, torch.float16)
BUILDS = (tiny.llama, tiny.gpt2, architectures.mpt, architectures.gemma3, architectures.mixtral)


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
@pytest.mark.parametrize("build", BUILDS)
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
