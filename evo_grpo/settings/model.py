"""The group `model`: the base, and the adapter that each agent trains over it."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from typing import Any, ClassVar

from evo_grpo.schema.group import Group, OptionalStrings, PlainMapping, Strings, setting


class LoraSettings(Group):
    """The adapter that each agent trains, under PEFT's names where it has them."""

    r: int = setting(8, "Rank of the two matrices.", ge=1)
    alpha: float | None = setting(
        None, "Scale of the update times the rank; null means twice `r`.", gt=0
    )
    dropout: float = setting(0.0, "Dropout before the first matrix.", ge=0, lt=1)
    target_modules: Strings = setting(
        "all-linear",
        "Layers that get an adapter: `all-linear`, a list of names such as `[q_proj, v_proj]`, or "
        "a regular expression for whole module names.",
    )
    exclude_modules: OptionalStrings = setting(
        None, "Layers that get none, named as in `target_modules`."
    )
    use_rslora: bool = setting(False, "Scale by alpha over the square root of the rank.")
    rank_pattern: PlainMapping = setting(
        factory=dict[str, Any], meaning="Ranks of single layers, by name or regular expression."
    )
    alpha_pattern: PlainMapping = setting(
        factory=dict[str, Any], meaning="Alphas of single layers, by name or regular expression."
    )


class ModelConfig(Group):
    """The one frozen base model. A plain string is its name: `model: tiny-sums`."""

    shorthand: ClassVar[str | None] = "name"

    name: str = setting(
        meaning="An embedded model (`tiny-sums`, `tiny-foods`), `smollm2` (from the extra of that "
        "name), a model folder, a `.gguf` file, or a hub id such as `owner/name`. In Python also a "
        "transformers module.",
        min_length=1,
    )
    lora: LoraSettings = setting(LoraSettings(), "The adapter that each agent trains.")
    config: PlainMapping = setting(
        factory=dict[str, Any],
        meaning="Keywords for `from_pretrained`, for instance `{attn_implementation: eager}`.",
    )
    trust_remote_code: bool = setting(
        False, "Run Python code that comes with the model's files. Only for models you trust."
    )
    adapter: str | None = setting(
        None,
        "A PEFT folder that every agent starts from, reference included; null starts from the "
        "base.",
        min_length=1,
    )
