"""Loads a model and its tokenizer to a device."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Literal, cast

import torch

from evo_grpo.errors import ModelError
from evo_grpo.escaping import shorten
from evo_grpo.model.alone import loading
from evo_grpo.model.files import check_files
from evo_grpo.sources import Source

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the torch dtype for a name or dtype.

    "auto" is float32 on the CPU; on CUDA it is bfloat16, or float16 on GPUs that emulate bfloat16.
    """
    if dtype == "auto" and device.type != "cuda":
        return torch.float32
    if dtype == "auto":
        if torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16
        _warn_float16(torch.cuda.get_device_name(device))
        return torch.float16
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"dtype: expected auto, {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[name]


@cache
def _warn_float16(card: str) -> None:
    warnings.warn(
        f"engine.dtype: auto is float16 on {card}, which emulates bfloat16",
        UserWarning,
        stacklevel=2,
    )


def merge_dtype_keywords(
    dtype: str | torch.dtype, extra: dict[str, Any]
) -> tuple[str | torch.dtype, dict[str, Any]]:
    """Return the dtype, from `dtype` or from `torch_dtype` in `extra`, and the other keywords.

    If the two differ, and neither is "auto", ModelError is raised; transformers would ignore
    torch_dtype.
    """
    keywords = dict(extra)
    older = keywords.pop("torch_dtype", None)
    if older is None:
        return dtype, keywords
    names = {str(word).removeprefix("torch.") for word in (dtype, older)} - {"auto"}
    if len(names) > 1:
        raise ModelError(
            f"dtype: got dtype={dtype!r} and torch_dtype={older!r}, expected one; leave "
            "torch_dtype out, the older spelling"
        )
    return older if dtype == "auto" else dtype, keywords


def pick_device(device: str) -> torch.device:
    """Return the torch device for "auto" or a device string; ModelError if it is not available."""
    available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if device == "auto":
        return torch.device("cuda" if available["cuda"]() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ModelError(
            f"device: expected auto, cpu, mps, cuda or cuda:N, got {device!r} (engine.device in "
            "population.yaml)"
        ) from error
    if chosen.type in available and not available[chosen.type]():
        raise ModelError(
            f"device: {device!r} asked for, but torch finds no {chosen.type.upper()} device; use "
            "auto or cpu (engine.device in population.yaml)"
        )
    return chosen


def from_pretrained(
    source: Source,
    dtype: torch.dtype,
    extra: dict[str, Any],
    *,
    with_tokenizer: bool,
    task: Literal["CausalLM", "SequenceClassification"] = "CausalLM",
) -> tuple[Any, Any]:
    """Load a model for a task, and optionally its tokenizer (else None).

    `extra` are keywords for the model's `from_pretrained`, among which a dtype overrides `dtype`.
    Python code of the model or its tokenizer runs only if `extra` has `trust_remote_code=True`;
    the user is not asked.
    """
    # Imported here: transformers takes seconds, and `evo-grpo check` must answer at once.
    import transformers
    from transformers import AutoTokenizer

    # Without a value, transformers would ask on standard input whether it may run the code.
    trust = extra.get("trust_remote_code", False)
    if not isinstance(trust, bool):
        raise ModelError(
            f"model {source.name!r}: trust_remote_code: expected true or false, got {trust!r}"
        )
    keywords = _keywords(source, trust)
    check_files(source)
    with as_model_error(source), quiet(), warnings.catch_warnings():
        # The gguf reader hands transformers a read-only array; it is copied before anything writes.
        warnings.filterwarnings(
            "ignore", message="The given NumPy array is not writable", category=UserWarning
        )
        model, report = getattr(transformers, f"AutoModelFor{task}").from_pretrained(
            source.path, output_loading_info=True, **{"dtype": dtype, **extra, **keywords}
        )
        tokenizer = (
            cast("Any", AutoTokenizer).from_pretrained(source.path, **keywords)
            if with_tokenizer
            else None
        )
    if source.gguf_file:
        # The weights are floats now, but a saved model would have the quantisation of the file.
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
    if missing := sorted(report["missing_keys"]):
        # transformers fills missing weights with random numbers, which only its log reports.
        raise ModelError(
            f"model {source.name!r}: {len(missing)} weights of its config.json are in no file of "
            f"{source.path!r} ({missing[0]}, ...); expected weights and config.json of one model"
        )
    return model, tokenizer


def load_tokenizer(
    source: Source, revision: str | None = None, *, trust_remote_code: bool = False
) -> Any:  # noqa: ANN401 -- of any class
    """Load the tokenizer of a model, without its weights; a revision of None takes the newest."""
    from transformers import AutoTokenizer

    keywords = _keywords(source, trust_remote_code, revision)
    with as_model_error(source, ": its tokenizer"), quiet():
        return cast("Any", AutoTokenizer).from_pretrained(source.path, **keywords)


def _keywords(source: Source, trust: bool, revision: str | None = None) -> dict[str, Any]:
    values = {"gguf_file": source.gguf_file, "revision": revision}
    return {"trust_remote_code": trust, **{name: v for name, v in values.items() if v}}


@contextmanager
def as_model_error(source: Source, what: str = "") -> Generator[None]:
    """Raise ModelError in place of any exception that transformers raises for a model's files.

    `what` names a part of the model, such as ": its tokenizer".
    """
    try:
        yield
    except Exception as error:
        hint = "" if source.local else "; a hub id needs the network or a warm cache"
        raise ModelError(
            f"model {source.name!r}{what} cannot be loaded from {source.path!r}{hint}: "
            f"{shorten(f'{type(error).__name__}: {error}', 3000)}"
        ) from error


@contextmanager
def quiet() -> Generator[None]:
    """Open a context that excludes other loads (see `model.alone`) and hides progress bars."""
    from transformers import modeling_gguf_pytorch_utils as gguf_files
    from transformers.utils import logging

    with loading():  # what another thread has switched off is on again then
        # GGUF files use tqdm's own bar, which the switch does not change.
        enabled, bar = logging.is_progress_bar_enabled(), getattr(gguf_files, "tqdm", None)
        logging.disable_progress_bar()
        if bar is not None:
            setattr(gguf_files, "tqdm", partial(bar, disable=True))  # noqa: B010 -- no name of its types
        try:
            yield
        finally:
            if bar is not None:
                setattr(gguf_files, "tqdm", bar)  # noqa: B010 -- no name of its types
            if enabled:
                logging.enable_progress_bar()
