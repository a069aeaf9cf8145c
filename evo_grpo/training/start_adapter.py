"""Reads and checks the adapter that agents start from, `model.adapter`."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from peft import LoraConfig
from torch import Tensor

from evo_grpo.errors import ConfigError
from evo_grpo.model.lora import configs
from evo_grpo.model.lora.files import WEIGHTS, AdapterCopy, read_adapter
from evo_grpo.places import find
from evo_grpo.population.checkpoints.read import refuse_foreign_files
from evo_grpo.settings import LoraSettings, ModelConfig
from evo_grpo.training.sizing.model_size import ModelSize, adapted_layers, rank_in

_SEARCHED = ("r", "alpha", "target_modules")


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

    The adapter must be plain LoRA and finite, and match `model.lora` if that is given.
    """
    if model.adapter is None:
        return None
    folder = find(model.adapter)
    refuse_foreign_files(folder)
    adapter = AdapterCopy(read_adapter(folder), configs.read_config(folder))
    try:
        configs.check_lora_config(adapter.config, remedy=configs.MERGE)
    except ConfigError as error:
        raise ConfigError(f"model.adapter {model.adapter}: {error}") from error
    for key, tensor in adapter.state.items():
        # Floats of 8 bits have no isfinite; they are refused by their dtype.
        if tensor.dtype.itemsize > 1 and not tensor.isfinite().all():
            raise ConfigError(
                f"model.adapter {model.adapter}: expected finite numbers, got NaN or infinity in "
                f"{key} of {folder / WEIGHTS}; give one that was saved before its training diverged"
            )
    if model.lora.is_default:
        return adapter
    for field, theirs, ours in configs.differences(adapter.config, lora_config(model.lora)):
        if not configs.only_names_modules(field):
            raise ConfigError(
                f"model.lora: expected {field} {theirs!r} of model.adapter {model.adapter}, got "
                f"{ours!r}; leave model.lora out to take the adapter's own settings"
            )
    return adapter


def with_adapter(model: ModelConfig, base: ModelSize, searched: Collection[str]) -> ModelConfig:
    """Return model settings whose `lora` is read from `adapter` and checked against the base.

    `searched` are the names of the hyperparameters that may change.
    """
    start = read_start(model)
    if start is None:
        return model
    config, lora = start.config, model.lora
    names = {configs.module_of(key) for key in start.state if ".lora_" in key}
    named = config.target_modules if config.layers_to_transform is None else None
    of_adapter = LoraSettings(
        r=config.r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=_plain(named or names),
        exclude_modules=_plain(config.exclude_modules),
        target_sets=lora.target_sets,
        use_rslora=config.use_rslora,
        rank_pattern=config.rank_pattern or {},
        alpha_pattern=config.alpha_pattern or {},
    )
    _check_tensors(start.state, base, of_adapter, model)
    # An adapter takes the rank, the alpha and the layers of its agent where these are searched.
    updates = {name: getattr(lora, name) for name in _SEARCHED if f"lora.{name}" in searched}
    of_adapter = of_adapter.model_copy(update=updates)
    return model.model_copy(update={"lora": of_adapter})


def _plain(modules: str | Iterable[str] | None) -> Any:  # noqa: ANN401 -- as `LoraSettings` takes it
    return modules if modules is None or isinstance(modules, str) else sorted(modules)


def _check_tensors(
    state: Mapping[str, Tensor], base: ModelSize, lora: LoraSettings, model: ModelConfig
) -> None:
    """Refuse an adapter whose tensors are not exactly A and B of the layers that `lora` names."""
    if not base.linears:
        return
    layers = adapted_layers(base, lora)
    if not model.lora.is_default and adapted_layers(base, model.lora).keys() != layers.keys():
        raise ConfigError(
            f"model.lora: expected the layers of model.adapter {model.adapter}, got "
            f"target_modules {model.lora.target_modules!r}; leave model.lora out to take the "
            "adapter's own settings"
        )
    shapes = {
        f"base_model.model.{name}.lora_{part}.weight": shape
        for name, (inputs, outputs) in layers.items()
        for part, shape in (
            ("A", (rank_in(name, lora), inputs)),
            ("B", (outputs, rank_in(name, lora))),
        )
    }
    for key in sorted({*shapes, *state}):
        tensor = state.get(key)
        got = "none" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
        if (
            tensor is None
            or tuple(tensor.shape) != shapes.get(key)
            or not tensor.is_floating_point()
            or tensor.dtype.itemsize < 2
        ):
            raise ConfigError(
                f"model.adapter {model.adapter}: expected A and B of the linear layers of "
                f"{base.name} that its adapter_config.json names, the head left out: as {key} "
                f"{shapes.get(key, 'none')} of 16 bits or more, got {got}; give an adapter of this "
                f"base, or {configs.MERGE}"
            )
