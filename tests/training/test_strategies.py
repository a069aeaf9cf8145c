"""Strategies by the names of their classes: loaded for a run, written back, resumed."""

import sys

import pytest
import yaml
from small_run import outcome, small, stopped_and_resumed

from evo_grpo import GRPO, RunConfig, resume, run
from evo_grpo.cli.plan.plan import make_plan
from evo_grpo.errors import ConfigError, RunDirError, ShapeError
from evo_grpo.evolve.kinds import UserStrategy
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.settings import EvolveConfig, to_yaml
from evo_grpo.training.strategies import explorer, from_object, selector

SOURCE = '''
from evo_grpo import Offspring

print("imported")

class Everyone:
    """Everyone survives; agent 1 copies agent 0 where asked to."""

    def __init__(self, copies=True):
        self.copies = copies

    def plan(self, histories, places, rng):
        parents = [0, 0, *range(2, places)] if self.copies else range(places)
        return [Offspring(p, parent) for p, parent in enumerate(parents)]

class Swap(Everyone):
    def plan(self, histories, places, rng):
        return [Offspring(0, 1), Offspring(1, 0), *(Offspring(p, p) for p in range(2, places))]

class HalveLR:
    def explore(self, candidate, hp_config, rng):
        old = candidate.hparams.lr
        new = hp_config["lr"].clip(old / 2)
        if not candidate.copied or new == old:
            return candidate.hparams
        return candidate.hparams.replace(lr=new)

class Neither:
    pass

def make(**args):
    return Everyone(**args)

everyone = Everyone()
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_strategies", raising=False)
    (tmp_path / "my_strategies.py").write_text(SOURCE)
    return tmp_path


def own(name, **args):
    return UserStrategy(kind=f"my_strategies:{name}", args=args)


def test_a_class_of_this_folder_plans_with_its_arguments(folder):
    for kind in ("Everyone", "make"):
        made = selector(own(kind, copies=False))
        assert [one.parent for one in made.plan([[]] * 3, 3, None)] == [0, 1, 2]
    exploration = UserStrategy(kind="my_strategies:HalveLR")
    assert type(explorer(exploration)).__name__ == "HalveLR"


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (own("everyone"), r"expected 'my_strategies:everyone' to be a class or a function, got Ev"),
        (own("Neither"), r"'my_strategies:Neither' to make an object with a method plan, got <my_"),
        (own("Everyone", copy=1), r"my_strategies:Everyone refuses .*'copy': 1.*TypeError.*'copy'"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(folder, selection, message):
    with pytest.raises(ConfigError, match=message) as info:
        selector(selection)
    assert str(info.value).startswith("evolve.selection")


def test_settings_and_plans_are_made_without_running_code(folder, capsys):
    config = small(evolve__selection="my_strategies:Everyone")
    assert RunConfig(**yaml.safe_load(to_yaml(config))) == config
    assert "my_strategies:Everyone" in to_yaml(config)
    make_plan(config)
    make_plan(small(evolve__selection="my_strategies:Swap"))
    make_plan(small(evolve__exploration="my_strategies:HalveLR"))
    assert "my_strategies" not in sys.modules
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("evolve", "message"),
    [
        ({"selection": "my_strategies:Nobody"}, r"^evolve.selection: .*has no 'Nobody'"),
        ({"selection": "my_strategie:X"}, r"no module 'my_strategie'.*\"my_strategies\""),
        ({"selection": "my_strategies:HalveLR"}, r"with a method plan, .*see evo_grpo.Selector"),
        ({"exploration": "my_strategies:Everyone"}, r"^evolve.exploration: .*method explore.*Expl"),
        (
            {"selection": {"kind": "my_strategies:Everyone", "args": {"copy": 1}}},
            r"my_strategies:Everyone refuses .*'copy': 1.*TypeError.*'copy'.*set evolve.sel",
        ),
    ],
)
def test_a_plan_of_a_run_says_what_shows_without_running(folder, evolve, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(small(**{f"evolve__{name}": value for name, value in evolve.items()}))
    assert "my_strategies" not in sys.modules


@pytest.mark.slow
def test_a_run_by_the_names_of_classes_ends_as_one_that_was_stopped_and_resumed(folder):
    config = small(
        evolve__selection={"kind": "my_strategies:Everyone", "args": {"copies": True}},
        evolve__exploration="my_strategies:HalveLR",
    )
    whole = outcome(run(config, out=folder / "whole"))
    lives = [member.parent for record, _ in whole["rounds"] for member in record.members]
    assert lives.count(0) >= 2, "agent 1 is a copy of agent 0"
    parts = outcome(stopped_and_resumed(config, folder / "parts", ("done", 0)))
    assert parts == whole


def test_a_sampler_that_cannot_propose_leaves_no_run_behind(folder):
    exploration = {"kind": "optuna", "sampler": "BruteForceSampler"}
    with pytest.raises(ConfigError, match=r"^evolve.exploration: .* cannot propose lr, beta"):
        run(small(evolve__exploration=exploration), out="run")
    assert not (folder / "run").exists()


def test_a_plan_that_copies_what_it_overwrites_ends_the_run_by_the_name_of_its_class(folder):
    with pytest.raises(ShapeError, match=r"^Swap.plan: position 0 copies position 1, expected"):
        run(small(evolve__selection="my_strategies:Swap"), out="run")


# --- objects that Python gives --------------------------------------------------------------------


class Mine:
    def plan(self, histories, places, rng):
        return TournamentSelection(size=1).plan(histories, places, rng)

    def explore(self, candidate, hp_config, rng):
        return candidate.hparams


ROUND = {
    "steps_per_round": 1,
    "fitness": {"prompts": 4, "test_prompts": 4, "test_samples": 1},
    "progress": False,
}


def population():
    return GRPO.population(
        size=2, model="tiny-sums", lora={"r": 2}, group_size=4, prompts_per_step=2, device="cpu"
    )


def test_a_run_file_holds_no_object():
    for name in ("selection", "exploration"):
        with pytest.raises(
            ConfigError,
            match=rf"^{name}: expected a name that a file can hold, got <.*Mine.*; name the class "
            r'as "module:Class", or give the object to Population.train',
        ):
            EvolveConfig(**{name: Mine()})
        with pytest.raises(
            ConfigError, match=rf"^{name}: expected a strategy with a method .*, got"
        ):
            EvolveConfig(**{name: object()})


def test_train_takes_objects_and_records_that_no_file_can_name_them(tmp_path):
    agents = population()
    agents.train(
        "sums", rounds=2, out=tmp_path / "run", selection=Mine(), exploration=Mine(), **ROUND
    )
    assert len(agents.rounds) == 2
    (tmp_path / "run" / "summary.json").unlink()  # as if it had been stopped
    with pytest.raises(RunDirError, match=r"with selection, exploration, which no file can name"):
        resume(tmp_path / "run")


def test_train_takes_names_and_records_them(folder):
    population().train("sums", rounds=1, out="run", selection="my_strategies:Everyone", **ROUND)
    assert "kind: my_strategies:Everyone" in (folder / "run" / "population.yaml").read_text()
    assert resume("run") is not None


@pytest.mark.parametrize("given", [Mine, TournamentSelection])
def test_a_class_is_not_an_object(given):
    with pytest.raises(
        ConfigError, match=rf"^selection: expected an object, got the class {given.__name__}; give "
    ):
        from_object("selection", given)
    with pytest.raises(ConfigError, match=r"^selection: expected an object, got the class"):
        population().train("sums", rounds=1, selection=given, **ROUND)
