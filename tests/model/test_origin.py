import functools

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.module_tracker import ModuleTracker
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from evo_grpo.model.origin import (
    class_from_libraries,
    foreign_functions,
    forward_change,
    from_libraries,
    global_hook,
    is_plain_linear,
)


def own(x):
    return x


def test_code_of_torch_and_transformers_is_told_from_a_persons_own(monkeypatch):
    """Also in a wrapper with another's name and module, and in one of torch around it."""
    theirs = nn.Module.__call__, modeling_llama.apply_rotary_pos_emb, LlamaForCausalLM.forward
    assert all(map(from_libraries, (*theirs, torch.nn.functional.scaled_dot_product_attention)))
    wrapped = functools.wraps(nn.Linear.forward)(own), torch.no_grad()(own)
    for function in (own, *wrapped, functools.partial(nn.Linear.forward), object()):
        assert not from_libraries(function)
    assert class_from_libraries(LlamaForCausalLM)
    assert not class_from_libraries(type("Own", (nn.Linear,), {}))
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", own)
    assert not class_from_libraries(modeling_llama.LlamaMLP)


@pytest.mark.parametrize(
    ("module", "name"),
    [(modeling_llama, "rotate_half"), (nn.functional, "scaled_dot_product_attention")],
)
def test_a_replaced_function_of_a_module_is_named(module, name, monkeypatch):
    assert not list(foreign_functions(vars(module)))
    monkeypatch.setattr(module, name, own)
    assert list(foreign_functions(vars(module))) == [name]


def test_what_another_model_compiled_is_no_foreign_function():
    own = dict(vars(modeling_llama))
    norm = modeling_llama.LlamaRMSNorm(4)
    norm.compile(backend="eager")
    norm(torch.ones(1, 4))
    assert vars(modeling_llama).keys() > own.keys()  # it leaves something behind
    assert not list(foreign_functions(vars(modeling_llama)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.register_forward_hook(own), "has a forward hook"),
        (lambda m: m.register_forward_pre_hook(own), "has a forward pre hook"),
        (lambda m: m.register_full_backward_hook(own), "has a backward hook"),
        (lambda m: m.register_full_backward_pre_hook(own), "has a backward pre hook"),
        (lambda m: setattr(m, "forward", own), "has a forward of its own"),
        (lambda m: nn.utils.weight_norm(m), "has a forward pre hook"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_changes_an_instance(change, said):
    linear = nn.Linear(2, 2)
    assert forward_change(linear) is None
    assert is_plain_linear(linear)
    assert not is_plain_linear(nn.LayerNorm(2))
    change(linear)
    assert forward_change(linear) == said
    assert not is_plain_linear(linear)


def test_hooks_on_all_modules():
    assert global_hook() is None
    hook = register_module_forward_hook(own)
    assert global_hook() == "global forward hook"
    hook.remove()
    with ModuleTracker():
        assert global_hook() is None
