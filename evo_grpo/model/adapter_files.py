"""The two files of a PEFT folder, written from a copy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from peft import LoraConfig
from safetensors.torch import save
from torch import Tensor

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
