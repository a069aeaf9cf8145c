"""Makes the files of an export that come from a base: tokenizer, model folder, or merged model.

This module never runs Python code of a model, since a run folder may come from a stranger.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from safetensors import SafetensorError

from evo_grpo.errors import CheckpointError, ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.digest import base_digest, comparable_digests
from evo_grpo.model.loading import DTYPES, as_model_error, from_pretrained, load_tokenizer, quiet
from evo_grpo.sources import Source

TOLERANCE = 1e-3
"""Greatest difference, in nats, of a merged model's log-probs from those of base and adapter."""
_TOKENS = 16
"""Number of tokens on which a merged model is compared with base and adapter."""


def tokenizer_files(
    source: Source, revision: str | None, pad_token: str | None
) -> dict[str, bytes]:
    """Return the files of a base's tokenizer, including the chat template, by name.

    Revision None takes the newest. A tokenizer without a padding token gets `pad_token`.
    """
    tokenizer = load_tokenizer(source, revision)
    if tokenizer.pad_token is None and pad_token:
        tokenizer.pad_token = pad_token
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def write_base(source: Source, dtype: str, digest: str | None, folder: Path) -> None:
    """Write a base, dequantised if it is a GGUF file, as a model folder without its tokenizer.

    Weights with another digest than `digest` raise CheckpointError; None accepts all weights.
    """
    model, _ = from_pretrained(source, DTYPES[dtype], {}, with_tokenizer=False)
    _check_base(model, source, digest)
    _save(model, folder)


def stored_dtype(source: Source, revision: str | None, otherwise: str) -> str:
    """Return the dtype in which a base is stored, or `otherwise` for a GGUF file.

    A configuration that cannot be read and a quantised base raise ModelError.
    """
    if source.gguf_file is not None:
        return otherwise
    from transformers import AutoConfig

    pinned = {} if revision is None else {"revision": revision}
    with as_model_error(source, ": its config.json"):
        config = cast("Any", AutoConfig).from_pretrained(
            source.path, trust_remote_code=False, **pinned
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"model {source.name!r}: expected a base of float weights to merge an adapter into, "
            "got a quantised one, which is too coarse for an adapter; export without --merge"
        )
    stored = str(getattr(config, "dtype", None) or otherwise).removeprefix("torch.")
    return stored if stored in DTYPES else otherwise


def write_merged(
    source: Source,
    revision: str | None,
    adapter: Mapping[str, bytes],
    dtype: str,
    digest: str | None,
    folder: Path,
) -> None:
    """Merge an adapter into its base, in float32, and write a model folder of transformers.

    `adapter` has the two files of a PEFT folder, by name; `dtype` is the dtype to store; `digest`
    is as for `write_base`. If the merged model's log-probs differ from those of base and adapter,
    ModelError is raised.
    """
    from peft import PeftModel

    extra: dict[str, Any] = {} if revision is None else {"revision": revision}
    model, _ = from_pretrained(source, torch.float32, extra, with_tokenizer=False)
    _check_base(model, source, digest)
    with TemporaryDirectory() as temporary, warnings.catch_warnings():
        for name, data in adapter.items():
            (Path(temporary) / name).write_bytes(data)
        # PEFT 0.21 uses an old name of transformers 5; users cannot change this.
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", category=FutureWarning
        )
        network: Any = PeftModel.from_pretrained(model, temporary).eval()
    ids = torch.arange(_TOKENS)[None] % int(model.get_input_embeddings().weight.shape[0])
    with torch.no_grad():
        expected = network(input_ids=ids).logits
        merged = network.merge_and_unload(safe_merge=True)
        logits = merged(input_ids=ids).logits
    gap = (logits.log_softmax(-1) - expected.log_softmax(-1)).abs().max().item()
    if not gap <= TOLERANCE:
        raise ModelError(
            f"model {source.name!r}: expected the merged model to have the log-probs of base and "
            f"adapter, got a difference of {gap:.2g} nats, as with weights that layers share; "
            "export without --merge"
        )
    _save(merged.to(DTYPES[dtype]), folder)


def _check_base(model: Any, source: Source, digest: str | None) -> None:  # noqa: ANN401 -- of any transformers architecture
    """Raise CheckpointError if the weights have another digest than `digest`; None accepts all."""
    if digest is None:
        return
    actual = base_digest(SharedBase(model, None, source.name))
    if comparable_digests(actual, digest) and actual != digest:
        raise CheckpointError(
            f"model {source.name!r}: expected the weights with which the adapter was trained, got "
            "other weights; restore the base, or export on the machine of the run"
        )


def _save(model: Any, folder: Path) -> None:  # noqa: ANN401 -- as above
    folder.mkdir(exist_ok=True)
    try:
        with quiet():
            model.save_pretrained(folder)
    except SafetensorError as error:  # of a full disk
        raise OSError(str(error)) from error
