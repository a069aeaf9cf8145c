"""An exploration of the user's own: whatever it returns, agents train with what is recorded."""

import numpy as np
import pytest
from explorer_contract import INSIDE, ExplorerContract
from hypothesis import strategies as st

from evo_grpo.errors import ConfigError, ShapeError
from evo_grpo.evolve.checked import CheckedExplorer
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.kinds import OwnStrategy
from evo_grpo.evolve.protocols import Candidate
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings import from_dict


class Mine:
    def __init__(self, answer):
        self.answer = answer

    def explore(self, candidate, hp_config, rng):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def explore(answer):
    rng = np.random.default_rng(0)
    return CheckedExplorer(Mine(answer)).explore(Candidate(INSIDE), HyperparameterConfig(), rng)


class TestContract(ExplorerContract):
    explorers = st.just(CheckedExplorer(Mutations(copies_only=True)))


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
        ((INSIDE.replace(lr=1e-3, beta=0.1), {}), r"got \{\} beside another lr, beta; name each"),
        ((INSIDE, {"lr": (1e-4, 1e-3)}), r"got \{'lr': \(0.0001, 0.001\)\} beside another lr"),
    ],
)
def test_what_does_not_say_what_changed_is_refused_by_the_name_of_the_class(answer, message):
    with pytest.raises(ShapeError, match=message) as info:
        explore(answer)
    assert str(info.value).startswith("Mine.explore: ")


def test_an_error_of_the_class_is_one_sentence_with_its_name():
    with pytest.raises(
        ConfigError, match=r"^evolve.exploration: Mine.explore raised KeyError: 'x'; it is called"
    ):
        explore(KeyError("x"))


def test_settings_name_it_without_importing_it():
    given = {"kind": "my_module:Mine", "args": {"factor": 0.5}}
    config = from_dict({"model": "m", "env": "e", "evolve": {"exploration": given}})
    assert config.evolve.exploration == OwnStrategy(**given)
    with pytest.raises(ConfigError, match=r"exploration.arg: unknown key; did you mean 'args'"):
        from_dict({"model": "m", "env": "e", "evolve": {"exploration": {"kind": "m:C", "arg": 1}}})
