"""A schedule of hyperparameters: all agents take the same new values from given rounds on."""

# No annotations from __future__ here: pydantic would compile each of them again at every start.

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast, final

from pydantic import AfterValidator, BeforeValidator

from evo_grpo.evolve import protocols, ranges, start
from evo_grpo.evolve.explore.step import put
from evo_grpo.schema.group import Group, plain, setting
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.problems import Problem, Problems, below, refuse
from evo_grpo.schema.search_space import outside

if TYPE_CHECKING:
    import numpy as np

    from evo_grpo.schema.search_space import HyperparameterConfig

ROUND = "round"


def _entries(value: object) -> object:
    """Return a list of mappings as plain values; raise ValueError for anything else."""
    items = cast("list[object]", list(value)) if isinstance(value, list | tuple) else []
    if items and all(isinstance(item, Mapping) for item in items):
        return [plain(item) for item in items]
    raise ValueError(
        "a list of mappings, each with a round and values, for instance [{round: 3, lr: 1.0e-3}]"
    )


def _in_order(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries; raise Problems unless they have values and ascending rounds."""
    problems: list[Problem] = []
    before = 1
    for index, entry in enumerate(entries):
        number = entry.get(ROUND)
        if type(number) is not int or number <= before:
            got = "none" if number is None else repr(number)
            least = "the second round or a later one: round 1 has the values of `algorithm`"
            if index:
                least = f"a round after {before}, that of the entry before"
            problems.append(Problem((index, ROUND), f"expected {least}, got {got}"))
        else:
            before = number
        if not entry.keys() - {ROUND}:
            text = "expected a value beside the round, for instance lr: 1.0e-3, got none"
            problems.append(Problem((index,), text))
        problems += [
            Problem((index, name), "expected a value, got null; leave it out to keep the present")
            for name, value in entry.items()
            if value is None and name != ROUND
        ]
    refuse(problems)
    return entries


Entries = Annotated[list[dict[str, Any]], BeforeValidator(_entries), AfterValidator(_in_order)]


@final
class ScheduleExploration(Group):
    """All agents take the values of an entry from the round of the entry on; nothing else changes.

    `evo-grpo recipe` writes the schedule of the winner of an earlier run.
    """

    scheduled: ClassVar[bool] = True
    kind: Literal["schedule"] = setting(
        "schedule", "All agents take given values from given rounds on."
    )
    rounds: Entries = setting(
        meaning="Values by round, each a mapping with `round` (from 1) and the hyperparameters "
        "that change before it, by the names of `evolve.hyperparameters`, for instance `[{round: "
        "3, lr: 1.0e-3}, {round: 5, lr: 5.0e-4}]`. The first round has the values of `algorithm`."
    )

    def explore(
        self,
        candidate: protocols.Candidate,
        hp_config: "HyperparameterConfig",
        rng: "np.random.Generator",
    ) -> Hparams:
        """Set the scheduled values of an agent's next round that have a range; nothing is drawn."""
        del rng
        hparams = candidate.hparams
        space = dict(ranges.parts(hparams, hp_config.parameters))
        return put(hparams, self.values_of(candidate.round), space)

    def values_of(self, round: int) -> dict[str, Any]:
        """Return the values that agents take before a round (0-based); empty if none change."""
        entries = (entry for entry in self.rounds if entry[ROUND] == round + 1)
        return {name: value for entry in entries for name, value in entry.items() if name != ROUND}

    def check(self, first: Hparams, hp_config: "HyperparameterConfig") -> None:
        """Raise ConfigError for values that no agent of a run can take."""
        refuse(below(self.problems(first, hp_config), "exploration"))

    def problems(self, first: Hparams, hp_config: "HyperparameterConfig") -> Iterator[Problem]:
        """Yield a problem for each value that no agent can take, with its path in the strategy."""
        hparams = first
        for index, entry in enumerate(self.rounds):
            values = {name: value for name, value in entry.items() if name != ROUND}
            path = ("rounds", index)
            space = dict(ranges.parts(hparams, hp_config.parameters))
            for name in values.keys() - space.keys():
                text = (
                    f"expected one of {', '.join(space) or 'none'}, since only what has a range "
                    f"changes; give it one: evolve.hyperparameters.{name}"
                )
                yield Problem((*path, name), text)
            try:
                hparams = start.with_values(hparams, values, hp_config.names())
            except Problems as error:
                yield from error.below(*path).problems
                continue
            for violation in outside(hparams, hp_config):
                if violation.name in values:
                    yield Problem((*path, violation.name), violation.told())
