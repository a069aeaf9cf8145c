"""SharedBase: the frozen model and tokenizer that all agents of a population share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evo_grpo.errors import ModelError
from evo_grpo.model import logprobs, origin, quantized, row_limit
from evo_grpo.model.loading import from_pretrained, merge_dtype_keywords, pick_device, pick_dtype
from evo_grpo.model.probing import check_forward, columns_of_probe, probe_ids
from evo_grpo.sources import resolve
from evo_grpo.working import working

if TYPE_CHECKING:
    from transformers import Cache

    from evo_grpo.settings.engine import Kernels

#: Bytes of activations of one forward and backward on a CPU, and the range of tokens. With fewer
#: tokens, matmuls are small and passes many; more tokens exceed the cache without being faster.
ACTIVATION_BYTES = 1 << 29
CPU_TOKENS = (2048, 8192)
DEVICE_TOKENS = 4096
#: Keys of a config for the number of positions: most models, GPT-J, MPT, Whisper's decoder.
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
#: Keys of a config for the tanh cap of the logits.
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


class Passes(Protocol):
    """Contexts for the passes over a base that is divided among processes."""

    def forward(self) -> AbstractContextManager[None]:
        """Return a context that spans one forward of the trunk."""
        ...

    def backward(self) -> AbstractContextManager[None]:
        """Return a context that spans one backward through the trunk."""
        ...


class SharedBase:
    """A frozen causal language model, separated into trunk and head, and its tokenizer.

    The transformers model is frozen in place. Without a tokenizer, only token ids can be used.
    `name` is the name of the model in messages and checkpoints.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 -- of any transformers architecture, which share no typed base
        tokenizer: Any = None,  # noqa: ANN401 -- slow or fast, which share no typed base
        name: str = "",
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
        #: Arguments of the last `set_padding`: the id, and the token as a string.
        self.padding: tuple[int, str | None] | None = None
        #: Caches derived from the weights, such as other layouts of them, by name.
        self.derived: dict[str, Any] = {}
        #: Whether a model of the Llama family uses the layers of `model.llama`; with False, every
        #: model uses its own modules, the reference of comparisons.
        self.specialized = True
        #: Quantisation of the linear layers; None without quantisation.
        self.quantization: quantized.Quantization | None = None
        #: Whether kernels of `llama.cuda` compute the log-probs of tokens.
        self.head_kernels = False
        #: The setting `engine.kernels`.
        self.kernels: Kernels = "auto"
        #: Whether flash attention adds gradients in a fixed order; see `llama.cuda.segments`.
        self.in_order = True
        #: Contexts of the passes of a base that is divided among processes.
        self.passes: Passes | None = None
        #: Runs the trunk with keywords and returns hidden states; an engine may replace it.
        self.entry: Callable[..., Tensor] = self._trunk_states
        #: A context in which the weights are whole; None if one process cannot gather them.
        self.gathered: Callable[[], AbstractContextManager[None]] | None = nullcontext
        model.requires_grad_(False)
        model.eval()
        config = model.config
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        self.head: nn.Linear = _head(model, self.name)
        self.trunk: nn.Module = _trunk(model)
        divisor = getattr(config, "logits_scaling", 1.0)
        if divisor == 0:
            raise ModelError(
                f"model {self.name!r}: logits_scaling: expected a number other than 0 in its "
                "config, since logits are divided by it"
            )
        self.logit_scale = float(getattr(config, "logit_scale", None) or 1.0 / divisor)
        self.softcap = next((float(v) for n in _SOFT_CAPS if (v := getattr(config, n, None))), 0.0)
        positions = next((int(n) for c in _CONTEXTS if (n := getattr(config, c, 0))), 0)
        self.row_limit = row_limit.RowLimit(self.trunk, self.name, positions)
        self.vocabulary = int(self.head.weight.shape[0])
        self._features = _linear_features(self.trunk)
        self._check_ids()
        columns = columns_of_probe(model, self.context_length)
        ids = probe_ids(self.vocabulary, columns=columns, avoid=(self.pad_id, *self.eos_ids))
        parts = self.name, model, self.trunk, self.hidden, self.logits
        #: Layout of the inputs of each linear layer, by name; see `watch_linear_inputs`.
        self.linear_inputs = check_forward(*parts, ids.to(self.device))

    @property
    def context_length(self) -> int:
        """Maximum number of tokens in a row; 0 if there is no limit."""
        return self.row_limit.longest

    @property
    def micro_batch_tokens(self) -> int:
        """Default number of tokens, including padding, in one forward and backward."""
        if self.device.type != "cpu":
            return DEVICE_TOKENS
        token_bytes = self._features * self.dtype.itemsize
        least, most = CPU_TOKENS
        return min(most, max(least, ACTIVATION_BYTES // max(1, token_bytes)))

    @classmethod
    def load(
        cls,
        name: str,
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        tokenizer: Any = None,  # noqa: ANN401 -- as for the constructor
        quantization: quantized.Quantization | None = None,
        on_host: bool = False,
        **extra: Any,
    ) -> SharedBase:
        """Load and freeze a base by name.

        Args:
            name: Name of an embedded model, `smollm2`, a folder, a .gguf file or a hub id.
            device: A torch device string, or "auto" for CUDA if available, else the CPU.
            dtype: "float32", "bfloat16", "float16", a torch.dtype or "auto": float32 on the CPU,
                and bfloat16 on CUDA or float16 below compute capability 8.0. `torch_dtype` is an
                older spelling of `dtype`.
            tokenizer: Replaces the tokenizer of the model.
            quantization: Keep the linear layers in 8 or 4 bits; see `model.quantized`.
            on_host: Keep the model in CPU memory for now, in the dtype for the device.
            **extra: Keywords for the model's `from_pretrained`.
        """
        source = resolve(name)
        target = pick_device(device)
        dtype, extra = merge_dtype_keywords(dtype, extra)
        chosen = pick_dtype(dtype, target)
        if quantization is not None:
            extra = {
                **extra,
                **quantized.quantization_keywords(quantization, source, chosen, target),
            }
        with working(f"load the weights of {name}"):
            model, loaded = from_pretrained(source, chosen, extra, with_tokenizer=tokenizer is None)
        tokenizer = tokenizer if tokenizer is not None else loaded
        if quantization is None:
            return cls(model.to("cpu" if on_host else target), tokenizer, name)
        quantized.use_plain_products(model, quantization, name)
        base = cls(model, tokenizer, name)
        base.quantization = quantization
        return base

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the weights."""
        return self.head.weight.dtype

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All ids that end a completion; the tokenizer's end id comes first."""
        ids: list[int] = []
        generation = getattr(self.model, "generation_config", None)
        for holder in (self.tokenizer, generation, self.model.config):
            value = getattr(holder, "eos_token_id", None)
            ids += [value] if isinstance(value, int) else list(value or [])
        return tuple(dict.fromkeys(ids))

    @property
    def pad_id(self) -> int:
        """The padding id, which may be any valid id, since masks are made from lengths."""
        tokenizer_id = getattr(self.tokenizer, "pad_token_id", None)
        configured_id = None if self.padding is None else self.padding[0]
        ids = (n for n in (configured_id, tokenizer_id, *self.eos_ids) if isinstance(n, int))
        return next(ids, 0)

    def set_padding(self, pad_id: int, pad_token: str | None = None) -> None:
        """Set the padding id, and the padding token of a tokenizer that has none."""
        if not 0 <= pad_id < self.vocabulary:
            raise ModelError(
                f"pad_token_id: expected an id in [0, {self.vocabulary}) of {self.name!r}, "
                f"got {pad_id}"
            )
        if self.tokenizer is not None and self.tokenizer.pad_token is None and pad_token:
            self.tokenizer.pad_token = pad_token
        self.padding = (pad_id, pad_token)

    @property
    def bytes_here(self) -> int:
        """Bytes of the base's weights in this process, without adapters."""
        parts = [
            p.to_local() if isinstance(p, DTensor) else p
            for name, p in self.model.named_parameters()
            if "lora_" not in name
        ]
        return sum(part.numel() * part.element_size() for part in parts)

    def weights(self) -> dict[str, Tensor]:
        """Return the frozen weights by their names in `from_pretrained`, without adapters.

        If the weights are divided among processes, all processes must call this; each gets copies.
        """
        if self.gathered is None:
            raise ModelError(
                f"base {self.name!r}: expected its whole weights, got those of one of several "
                "processes (engine.base: sharded); do this in one process"
            )
        pointers: set[int] = set()
        weights: dict[str, Tensor] = {}
        with self.gathered():
            for name, value in self.model.state_dict().items():
                # Tied weights are stored once.
                if "lora_" not in name and value.data_ptr() not in pointers:
                    pointers.add(value.data_ptr())
                    tensor = value if self.gathered is nullcontext else value.cpu().clone()
                    weights[name.replace(".base_layer.", ".")] = tensor
        return weights

    def save(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the base as a model folder: config.json, model.safetensors and the tokenizer.

        `weights` is an earlier result of `weights()`. A quantised base raises ModelError.
        """
        if self.quantization is not None:
            raise ModelError(
                f"model {self.name!r}: quantised to {self.quantization}, it is not written; save "
                "adapters alone (lora_only=True), which fit the original model"
            )
        folder.mkdir(parents=True, exist_ok=True)
        tensors = self.weights() if weights is None else weights
        state = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        self.model.config.save_pretrained(str(folder))
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(str(folder))

    def check_same(self, folder: Path) -> None:
        """Raise ModelError if the weights in a model folder differ from those of this base."""
        weights = self.weights()
        with safe_open(folder / "model.safetensors", framework="pt") as saved:
            same = set(saved.keys()) == set(weights) and all(
                torch.equal(saved.get_tensor(k), v.cpu()) for k, v in weights.items()
            )
        if not same:
            raise ModelError(
                f"checkpoint {folder}: its base model is not {self.name!r}, and loading it would "
                "change every agent that shares the base; build an agent over it with "
                "GRPO.load(path)"
            )

    def hidden(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """Return final hidden states (B, T, H) of ids (B, T), with the active adapters."""
        return self.run(input_ids=input_ids, use_cache=False, **kwargs)

    def run(self, cache: Cache | None = None, **inputs: Any) -> Tensor:
        """Run the trunk and return final hidden states (B, T, H); every forward pass calls this.

        `cache` holds keys and values of earlier tokens. The call appends those of its inputs.
        """
        if cache is not None:
            inputs |= {self._cache_keyword: cache, "use_cache": True}
        with nullcontext() if self.passes is None else self.passes.forward():
            return self.entry(**inputs)

    def _trunk_states(self, **inputs: Any) -> Tensor:
        return self.trunk(**inputs).last_hidden_state

    @property
    def _cache_keyword(self) -> str:
        """The name of the trunk's cache argument; it varies with model and transformers."""
        parameters = inspect.signature(self.trunk.forward).parameters
        return next((n for n in ("cache_params", "cache") if n in parameters), "past_key_values")

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a loss whose forward was `run`."""
        with nullcontext() if self.passes is None else self.passes.backward():
            loss.backward()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the model's logits (..., V) fp32 of final hidden states (..., H)."""
        logits = self.head(hidden if self.logit_scale == 1.0 else hidden * self.logit_scale).float()
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def token_logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor,
        *,
        of_entropies: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies (M,) of targets (M,) from hidden states (M, H).

        See `linear_logprobs`. If the head is not a plain linear layer, its module is called.
        """
        if not origin.is_plain_linear(self.head):
            return logprobs.module_logprobs(
                self.logits, hidden, targets, temperature, self.vocabulary
            )
        return logprobs.linear_logprobs(
            hidden, self.head.weight, targets, temperature, bias=self.head.bias,
            scale=self.logit_scale, softcap=self.softcap, of_entropies=of_entropies,
            kernels=self.head_kernels,
        )  # fmt: skip

    def _check_ids(self) -> None:
        """Raise ModelError if an end or padding id is outside of the vocabulary."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        ids = [("end token", number) for number in self.eos_ids]
        ids += [("padding token", pad)] if isinstance(pad, int) else []
        for kind, number in ids:
            if not 0 <= number < self.vocabulary:
                raise ModelError(
                    f"model {self.name!r}: its {kind} has id {number}, expected one in "
                    f"[0, {self.vocabulary}), the vocabulary of its head; set it in the tokenizer "
                    "and in the model's config and generation_config, or call "
                    "model.resize_token_embeddings"
                )


def _head(model: Any, name: str) -> nn.Linear:  # noqa: ANN401 -- as for SharedBase
    head = model.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), Tensor):
        # None, or a list of heads, one per codebook of an audio model.
        raise ModelError(
            f"model {name!r} ({type(model).__name__}): expected a head with one matrix over its "
            f"vocabulary, got {type(head).__name__}; use a language model of text"
        )
    return head


def _trunk(model: Any) -> nn.Module:  # noqa: ANN401 -- as for SharedBase
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not hasattr(model, prefix):
        remedy = "use a decoder-only language model of text"
        # In some releases, text and image models have the type of the whole model.
        if isinstance(getattr(model, "model", None), nn.Module):
            remedy = f"set its base_model_prefix to 'model' where you build it, or {remedy}"
        raise ModelError(
            f"model {type(model).__name__}: expected a transformers causal language model with the "
            f"part below its head under base_model_prefix, got {prefix!r}, which it does not have; "
            f"{remedy}"
        )
    return getattr(model, prefix)


def _linear_features(trunk: nn.Module) -> int:
    """Return the sum of the input and output features of all linear layers.

    This approximates the number of activations of a token.
    """
    total = 0
    for module in trunk.modules():
        weight = getattr(module, "weight", None)
        if quantized.is_quantized(module):
            total += int(module.in_features) + int(module.out_features)  # pyright: ignore[reportArgumentType] -- of nn.Linear
        elif not isinstance(module, nn.Embedding) and isinstance(weight, Tensor):
            total += sum(weight.shape) if weight.ndim == 2 else 0
    return total
