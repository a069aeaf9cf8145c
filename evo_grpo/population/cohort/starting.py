"""Checks a base and settings before agents are created, and loads the start adapter."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.digest import base_digest, tokenizer_digest
from evo_grpo.model.llama.departures import can_join_layers, departures_of
from evo_grpo.model.llama.weights import is_llama_family
from evo_grpo.model.lora.configs import MERGE
from evo_grpo.model.lora.files import AdapterCopy
from evo_grpo.model.lora.load import fit_slot, plan_copy
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.cohort.state import narrowest
from evo_grpo.population.ranks.team import Team
from evo_grpo.rollout.native.ability import ability_of
from evo_grpo.settings.model import above_width, pattern_problems, searched, too_wide
from evo_grpo.types import Slot


def check_adapters(cohort: Cohort) -> None:
    """Check that the base allows adapters of every searched rank, alpha and set of layers."""
    space, lora = cohort.hp_config, cohort.slots.config
    if not searched(space):
        return
    problems = list(pattern_problems(space, lora, ("hyperparameters",)))
    if "lora.r" in space.names() and lora.init_lora_weights == "orthogonal":
        text = "expected another than 'orthogonal' where lora.r is searched, since PEFT draws it "
        problems.append(("init_lora_weights", f"{text}for even ranks only; leave it out"))
    for name, text in problems:
        raise ConfigError(f"lora.{name}: {text}")
    cohort.slots.target_sets.check()
    for name in cohort.settings.lora.searched_sets(space):
        cohort.slots.target_sets.modules(name)


def check_widths(cohort: Cohort, *, given: bool) -> None:
    """Check, once there are agents, that no LoRA rank is above the width of a layer.

    `given` says whether the agents start from an adapter; their rank is then the adapter's.
    """
    layer = narrowest(cohort.slots)
    if layer is None:
        return
    # A PEFT object may have any rank.
    from_settings = not given and "lora" not in cohort.objects
    above = above_width(cohort.slots.config.r, *layer) if from_settings else ""
    problem = too_wide(cohort.hp_config, *layer)
    if problem or above:
        name, text = ("hyperparameters.", problem) if problem else ("", f"{above}; lower it")
        raise ConfigError(f"{name}lora.r: {text}")


def start_with(cohort: Cohort, slots: Sequence[Slot], start: AdapterCopy) -> None:
    """Copy the start adapter into actors and references; the KL term then refers to it."""
    states = [cohort.agents[slot] for slot in slots if cohort.is_local(slot)]
    names = [s.adapter for s in states] + [s.reference for s in states if s.has_reference]
    for name in names:
        fit_slot(cohort.slots, name, cohort.slots.config)
    if not cohort.settings.algorithm.separate_reference:
        names.append(cohort.references.add_start())  # all agents share this reference
    model = cohort.settings.model
    folder = None if model is None else model.adapter
    try:
        plans = [plan_copy(cohort.slots, n, start, Path(folder or "of the model")) for n in names]
    except CheckpointError as error:
        why = str(error).removeprefix("checkpoint ")
        source, remedy = "model.adapter", f"give an adapter of this base, or {MERGE}"
        if folder is None:
            source, remedy = "the adapter", "or leave lora out to take the adapter's own"
        raise ConfigError(f"{source} {why}; {remedy}") from error
    for note in plans[0].notes:
        warnings.warn(note, UserWarning, stacklevel=4)
    for plan in plans:
        plan.apply()
    for state in states:
        state.optimizer = cohort.fresh_optimizer(state.slot, state.hparams)
        cohort.set_hparams(state.slot, state.hparams)  # its own rank, to which the adapter is cut


def check_same_base(team: Team, base: SharedBase, start: AdapterCopy | None) -> None:
    """Raise an error if bases or start adapters differ among ranks; all ranks call this."""
    if team.size == 1:
        return
    adapter = None if start is None else hashlib.sha256(save(start.state) + start.config_json())
    local_digests = {
        "weights": base_digest(base),
        "tokenizer": tokenizer_digest(base),
        "start adapter": adapter and adapter.hexdigest(),
    }
    digests = team.gather(local_digests)
    for rank, theirs in enumerate(digests):
        unlike = [name for name, digest in theirs.items() if digest != digests[0][name]]
        if unlike:
            raise ConfigError(
                f"model: expected the same base on all {team.size} ranks, got {base.name!r} with "
                f"another {' and another '.join(unlike)} on rank {rank} than on rank 0; give both "
                "the same files"
            )


def agree_on_path(team: Team, base: SharedBase, *, native: bool) -> None:
    """Agree among ranks on whether specialised code runs the base; refuse a base that cannot run.

    Call this before the base is divided among ranks, because an operation that the model lacks
    would interrupt a pass. Without `native`, warn of changes to the model object, because vLLM
    reads only the model's files.
    """
    if native:
        ability_of(base, {})
    # The probe compares rounded numbers, so its result may differ between machines.
    answers = team.gather(can_join_layers(base, {}))
    if not native and base.specialized and is_llama_family(base):
        departures = departures_of(base, {})
        if departures and team.rank == 0:
            kind = base.model.config.model_type
            warnings.warn(
                f"engine.rollout: the engine samples from model {base.name!r} as an ordinary "
                f"{kind} model, which it is not ({departures[0]}): what is sampled is not what "
                "trains; set engine.rollout: native",
                UserWarning,
                stacklevel=2,
            )
    if any(answers) and not all(answers):
        base.specialized = False
