"""Defines one DeepSpeed engine over a shared base; agents take turns on the engine's adapter.

The engine's adapter is a slot that belongs to no agent. A turn begins by copying an agent's weights
and moments into the engine, and ends by copying both back. Agents are therefore added, copied and
removed without DeepSpeed, whose engines do not support this. In a process, an agent takes the
memory of its adapter and of the process's part of its moments.

The engine's adapter has the largest rank and all layers of any agent. In ranks and layers that an
agent lacks, A and B are zero, and so is their gradient, so they stay zero.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.model.digest import base_digest
from evo_grpo.model.forward.fused import population_forward
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.model.sharding import decoder_layers
from evo_grpo.schema.validation import shown

#: AdamW's state of the parts of a flat partition, by the number of its sub-group.
LocalMoments: TypeAlias = dict[int, dict[str, Tensor]]
"""Number of a flat tensor -> its AdamW `exp_avg` and `exp_avg_sq`, of equal size, and `step` ()."""
#: The slot of DeepSpeed's adapter.
TURN = "turn"


class _Parts(nn.Module):
    """A module of all modules whose parameters DeepSpeed divides; a call runs the base's trunk."""

    def __init__(self, parts: Sequence[nn.Module], run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.run = run

    def forward(self, **inputs: Any) -> Tensor:
        return self.run(**inputs)


@final
class ZeroEngine:
    """DeepSpeed's engine for one adapter over a base; all processes create an equal engine.

    `config`, of the engine's adapter, has the largest rank and all layers of any agent. Stage 2
    divides the adapter's moments and gradients among the processes; stage 3 also its weights and
    the decoder layers of the base, but not head and embedding. `accelerator` is an Accelerator
    whose active DeepSpeed plugin has this stage.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        config: LoraConfig,
        stage: int,
        accelerator: Any,  # noqa: ANN401 -- accelerate is untyped
        device: torch.device,
    ) -> None:
        """Build the engine; from now on every forward of the base goes through it."""
        self._deepspeed = import_deepspeed(device)
        self.slots, self.stage = slots, stage
        self.rank, self.ranks = accelerator.process_index, accelerator.num_processes
        base = slots.base
        base_digest(base)  # cache the digest of the whole weights
        slots.add(TURN, config)
        slots.reserved.add(TURN)
        self.parameters = slots.parameters(TURN)
        self.shapes = slots.shapes(TURN)  # in stage 3 parameters lose their shapes
        self._shapes = [*self.shapes.values()]
        matrices = [pair[TURN] for layer in slots.layers.values() for pair in _matrices(layer)]
        trunk: Any = base.trunk
        parts = _Parts(
            [*matrices, *(_leaves(slots) if stage == 3 else ())],
            lambda **inputs: trunk(**inputs).last_hidden_state,
        )
        group = {"params": self.parameters, "lr": 0.0, "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([group], lr=0.0, fused=True)
        self.engine = prepare(accelerator, parts, optimizer)
        for parameter in (*base.model.parameters(), *base.model.buffers()):
            if not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(device)
        base.entry = self._run
        if stage == 3:
            divided = [p for part in _leaves(slots) for p in part.parameters(recurse=False)]
            base.gathered = lambda: self._gathered(divided)
        self._parts = parts
        self._make_whole()

    @property
    def stepped(self) -> bool:
        """Whether the last step was taken; a step with a non-finite gradient is skipped."""
        return bool(self.engine.was_step_applied())

    @property
    def grad_norm(self) -> float:
        """Norm, before clipping, of the last step's gradient; inf for a gradient not finite."""
        return float(self.engine.get_global_grad_norm())

    def check_holds(self, rank: int, layers: Collection[str]) -> None:
        """Raise ConfigError if the engine's adapter has a rank below `rank` or lacks a layer."""
        most, modules = self.slots.lora_config(TURN).r, self.slots.modules(TURN)
        if rank > most or not modules.issuperset(layers):
            raise ConfigError(
                f"lora.r, lora.target_modules: expected a rank of at most {most} and layers among "
                f"{len(modules)} with engine.zero, whose adapter is as large as the ranges of the "
                f"search allow, got rank {rank} and {len(set(layers) - modules)} further layers; "
                "widen evolve.hyperparameters.lora.r or lora.target_modules, or set zero to null"
            )

    def begin(self, weights_of: str, moments: LocalMoments, group: dict[str, Any]) -> None:
        """Begin an agent's turn: load its weights and moments into the engine.

        `weights_of` is the agent's slot; of AdamW's `group`, lr, betas and weight_decay are used.
        """
        with self._writing(), torch.no_grad():
            own = _named(self.slots, weights_of)
            for key, parameter in zip(self.shapes, self.parameters, strict=True):
                fill(parameter, own.get(key))
            self.slots.mark_changed(TURN)
        for layer in self.slots.layers.values():
            if weights_of in layer.scaling:
                layer.scaling[TURN] = layer.scaling[weights_of]
        zero, adamw = self.engine.optimizer, self.engine.optimizer.optimizer
        zero.refresh_fp32_params()  # AdamW steps a separate float32 copy
        self._make_whole()
        adamw.state.clear()
        for number, flat in enumerate(self.flats):
            if number in moments:
                adamw.state[flat] = moments[number]
        for own in adamw.param_groups:
            own.update({name: group[name] for name in ("lr", "betas", "weight_decay")})

    def end(self, weights_to: str) -> LocalMoments:
        """End an agent's turn: copy the weights to the slot `weights_to`; return the moments."""
        turn = dict(zip(self.shapes, self.parameters, strict=True))
        with torch.no_grad():
            for key, parameter in _named(self.slots, weights_to).items():
                parameter.copy_(part_of(turn[key], parameter.shape))
        self.slots.mark_changed(weights_to)
        state = self.engine.optimizer.optimizer.state
        moments = {n: dict(state[flat]) for n, flat in enumerate(self.flats) if flat in state}
        state.clear()
        return moments

    def micro_batch(self, *, last: bool) -> None:
        """Set, before a forward, whether an optimizer step follows the backward of that forward."""
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of this process's part of a loss; gradients of all parts are summed."""
        # DeepSpeed averages the gradients.
        self.engine.backward(loss * self.ranks, scale_wrt_gas=False)

    def step(self, most: float | None) -> None:
        """Clip the gradient to norm `most` (None for no clipping), and take a step of AdamW."""
        self.engine.optimizer.clip_grad = most or 0.0
        self.engine.step()
        self._make_whole()

    @property
    def flats(self) -> list[Tensor]:
        """The flat tensors that AdamW updates: this process's parts of the adapter."""
        zero = self.engine.optimizer
        return list(
            zero.fp32_partitioned_groups_flat
            if self.stage == 3
            else zero.single_partition_of_fp32_groups
        )

    def whole_moments(self, moments: LocalMoments) -> dict[int, dict[str, Tensor]]:
        """Return an agent's whole moments by parameter position; all processes call this."""
        whole: dict[int, dict[str, Tensor]] = {}
        for number, state in sorted(moments.items()):
            for name, part in state.items():
                if name == "step":
                    values = [part.clone() for _ in self._members(number)]
                else:
                    values = self._joined(number, self._from_all(part))
                for (index, _), value in zip(self._members(number), values, strict=True):
                    whole.setdefault(index, {})[name] = value
        return whole

    def own_moments(self, moments: dict[int, dict[str, Tensor]]) -> LocalMoments:
        """Return this process's part of moments by parameter position; empty without moments."""
        local_moments: LocalMoments = {}
        for number, flat in enumerate(self.flats if moments else ()):
            members = self._members(number)
            for name in moments[members[0][0]]:
                tensors = [moments[index][name] for index, _ in members]
                part = tensors[0] if name == "step" else self._cut(number, tensors).to(flat.device)
                local_moments.setdefault(number, {})[name] = part.clone()
        return local_moments

    def _members(self, number: int) -> list[tuple[int, Any]]:
        """Return (position, parameter) for each parameter that flat tensor `number` contains."""
        zero = self.engine.optimizer
        groups = zero.fp16_groups if self.stage == 3 else zero.bit16_groups
        positions = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        return [(positions[id(p)], p) for p in groups[number]]

    def _from_all(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        dist.all_gather(parts, part.contiguous())
        return parts

    def _joined(self, number: int, parts: Sequence[Tensor]) -> list[Tensor]:
        """Join all processes' parts of flat tensor `number` into tensors shaped as parameters."""
        shapes = [self._shapes[index] for index, _ in self._members(number)]
        if self.stage == 2:  # one flat tensor of all parameters was cut
            pieces = torch.cat(list(parts)).split([*map(math.prod, shapes), self._padding])[:-1]
            return [piece.view(shape).clone() for piece, shape in zip(pieces, shapes, strict=True)]
        # Every parameter was cut separately.
        by_rank = [part.split(self._cuts(number)) for part in parts]
        whole = [torch.cat(pieces) for pieces in zip(*by_rank, strict=True)]
        return [w[: math.prod(s)].view(s).clone() for w, s in zip(whole, shapes, strict=True)]

    def _cut(self, number: int, whole: Sequence[Tensor]) -> Tensor:
        """Return this process's part of whole tensors; the inverse of `_joined`."""
        flat = [tensor.reshape(-1) for tensor in whole]
        if self.stage == 2:
            return _part(torch.cat(flat), len(self.flats[number]), self.rank)
        cuts = zip(flat, self._cuts(number), strict=True)
        return torch.cat([_part(tensor, size, self.rank) for tensor, size in cuts])

    def _cuts(self, number: int) -> list[int]:
        return [int(p.partition_numel()) for _, p in self._members(number)]

    @property
    def _padding(self) -> int:
        size = sum(math.prod(shape) for shape in self._shapes)
        return len(self.flats[0]) * self.ranks - size

    def _run(self, **inputs: Any) -> Tensor:
        # The engine counts the forwards that will have a backward.
        return (self.engine if torch.is_grad_enabled() else self._parts)(**inputs)

    def _writing(self) -> AbstractContextManager[None]:
        """Return a context in which the engine's adapter is writable."""
        if self.stage == 2:
            return nullcontext()
        return self._deepspeed.zero.GatheredParameters(self.parameters, modifier_rank=0)

    def _make_whole(self) -> None:
        """Gather the engine's adapter, because its weights are read without calling its modules."""
        if self.stage == 3:
            parameter: Any = self.parameters[0]
            parameter.all_gather(self.parameters)

    @contextmanager
    def _gathered(self, divided: Iterable[nn.Parameter]) -> Generator[None]:
        with self._deepspeed.zero.GatheredParameters(list(divided)):
            yield

    def idle_forward(self) -> None:
        """Take part in a forward of other processes, with a row of one token."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.slots.base.device)
        # Run the base only: adapters are not gathered in a forward.
        with torch.no_grad(), population_forward(self.slots.layers, RowLayout((None,), (1,))):
            self._parts(input_ids=ids, use_cache=False)


def _named(slots: AdapterSlots, name: str) -> dict[str, nn.Parameter]:
    return dict(zip(slots.shapes(name), slots.parameters(name), strict=True))


def fill(target: Tensor, values: Tensor | None) -> None:
    """Copy values, if any, into the first rows and columns of a tensor; zero the rest."""
    if values is None or values.shape != target.shape:
        target.zero_()
    if values is not None:
        part_of(target, values.shape).copy_(values)


def part_of(whole: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a view of the first rows and columns of a tensor, with shape `shape`."""
    return whole[tuple(slice(0, size) for size in shape)]


def _matrices(layer: LoraLayer) -> tuple[nn.ModuleDict, nn.ModuleDict]:
    return layer.lora_A, layer.lora_B


def _leaves(slots: AdapterSlots) -> list[nn.Module]:
    """Return the modules of the decoder layers that own parameters, except those of adapters."""
    adapters = {
        id(module)
        for layer in slots.layers.values()
        for matrices in _matrices(layer)
        for module in matrices.modules()
    }
    return [
        module
        for layer in decoder_layers(slots.base)
        for module in layer.modules()
        if id(module) not in adapters and next(module.parameters(recurse=False), None) is not None
    ]


def _part(flat: Tensor, size: int, rank: int) -> Tensor:
    """Return the part of a flat tensor that a rank has, padded with zeros to `size` entries."""
    part = flat[rank * size : (rank + 1) * size]
    return nn.functional.pad(part, (0, size - len(part)))


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
    """Return an accelerator for a device, with DeepSpeed's plugin for stage 2 or 3."""
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
