"""Fetches the small files of a hub model, and reads the size of a base model from them.

The size comes from config.json or a GGUF header, without torch or weights. Layer sizes are known
only for the architectures that have `biases` in `FAMILIES`.
"""

import os
import re
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from evo_grpo.errors import ConfigError, ModelError
from evo_grpo.escaping import shorten
from evo_grpo.model.files import config_file, gguf_config, read_config
from evo_grpo.model.llama.families import FAMILIES
from evo_grpo.schema.patterns import ending, matches
from evo_grpo.settings import LoraSettings, ModelConfig
from evo_grpo.settings.engines.declaration import Shape
from evo_grpo.settings.model import missing_layers
from evo_grpo.sources import hub_message, resolve

#: Files that tell the size of a model and whether its tokenizer has a chat template.
CONFIG = "config.json"
TOKENIZER_FILES = ("tokenizer_config.json", "chat_template.jinja")
#: Files of which a model with weights has one.
WEIGHT_FILES = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
#: Seconds in which the hub has to answer the first request.
HUB_SECONDS = 4.0


class ModelSize(NamedTuple):
    """The size of a base model, as far as it is known before loading.

    Attributes:
        name: The name as the user wrote it.
        architecture: The model_type, for instance "llama"; empty if unknown.
        parameters: Number of parameters, or None if unknown.
        context: Longest sequence in tokens, or None if unknown.
        linears: Full name of each linear layer except the output head -> (inputs, outputs); empty
            if the architecture is unknown.
        note: Reason why a size is unknown, or empty.
        shape: The sizes of its layers; None if the architecture is unknown.
    """

    name: str
    architecture: str = ""
    parameters: int | None = None
    context: int | None = None
    linears: Mapping[str, tuple[int, int]] = MappingProxyType({})
    note: str = ""
    shape: Shape | None = None


def read_model_size(name: str) -> ModelSize:
    """Read the size of a model without loading it; raise ModelError if it is missing or damaged."""
    source = resolve(name)
    if source.gguf_file is not None:
        return _from_gguf(name, Path(source.path) / source.gguf_file)
    file = config_file(source)
    if file is None:
        return ModelSize(name, note="its size is unknown until it is downloaded from the hub")
    size = from_config(name, read_config(name, file))
    if size.parameters is not None:
        return size
    return size._replace(parameters=_stored_parameters(file.parent))


def classifier_parameters(name: str) -> int | None:
    """Return the number of parameters of a sequence classifier; None if it is unknown.

    The number is read from the files with the weights; without them, it is computed from the
    config.json. Raises ModelError for a missing model.
    """
    source = resolve(name)
    file = config_file(source)
    if file is None or source.gguf_file is not None:
        return None
    config, stored = read_config(name, file), _stored_parameters(file.parent)
    if stored is not None:
        return stored
    size = from_config(name, {**config, "tie_word_embeddings": True})
    labels = config.get("num_labels") or len(config.get("id2label") or ()) or 2
    if size.parameters is None or size.shape is None:
        return None
    return size.parameters + labels * size.shape.hidden


def lora_parameters(size: ModelSize, lora: LoraSettings) -> int | None:
    """Return the number of parameters of one adapter; None if the layers are unknown.

    Raises ConfigError if target_modules match no layer, or if matching a pattern takes too long.
    """
    if not size.linears:
        return None
    return sum(
        rank_in(layer, lora) * (inputs + outputs)
        for layer, (inputs, outputs) in adapted_layers(size, lora).items()
    )


def adapted_layers(size: ModelSize, lora: LoraSettings) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each layer that `lora` adapts; ConfigError if it adapts none."""
    if not size.linears:
        return {}
    excluded = lora.exclude_modules
    layers = {
        layer: ends
        for layer, ends in size.linears.items()
        if matches(layer, lora.target_modules)
        and not (excluded is not None and matches(layer, excluded))
    }
    if not layers:
        names = sorted({layer.rpartition(".")[2] for layer in size.linears})
        raise ConfigError(
            f"model.lora.target_modules: {lora.target_modules!r} matches no layer of {size.name}; "
            f"expected all-linear or some of {', '.join(names)}"
        )
    return layers


def check_adapters_fit(model: ModelConfig, largest: LoraSettings, size: ModelSize) -> None:
    """Refuse LoRA settings with layers that the model lacks; nothing if its layers are unknown.

    `largest` is the largest adapter of an agent.
    """
    lora = model.lora
    for name, targets in lora.target_sets.items() if size.linears else ():
        if text := missing_layers(targets, size.linears, size.name, lora.exclude_modules or ()):
            raise ConfigError(f"model.lora.target_sets.{name}: {text}")
    adapted_layers(size, largest)


def rank_in(layer: str, lora: LoraSettings) -> int:
    """Return a layer's LoRA rank by the first pattern that matches its name's end, as in PEFT."""
    ranks = (r for key, r in lora.rank_pattern.items() if re.match(ending(key), layer))
    return next(ranks, lora.r)


def from_config(name: str, config: Mapping[str, Any]) -> ModelSize:
    """Return the size of the model that a config.json describes."""
    kind = str(config["model_type"])
    context = _positive_integer(config.get("max_position_embeddings"))
    unknown = ModelSize(
        name, kind, None, context, note=f"the layers of architecture {kind!r} are not known here"
    )
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = [_positive_integer(config.get(key)) for key in (*needed, "vocab_size")]
    family = FAMILIES.get(kind)
    if family is None or family.biases is None or any(size is None for size in sizes):
        return unknown
    hidden, inner, layers, heads, vocabulary = (size or 0 for size in sizes)
    head = _positive_integer(config.get("head_dim")) or hidden // heads
    kv_heads = _positive_integer(config.get("num_key_value_heads")) or heads
    qkv_bias, o_bias, mlp_bias = family.biases
    linears: dict[str, tuple[int, int, bool]] = {
        "self_attn.q_proj": (hidden, heads * head, _flag(config, qkv_bias)),
        "self_attn.k_proj": (hidden, kv_heads * head, _flag(config, qkv_bias)),
        "self_attn.v_proj": (hidden, kv_heads * head, _flag(config, qkv_bias)),
        "self_attn.o_proj": (heads * head, hidden, _flag(config, o_bias)),
    }
    for part, inputs, outputs in (
        ("gate", hidden, inner),
        ("up", hidden, inner),
        ("down", inner, hidden),
    ):
        linears[f"mlp.{part}_proj"] = (inputs, outputs, _flag(config, mlp_bias))
    per_layer = sum(i * o + o * bias for i, o, bias in linears.values())
    per_layer += 2 * hidden + (2 * head if family.head_norms else 0)
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    return ModelSize(
        name,
        kind,
        layers * per_layer + embeddings + hidden,
        context,
        {
            f"model.layers.{layer}.{part}": (inputs, outputs)
            for layer in range(layers)
            for part, (inputs, outputs, _) in linears.items()
        },
        shape=Shape(layers, hidden, inner, heads * head, kv_heads * head, vocabulary, heads),
    )


def _from_gguf(name: str, file: Path) -> ModelSize:
    header, config = gguf_config(name, file)
    parameters = sum(prod(shape) for shape in header.shapes.values())
    return from_config(name, config)._replace(parameters=parameters)


def _stored_parameters(folder: Path) -> int | None:
    """Return the number of parameters in a folder's safetensors files; None if it has none."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(map(_header_parameters, files)) if files else None


def _header_parameters(file: Path) -> int:
    try:
        # safetensors bounds the header, and checks shapes against offsets and the file's size.
        with safe_open(file, framework="np") as stored:
            return sum(prod(stored.get_slice(key).get_shape()) for key in stored.keys())  # noqa: SIM118 -- no mapping
    except (OSError, SafetensorError) as error:
        text = f"{file} is not a complete safetensors file: {shorten(str(error))}"
        raise ModelError(text) from None


def _positive_integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _flag(config: Mapping[str, Any], key: bool | str) -> bool:
    return key if isinstance(key, bool) else bool(config.get(key, False))


def fetch_small_files(name: str) -> str | None:
    """Fetch a model's small files into the hub's cache; return why the hub did not answer, or None.

    Cached files are fetched again if the hub has newer ones. Nothing is fetched if `name` is no hub
    id, or if HF_HUB_OFFLINE is set. Raises ModelError if the hub refuses the model.
    """
    source = resolve(name)
    if source.local:
        return None
    try:
        _download(source.path)
    except Exception as error:  # the client's HTTP library, and its errors, differ between versions
        return _reason(name, error)
    return None


def check_available(name: str) -> None:
    """Refuse a hub model that cannot be downloaded, before a run is set up.

    A model whose weights are in the hub's cache needs no request.
    """
    source = resolve(name)
    if source.local or any(config_file(source, file) for file in WEIGHT_FILES):
        return
    why = fetch_small_files(name)
    if why is not None:
        raise ModelError(
            f"model {name!r}: {why}, and its weights are not in the cache; a hub id needs the "
            "network or a warm cache: connect, or name a folder with the model"
        )


def _download(repository: str) -> None:
    # Imported here: only a hub id needs it; it is a dependency of transformers.
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import RemoteEntryNotFoundError
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        """A progress bar that is not shown, because the files are small."""

        def __init__(self, *given: Any, **keywords: Any) -> None:
            super().__init__(*given, **{**keywords, "disable": True})

    endpoint = os.environ.get("HF_ENDPOINT")
    # A download repeats a failed request for almost a minute; this shows a missing network at once.
    get_hf_file_metadata(hf_hub_url(repository, CONFIG, endpoint=endpoint), timeout=HUB_SECONDS)
    get = partial(hf_hub_download, repository, endpoint=endpoint, tqdm_class=Silent)
    get(CONFIG)
    for file in TOKENIZER_FILES:
        try:
            get(file)
        except RemoteEntryNotFoundError:
            continue  # the cache records that the model has no such file


def _endpoint() -> str:
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT") or constants.ENDPOINT


def _reason(name: str, error: Exception) -> str:
    """Return why the hub could not be reached; raise ModelError if the hub refused the model."""
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and its config.json is not in the cache"
    hub, login = _endpoint(), "log in with: hf auth login"
    for kinds, text in (
        (
            errors.GatedRepoError | errors.DisabledRepoError,
            f"accept its terms on {hub}/{name}, then {login}",
        ),
        (
            errors.RepositoryNotFoundError,
            f"{hub} has no such id, or a private one; correct it or {login}",
        ),
        (errors.HFValidationError, f"expected a hub id owner/name: {error}"),
        (
            errors.RemoteEntryNotFoundError,
            "expected a config.json on the hub, found none; name its base",
        ),
    ):
        if isinstance(error, kinds):
            raise ModelError(f"model {name!r}: {text}") from None
    first_line = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
    return f"{hub} cannot be reached: {hub_message(first_line, 200)}"
