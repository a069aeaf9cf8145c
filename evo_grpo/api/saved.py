"""Loads a saved agent or population, and writes population.json."""

# No annotations from __future__ here: see `evo_grpo.schema.group`.

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.model.lora.configs import read_config
from evo_grpo.model.lora.load import fit_slot
from evo_grpo.population.checkpoints.read import load_agent, read_attributes
from evo_grpo.population.checkpoints.rebuild import recipe
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.record.family import next_member_id
from evo_grpo.record.files import atomic_write, to_line
from evo_grpo.record.plain import MAX_LOG_BYTES, inside, read_plain
from evo_grpo.record.records import RoundRecord, member_from_json, round_from_json, to_json
from evo_grpo.schema.group import Group
from evo_grpo.training.assemble import Objects, add_agents, build_agents, build_cohort
from evo_grpo.types import Slot

POPULATION = "population.json"
MOST_SLOTS = 10_000
"""Bound on slot numbers: `load` builds a slot for each number up to the largest."""
ARCHIVE = "archive"
"""Folder of the archive, the best agent ever."""


class Saved(Group):
    """The contents of population.json: the agents by their slots, and records of their rounds."""

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
    """Build an agent of an algorithm from a checkpoint, over a new base; see `Agent.load`.

    `zero` is the stage of DeepSpeed for further training, None for AdamW of torch.
    """
    folder = Path(path)
    attributes = read_attributes(folder)
    parts = recipe(folder, attributes, kind, device, trust_remote_code=trust_remote_code, zero=zero)
    objects = Objects(parts.model, lora=parts.lora, padding=parts.padding, accelerator=accelerator)
    cohort, (slot,) = build_agents(parts.settings, objects, 1, "same")
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
    parts = recipe(first_checkpoint, attributes, kind, device, trust_remote_code=trust_remote_code)
    objects = Objects(parts.model, lora=parts.lora, padding=parts.padding)
    cohort, _ = build_cohort(parts.settings, objects)
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
    """Read a checkpoint into a slot, which takes over the LoRA configuration of the checkpoint."""
    attributes, state = read_attributes(place), cohort.agents[slot]
    # Agents of a population differ in LoRA rank or modules if an agent has loaded another adapter,
    # or if these are searched.
    fit_slot(cohort.slots, state.adapter, read_config(place / "actor"))
    _fit_reference(cohort, slot, place)
    load_agent(cohort, slot, place, load_optimizer=bool(attributes["has_optimizer"]))
    state.member = member_from_json(attributes["member"])


def _fit_reference(cohort: Cohort, slot: Slot, place: Path) -> None:
    """Fit an agent's reference adapter, if any, to the saved LoRA configuration."""
    state, saved_reference = cohort.agents[slot], place / "reference"
    if state.has_reference:
        folder = saved_reference if saved_reference.is_dir() else place / "actor"
        fit_slot(cohort.slots, state.reference, read_config(folder))
