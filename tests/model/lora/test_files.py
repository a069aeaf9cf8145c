"""The bytes of an adapter's file are those that safetensors writes for torch."""

import hashlib

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save

from evo_grpo.model.lora.files import AdapterCopy, read_adapter, serialise


def tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    return {
        "b.lora_A": torch.randn(2, 3, generator=generator).to(dtype),
        "a.lora_B": torch.randn(3, 2, generator=generator).to(dtype),
        "step": torch.tensor(3.0),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_bytes_are_those_of_safetensors(dtype, metadata):
    assert serialise(tensors(dtype), metadata) == save(tensors(dtype), metadata)


def test_a_digest_is_that_of_the_file_and_the_tensors_come_back(tmp_path):
    copy = AdapterCopy(tensors(torch.float32), LoraConfig(r=2))
    digest = copy.write(tmp_path / "actor")
    file = tmp_path / "actor" / "adapter_model.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == digest
    assert file.read_bytes() == copy.serialise()
    for read in (load_file(file), read_adapter(tmp_path / "actor")):
        assert all(torch.equal(read[name], value) for name, value in copy.state.items())
