"""Sets up DeepSpeed: its environment, the process group, and accelerate's plugin for a stage."""

from __future__ import annotations

import logging
import os
import warnings
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.schema.validation import shown

STAGES = (2, 3)
_SETTINGS: dict[str, Any] = {
    # Rows are divided before they reach DeepSpeed, and the learner decides when a step is complete.
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    # Every agent has its own bound, which is set before each step.
    "gradient_clipping": 0.0,
    # Stock AdamW; DeepSpeed's AdamW for the CPU would be compiled for minutes.
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
_PARTITIONING: dict[str, Any] = {
    "overlap_comm": False,
    # Fetch layers only when they are needed: passes for sampling, learning and the reference
    # alternate, so the next layer cannot be predicted from the previous pass.
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}


def own_accelerator(stage: int, device: torch.device) -> Any:  # noqa: ANN401 -- accelerate is untyped
    """Return an accelerator with DeepSpeed's plugin for stage 2 or 3, computing on a device."""
    import_deepspeed(device)
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, is_initialized
    from accelerate.utils import InitProcessGroupKwargs

    if not is_initialized():
        _join_alone(device)
        # Pass both plugins at once: accelerate accepts none after the first accelerator exists.
        plugins = {
            _key(zero_stage): DeepSpeedPlugin(zero_stage=zero_stage, zero3_init_flag=False)
            for zero_stage in STAGES
        }
        plugins = {_key(stage): plugins[_key(stage)], **plugins}  # the first plugin is in force
        backend = InitProcessGroupKwargs(backend="gloo" if device.type == "cpu" else "nccl")
        return Accelerator(deepspeed_plugin=plugins, kwargs_handlers=[backend])
    existing = AcceleratorState().deepspeed_plugins
    if not isinstance(existing, dict) or _key(stage) not in existing:
        raise ConfigError(
            "engine.zero: expected to make the first accelerator of this process, and there is one "
            "already, to which DeepSpeed cannot be added; make yours with "
            f"DeepSpeedPlugin(zero_stage={stage}) and pass it as accelerator="
        )
    AcceleratorState().select_deepspeed_plugin(_key(stage))
    return Accelerator()


def stage_of(accelerator: Any) -> int | None:  # noqa: ANN401 -- whatever the user gives
    """Return the ZeRO stage of the user's accelerator; None without one or without DeepSpeed."""
    if accelerator is None:
        return None
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    if not isinstance(accelerator, Accelerator):
        raise ConfigError(
            f"accelerator: expected an accelerate.Accelerator, or None, got {shown(accelerator)}"
        )
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        if accelerator.num_processes == 1:
            return None
        raise ConfigError(
            f"accelerator: expected one with DeepSpeed for {accelerator.num_processes} processes, "
            f"got one of the kind {accelerator.distributed_type.value}; make it with "
            "Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2)), or divide the agents "
            "among processes with evo-grpo run --nproc"
        )
    plugin: Any = accelerator.state.deepspeed_plugin
    config, stage = plugin.deepspeed_config, plugin.zero_stage
    zero = config["zero_optimization"]
    problems = [] if stage in STAGES else [f"zero_stage {stage!r}"]
    problems += [
        n for n in ("fp16", "bf16") if str(config.get(n, {}).get("enabled")).lower() == "true"
    ]
    parts = ("offload_optimizer", "offload_param")
    problems += [n for n in parts if zero.get(n, {}).get("device", "none") != "none"]
    if problems:
        raise ConfigError(
            "accelerator: expected a DeepSpeedPlugin with zero_stage 2 or 3, and neither mixed "
            "precision nor offloading, since agents are adapters in float32 with their moments, "
            f"got {problems[0]}"
        )
    return int(stage)


def prepare(
    accelerator: Any,  # noqa: ANN401 -- accelerate is untyped
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Any:  # noqa: ANN401 -- DeepSpeed's engine, which is untyped
    """Return DeepSpeed's engine for a module, with the optimizer of its trained parameters.

    DeepSpeed divides the trained parameters, and at stage 3 also the frozen ones.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config.update(_SETTINGS)
    config["zero_optimization"].update(_PARTITIONING)
    # An earlier engine with the same accelerator may have set this.
    config.pop("train_batch_size", None)
    accelerator.deepspeed_engine_wrapped = None
    engine, _ = accelerator.prepare(module, optimizer)
    # Otherwise transformers would divide every model that this process loads later.
    unset_hf_deepspeed_config()
    return engine


def import_deepspeed(device: torch.device) -> Any:  # noqa: ANN401 -- a module
    """Import DeepSpeed for a device, without its log output and its compiler."""
    if device.type not in ("cpu", "cuda"):
        raise EngineUnavailable(
            f"engine.zero: expected engine.device cpu or cuda, got {device.type}; set zero to null"
        )
    # DeepSpeed would search for devices, and warn if it finds none.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    # torch 2.13 renamed collectives that DeepSpeed 0.19 calls.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    try:
        deepspeed: Any = import_module("deepspeed")
    except ImportError as error:
        raise EngineUnavailable(
            "engine.zero: DeepSpeed is not installed; install it with: pip install "
            "'evo-grpo[deepspeed]', or set engine.zero to null"
        ) from error
    # The metrics of an agent already report a skipped step.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed would compile a shared-memory backend for a minute; gloo is sufficient.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _key(stage: int) -> str:
    return f"zero{stage}"


def _join_alone(device: torch.device) -> None:
    """Create the process group of a single process that no launcher has started."""
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        alone: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] -- documented there
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
