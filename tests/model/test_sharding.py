"""Which layers of a model are divided among processes, and what a divided base refuses.

What it computes is compared in tests/distributed/test_sharded.py.
"""

import ast
from pathlib import Path

import pytest
import tiny
import torch
from torch import nn

import evo_grpo
from evo_grpo.errors import ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.sharding import ShardedLayers, decoder_layers

PACKAGE = Path(evo_grpo.__file__).parent


@pytest.mark.parametrize("build", [tiny.llama, tiny.qwen2, tiny.gpt2])
def test_the_layers_are_those_of_the_model_in_its_order(build):
    base = SharedBase(build(num_hidden_layers=3) if build is not tiny.gpt2 else build(n_layer=3))
    layers = getattr(base.trunk, "layers", None) or base.trunk.h
    assert decoder_layers(base) == list(layers)


def test_a_model_without_known_layers_or_a_device_without_exchange_is_refused():
    base = SharedBase(tiny.llama())
    with pytest.raises(ModelError, match=r"expected engine\.device cpu or cuda .*, got mps"):
        ShardedLayers(base, torch.device("mps"))
    assert base.passes is None
    base.trunk = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"engine\.base: expected .*; set engine\.base: replicat"):
        decoder_layers(base)


def test_one_process_does_not_pass_its_part_off_as_the_weights():
    base = SharedBase(tiny.llama())
    whole = sum(p.numel() * 4 for p in base.model.parameters())
    assert base.bytes_here == whole
    base.gathered = None
    with pytest.raises(ModelError, match="expected its whole weights"):
        base.weights()


def test_every_pass_comes_by_the_base_where_it_is_counted():
    """A pass that went by would leave the other processes waiting for ever."""
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    calls = {
        (str(path.relative_to(PACKAGE)), ast.unparse(node.func))
        for path, text in texts.items()
        if "backward(" in text or "trunk(" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute | ast.Name)
        and ast.unparse(node.func).rpartition(".")[2] in ("trunk", "backward")
        and path != PACKAGE / "quickstart.py"
    }
    assert calls == {
        ("model/base.py", "self.trunk"),
        ("model/base.py", "loss.backward"),
        ("model/base.py", "self.passes.backward"),
        ("learn/learner.py", "self.updates.backward"),
        ("learn/updates.py", "self.slots.base.backward"),
        # Before the first step on a GPU, of a base that is not divided.
        ("model/forward/choice.py", "base.backward"),
        # DeepSpeed's own, which go by `SharedBase.entry` and have their backwards counted by it.
        ("population/zero/engine.py", "trunk"),
        ("population/zero/engine.py", "self.engine.backward"),
        ("population/zero/together.py", "self.engine.backward"),
    }
