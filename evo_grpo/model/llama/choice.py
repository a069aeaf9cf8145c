"""The choice between the joined layers of the Llama family and a base's own modules."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from peft.tuners.lora import LoraLayer

from evo_grpo.errors import ModelError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.llama.comparison import find_difference
from evo_grpo.model.llama.departures import Departure, find_departure
from evo_grpo.model.llama.weights import is_llama_family
from evo_grpo.model.origin import tampered

_log = logging.getLogger(__name__)
_DIFFERENCE, _SAID, _WHOLE = "llama difference", "llama departures", "hooks of the whole"


def takes_fast_path(base: SharedBase, adapted: Mapping[str, LoraLayer]) -> bool:
    """Return whether the joined layers compute what a base's own modules compute.

    This is checked before each generation and each learn pass, since hooks may be registered at any
    time; the numbers are compared once. If the answer is no, the reason is logged once. A hook on
    the whole model, which the population forward does not call, raises ModelError.
    """
    _refuse_hook_on_the_whole(base)
    if not base.specialized or not is_llama_family(base):
        return False
    found = departure_of(base, adapted)
    if found is None:
        return True
    said: set[str] = base.derived.setdefault(_SAID, set())
    if found.what not in said:
        said.add(found.what)
        _log.warning(
            "model %r (%s): computed by its own modules, not by the faster layers of the Llama "
            "family: %s",
            base.name,
            type(base.model).__name__,
            found.what,
        )
    return False


def departure_of(base: SharedBase, adapted: Mapping[str, LoraLayer]) -> Departure | None:
    """Return how a base of the family differs from its type, in code or numbers, or None."""
    found = find_departure(base)
    if found is not None:
        return found
    if _DIFFERENCE not in base.derived:
        base.derived[_DIFFERENCE] = find_difference(base, adapted)
    difference: str | None = base.derived[_DIFFERENCE]
    return None if difference is None else Departure(difference, masks=True)


def _refuse_hook_on_the_whole(base: SharedBase) -> None:
    """Raise ModelError for a hook or forward on the whole model that was added after loading.

    `check_forward` has checked earlier ones.
    """
    now = tampered(base.model)
    before: str | None = base.derived.setdefault(_WHOLE, now)
    if now is not None and before is None:
        raise ModelError(
            f"model {base.name!r} ({type(base.model).__name__}): the whole model {now} since "
            "agents were made over it, which would never be called, since its head and the part "
            f"below run apart; put it on model.{base.model.base_model_prefix} or on the head, or "
            "remove it"
        )
