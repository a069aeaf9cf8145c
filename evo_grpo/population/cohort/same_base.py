"""Checks that all ranks have loaded the same base, and run it through the same code path."""

from __future__ import annotations

import hashlib
import warnings

from evo_grpo.errors import ConfigError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.digest import base_digest, tokenizer_digest
from evo_grpo.model.llama.choice import departures_of, takes_fast_path
from evo_grpo.model.llama.weights import is_llama_family
from evo_grpo.model.lora.files import AdapterCopy
from evo_grpo.population.ranks.team import Team
from evo_grpo.rollout.native.ability import ability_of


def check_same_base(team: Team, base: SharedBase, start: AdapterCopy | None) -> None:
    """Refuse ranks with different bases or start adapters; all ranks call this before dividing.

    Raises:
        ConfigError: A rank has another base. Raised on all ranks; it names the rank and the part.
    """
    if team.size == 1:
        return
    adapter = None if start is None else hashlib.sha256(start.serialise() + start.config_json())
    mine = {
        "weights": base_digest(base),
        "tokenizer": tokenizer_digest(base),
        "start adapter": adapter and adapter.hexdigest(),
    }
    found = team.gather(mine)
    for rank, theirs in enumerate(found):
        unlike = [name for name, digest in theirs.items() if digest != found[0][name]]
        if unlike:
            raise ConfigError(
                f"model: expected the same base on all {team.size} ranks, got {base.name!r} with "
                f"another {' and another '.join(unlike)} on rank {rank} than on rank 0; give both "
                "the same files"
            )


def agree_on_path(team: Team, base: SharedBase, *, native: bool) -> None:
    """Determine whether the base can be run, and by which path; all ranks use the same path.

    Call this before the base is divided among ranks: an operation that the model lacks would
    interrupt a pass. With the native engine, the abilities of the base are probed too. vLLM reads
    the files of the model and ignores changes to the object.

    Raises:
        ModelError: The base cannot be run.
    """
    if native:
        ability_of(base, {})
    # The probe compares rounded numbers, so its result may differ between machines.
    answers = team.gather(takes_fast_path(base, {}))
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
