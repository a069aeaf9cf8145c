"""The two files of a PEFT folder, written from a copy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from evo_grpo.errors import CheckpointError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class AdapterCopy:
    """One slot as it was at one moment.

    Attributes:
        state: Tensors by PEFT's file keys, on the CPU.
        config: Its configuration, as it goes into adapter_config.json.
    """

    state: dict[str, Tensor]
    config: LoraConfig

    def write(self, folder: Path) -> str:
        """Write a PEFT folder; returns the SHA-256 of the safetensors file."""
        folder.mkdir(parents=True, exist_ok=True)
        data = save(self.state, metadata={"format": "pt"})
        (folder / WEIGHTS).write_bytes(data)
        self.config.save_pretrained(str(folder))
        return hashlib.sha256(data).hexdigest()


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a PEFT folder.

    Raises:
        CheckpointError: Naming the file that is missing, truncated or a pickle.
    """
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
