"""The setting `selection`: a kind, a mapping, or a strategy."""

import pytest

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.kinds import Selection
from evo_grpo.evolve.select.halving import NoSelection
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.schema.group import Group, setting


class Evolve(Group):
    selection: Selection = setting(TournamentSelection())


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("none", NoSelection()),
        ("tournament", TournamentSelection()),
        (None, TournamentSelection()),
        ({}, TournamentSelection()),
        ({"size": 3}, TournamentSelection(size=3)),
        (
            {"kind": "tournament", "size": 4, "elitism": False},
            TournamentSelection(size=4, elitism=False),
        ),
        ({"kind": "none"}, NoSelection()),
        (NoSelection(), NoSelection()),
        (TournamentSelection(size=5), TournamentSelection(size=5)),
    ],
)
def test_it_is_a_kind_or_settings_or_a_strategy(given, made):
    assert Evolve(selection=given).selection == made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "turnament",
            r"selection\.kind: expected one of .*did you mean 'tournament'",
        ),
        ({"sise": 3}, r"selection\.sise: unknown key; did you mean 'size'"),
        ({"size": 0}, r"selection\.size: expected .* >= 1, got 0"),
        ({"kind": "none", "size": 2}, r"selection\.size: unknown key"),
        (3, r"selection: expected a mapping, got 3"),
    ],
)
def test_anything_else_is_refused_with_its_path(given, message):
    with pytest.raises(ConfigError, match=message):
        Evolve(selection=given)
