"""Loads a saved agent or population, and writes population.json."""

# No annotations from __future__ here: see `evo_grpo.schema.group`.

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field

from evo_grpo.errors import CheckpointError, ConfigError, RunDirError
from evo_grpo.model.loading import DTYPES, from_pretrained, pick_dtype
from evo_grpo.model.lora.configs import read_config
from evo_grpo.model.lora.load import fit_slot
from evo_grpo.population.checkpoints.read import load_agent, read_attributes
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.record.family import next_member_id
from evo_grpo.record.files import atomic_write, to_line
from evo_grpo.record.names import ATTRIBUTES
from evo_grpo.record.plain import MAX_LOG_BYTES, inside, read_plain
from evo_grpo.record.records import RoundRecord, member_from_json, round_from_json, to_json
from evo_grpo.schema.group import Group
from evo_grpo.schema.problems import Problems
from evo_grpo.schema.validation import Rule, flag, shown
from evo_grpo.settings import AgentSettings, ModelConfig
from evo_grpo.settings.yaml import without_removed
from evo_grpo.sources import resolve
from evo_grpo.training.assemble import Objects, add_agents, build_agents, build_cohort
from evo_grpo.types import Slot

POPULATION = "population.json"
MOST_SLOTS = 10_000
"""Bound on the slots in a file, because `load` builds an adapter for each number below them."""
ARCHIVE = "archive"
"""Folder of the archive, the best agent ever."""


class Saved(Group):
    """The content of population.json: the slots of the agents, and the records of their rounds."""

    format: Literal[4]
    agents: list[Annotated[int, Field(ge=0, lt=MOST_SLOTS)]] = Field(min_length=1)
    rounds: list[Any]


def write(folder: Path, agents: Sequence[Slot], rounds: Sequence[RoundRecord]) -> None:
    """Write population.json."""
    saved = Saved(
        format=4, agents=list(map(int, agents)), rounds=[to_json(record) for record in rounds]
    )
    atomic_write(folder / POPULATION, to_line(dict(saved)) + "\n")


def load_one(
    kind: str,
    path: str | Path,
    device: str,
    *,
    trust_remote_code: bool,
    zero: int | None = None,
    accelerator: object = None,
) -> tuple[Cohort, Slot]:
    """Build an agent of the algorithm `kind` from a checkpoint, over a new base; see `Agent.load`.

    `zero` is the stage of DeepSpeed for further training, None for AdamW of torch.
    """
    folder = Path(path)
    attributes = read_attributes(folder)
    settings, objects = _settings_and_objects(
        folder, attributes, kind, device, trust_remote_code=trust_remote_code, zero=zero
    )
    objects = replace(objects, accelerator=accelerator)
    cohort, (slot,) = build_agents(settings, objects, 1, "same")
    _fit_reference(cohort, slot, folder)
    load_agent(cohort, slot, folder, load_optimizer=bool(attributes["has_optimizer"]))
    return cohort, slot


def load(
    folder: Path, device: str, *, trust_remote_code: bool
) -> tuple[list[Slot], list[RoundRecord], str, Cohort]:
    """Build the cohort of a saved population, over a new base.

    Returns:
        The slots and rounds in population.json, the name of the algorithm, and the cohort.
    """
    file = folder / POPULATION
    try:
        saved = Saved(**json.loads(read_plain(file, MAX_LOG_BYTES)))
        slots, rounds = [Slot(slot) for slot in saved.agents], [*map(round_from_json, saved.rounds)]
    except RunDirError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: expected a folder of Population.save, but {POPULATION} is missing"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: expected a file of Population.save, but {error}; restore it from a copy"
        ) from error
    checkpoints = {slot: inside(folder, f"agent-{slot:02d}") for slot in slots}
    first_checkpoint = checkpoints[slots[0]]
    attributes = read_attributes(first_checkpoint)
    kind = str(attributes["settings"]["algorithm"]["kind"])
    settings, objects = _settings_and_objects(
        first_checkpoint, attributes, kind, device, trust_remote_code=trust_remote_code
    )
    cohort, _ = build_cohort(settings, objects)
    for slot in add_agents(cohort, max(slots) + 1, "same"):
        if slot not in slots:
            cohort.remove(slot)
    for slot, checkpoint in checkpoints.items():
        _load_agent(cohort, slot, checkpoint)
    archive = inside(folder, ARCHIVE)
    if archive.is_dir():
        any_agent = cohort.agents[slots[0]]
        cohort.archive = cohort.add_spare(any_agent.member, any_agent.hparams)
        _load_agent(cohort, cohort.archive.slot, archive)
    cohort.reserve_members(next_member_id(rounds))
    return slots, rounds, kind, cohort


def _load_agent(cohort: Cohort, slot: Slot, place: Path) -> None:
    """Read a checkpoint into a slot; the slot takes over the checkpoint's LoRA configuration."""
    attributes, state = read_attributes(place), cohort.agents[slot]
    # Agents of a population differ in LoRA rank or modules if an agent has loaded another adapter,
    # or if these are searched.
    fit_slot(cohort.slots, state.adapter, read_config(place / "actor"))
    _fit_reference(cohort, slot, place)
    load_agent(cohort, slot, place, load_optimizer=bool(attributes["has_optimizer"]))
    state.member = member_from_json(attributes["member"])


def _fit_reference(cohort: Cohort, slot: Slot, place: Path) -> None:
    """Rebuild an agent's reference adapter, if any, with the LoRA configuration that was saved."""
    state, saved_reference = cohort.agents[slot], place / "reference"
    if state.has_reference:
        folder = saved_reference if saved_reference.is_dir() else place / "actor"
        fit_slot(cohort.slots, state.reference, read_config(folder))


def _named_strings(value: object) -> bool:
    entries = cast("dict[object, object]", value).items() if isinstance(value, dict) else ()
    return isinstance(value, dict) and all(
        isinstance(part, str) for entry in entries for part in entry
    )


_DTYPE = Rule(lambda value: value in ("auto", *DTYPES), f"auto, {', '.join(DTYPES)}")
_TEXT = Rule(lambda value: isinstance(value, str), "a string")
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
#: Keywords of `from_pretrained` that a checkpoint may name. transformers has others that fetch code
#: (kernels, a revision of the code) or unpickle weights, and gets more with each release.
_KEYWORDS: dict[str, Rule] = {
    # Any other name refers to a repository, whose kernels would be downloaded and imported.
    "attn_implementation": Rule(
        lambda value: isinstance(value, str) and value in _ATTENTION, ", ".join(_ATTENTION)
    ),
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "low_cpu_mem_usage": flag(),
    "key_mapping": Rule(_named_strings, "a mapping of strings"),
    "revision": _TEXT,
    "subfolder": _TEXT,
    "variant": _TEXT,
}


def _settings_and_objects(
    folder: Path,
    attributes: Mapping[str, Any],
    kind: str,
    device: str,
    *,
    trust_remote_code: bool = False,
    zero: int | None = None,
) -> tuple[AgentSettings, Objects]:
    """Return the settings and objects from which a checkpoint's agent is built.

    Warns of a tokenizer that was not saved. `trust_remote_code` alone decides whether Python code
    of the base may run; the value in the checkpoint is ignored. `kind` is the algorithm to build:
    grpo, gspo or cispo. `zero` is the DeepSpeed stage with which the agent continues, None for
    AdamW of torch.
    """
    flag().check("trust_remote_code", trust_remote_code)
    settings = _settings(attributes, folder)
    algorithm = settings.algorithm
    if algorithm.kind != kind:
        saved, expected = algorithm.kind.upper(), kind.upper()
        raise ConfigError(
            f"{expected}.load: checkpoint {folder} is of {saved}, expected one of {expected}; use "
            f"{saved}.load(path), or build {expected}(...) and call load_checkpoint(path) for its "
            "weights and hyperparameters"
        )
    # The agent may have received its reference from set_reference_policy after it was built.
    algorithm = algorithm.replace(separate_reference=(folder / "reference").is_dir())
    # The training engine is not part of an agent: a checkpoint written with DeepSpeed loads without
    # it. The rollout engine depends on the machine, and a checkpoint must not start a program.
    engine = settings.engine.with_default_rollout(device=device, zero=zero)
    base = folder / "base"
    name = str(base) if base.is_dir() else str(attributes["base"])
    model = settings.model or ModelConfig(name=name, lora=settings.lora)
    _check_keywords(model.config, folder)
    model = model.replace(trust_remote_code=trust_remote_code)
    # A base given as an object, or saved in the checkpoint, keeps the dtype it was saved in.
    if (settings.model is None or base.is_dir()) and attributes["dtype"] in DTYPES:
        engine = engine.replace(dtype=attributes["dtype"])
    network = None
    if base.is_dir() and not (base / "tokenizer_config.json").is_file():
        # The base was saved without a tokenizer, so build it from the model alone.
        network = _network(base, model, engine.dtype)
    elif "tokenizer" in attributes["objects"] and not base.is_dir():
        warnings.warn(
            f"checkpoint {folder}: tokenizer cannot be written to {ATTRIBUTES} and is left at its "
            "default; build the agent with it and call load_checkpoint(path)",
            UserWarning,
            stacklevel=3,
        )
    # The start adapter only matters for the first step; the checkpoint has a trained adapter.
    model = None if network is not None else model.replace(name=name, adapter=None)
    sets = settings.lora.target_sets if model is None else {}
    settings = settings.replace(model=model, algorithm=algorithm, engine=engine, target_sets=sets)
    padding = None if attributes["padding"] is None else tuple(attributes["padding"])
    return settings, Objects(network, lora=read_config(folder / "actor"), padding=padding)


def _settings(attributes: Mapping[str, Any], folder: Path) -> AgentSettings:
    try:
        return AgentSettings(**without_removed(attributes["settings"])[0])
    except (Problems, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder / ATTRIBUTES}: settings are not what save_checkpoint writes: "
            f"{error}"
        ) from error


def _check_keywords(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse keywords of `from_pretrained`, and values, that `_KEYWORDS` does not allow."""
    for name, value in config.items():
        rule = _KEYWORDS.get(name)
        if rule is None or not rule.good(value):
            expected = f"one of {', '.join(_KEYWORDS)}" if rule is None else rule.expected
            raise CheckpointError(
                f"checkpoint {folder / ATTRIBUTES}: settings.model.config.{name}: expected "
                f"{expected}, got {shown(value)}: nothing else is taken from a checkpoint for "
                "loading the base; build the agent yourself, GRPO(model=..., config={...}), and "
                "call load_checkpoint(path)"
            )


def _network(folder: Path, model: ModelConfig, dtype: str) -> Any:  # noqa: ANN401 -- of any transformers architecture
    keywords = {"trust_remote_code": model.trust_remote_code, **model.config}
    source = resolve(str(folder))
    torch_dtype = pick_dtype(dtype, torch.device("cpu"))
    return from_pretrained(source, torch_dtype, keywords, with_tokenizer=False)[0]
