"""Loads an agent into a slot, from a checkpoint (see `write`) or a plain PEFT folder."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from peft import LoraConfig
from pydantic import AfterValidator, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from evo_grpo.errors import CheckpointError, ConfigError, RunDirError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.digest import base_digest, comparable_digests
from evo_grpo.model.lora.adapter_files import CONFIG, WEIGHTS, read_adapter
from evo_grpo.model.lora.configs import read_config, with_targets
from evo_grpo.model.lora.load import AdapterPlan, padded, plan_adapter
from evo_grpo.population.checkpoints.write import FORMAT, OPTIMIZER
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.state import START, AgentState, adapter_config
from evo_grpo.record.names import ATTRIBUTES
from evo_grpo.record.plain import MAX_JSON_BYTES, check_digests, check_relative, refuse_links
from evo_grpo.record.records import score_from_json
from evo_grpo.schema.hparams import LORA, Hparams
from evo_grpo.schema.problems import validated
from evo_grpo.schema.validation import short_integer
from evo_grpo.types import Score

#: AdamW's state of a parameter, in the order in which all ranks exchange it.
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_OWN = (ATTRIBUTES, OPTIMIZER, CONFIG, WEIGHTS, "actor", "reference", "base")
"""All entries of a checkpoint or a PEFT folder that are ever read."""


@dataclass(frozen=True)
class _Attributes:
    """The content of attributes.json.

    `files` has the SHA-256 of every other file except those of a saved base, by path in the folder.
    `reference` is "own", "start" (the adapter that the agents started from) or "base".
    """

    format: int
    settings: dict[str, Any]
    base: str
    base_digest: str
    dtype: str
    vocabulary: int
    hparams: dict[str, Any]
    member: dict[str, Any]
    history: list[dict[str, Any]]
    steps: int
    reference_updates: int
    has_optimizer: bool
    lora_only: bool
    objects: list[str]
    padding: tuple[int, str | None] | None
    files: dict[Annotated[str, AfterValidator(check_relative)], str]
    reference: str
    dead_steps: int = 0
    calls: int = 0


_SCHEMA = TypeAdapter(_Attributes)


def refuse_foreign_files(folder: Path) -> None:
    """Refuse a checkpoint with a link, pipe or device in it; `folder` itself may be a link."""
    try:
        for name in _OWN:
            refuse_links(folder / name, MAX_JSON_BYTES)
    except RunDirError as error:
        raise CheckpointError(f"checkpoint {error}") from error


def peft_folder(folder: Path) -> Path | None:
    """Return the folder of a plain PEFT adapter: `folder` or its actor/; None if there is none.

    A folder with attributes or AdamW's moments is a checkpoint, not a plain adapter.
    """
    refuse_foreign_files(folder)
    parts = (ATTRIBUTES, "attributes.pt", OPTIMIZER)
    if any((folder / part).exists() for part in parts):
        return None
    places = (folder, folder / "actor")
    return next((place for place in places if (place / CONFIG).is_file()), None)


def read_attributes(folder: Path) -> dict[str, Any]:
    """Read attributes.json; CheckpointError if it is missing, damaged or of another format."""
    refuse_foreign_files(folder)
    file = folder / ATTRIBUTES
    if not file.is_file():
        raise CheckpointError(f"checkpoint {folder}: {ATTRIBUTES} is missing{_remedy(folder)}")
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"), parse_int=short_integer)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {file}: not JSON, it may be truncated: {error}"
        ) from error
    version = data.get("format") if isinstance(data, dict) else FORMAT
    if version != FORMAT:
        raise CheckpointError(
            f"checkpoint {file}: expected format {FORMAT}, got {version!r}: another version of "
            "evo-grpo wrote it; load it with that version, or take the weights alone: "
            f"load_checkpoint({str(folder / 'actor')!r})"
        )
    try:
        validated(_SCHEMA, data)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {file}: {error}; put the file back as it was") from error
    return data


def read_state(attributes: Mapping[str, Any], folder: Path) -> tuple[Hparams, list[Score]]:
    """Return the agent's hyperparameters and its history of scores from attributes.json."""
    try:
        history = [score_from_json(score) for score in attributes["history"]]
        return Hparams(**attributes["hparams"]), history
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {folder / ATTRIBUTES}: hparams or history are not what "
            f"save_checkpoint writes: {error}"
        ) from error


def _remedy(folder: Path) -> str:
    weights = f"load_checkpoint({str(folder / 'actor')!r}) takes the weights alone"
    if peft_folder(folder) is not None:
        return (
            ": it is a PEFT folder, which names no agent; build one with GRPO(model=..., "
            f"lora=...) and call load_checkpoint({str(folder)!r})"
        )
    if (folder / "actor" / CONFIG).is_file():
        return f"; put it back, or {weights}"
    return "; expected a folder written by save_checkpoint, or a PEFT folder: no pickle is loaded"


def load_agent(
    cohort: Cohort,
    slot: int,
    path: str | Path,
    *,
    load_optimizer: bool = False,
    overwrite_reference_adapter: bool = False,
    merge_lora_configs: bool = False,
) -> dict[str, Any]:
    """Load an agent into a slot; return its attributes, empty for a PEFT folder.

    `path` is a folder that `save_agent` wrote, a plain PEFT folder, or a folder with a PEFT folder
    actor/. The weights of a PEFT folder become the actor, and the reference if the agent has its
    own. All files are read and checked before the slot changes. `load_optimizer` loads AdamW's
    moments; `overwrite_reference_adapter` uses the actor as the reference, even if the checkpoint
    has another; `merge_lora_configs` accepts a LoRA configuration other than the slot's.
    """
    folder = Path(path)
    state = cohort.check_slot(slot)
    plain = peft_folder(folder)
    # Read and check everything before `apply`, which changes the slot and cannot be refused.
    attributes = read_attributes(folder) if plain is None else {}
    notes = _check_base(attributes, folder, cohort.base) if plain is None else []
    saved = read_state(attributes, folder) if plain is None else None
    # The adapter's rank, alpha and layers are hyperparameters, which the checkpoint contains.
    actor = plan_adapter(
        cohort.slots,
        state.adapter,
        plain or folder / "actor",
        merge=merge_lora_configs,
        becomes=None if saved is None else _config(cohort, state, saved[0], folder / "actor"),
    )
    if plain is not None:
        notes.append(_about_peft(folder, read_config(plain), cohort.base))
    _check_one_adapter(cohort, actor)
    has_reference = any(name.startswith("reference/") for name in attributes.get("files", ()))
    plans = [actor]
    if state.has_reference:
        keep = has_reference and not overwrite_reference_adapter
        source = folder / "reference" if keep else actor.origin
        plans.append(plan_adapter(cohort.slots, state.reference, source, merge=True))
    else:
        notes += _about_reference(cohort, folder, attributes, own=has_reference)
    moments: dict[int, dict[str, Tensor]] = {}
    if load_optimizer and plain is None:
        moments = _saved_moments(attributes, folder, actor, notes)
    if plain is None:
        _check_digests(attributes, folder, overwrite_reference_adapter)
    # The actor and the reference often produce the same notes.
    for note in dict.fromkeys([*notes, *(note for plan in plans for note in plan.notes)]):
        warnings.warn(note, UserWarning, stacklevel=3)
    for plan in plans:
        plan.apply()
    # A PEFT folder brings rank, alpha and layers; a checkpoint has them as hyperparameters.
    hparams = _with_its_own(cohort, slot) if saved is None else saved[0]
    state.optimizer = cohort.fresh_optimizer(slot, hparams)
    if moments:
        state.optimizer.load_state_dict(
            {"state": moments, "param_groups": state.optimizer.state_dict()["param_groups"]}
        )
    cohort.set_hparams(slot, hparams)
    if saved is not None:
        _, state.history = saved
        state.counters = attributes
        # Continue the random streams instead of repeating draws.
        cohort.calls = max(cohort.calls, attributes.get("calls", 0))
    return attributes


def _config(cohort: Cohort, state: AgentState, hparams: Hparams, actor: Path) -> LoraConfig:
    """Return the LoRA configuration that an agent's adapter has with a checkpoint's `hparams`."""
    config = adapter_config(cohort.slots, hparams, state.adapter)
    searched = f"{LORA}target_modules" in cohort.hp_config.names()
    if searched and hparams.lora_target_modules is None:
        # The layers of a mean may be no named set.
        return with_targets(config, read_config(actor).target_modules or ())
    return config


def _with_its_own(cohort: Cohort, slot: int) -> Hparams:
    """Return an agent's hyperparameters with the current rank, alpha and layers of its adapter."""
    state = cohort.agents[slot]
    config, hparams = cohort.slots.lora_config(state.adapter), state.hparams
    if hparams.lora_r is not None:
        hparams = hparams.replace(lora_r=config.r)
    if hparams.lora_alpha is not None:
        hparams = hparams.replace(lora_alpha=float(config.lora_alpha))
    if hparams.lora_target_modules is not None:
        name = cohort.slots.target_sets.name_of(cohort.slots.modules(state.adapter))
        hparams = hparams.replace(lora_target_modules=name)
    return hparams


def _about_reference(
    cohort: Cohort, folder: Path, attributes: Mapping[str, Any], *, own: bool
) -> list[str]:
    """Return a note if the reference of a loaded agent is not the reference of the saved agent.

    The loaded agent has no reference slot. `own` says whether the checkpoint contains a reference.
    """
    starts = cohort.references.start
    if own and starts:
        start, saved = cohort.slots.state(START), read_adapter(folder / "reference")
        own = start.keys() != saved.keys() or any(not v.equal(saved[k]) for k, v in start.items())
    was_start = attributes.get("reference") == START and not starts
    if not (own or was_start):
        return []
    was = "an adapter of its own" if own else "the adapter that its agents started from"
    here = "the adapter that it started from" if starts else "the base with adapters off"
    keyword = "separate_reference=True" if own else "adapter="
    return [
        f"checkpoint {folder}: its reference was {was}, this agent's is {here}; to keep it, build "
        f"the agent with {keyword} before load_checkpoint"
    ]


def _check_one_adapter(cohort: Cohort, actor: AdapterPlan) -> None:
    """If agents share DeepSpeed's adapter, refuse a checkpoint with another LoRA configuration."""
    if cohort.trains_jointly and actor.config is not None:
        raise ConfigError(
            f"checkpoint {actor.origin}: expected the ranks and modules of this population's "
            "agents, got others, which merge_lora_configs would add; with engine.zero all agents "
            "train through one adapter of DeepSpeed's: build them with the checkpoint's lora"
        )


def _check_base(attributes: Mapping[str, Any], folder: Path, base: SharedBase) -> list[str]:
    """Compare a checkpoint's base with the loaded base, by digest or else by name; return notes."""
    if attributes["vocabulary"] != base.vocabulary:
        raise CheckpointError(
            f"checkpoint {folder}: made for base {attributes['base']!r} with a vocabulary of "
            f"{attributes['vocabulary']}, but {base.name!r} has {base.vocabulary}; "
            "load it over its own base model"
        )
    if (folder / "base").is_dir():
        base.check_same(folder / "base")
        return []
    saved, live = str(attributes["base_digest"]), base_digest(base)
    if comparable_digests(saved, live):
        differs, how = saved != live, "whose weights are others"
    else:
        differs, how = attributes["base"] != base.name, "by its name another one"
    if not differs:
        return []
    return [
        f"checkpoint {folder}: its adapter was trained over base {attributes['base']!r}, this "
        f"agent's base is {base.name!r}, {how}: an adapter means nothing over another base; load "
        "it over its own"
    ]


def _check_digests(attributes: Mapping[str, Any], folder: Path, without_reference: bool) -> None:
    digests = {
        name: digest
        for name, digest in attributes["files"].items()
        if name != OPTIMIZER and not (without_reference and name.startswith("reference/"))
    }
    weights = folder / "actor"
    check_digests(
        folder,
        digests,
        f"{ATTRIBUTES} names",
        f"or take the weights alone: load_checkpoint({str(weights)!r})",
    )


def _about_peft(folder: Path, config: LoraConfig, base: SharedBase) -> str:
    """Return a note about what a PEFT folder lacks, and about its base if that is another one."""
    note = (
        f"checkpoint {folder}: a PEFT folder, so its weights are taken alone: hyperparameters, "
        "steps and history stay as they are, AdamW starts afresh"
    )
    base_name = str(config.base_model_name_or_path or base.name)
    # Compare last components: the path of a model differs between machines.
    if Path(base_name).name != Path(base.name).name:
        note += f"; its base is {base_name!r}, this agent's is {base.name!r}: load it over its own"
    return note


def _saved_moments(
    attributes: Mapping[str, Any], folder: Path, actor: AdapterPlan, notes: list[str]
) -> dict[int, dict[str, Tensor]]:
    """Read AdamW's moments from a checkpoint; if it was saved without them, add a note."""
    if OPTIMIZER in attributes["files"]:
        remedy = "or load without load_optimizer to start AdamW afresh"
        digest = {OPTIMIZER: attributes["files"][OPTIMIZER]}
        check_digests(folder, digest, f"{ATTRIBUTES} names", remedy)
        return _read_moments(folder, actor)
    if attributes["steps"] and not attributes["has_optimizer"]:
        notes.append(
            f"checkpoint {folder} holds no optimizer state (saved with save_optimizer=False): "
            "AdamW starts afresh"
        )
    return {}


def _read_moments(folder: Path, plan: AdapterPlan) -> dict[int, dict[str, Tensor]]:
    """Return AdamW's moments by parameter position in the slot, padded to the plan's shapes.

    A parameter that the checkpoint's configuration does not have gets no moments.
    """
    file = folder / OPTIMIZER
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise CheckpointError(
            f"checkpoint {file}: not a whole safetensors file: {error}"
        ) from error
    moments: dict[int, dict[str, Tensor]] = {}
    for place, (parameter, shape) in enumerate(plan.shapes.items()):
        keys = {name: f"{parameter}.{name}" for name in _MOMENTS}
        values = {name: tensors[key] for name, key in keys.items() if key in tensors}
        if len(values) == len(_MOMENTS) and _fit(values, plan.read_shapes.get(parameter)):
            for key in keys.values():
                del tensors[key]
            wide = {n: v if n == "step" else v.new_zeros(shape) for n, v in values.items()}
            moments[place] = {name: padded(value, wide[name]) for name, value in values.items()}
    if tensors:
        key, value = min(tensors.items(), key=lambda item: item[0])
        raise CheckpointError(
            f"checkpoint {file}: {key} of shape {tuple(value.shape)} and {value.dtype} does not "
            "fit this agent's adapter, or stands alone; load it without load_optimizer to start "
            "AdamW afresh"
        )
    return moments


def _fit(moments: Mapping[str, Tensor], shape: tuple[int, ...] | None) -> bool:
    """Return whether AdamW's moments of a parameter are float tensors of the parameter's shape."""
    return all(
        value.shape == (() if name == "step" else shape)
        and value.is_floating_point()
        and value.dtype.itemsize >= 2
        for name, value in moments.items()
    )
