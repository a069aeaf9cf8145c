"""All state of an agent goes along wherever an agent is copied, archived, saved or restored."""

from dataclasses import fields

import pytest
from tiny_cohort import build_cohort

from evo_grpo.population.checkpoints.read import load_agent
from evo_grpo.population.checkpoints.write import save_agent
from evo_grpo.population.cohort.archive import LastWholeRound, put_into_archive
from evo_grpo.population.cohort.state import COUNTERS, AgentState
from evo_grpo.types import Score

OTHERWISE = {
    "slot": "never changes", "rank": "placed anew", "shard": "dealt anew",
    "_hparams": "given by the caller of a copy", "optimizer": "copied with the weights",
    "member": "given by the caller of a copy", "history": "of the member",
    "rank_error": "of one rank and round", "last": "of one learn call",
    "has_reference": "copied with the weights", "hooks": "of the object",
}  # fmt: skip
"""Fields that are no counters, and why."""


def test_every_field_of_an_agent_is_a_counter_or_is_kept_otherwise():
    assert {field.name for field in fields(AgentState)} == {*OTHERWISE, *COUNTERS}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_goes_along(name, tmp_path):
    cohort = build_cohort(3)

    def count(slot=0):
        return getattr(cohort.agents[slot], name)

    setattr(cohort.agents[0], name, 7)
    cohort.copy(0, 1)
    assert count(1) == 7, "copied"
    put_into_archive(cohort, 0, Score(0.5, 0.1, 4))
    assert getattr(cohort.archive, name) == 7, "archived"
    whole = LastWholeRound(cohort)
    whole.keep([0, 1, 2], 1)
    setattr(cohort.agents[0], name, 9)
    whole.put_back()
    assert count() == 7, "restored after an interruption"
    save_agent(cohort, 0, tmp_path / "agent")
    load_agent(cohort, 2, tmp_path / "agent", load_optimizer=True)
    assert count(2) == 7, "saved and loaded"
