"""What a database gets of a run: all that is recorded, once, and never another run's trials."""

import json
import shutil
from dataclasses import replace

import optuna
import pytest
from random_runs import HP_CONFIG, make_run, timed, with_scores

from evo_grpo.errors import CheckpointError
from evo_grpo.record.database import DatabaseStudy, Unreachable, open_url
from evo_grpo.record.lineage import Lineage
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.sending import Sender
from evo_grpo.record.study import RunStudy
from evo_grpo.settings import from_dict
from evo_grpo.types import Slot

CONFIG = from_dict({"name": "small", "model": "tiny-sums", "env": "sums"})


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'shared.db'}"


@pytest.fixture
def records():
    return timed(make_run(size=3, rounds=4))


def folder_of(path, records):
    """A folder with recorded rounds; returns it with the length of each beginning."""
    lengths = [0]
    with RunDir.create(path, "small", "name: small\n") as run:
        for record in records:
            run.append_round(record)
            lengths.append(run.length)
    return path, lengths


def sender(folder, url, id="id-1", ids=("id-2", "id-3")):
    """A sender of a run whose next ids are known."""
    rest = iter(ids)
    return Sender(folder, url, RunStudy(CONFIG, id, lambda: next(rest)), HP_CONFIG)


def studies(url):
    """The trials of all studies of a database, by name."""
    return {
        name: optuna.load_study(study_name=name, storage=url).trials
        for name in optuna.get_all_study_names(url)
    }


def complete(url, records, name="small-id-1", more=0):
    """Whether a study has each trial of these records, as recorded, and no other."""
    with open_url(url, name, {}) as study:
        lineage = Lineage(study, hp_config=HP_CONFIG)
        there = {(t.user_attrs["agent"], t.user_attrs["round"]) for t in lineage.trials()}
        expected = {(a.agent, a.round) for record in records for a in record.agents}
        return (
            lineage.differing(records) == []
            and expected <= there
            and len(lineage.trials()) == len(expected) + more
        )


def test_rounds_are_sent_as_they_come_and_once(tmp_path, url, records):
    folder, lengths = folder_of(tmp_path / "run", records)
    with sender(folder, url) as ours:
        for number, end in enumerate(lengths):
            assert ours.send(end)
            assert (ours.rounds, ours.added) == (number, 3 * number)
        assert ours.send(lengths[-1])
        assert ours.added == 12
    assert complete(url, records)
    with sender(folder, url) as again:
        again.send(lengths[-1])
        assert (again.rounds, again.added) == (4, 0)
    assert complete(url, records)


def test_what_follows_the_finished_rounds_is_not_read(tmp_path, url, records):
    folder, lengths = folder_of(tmp_path / "run", records)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"format": 4, "half a li')
    with sender(folder, url) as ours:
        ours.send(lengths[2])
        assert ours.rounds == 2
        ours.send(lengths[4])
    assert complete(url, records)


def test_a_sender_that_was_closed_looks_anew_and_goes_on(tmp_path, url, records):
    folder, lengths = folder_of(tmp_path / "run", records)
    ours = sender(folder, url)
    ours.send(lengths[2])
    ours.close()
    ours.close()
    optuna.delete_study(study_name="small-id-1", storage=url)
    ours.send(lengths[4])
    assert (ours.rounds, ours.added) == (4, 6 + 12)
    ours.close()
    assert complete(url, records)


def test_a_study_that_is_deleted_meanwhile_is_filled_again(tmp_path, url, records):
    folder, lengths = folder_of(tmp_path / "run", records)
    with sender(folder, url) as ours:
        ours.send(lengths[2])
        optuna.delete_study(study_name="small-id-1", storage=url)
        with pytest.raises(Unreachable):
            ours.send(lengths[4])
        ours.close()
        ours.send(lengths[4])
    assert complete(url, records)


def test_it_stops_between_rounds_when_told(tmp_path, url, records):
    folder, lengths = folder_of(tmp_path / "run", records)
    with sender(folder, url) as ours:
        answers = iter([True, True, False])
        assert not ours.send(lengths[4], go_on=lambda: next(answers))
    with sender(folder, url) as rest:
        rest.send(lengths[4])
        assert rest.added == 6
    assert complete(url, records)


def test_a_damaged_line_is_named_by_its_place(tmp_path, url, records):
    folder, lengths = folder_of(tmp_path / "run", records)
    with sender(folder, url) as ours:
        ours.send(lengths[2])
        text = (folder / "rounds.jsonl").read_text()
        cut = lengths[2] + 40
        (folder / "rounds.jsonl").write_text(text[:cut] + "x" + text[cut + 1 :])
        with pytest.raises(CheckpointError, match=r"line 3: expected round 3 as it was written"):
            ours.send(lengths[4])


def test_two_runs_of_one_name_have_a_study_each(tmp_path, url, records):
    others = timed(make_run(size=3, rounds=4, seed=5))
    one, ends = folder_of(tmp_path / "one", records)
    two, other_ends = folder_of(tmp_path / "two", others)
    with sender(one, url, "id-1") as first, sender(two, url, "id-2") as second:
        for end, other in zip(ends, other_ends, strict=True):
            first.send(end)
            second.send(other)
    assert complete(url, records)
    assert complete(url, others, "small-id-2")


def test_a_copy_that_goes_on_as_the_run_does_adds_nothing(tmp_path, url, records):
    folder, lengths = folder_of(tmp_path / "run", records)
    copy = shutil.copytree(folder, tmp_path / "copy")
    with sender(folder, url) as ours, sender(copy, url) as theirs:
        ours.send(lengths[1])
        theirs.send(lengths[3])
        ours.send(lengths[2])  # where the copy has been already
        ours.send(lengths[4])
        theirs.send(lengths[4])
        assert (ours.added, theirs.added) == (3 + 3, 9 - 3)
        assert ours.study.id == theirs.study.id == "id-1"
        assert ours.notes == theirs.notes == []
    assert list(studies(url)) == ["small-id-1"]
    assert complete(url, records)


@pytest.mark.parametrize("opened", [False, True], ids=["before it is opened", "while it is open"])
def test_a_copy_that_goes_on_otherwise_leaves_the_study_alone(tmp_path, url, records, opened):
    """Its whole history is then in a study of its own; the run's has nothing of the copy."""
    folder, lengths = folder_of(tmp_path / "run", records)
    other = with_scores(records[2], [0.125, 0.25, 0.5])
    copy, copied = folder_of(tmp_path / "copy", [*records[:2], other])
    with sender(folder, url) as ours, sender(copy, url) as theirs:
        if opened:
            theirs.send(copied[2])
        ours.send(lengths[4])
        theirs.send(copied[3])
        assert theirs.study.id == "id-2"
        (note,) = theirs.notes
        assert "small-id-1 has other trials than this run has recorded" in note
        assert "small-id-2 from now on" in note
        assert ours.notes == []
    assert complete(url, records)
    assert complete(url, [*records[:2], other], "small-id-2")


def test_a_run_whose_copy_was_faster_in_the_middle_of_a_round_leaves_it_the_study(
    tmp_path, url, records, monkeypatch
):
    folder, lengths = folder_of(tmp_path / "run", records)
    other = with_scores(records[2], [0.125, 0.25, 0.5])
    copy, copied = folder_of(tmp_path / "copy", [*records[:2], other])
    record = Lineage.record

    def slowly(self, played):
        if played.round == 2:
            with monkeypatch.context() as patch:
                patch.setattr(Lineage, "record", record)
                with sender(copy, url) as theirs:
                    theirs.send(copied[3])
        record(self, played)

    with sender(folder, url) as ours:
        ours.send(lengths[2])
        monkeypatch.setattr(Lineage, "record", slowly)
        ours.send(lengths[3])
        assert ours.study.id == "id-2"
    assert complete(url, [*records[:2], other])
    assert complete(url, records[:3], "small-id-2")


def test_a_copy_that_was_stopped_in_the_middle_of_a_round_gets_no_trial_of_the_run(
    tmp_path, url, records
):
    folder, lengths = folder_of(tmp_path / "run", records)
    other = with_scores(records[2], [0.125, 0.25, 0.5])
    with sender(folder, url) as ours:
        ours.send(lengths[2])
        with open_url(url, "small-id-1", {}) as study:
            copy = Lineage(study, hp_config=HP_CONFIG)
            copy.record_all([*records[:2], replace(other, agents=other.agents[:1])])
        ours.send(lengths[4])
        assert ours.study.id == "id-2"
    assert len(studies(url)["small-id-1"]) == 6 + 1
    assert complete(url, records, "small-id-2")


def test_what_is_there_is_read_once_when_a_long_run_is_opened_again(tmp_path, url, monkeypatch):
    """Read for each round, it would take a database that was gone hours to get what it lacks."""
    records = timed(make_run(size=2, rounds=12))
    folder, lengths = folder_of(tmp_path / "run", records)
    with sender(folder, url) as ours:
        ours.send(lengths[10])
    whole, asked = DatabaseStudy.whole_trials, []
    monkeypatch.setattr(
        DatabaseStudy, "whole_trials", lambda study: asked.append(1) or whole(study)
    )
    with sender(folder, url) as ours:
        ours.send(lengths[12])
        assert ours.added == 4
    assert len(asked) == 2  # their outlines, and what they say


def test_another_version_of_the_same_trials_is_no_other_run(tmp_path, url, records):
    """A later release may tell more of a trial; its runs go on in their studies."""
    folder, lengths = folder_of(tmp_path / "run", records)
    fewer = [
        replace(
            record, agents=tuple(replace(a, metrics={}, step_rewards=()) for a in record.agents)
        )
        for record in records
    ]
    before, ends = folder_of(tmp_path / "before", fewer)
    with sender(before, url) as theirs:
        theirs.send(ends[2])
    with sender(folder, url) as ours:
        ours.send(lengths[4])
        assert (ours.study.id, ours.added) == ("id-1", 6)


def summary_of(last, kind="mean", validation=True):
    score = {"mean": 0.625, "se": None, "n": 8}
    parents = [agent.member for agent in last.agents[:2]]
    who = {"kind": kind, "agent": None if kind == "mean" else 0, "member": 99, "parents": parents}
    mean = {**who, "kind": "mean", "agent": None, "tie": None}
    return {
        "split": "test",
        "base": score,
        "best": {**score, **who, "fitness": None, "checkpoint": "checkpoints/mean"},
        "gain": 0.0,
        "gain_se": 0.1,
        "rounds": last.round + 1,
        "wall_seconds": 1.0,
        "candidates": [{**mean, "validation": score if validation else None}],
        "final_tokens": 3,
    }


def test_the_mean_that_a_run_ended_with_is_sent_once(tmp_path, url, records):
    folder, lengths = folder_of(tmp_path / "run", records)
    with sender(folder, url) as ours:
        ours.send(lengths[4])
        (folder / "summary.json").write_text(json.dumps(summary_of(records[-1])))
        for _ in range(2):
            ours.send(lengths[4])
    with sender(folder, url) as again:
        again.send(lengths[4])
    assert complete(url, records, more=1)
    trial = studies(url)["small-id-1"][-1]
    said = trial.user_attrs
    assert (trial.value, said["fitness_se"]) == (0.625, None)
    assert (said["op"], said["member"], said["round"]) == ("mean", 99, 4)
    parents = [agent.member for agent in records[-1].agents[:2]]
    assert [said["parent"], said["second_parent"]] == parents


@pytest.mark.parametrize("change", ["last", "nothing was compared", "of fewer rounds"])
def test_a_mean_that_did_not_win_has_no_trial(tmp_path, url, records, change):
    folder, lengths = folder_of(tmp_path / "run", records)
    summary = summary_of(
        records[-1],
        kind="last" if change == "last" else "mean",
        validation=change != "nothing was compared",
    )
    if change == "of fewer rounds":
        summary["rounds"] = 3
    (folder / "summary.json").write_text(json.dumps(summary))
    with sender(folder, url) as ours:
        ours.send(lengths[4])
    assert complete(url, records)


def test_the_mean_of_an_earlier_end_is_nobodys_parent(tmp_path, url, records):
    """More rounds give its member id to a real agent."""
    folder, lengths = folder_of(tmp_path / "run", records[:3])
    (folder / "summary.json").write_text(json.dumps(summary_of(records[2])))
    with sender(folder, url) as ours:
        ours.send(lengths[3])
    (folder / "summary.json").unlink()
    born = replace(records[3].agents[0], member=99, agent=Slot(0))
    last = replace(records[3], agents=(born, *records[3].agents[1:]))
    whole = [*records[:3], last]
    longer, ends = folder_of(tmp_path / "longer", whole)
    with sender(longer, url) as ours:
        ours.send(ends[4])
        assert ours.added == 3
    assert complete(url, whole, more=1)
