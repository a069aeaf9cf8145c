"""Describes the decoder layers of model types for the faster forward of the Llama family.

A `Family` says how a model type of transformers differs from Llama: in norms, factors, rotary
positions and windows. `describe` combines a family and a model's configuration into a
`Description`. Decoding, the learn pass and the checks choose their operations from it once, so
features that a model lacks cost nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

#: The table of rotary positions of models that have one for all layers.
ALL_LAYERS = ""

#: Whether an activation of the MLP, by its configured name, is GELU; else it is SiLU.
_IS_GELU = {"silu": False, "swish": False, "gelu_pytorch_tanh": True}


@dataclass(frozen=True)
class Family:
    """A model type of transformers.

    Attributes:
        name: Prefix of its class names.
        module: Name of its module in transformers.models.
        norms: Names of the norms before the attention, after the attention, before the MLP and
            after the MLP; "" for no norm. The norms after attention and MLP act on their outputs,
            before the residual is added.
        head_norms: Norms of q and k before the rotary positions: "each" head is divided by a
            separate root mean square, or "all" heads by one; empty for no norms.
        one_plus: Whether a norm multiplies by 1 + weight instead of weight.
        rounds_once: Whether a norm in half precision rounds only after the weight.
        windows: Which layers have the configured sliding window: "" for none, "all", or "types"
            for those whose layer type is "sliding_attention".
        tables: Whether each type of layer has its own rotary table.
        without_rotary: Whether layers with 0 in `no_rope_layers` have no rotary positions.
        multipliers: Whether the embeddings, and the outputs of attention and MLP, are multiplied by
            factors.
        scale: Factor of the attention scores, from the configuration and the size of a head.
        trunk: Class name of the model below the head, without the prefix `name`.
        embedding: Class name of the embeddings, without the prefix; empty for torch's class.
        activation: Key of the activation in the configuration.
        kernels: Whether the kernels of `llama.cuda` support the family.
        biases: Three items, each a bool or a key of the configuration: whether q, k and v have
            biases, whether o has one, and whether the MLP has them. None if `training.sizing` does
            not know the layers' sizes.
    """

    name: str
    module: str
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    head_norms: Literal["", "each", "all"] = ""
    one_plus: bool = False
    rounds_once: bool = False
    windows: Literal["", "all", "types"] = ""
    tables: bool = False
    without_rotary: bool = False
    multipliers: bool = False
    scale: Callable[[Any, int], float] = lambda config, size: size**-0.5
    trunk: str = "Model"
    embedding: str = ""
    activation: str = "hidden_act"
    kernels: bool = True
    biases: tuple[bool | str, bool | str, bool | str] | None = None


_POST_NORMS = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_NORMS_AROUND = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

#: The families by model type; all else is as in Llama.
FAMILIES = {
    "llama": Family("Llama", "llama", biases=("attention_bias", "attention_bias", "mlp_bias")),
    "mistral": Family("Mistral", "mistral", windows="all", biases=(False, False, False)),
    "qwen2": Family("Qwen2", "qwen2", windows="types", biases=(True, False, False)),
    "qwen3": Family(
        "Qwen3",
        "qwen3",
        head_norms="each",
        windows="types",
        biases=("attention_bias", "attention_bias", False),
    ),
    "smollm3": Family("SmolLM3", "smollm3", windows="types", without_rotary=True),
    "granite": Family(
        "Granite",
        "granite",
        multipliers=True,
        scale=lambda config, size: float(config.attention_multiplier),
    ),
    "olmo2": Family(
        "Olmo2", "olmo2", norms=_POST_NORMS, head_norms="all", rounds_once=True, kernels=False
    ),
    "olmo3": Family(
        "Olmo3",
        "olmo3",
        norms=_POST_NORMS,
        head_norms="all",
        rounds_once=True,
        windows="types",
        tables=True,
        kernels=False,
    ),
    "gemma3_text": Family(
        "Gemma3",
        "gemma3",
        norms=_NORMS_AROUND,
        head_norms="each",
        one_plus=True,
        rounds_once=True,
        windows="types",
        tables=True,
        scale=lambda config, size: float(config.query_pre_attn_scalar) ** -0.5,
        trunk="TextModel",
        embedding="TextScaledWordEmbedding",
        activation="hidden_activation",
    ),
}


@dataclass(frozen=True)
class LayerKind:
    """The properties in which the layers of one model may differ.

    Attributes:
        table: The layer's rotary table: `ALL_LAYERS` or a layer type; None without rotary
            positions.
        window: Number of tokens that a token attends to, itself included; None for all before it.
    """

    table: str | None = ALL_LAYERS
    window: int | None = None


@dataclass(frozen=True)
class Description:
    """The decoder layers of one model.

    Attributes:
        scale: Factor of the attention scores.
        gelu: Whether the MLP's gate uses the tanh approximation of GELU; otherwise SiLU.
        embedding_multiplier: Factor of the embeddings, which their module does not apply.
        residual_multiplier: Factor of the outputs of attention and MLP.
    """

    family: Family
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    gelu: bool
    embedding_multiplier: float
    residual_multiplier: float
    layers: tuple[LayerKind, ...]

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the layers' rotary tables, without repeats."""
        return tuple(dict.fromkeys(k.table for k in self.layers if k.table is not None))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; empty if no layer has one."""
        windows = tuple(kind.window for kind in self.layers)
        return windows if any(windows) else ()


def describe(config: Any) -> Description | None:  # noqa: ANN401 -- a configuration of any model
    """Return the description of a model's layers; None if the model belongs to no family."""
    family = FAMILIES.get(config.model_type)
    if family is None or getattr(config, "use_bidirectional_attention", False):
        return None
    gelu = _IS_GELU.get(str(getattr(config, family.activation, None)))
    layers = _layers(config, family)
    if gelu is None or layers is None:
        return None
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Description(
        family=family,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=size,
        scale=family.scale(config, size),
        gelu=gelu,
        embedding_multiplier=float(config.embedding_multiplier) if family.multipliers else 1.0,
        residual_multiplier=float(config.residual_multiplier) if family.multipliers else 1.0,
        layers=layers,
    )


def _layers(config: Any, family: Family) -> tuple[LayerKind, ...] | None:  # noqa: ANN401 -- as above
    """Return the kind of each layer; None if the family does not support the configured layers."""
    count = int(config.num_hidden_layers)
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * count)
    window = int(getattr(config, "sliding_window", None) or 0) or None
    # transformers' Mistral ignores `use_sliding_window`.
    if family.windows != "all" and not getattr(config, "use_sliding_window", True):
        window = None
    sliding = "sliding_attention" in types
    if len(types) < count or not set(types) <= {"full_attention", "sliding_attention"}:
        return None
    if (family.windows != "types" and sliding) or (sliding and window is None):
        return None
    if not family.windows and window is not None:
        return None
    ropes = list(getattr(config, "no_rope_layers", None) or ()) if family.without_rotary else []
    if ropes and len(ropes) < count:
        return None
    # OLMo 3 has one table for all layers in older releases of transformers.
    per_type = family.tables and set(types) <= set(getattr(config, "rope_parameters", None) or ())
    return tuple(
        LayerKind(
            table=None if ropes and not ropes[i] else kind if per_type else ALL_LAYERS,
            window=window if family.windows == "all" or kind == "sliding_attention" else None,
        )
        for i, kind in enumerate(types[:count])
    )
