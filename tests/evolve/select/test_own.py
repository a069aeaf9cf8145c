"""A selection of the user's own: whatever it returns, nothing is overwritten without a plan."""

import numpy as np
import pytest
from hypothesis import strategies as st
from selector_contract import SelectorContract, history

from evo_grpo.errors import ConfigError, RunFailedError, ShapeError
from evo_grpo.evolve.checked import CheckedSelector
from evo_grpo.evolve.kinds import OwnStrategy
from evo_grpo.evolve.protocols import Offspring
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.settings import from_dict

HISTORIES = [history(0.1), history(0.9), history(0.5)]


class Mine:
    def __init__(self, answer):
        self.answer = answer

    def plan(self, histories, places, rng):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def plan(answer, places=3):
    return CheckedSelector(Mine(answer)).plan(HISTORIES, places, np.random.default_rng(0))


class TestContract(SelectorContract):
    example = CheckedSelector(TournamentSelection())
    selectors = st.just(example)


@pytest.mark.parametrize(
    "answer",
    [
        (Offspring(0, 1), Offspring(1, 1, elite=True), Offspring(2, 2)),
        [Offspring(1, 1)],
        (one for one in [Offspring(0, 0), Offspring(2, 0)]),
        [Offspring(np.int64(0), np.int64(0)), Offspring(np.int64(1), np.int64(0), np.True_)],
    ],
)
def test_a_plan_comes_through_in_plain_values(answer):
    found = plan(answer)
    assert all(type(one) is Offspring for one in found)
    assert {type(n) for one in found for n in (one.position, one.parent)} == {int}
    assert {type(one.elite) for one in found} == {bool}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"^Mine.plan: expected a sequence of evo_grpo.Offspring, got None; return one for"),
        (Offspring(0, 0), r"expected a sequence of evo_grpo.Offspring, got Offspring\("),
        ([0, 1, 2], r"expected a sequence of evo_grpo.Offspring, got \[0, 1, 2\]"),
        ([(0, 0)], r"expected a sequence of evo_grpo.Offspring, got \[\(0, 0\)\]"),
        ([Offspring(0, 3)], r"parents in 0..2, the indices of `histories`, got \[0, 3\]"),
        ([Offspring(-1, -1)], r"in 0..2.* got \[-1, -1\]"),
        ([Offspring(0.0, 0)], r"in 0..2.* got \[0.0, 0\]"),
        ([], r"expected 1 to 3 offspring at different positions.* got positions \[\]"),
        ([Offspring(1, 1), Offspring(0, 0)], r"in ascending order, got positions \[1, 0\]"),
        ([Offspring(1, 1), Offspring(1, 1)], r"at different positions.* got positions \[1, 1\]"),
        ([Offspring(0, 1), Offspring(1, 0)], r"position 0 copies position 1.*its own parent: \[\]"),
        ([Offspring(0, 0), Offspring(1, 2)], r"position 1 copies position 2.*: \[0\]; an agent"),
    ],
)
def test_what_is_no_plan_is_refused_by_the_name_of_the_class(answer, message):
    with pytest.raises(ShapeError, match=message) as info:
        plan(answer)
    assert str(info.value).startswith("Mine.plan: ")


def test_more_offspring_than_places_are_refused():
    with pytest.raises(ShapeError, match=r"^Mine.plan: expected 1 to 2 offspring.*\[0, 1, 2\]"):
        plan([Offspring(p, p) for p in range(3)], places=2)


def test_an_error_of_the_class_is_one_sentence_with_its_name():
    with pytest.raises(
        ConfigError,
        match=r"^evolve.selection: Mine.plan raised ZeroDivisionError: by 0; it is called with",
    ) as info:
        plan(ZeroDivisionError("by 0"))
    assert isinstance(info.value.__cause__, ZeroDivisionError)


def test_a_population_that_failed_is_still_a_failed_run():
    with pytest.raises(RunFailedError, match=r"^nobody is left$"):
        plan(RunFailedError("nobody is left"))


@pytest.mark.parametrize("given", ["my_module:Mine", "package.module:Outer.Mine"])
def test_settings_name_it_without_importing_it(given):
    data = {"model": "m", "env": "e", "evolve": {"selection": given}}
    config = from_dict(data)
    assert config.evolve.selection == OwnStrategy(kind=given)
    data["evolve"]["selection"] = {"kind": given, "args": {"share": 0.5}}
    assert from_dict(data).evolve.selection == OwnStrategy(kind=given, args={"share": 0.5})


@pytest.mark.parametrize(
    "given", ["my_module:", ":Mine", "./mine.py:Mine", "my module:Mine", "a:b:c"]
)
def test_what_cannot_be_a_class_is_refused(given):
    with pytest.raises(ConfigError, match=r"selection.kind: expected a module and a class in it"):
        from_dict({"model": "m", "env": "e", "evolve": {"selection": given}})
