"""The bytes of an adapter's file are those that safetensors writes for torch."""

import json
import resource
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save

from evo_grpo.model.lora.adapter_files import AdapterCopy, read_adapter, write_tensors


def tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    return {
        "b.lora_A": torch.randn(2, 3, generator=generator).to(dtype),
        "a.lora_B": torch.randn(3, 2, generator=generator).to(dtype),
        "step": torch.tensor(3.0),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_bytes_are_those_of_safetensors(dtype, metadata, tmp_path):
    write_tensors(tensors(dtype), tmp_path / "file", metadata)
    assert (tmp_path / "file").read_bytes() == save(tensors(dtype), metadata)


def test_the_digest_is_that_of_the_file_whatever_the_size_and_shape_of_a_tensor(tmp_path):
    generator = torch.Generator().manual_seed(0)
    megabytes = torch.randn(3, 1 << 18, generator=generator)
    given = {
        "large": megabytes,
        "as large": megabytes + 1,
        "columns": megabytes[:, :5],
        "every other": megabytes[0].bfloat16()[::2],
        'a "name"\n\\ \N{SNOWMAN}': torch.arange(3.0),
        "none": torch.empty(0, 4),
    }
    digest = write_tensors(given, tmp_path / "file")
    written = (tmp_path / "file").read_bytes()
    assert written == save({name: value.contiguous() for name, value in given.items()})
    assert digest == sha256(written).hexdigest()


def test_a_disk_that_fills_up_within_a_large_tensor_is_an_os_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_tensors({"large": torch.zeros(1 << 20)}, tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_is_as_open_as_other_files_and_a_full_disk_is_an_os_error(tmp_path):
    write_tensors(tensors(torch.float32), tmp_path / "file")
    (tmp_path / "other").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises(OSError, match="No space left"):
        write_tensors(tensors(torch.float32), Path("/dev/full"))


def test_the_tensors_come_back(tmp_path):
    copy = AdapterCopy(tensors(torch.float32), LoraConfig(r=2))
    file = tmp_path / "adapter_model.safetensors"
    copy.write(tmp_path)
    for read in (load_file(file), read_adapter(tmp_path)):
        assert all(torch.equal(read[name], value) for name, value in copy.state.items())


def test_a_configuration_has_the_bytes_of_pefts_own_but_for_the_order_of_sets(tmp_path):
    modules = {"q_proj", "v_proj", "down_proj", "k_proj"}
    config = LoraConfig(r=2, target_modules=modules, exclude_modules={"lm_head", "embed"})
    config.save_pretrained(str(tmp_path))
    theirs = json.loads((tmp_path / "adapter_config.json").read_text())
    theirs["target_modules"] = sorted(modules)
    theirs["exclude_modules"] = ["embed", "lm_head"]
    written = AdapterCopy({}, config).config_json()
    assert written == json.dumps(theirs, indent=2, sort_keys=True).encode()
