"""Reads and writes the two files of a PEFT folder."""

import hashlib
import json
from collections.abc import Iterator, Mapping
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
_BUFFER = 1 << 20
"""Bytes of small tensors that are written at once."""
#: Names that safetensors gives the dtypes of adapters and moments.
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


@dataclass(frozen=True)
class AdapterCopy:
    """A copy of a slot: tensors on the CPU by PEFT's file keys, and its configuration."""

    state: dict[str, Tensor]
    config: LoraConfig

    def write(self, folder: Path) -> dict[str, str]:
        """Write both files into a folder that exists; return their SHA-256 by name."""
        weights = write_tensors(self.state, folder / WEIGHTS, {"format": "pt"})
        config = self.config_json()
        (folder / CONFIG).write_bytes(config)
        return {WEIGHTS: weights, CONFIG: hashlib.sha256(config).hexdigest()}

    def config_json(self) -> bytes:
        """Return the contents of adapter_config.json, as PEFT writes it."""
        # PEFT lists a set in the order of iteration, which differs from process to process.
        fields = self.config.to_dict().items()
        plain = {name: sorted(v) if isinstance(v, set) else v for name, v in fields}
        return json.dumps(plain, indent=2, sort_keys=True).encode()


def write_tensors(
    tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None
) -> str:
    """Write tensors on the CPU as a safetensors file; return the SHA-256 of the file.

    The file has the bytes of `safetensors.torch.save`, but for the order of tensors where float16
    and bfloat16 are mixed. `save` holds Python's lock while it builds the whole file, so no other
    thread can launch a kernel; `save_file` makes a file that only its owner may read. This function
    writes one tensor after another.
    """
    # safetensors sorts by alignment, then by name, and fills the header up to 8 bytes.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    # Text, not mappings: thousands of new containers would start a collection of all garbage.
    entries = [f'"__metadata__":{_to_json(metadata)}'] if metadata else []
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        shape = ",".join(map(str, tensor.shape))
        entries.append(
            f'{_to_json(name)}:{{"dtype":"{_KINDS[tensor.dtype]}","shape":[{shape}],'
            f'"data_offsets":[{start},{end}]}}'
        )
    text = f"{{{','.join(entries)}}}".encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        digest.update(text)
        yield text
        for name in names:
            data = tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().data
            digest.update(data)
            yield data

    with file.open("wb", buffering=_BUFFER) as opened:
        opened.writelines(hashed())
    return digest.hexdigest()


def _to_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a PEFT folder; CheckpointError for a missing or damaged file."""
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise CheckpointError(
                f"checkpoint {folder}: expected {CONFIG} and {WEIGHTS}, {file} is missing; a "
                "pickle (*.bin, *.pt) is never loaded: save the adapter as safetensors"
            )
    try:
        return load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"checkpoint {folder / WEIGHTS}: not a whole safetensors file (truncated, or a pickle "
            f"under that name): {error}"
        ) from error
