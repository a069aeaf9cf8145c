"""User-defined strategies: whatever they return, agents train with what is planned and recorded."""

import numpy as np
import pytest
from explorer_contract import INSIDE, ExplorerContract
from hypothesis import strategies as st
from selector_contract import SelectorContract, history

from evo_grpo.errors import ConfigError, RunFailedError, ShapeError
from evo_grpo.evolve.checked import CheckedExplorer, CheckedSelector
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.protocols import Candidate, Offspring
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.schema.search_space import HyperparameterConfig

HISTORIES = [history(0.1), history(0.9), history(0.5)]


class Mine:
    def __init__(self, answer):
        self.answer = answer

    def plan(self, histories, places, rng):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def explore(self, candidate, hp_config, rng):
        return self.plan((), 0, rng)


def plan(answer, places=3):
    return CheckedSelector(Mine(answer)).plan(HISTORIES, places, np.random.default_rng(0))


def explore(answer):
    rng = np.random.default_rng(0)
    return CheckedExplorer(Mine(answer)).explore(Candidate(INSIDE), HyperparameterConfig(), rng)


class TestSelector(SelectorContract):
    example = CheckedSelector(TournamentSelection())
    selectors = st.just(example)


class TestExplorer(ExplorerContract):
    explorers = st.just(CheckedExplorer(Mutations(copies_only=True)))


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


def test_a_population_that_failed_is_still_a_failed_run():
    with pytest.raises(RunFailedError, match=r"^nobody is left$"):
        plan(RunFailedError("nobody is left"))


@pytest.mark.parametrize(
    ("changes", "new"),
    [
        ({}, INSIDE),
        ({"lr": (1e-4, 2e-4)}, INSIDE.replace(lr=2e-4)),
        ({"lr": [1e-4, np.float64(2e-4)]}, INSIDE.replace(lr=2e-4)),
        ({"clip_low": (0.8, 1.3), "clip_high": (1.2, 1.4)}, INSIDE.replace(clip_coef=(1.3, 1.4))),
        ({"batch_size": (64, 8)}, INSIDE.replace(batch_size=8)),
    ],
)
def test_what_changed_comes_through_in_plain_values(changes, new):
    hparams, found = explore((new, changes))
    assert hparams == new
    assert found == {name: tuple(change) for name, change in changes.items()}
    assert {type(end) for change in found.values() for end in change} <= {int, float}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"expected \(hparams, changes\), an Hparams and a mapping.* got None"),
        (INSIDE, r"expected \(hparams, changes\).* got Hparams\("),
        ((INSIDE, None), r"expected \(hparams, changes\)"),
        (({"lr": 1e-4}, {}), r"expected \(hparams, changes\)"),
        ((INSIDE, {"lr": 2e-4}), r"expected changes such as \{'lr': \(old, new\)\}, got \{'lr': 0"),
        ((INSIDE, {"size": (1, 2)}), r"expected changes such as .* got \{'size': \(1, 2\)\}"),
        ((INSIDE, {"lr": (1e-4, "x")}), r"expected changes such as"),
        ((INSIDE, {"lr": ("x", 1e-4)}), r"expected changes such as"),
        ((INSIDE.replace(lr=1e-3, beta=0.1), {}), r"got \{\} beside another lr, beta; name each"),
        ((INSIDE, {"lr": (1e-4, 1e-3)}), r"got \{'lr': \(0.0001, 0.001\)\} beside another lr"),
    ],
)
def test_changes_that_do_not_lead_to_the_values_are_refused(answer, message):
    with pytest.raises(ShapeError, match=message) as info:
        explore(answer)
    assert str(info.value).startswith("Mine.explore: ")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (plan, r"^evolve.selection: Mine.plan raised ZeroDivisionError: by 0; it is called with"),
        (explore, r"^evolve.exploration: Mine.explore raised ZeroDivisionError: by 0; it is call"),
    ],
)
def test_an_error_of_the_class_is_one_sentence_with_its_name(call, message):
    with pytest.raises(ConfigError, match=message) as info:
        call(ZeroDivisionError("by 0"))
    assert isinstance(info.value.__cause__, ZeroDivisionError)
