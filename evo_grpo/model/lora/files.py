"""The two files of a PEFT folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from evo_grpo.errors import CheckpointError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
#: The dtypes of adapters and moments as safetensors names them.
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


@dataclass(frozen=True)
class AdapterCopy:
    """One slot as it was: tensors on the CPU by PEFT's file keys, and its configuration."""

    state: dict[str, Tensor]
    config: LoraConfig

    def write(self, folder: Path) -> None:
        """Write both files into a folder that exists."""
        write_tensors(self.state, folder / WEIGHTS, {"format": "pt"})
        (folder / CONFIG).write_bytes(self.config_json())

    def config_json(self) -> bytes:
        """Return the contents of adapter_config.json, as PEFT writes it."""
        # PEFT lists the names of a set as they come, which is another order in every process.
        fields = self.config.to_dict().items()
        plain = {name: sorted(v) if isinstance(v, set) else v for name, v in fields}
        return json.dumps(plain, indent=2, sort_keys=True).encode()


def write_tensors(
    tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors on the CPU as a safetensors file, with the bytes of `safetensors.torch.save`.

    That function makes the bytes of the whole file first, and holds Python's lock meanwhile, in
    which no other thread can launch a kernel; `save_file` replaces the file by one that only its
    owner may read. Here, the tensors are joined and written without the lock.
    """
    # safetensors sorts by alignment, then by name, and fills the header up to 8 bytes.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        kind, offsets = _KINDS[tensor.dtype], [start, end]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        flat = [tensors[name].detach().reshape(-1).view(torch.uint8) for name in names]
        opened.write(torch.cat(flat).numpy().data)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a PEFT folder, or say which file is missing, truncated or a pickle."""
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            other = [p.name for p in folder.glob("*.bin")] if folder.is_dir() else []
            pickled = (
                f" ({other[0]} is a pickle, which is never loaded; save it as safetensors)"
                if other
                else ""
            )
            raise CheckpointError(
                f"checkpoint {folder}: expected {CONFIG} and {WEIGHTS}, {file} is missing{pickled}"
            )
    try:
        return load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"checkpoint {folder / WEIGHTS}: not a whole safetensors file (truncated, or a pickle "
            f"under that name): {error}"
        ) from error


def check_adapter_state(
    state: dict[str, Tensor], current: Mapping[str, Tensor], folder: Path, base: str
) -> None:
    """Raise CheckpointError for the first key or shape of a file that differs from a slot's."""
    missing, extra = sorted(set(current) - set(state)), sorted(set(state) - set(current))
    if missing or extra:
        raise CheckpointError(
            f"checkpoint {folder}: its layers are not those of {base!r}: {len(missing)} missing "
            f"({missing[:1]}), {len(extra)} unknown ({extra[:1]}); expected an adapter of the same "
            "base model and target_modules"
        )
    for key, value in state.items():
        want = current[key].shape
        # Torch computes nothing in the floats of 8 bits.
        if not value.is_floating_point() or value.dtype.itemsize < 2:
            raise CheckpointError(
                f"checkpoint {folder}: {key} has dtype {value.dtype}, expected floating-point "
                "numbers of 16 bits or more; save the adapter again with PEFT or save_checkpoint"
            )
        if value.shape != want:
            rank_only = ("lora_A" in key and value.shape[1:] == want[1:]) or (
                "lora_B" in key and value.shape[:1] == want[:1]
            )
            what = (
                "another rank r"
                if rank_only
                else "another hidden size: an adapter of another base model"
            )
            raise CheckpointError(
                f"checkpoint {folder}: {key} has shape {tuple(value.shape)}, expected "
                f"{tuple(want)} for {base!r} ({what})"
            )
