"""The adapter that agents start from, `model.adapter`: read and checked in `check` and in a run."""

from __future__ import annotations

from peft import LoraConfig

from evo_grpo.errors import ConfigError
from evo_grpo.model.lora.configs import (
    check_lora_config,
    differences,
    module_of,
    only_names_modules,
    read_config,
)
from evo_grpo.model.lora.files import AdapterCopy, read_adapter
from evo_grpo.places import find
from evo_grpo.population.checkpoints.manifest import refuse_foreign_files
from evo_grpo.settings import LoraSettings, ModelConfig, RunConfig
from evo_grpo.training.sizing.model_size import ModelSize

_MERGE = (
    "merge this adapter into its base (merge_and_unload() of its PeftModel, then "
    "save_pretrained()), and set model.name to the folder of the merged model"
)


def lora_config(lora: LoraSettings) -> LoraConfig:
    """Convert the settings of an adapter into a LoraConfig of PEFT."""
    alpha = lora.alpha if lora.alpha is not None else 2 * lora.r
    return LoraConfig(
        r=lora.r,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType] -- PEFT types it as int and takes floats
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules,
        use_rslora=lora.use_rslora,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        task_type="CAUSAL_LM",
    )


def read_start(model: ModelConfig) -> AdapterCopy | None:
    """Read the adapter that agents start from; None if they start from the base.

    Raises:
        CheckpointError: A file is missing or damaged.
        ConfigError: It is more than plain LoRA, or unlike `model.lora` where that is given.
    """
    if model.adapter is None:
        return None
    folder = find(model.adapter)
    refuse_foreign_files(folder)
    adapter = AdapterCopy(read_adapter(folder), read_config(folder))
    try:
        check_lora_config(adapter.config, remedy=_MERGE)
    except ConfigError as error:
        raise ConfigError(f"model.adapter {model.adapter}: {error}") from error
    if model.lora.is_default:
        return adapter
    for field, theirs, ours in differences(adapter.config, lora_config(model.lora)):
        if not only_names_modules(field):
            raise ConfigError(
                f"model.lora: expected {field} {theirs!r} of model.adapter {model.adapter}, got "
                f"{ours!r}; leave model.lora out to take the adapter's own settings"
            )
    return adapter


def with_adapter(config: RunConfig, base: ModelSize) -> RunConfig:
    """Return settings whose `model.lora` is that of `model.adapter`, checked against the base.

    Raises:
        CheckpointError, ConfigError: As `read_start`; or it has a layer that the base lacks.
    """
    start = read_start(config.model)
    if start is None:
        return config
    own = {key: tensor for key, tensor in start.state.items() if ".lora_" in key}
    for key, tensor in own.items() if base.linears else ():
        name, number = module_of(key), 1 if ".lora_A" in key else 0
        shape = base.linears.get(name)
        if shape is None or tensor.shape[number] != shape[1 - number]:
            got = "which is none" if shape is None else f"with {tensor.shape[number]} features"
            raise ConfigError(
                f"model.adapter {config.model.adapter}: expected adapters of linear layers of "
                f"{base.name}, the head left out, got one of {name}, {got}; give an adapter of "
                f"this base, or {_MERGE}"
            )
    given = start.config
    named = given.target_modules if given.layers_to_transform is None else None
    targets = named if isinstance(named, str) else sorted(named or {*map(module_of, own)})
    # An adapter takes the rank of its agent where ranks are searched.
    searched, lora = config.search_space().names(), config.model.lora
    lora = LoraSettings(
        r=lora.r if "lora.r" in searched else given.r,
        alpha=lora.alpha if "lora.alpha" in searched else given.lora_alpha,
        dropout=given.lora_dropout,
        target_modules=targets,
        exclude_modules=given.exclude_modules,
        target_sets=lora.target_sets,
        use_rslora=given.use_rslora,
        rank_pattern=given.rank_pattern or {},
        alpha_pattern=given.alpha_pattern or {},
    )
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
