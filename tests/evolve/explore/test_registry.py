"""The setting `exploration`: a kind, a mapping, or a strategy."""

import pytest

from evo_grpo.errors import ConfigError
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.none import NoExploration
from evo_grpo.evolve.kinds import Exploration
from evo_grpo.schema.group import Group, setting


class Evolve(Group):
    exploration: Exploration = setting(Mutations())


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("none", NoExploration()),
        ("mutate", Mutations()),
        (None, Mutations()),
        ({"rl_hp": 0.5}, Mutations(rl_hp=0.5)),
        (
            {"kind": "mutate", "no_mutation": 1, "mutate_elite": True},
            Mutations(no_mutation=1, mutate_elite=True),
        ),
        (NoExploration(), NoExploration()),
    ],
)
def test_it_is_a_kind_or_settings_or_a_strategy(given, made):
    assert Evolve(exploration=given).exploration == made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mutation", r"exploration\.kind: expected one of .*'mutate'.*did you mean 'mutate'"),
        ({"rl_hq": 1}, r"exploration\.rl_hq: unknown key; did you mean 'rl_hp'"),
        ({"rl_hp": 0, "no_mutation": 0}, r"exploration: expected no_mutation or rl_hp above 0"),
    ],
)
def test_anything_else_is_refused_with_its_path(given, message):
    with pytest.raises(ConfigError, match=message):
        Evolve(exploration=given)
