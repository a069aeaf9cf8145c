"""Runs in which survivors have children, and copies get noise on their weights."""

import json

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from small_run import SETTINGS, outcome, small, stopped_and_resumed

from evo_grpo import run
from evo_grpo.errors import ConfigError
from evo_grpo.readers.terminal.result import family_tree
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.view import view_of
from evo_grpo.settings import from_dict
from evo_grpo.training import judge


def recombining(**changes):
    """A run whose first round ends with a child that is kept."""
    return small(
        **{
            "seed": 8,
            "population__size": 4,
            "population__sizes": [4, 3],
            "population__steps_per_round": 2,
            "evolve__significance": 0.2,
            "evolve__recombine": "average",
            "algorithm__lr": 3e-3,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(recombining(), out=tmp_path_factory.mktemp("runs") / "whole")


def child_of(rounds):
    (child,) = [m for m in rounds[0].members if m.second_parent is not None]
    return child


def test_a_child_that_is_ahead_trains_on_with_two_parents(finished):
    rounds = read_rounds(finished)
    child = child_of(rounds)
    played = {agent.member: agent for agent in rounds[1].agents}[child.id]
    assert (played.parent, played.second_parent) == (child.parent, child.second_parent)
    assert played.mutation.op == "recombine"
    kinds = [decision.kind for record in rounds for decision in record.decisions]
    assert (kinds.count("recombined"), kinds.count("discarded")) == (1, 1)


def test_lineage_and_trials_name_both_parents(finished):
    rounds = read_rounds(finished)
    child = child_of(rounds)
    storage = JournalStorage(JournalFileBackend(str(finished / "journal.log")))
    (study,) = optuna.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=study.study_name, storage=storage).trials
    own = [t.user_attrs for t in trials if t.user_attrs["member"] == child.id]
    assert (own[0]["op"], own[0]["second_parent"]) == ("recombine", child.second_parent)
    assert {one.get("op") for one in own[1:]} <= {"continue"}
    shown = "".join(str(line) for line in _labels(family_tree(view_of(finished))))
    assert f"child of members {child.parent} and {child.second_parent}" in shown
    members = view_of(finished).family_document()["members"]
    assert members[child.id]["second_parent"] == child.second_parent


def _labels(tree):
    yield tree.label
    for child in tree.children:
        yield from _labels(child)


def test_the_tokens_of_a_child_count_as_evaluation(finished, tmp_path):
    without = run(recombining(evolve__recombine="none"), out=tmp_path / "without")
    first, other = (read_rounds(folder)[0] for folder in (finished, without))
    # Four agents were evaluated on as many prompts as the child.
    assert 1.1 < first.evaluation_tokens / other.evaluation_tokens < 1.4
    assert [agent.adapter_sha256 for agent in first.agents] == [
        agent.adapter_sha256 for agent in other.agents
    ]


def test_a_stopped_run_makes_the_recorded_child_again_from_its_parents(finished, tmp_path):
    folder = stopped_and_resumed(recombining(), tmp_path / "run", ("learn", 1))
    assert outcome(folder) == outcome(finished)


def test_the_mean_of_a_resumed_run_has_the_files_of_one_that_was_not_stopped(tmp_path, monkeypatch):
    # The child of the first round has been tried and is gone when the run goes on.
    monkeypatch.setattr(judge, "founder_of", lambda rounds, member: 0)
    fitness = {**SETTINGS["evolve"]["fitness"], "final_samples": 1}
    config = recombining(evolve__fitness=fitness, evolve__significance=0.5)
    whole = run(config, out=tmp_path / "whole")
    resumed = stopped_and_resumed(config, tmp_path / "run", ("learn", 1))
    members = []
    for folder in (whole, resumed):
        best = json.loads((folder / "summary.json").read_text())["best"]
        attributes = json.loads((folder / best["checkpoint"] / "attributes.json").read_text())
        assert best["kind"] == "mean"
        members.append(attributes["member"])
    assert members[0] == members[1]


def test_noise_changes_the_weights_of_copies_and_of_no_other(tmp_path):
    given = {"evolve__svd_noise": 0.2, "population__rounds": 2, "population__size": 4}
    folder = run(small(**given), out=tmp_path / "noise")
    plain = run(small(**{**given, "evolve__svd_noise": 0.0}), out=tmp_path / "plain")
    (first, last), (_, other) = read_rounds(folder), read_rounds(plain)
    slots = {agent.member: agent.agent for agent in first.agents}
    copies = {m.agent for m in first.members if slots.get(m.id, slots.get(m.parent)) != m.agent}
    assert copies
    assert {m.agent for m in first.members if m.mutation.noise is not None} == copies
    changed = {
        one.agent
        for one, same in zip(last.agents, other.agents, strict=True)
        if one.adapter_sha256 != same.adapter_sha256
    }
    assert changed == copies
    again = stopped_and_resumed(small(**given), tmp_path / "run", ("learn", 1))
    assert outcome(again) == outcome(folder)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["evolve.recombine=average", "evolve.significance=null"],
            "evolve.recombine: expected none with evolve.significance null, where no two agents",
        ),
        (
            [
                "evolve.recombine=layer_wise",
                "population.size=1",
                "evolve.selection=none",
                "evolve.significance=0.1",
            ],
            "evolve.recombine: expected none with one agent, got layer_wise: a child has two",
        ),
        (
            ["evolve.recombine=svd_subspace", "engine.zero=2", "evolve.significance=0.1"],
            "evolve.recombine: expected none with engine.zero, where every process",
        ),
        (["evolve.svd_noise=0.1", "engine.zero=2"], "evolve.svd_noise: expected 0 with engine"),
        (["evolve.recombine=mean"], "evolve.recombine: .*average"),
        (["evolve.svd_noise=-0.1"], "evolve.svd_noise: "),
    ],
)
def test_what_cannot_recombine_is_refused_before_anything_trains(given, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(SETTINGS, given)
