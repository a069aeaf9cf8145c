"""Run folders: nothing is lost, nothing is overwritten unasked, and a run can always go on."""

import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shown_run import SUMMARY

from evo_grpo.errors import CheckpointError, RunDirError, RunFailedError, RunNotFoundError
from evo_grpo.readers.report.run_page import write_report
from evo_grpo.record.family import best_agent, best_ever
from evo_grpo.record.files import atomic_write, remove, seal, to_line, unseal
from evo_grpo.record.folder import (
    config_text,
    expect_run,
    is_run,
    listed_objects,
    parse_rounds,
    read_rounds,
    round_entries,
    with_objects,
)
from evo_grpo.record.leaderboard import leaderboard
from evo_grpo.record.records import NextAgents, outline
from evo_grpo.record.run_dir import RunDir, checkpoint_name, kept_checkpoints, kept_throughout
from evo_grpo.record.summary import read_summary
from evo_grpo.settings import RecordConfig
from evo_grpo.types import Decision, Mutation, Request, RequestOutcome

ROOT = Path(__file__).resolve().parents[2]
YAML = "name: population\n"


def tree(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def filled(folder, records, *, checkpoints=True):
    """A run with these rounds, closed again."""
    with RunDir.create(folder, "population", YAML) as run:
        for record in records:
            run.write(f"completions/round-{record.round:04d}.jsonl", '{"completion": "12"}\n')
            run.append_step(record.round, 0, [{"round": record.round, "step": 0, "agent": 0}])
            run.finish_metrics(record.round)
            for agent in record.agents if checkpoints else ():
                path = run.path / checkpoint_name(record.round, agent.agent)
                path.mkdir(parents=True)
                (path / "attributes.json").write_text("{}")
            run.append_round(record)
    return folder


# --- create ---------------------------------------------------------------------------------------


def test_a_new_folder_is_a_run_from_the_start(tmp_path):
    with RunDir.create(tmp_path / "deep" / "run", "population", YAML) as run:
        assert is_run(run.path)
        assert config_text(run.path) == YAML
        assert run.rounds() == []
        assert read_summary(run.path) is None
        assert tree(run.path) == [".lock", "population.yaml", "rounds.jsonl"]
    with RunDir.open(tmp_path / "deep" / "run") as run:
        assert run.rounds() == []


def test_objects_of_one_keyword_are_all_listed_when_the_settings_are_written_again(tmp_path):
    objects = ["env.reward (the function f)", "env.reward (the function g)"]
    with RunDir.create(tmp_path, "population", with_objects(YAML, objects)) as run:
        run.write("population.yaml", with_objects(YAML, listed_objects(run.path)))
        assert listed_objects(run.path) == objects
        assert config_text(run.path).endswith(f"\n{YAML}")
        run.write("population.yaml", with_objects(YAML, []))
        assert listed_objects(run.path) == []


def test_no_path_takes_the_next_free_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for expected in ("runs/my-sums-1", "runs/my-sums-2"):
        with RunDir.create(None, "my sums", YAML) as run:
            assert run.path == Path(expected)
    (tmp_path / "runs" / "my-sums-1").rename(tmp_path / "runs" / "my-sums-7")
    with RunDir.create(None, "my sums", YAML) as run:
        assert run.path.name == "my-sums-8"
    with RunDir.create(None, "../..", YAML) as run:
        assert run.path == Path("runs/run-1")


def test_an_empty_folder_is_fine_and_so_is_one_that_died_young(tmp_path):
    RunDir.create(tmp_path, "population", YAML).close()
    (tmp_path / "population.yaml").unlink()
    (tmp_path / ".population.yaml.tmp").write_text("na")
    with RunDir.create(tmp_path, "population", YAML) as run:
        assert config_text(run.path) == YAML


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        message = r"cannot be written \(Not a directory\).*--out"
        with pytest.raises(RunDirError, match=message) as info:
            RunDir.create(path, "population", YAML, force=True)
        assert info.value.exit_code == 2


def test_a_foreign_folder_is_refused_and_left_as_it_is(tmp_path):
    for name in "dcba":
        (tmp_path / name).write_text(name)
    with pytest.raises(RunDirError, match=r"new or empty folder, found a, b, c, \.\.\.; .*--force"):
        RunDir.create(tmp_path, "population", YAML)
    assert tree(tmp_path) == ["a", "b", "c", "d"]


def test_force_in_a_foreign_folder_changes_none_of_its_files(tmp_path):
    (tmp_path / "notes.txt").write_text("notes")
    for name in ("population.yaml", "checkpoints"):
        (tmp_path / name).mkdir()
        with pytest.raises(RunDirError, match=rf"empty folder, found {name}; choose another --out"):
            RunDir.create(tmp_path, "population", YAML, force=True)
        assert sorted(os.listdir(tmp_path)) == sorted([name, "notes.txt"])
        (tmp_path / name).rmdir()
    with RunDir.create(tmp_path, "population", YAML, force=True) as run:
        assert config_text(run.path) == YAML
    assert (tmp_path / "notes.txt").read_text() == "notes"


def test_an_unfinished_run_is_refused_with_the_way_on(tmp_path, make_run):
    folder = filled(tmp_path / "run", make_run())
    before = tree(folder)
    message = rf"found an unfinished run; continue with: evo-grpo resume {re.escape(str(folder))}"
    with pytest.raises(RunDirError, match=message) as info:
        RunDir.create(folder, "population", "name: other\n")
    assert info.value.exit_code == 2
    assert tree(folder) == before
    assert len(read_rounds(folder)) == 3


def test_a_finished_run_is_refused(tmp_path, make_run):
    folder = filled(tmp_path / "run", make_run())
    with RunDir.open(folder) as run:
        run.write("summary.json", "{}")
    with pytest.raises(RunDirError, match=r"found a finished run; .*replace it with --force"):
        RunDir.create(folder, "population", YAML)
    RunDir.open(folder).close()  # the refusal holds nothing


def test_force_replaces_a_run_and_keeps_what_is_not_its_own(tmp_path, make_run):
    folder = filled(tmp_path / "run", make_run())
    (folder / "readers").mkdir()
    for name in (
        *("journal.log", "leaderboard.csv", "summary.json", "notes.txt"),
        *("notes.jsonl", "readers/wandb.json", "readers/wandb.lock"),
    ):
        (folder / name).write_text("{}")
    (folder / "checkpoints" / "best-so-far").mkdir()
    (folder / "checkpoints" / "best-so-far" / "weights").write_text("kept by hand")
    with RunDir.create(folder, "population", "name: new\n", force=True) as run:
        assert run.rounds() == []
        assert config_text(run.path) == "name: new\n"
        assert read_summary(run.path) is None
    assert tree(folder) == [
        ".lock",
        "checkpoints/best-so-far/weights",
        "notes.txt",
        "population.yaml",
        "rounds.jsonl",
    ]


# --- the lock -------------------------------------------------------------------------------------


def test_a_run_in_use_is_refused_whatever_is_asked(tmp_path):
    with RunDir.create(tmp_path / "run", "population", YAML):
        for again in (
            lambda: RunDir.open(tmp_path / "run"),
            lambda: RunDir.create(tmp_path / "run", "population", YAML, force=True),
        ):
            with pytest.raises(RunDirError, match=rf"in use by process {os.getpid()};"):
                again()
        assert read_rounds(tmp_path / "run") == [], "reading needs no lock"
    RunDir.open(tmp_path / "run").close()


HOLD = """
import os, sys, time
from evo_grpo.record.run_dir import RunDir
run = RunDir.create(sys.argv[1], "population", "name: population\\n")
if sys.argv[2] == "fork" and os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
if sys.argv[2] == "alone":
    print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("mode", ["alone", "fork"])
def test_the_lock_dies_with_its_process(tmp_path, mode):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), mode],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    worker = None
    try:
        said = process.stdout.readline().strip()
        worker = int(said) if mode == "fork" else None
        with pytest.raises(RunDirError, match=rf"in use by process {process.pid};"):
            RunDir.open(folder)
        process.kill()
        process.wait(timeout=30)
        # A worker that outlives the run does not hold its folder.
        with RunDir.open(folder) as run:
            assert run.rounds() == []
    finally:
        process.kill()
        process.wait(timeout=30)
        process.stdout.close()
        if worker is not None:
            os.kill(worker, signal.SIGKILL)


# --- rounds ---------------------------------------------------------------------------------------


def test_rounds_are_read_back_as_they_were(tmp_path, make_run):
    records = make_run(size=3, rounds=4, failures=0.5)
    folder = filled(tmp_path / "run", records)
    assert read_rounds(folder) == records
    with RunDir.open(folder) as run:
        assert run.rounds() == records


def test_rounds_come_once_and_in_order(tmp_path, make_run):
    first, second, third = make_run(rounds=3)
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        run.append_round(first)
        for wrong in (first, third):
            with pytest.raises(AssertionError, match="each round is recorded once, in order"):
                run.append_round(wrong)
        run.append_round(second)
        assert [record.round for record in run.rounds()] == [0, 1]


def test_a_run_that_goes_on_keeps_outlines_of_earlier_rounds(tmp_path, make_run):
    records = make_run(rounds=3)
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        for record in records:
            run.append_round(record)
        assert run.rounds() == [*map(outline, records[:-1]), records[-1]]
        assert run.rounds() != records
    assert read_rounds(run.path) == records


def amended(record):
    """The round once its second agent was stopped by hand."""
    asked = Request("1", "stop-agent", agent=1, after=record.round)
    return replace(
        record,
        members=(record.members[0], *record.members[2:]),
        next_hparams=(record.next_hparams[0], *record.next_hparams[2:]),
        decisions=(Decision("steered", 1, None, math.nan, math.nan, 0, "by hand"),),
        steering=(*record.steering, RequestOutcome(asked)),
        next_member=30,
    )


def test_what_was_asked_for_after_a_round_stands_in_a_line_of_its_own(tmp_path, make_run):
    first, second, third = make_run(rounds=3)
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        for record in (first, second):
            run.append_round(record)
        path = run.path / "rounds.jsonl"
        before = path.stat().st_size
        run.amend_round(amended(second))
        with pytest.raises(AssertionError, match="only the last round can be changed"):
            run.amend_round(amended(first))
        assert run.rounds()[1].members == amended(second).members
        # Who has read up to here reads on without that round.
        rest = path.stat().st_size - before
        assert parse_rounds(path, start=before, first=2) == ([], rest, [])
        run.append_round(third)
    assert str(read_rounds(run.path)) == str([first, amended(second), third])
    with RunDir.open(run.path) as again:
        assert str(again.rounds()) == str([first, amended(second), third])
        again.amend_round(amended(third))
    assert str(read_rounds(run.path)) == str([first, amended(second), amended(third)])


def test_a_run_that_goes_on_after_its_end_carries_out_the_plan_of_its_last_round(
    tmp_path, make_run
):
    first, second = make_run(rounds=2)
    staying = NextAgents(second.members[:1], second.next_hparams[:1], amended(second).decisions)
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        run.append_round(first)
        run.append_round(replace(second, stopped=("fitness",), plan=staying))
        run.write("summary.json", seal({"rounds": 2}))
        assert run.rounds()[-1].is_end
        for _ in range(2):  # the second time nothing is left to do
            run.reopen()
    *_, last = read_rounds(run.path)
    assert (last.members, last.next_hparams) == (staying.members, staying.hparams)
    assert [one.sentence for one in last.decisions] == ["by hand"]
    assert (last.plan, last.is_end) == (None, False)
    assert (run.path / "summary.rounds-2.json").is_file()
    assert len((run.path / "rounds.jsonl").read_bytes().splitlines()) == 3


@pytest.mark.parametrize("kept", [1, 20, -40, -2])
def test_a_torn_amendment_is_dropped(tmp_path, make_run, kept):
    records = make_run(rounds=2)
    folder = filled(tmp_path / "run", records)
    with RunDir.open(folder) as run:
        run.amend_round(amended(records[1]))
    path = folder / "rounds.jsonl"
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[:kept])
    assert read_rounds(folder) == records
    with RunDir.open(folder) as run:
        run.amend_round(amended(records[1]))
    assert path.read_bytes() == b"".join([*whole, last])


def test_an_amendment_of_another_round_is_damage(tmp_path, make_run):
    records = make_run(rounds=2)
    folder = filled(tmp_path / "run", records[:1])
    with RunDir.open(folder) as run:
        run.amend_round(amended(records[0]))
        run.append_round(records[1])
    path = folder / "rounds.jsonl"
    first, amendment, second = path.read_bytes().splitlines(keepends=True)
    for lines in ([amendment, first, second], [first, second, amendment]):
        path.write_bytes(b"".join(lines))
        with pytest.raises(CheckpointError, match="it amends round 0, expected round"):
            read_rounds(folder)


@pytest.mark.parametrize("kept", [1, 20, -40, -2])
def test_a_torn_last_line_is_dropped(tmp_path, make_run, kept, caplog):
    records = make_run(rounds=3)
    folder = filled(tmp_path / "run", records)
    path = folder / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:kept])
    assert read_rounds(folder) == records[:2]
    with RunDir.open(folder) as run:
        assert run.rounds() == records[:2]
        run.append_round(records[2])
    assert path.read_bytes() == b"".join(lines)
    assert f"removed a truncated last line of {len(lines[2][:kept])} bytes" in caplog.text


def test_a_whole_last_line_without_its_end_is_kept(tmp_path, make_run):
    records = make_run(rounds=2)
    folder = filled(tmp_path / "run", records[:1])
    path = folder / "rounds.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    with RunDir.open(folder) as run:
        run.append_round(records[1])
    assert read_rounds(folder) == records


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [lines[0], lines[1].replace(b'"tokens": 100', b'"tokens": 999'), lines[2]],
         r"line 2: expected round 2 as it was written, but its sha256 does not match"),
        (lambda lines: [lines[0], lines[1][:50] + b"\n", lines[2]], r"line 2: .*it is not JSON"),
        (lambda lines: [lines[0], lines[2]], r"line 2: .*it is round 3, expected 2"),
        (lambda lines: [*lines, b"{}\n"], r"line 4: .*it has no sha256"),
        (lambda lines: [b"\n", *lines], r"line 1: .*it is not JSON"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(tmp_path, make_run, damage, message):
    folder = filled(tmp_path / "run", make_run(rounds=3))
    path = folder / "rounds.jsonl"
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    for read in (read_rounds, RunDir.open):
        with pytest.raises(CheckpointError, match=message):
            read(folder)
    assert path.read_bytes() == before, "nothing is dropped but a torn end"
    for _, entry in list(round_entries(folder / "checkpoints")):
        remove(entry)
    path.write_text("")
    RunDir.open(folder).close()  # the failed open holds nothing


def with_format(line, version):
    """A line as another version of this library wrote it; None is 0.1, which wrote no version."""
    data = unseal(line)
    del data["format"]
    return seal(data if version is None else {"format": version, **data}).encode()


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "got None: another version of evo-grpo wrote it; finish or read it with that ver"),
        (5, "got 5: another version of evo-grpo wrote it; finish or read it with that version"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_run_of_another_format_is_refused_and_left_as_it_is(
    tmp_path, make_run, version, message, place, end
):
    folder = filled(tmp_path / "run", make_run(rounds=2))
    path = folder / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[place] = with_format(lines[place], version)
    path.write_bytes(b"".join(lines).removesuffix(b"\n") + end)
    before = path.read_bytes()
    expected = rf"rounds\.jsonl, line {place + 1}: expected a run in format 4, {message}"
    for read in (read_rounds, RunDir.open):
        with pytest.raises(RunDirError, match=expected):
            read(folder)
    assert path.read_bytes() == before


def test_a_run_of_0_2_is_refused_by_its_version_although_its_seal_is_another(tmp_path, make_run):
    folder = filled(tmp_path / "run", make_run(rounds=1))
    (folder / "rounds.jsonl").write_text('{"round": 0, "agents": [], "sha256": "a6cb"}\n')
    with pytest.raises(RunDirError, match="format 4, got None: another version of evo-grpo wrote"):
        read_rounds(folder)


def test_a_full_disk_leaves_no_half_of_a_line(tmp_path, make_run, monkeypatch):
    first, second = make_run(rounds=2)
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        run.append_round(first)
        before = (run.path / "rounds.jsonl").read_bytes()

        def full(_descriptor):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(RunFailedError, match=r"rounds.jsonl: cannot be written \(No space"):
                run.append_round(second)
        assert (run.path / "rounds.jsonl").read_bytes() == before
        run.append_round(second)
        assert read_rounds(run.path) == [first, second]


def test_numbers_that_are_not_finite_do_not_spoil_a_line(tmp_path, make_run):
    (record,) = make_run(rounds=1)
    agents = (replace(record.agents[0], metrics={"kl": float("nan")}), *record.agents[1:])
    folder = filled(tmp_path / "run", [replace(record, agents=agents)])
    (read,) = read_rounds(folder)
    assert str(read.agents[0].metrics["kl"]) == "nan"


# --- the rest of the folder -----------------------------------------------------------------------


def test_completions_and_checkpoints_have_their_places(tmp_path):
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        for step in (0, 0, 1):  # a round that is begun again
            run.append_step(3, step, [{"step": step, "kl": float("nan")}])
        ((name, digest),) = run.finish_metrics(3).items()
        assert name == "metrics/round-0003.jsonl"
        text = '{"step": 0, "kl": null}\n{"step": 1, "kl": null}\n'
        assert (run.path / name).read_text(encoding="utf-8") == text
        assert hashlib.sha256(text.encode()).hexdigest() == digest
        assert run.finish_metrics(4) == {}, "no step of that round"
        name = "completions/round-0003.jsonl"
        digest = hashlib.sha256("ä\n".encode()).hexdigest()
        assert run.write(name, "ä\n") == {name: digest}
        assert (run.path / name).read_text(encoding="utf-8") == "ä\n"
        assert checkpoint_name(3, 2) == "checkpoints/round-0003/agent-02"


def test_metrics_replace_a_link_and_not_its_target(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        path = run.path / "metrics" / "round-0000.jsonl"
        path.parent.mkdir()
        path.symlink_to(theirs)
        run.append_step(0, 0, [{"step": 0}])
        assert not path.is_symlink()
    assert theirs.read_text() == "theirs"


def test_the_summary_finishes_a_run(tmp_path):
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        run.write("summary.json", to_line(SUMMARY))
        assert read_summary(run.path) == SUMMARY


def test_what_belongs_to_unfinished_rounds_is_dropped(tmp_path, make_run):
    records = make_run(size=2, rounds=2)
    folder = filled(tmp_path / "run", records)
    (folder / "completions" / "round-0002.jsonl").write_text("stale")
    (folder / "completions" / ".round-0003.jsonl.tmp").write_text("torn")
    (folder / ".leaderboard.csv.tmp").write_text("torn")
    for place in ("metrics", "steering"):
        (folder / place).mkdir(exist_ok=True)
        (folder / place / ".torn.json.tmp").write_text("torn")
    (folder / "completions" / "mine.txt").write_text("mine")
    half = folder / "checkpoints" / "round-0002" / "agent-00"
    half.mkdir(parents=True)
    (half / "optimizer.safetensors").write_text("half")
    with RunDir.open(folder) as run:
        run.drop_unfinished()
    assert tree(folder) == [
        ".lock",
        "checkpoints/round-0000/agent-00/attributes.json",
        "checkpoints/round-0000/agent-01/attributes.json",
        "checkpoints/round-0001/agent-00/attributes.json",
        "checkpoints/round-0001/agent-01/attributes.json",
        "completions/mine.txt",
        "completions/round-0000.jsonl",
        "completions/round-0001.jsonl",
        "metrics/round-0000.jsonl",
        "metrics/round-0001.jsonl",
        "population.yaml",
        "rounds.jsonl",
    ]


def test_opening_a_run_changes_nothing_in_it(tmp_path, make_run):
    folder = filled(tmp_path / "run", make_run(rounds=2))
    path = folder / "rounds.jsonl"
    path.write_bytes(path.read_bytes() + b'{"format": 4, "round": 2, "ag')
    half = folder / "checkpoints" / "round-0002" / "agent-00"
    half.mkdir(parents=True)
    before, text = tree(folder), path.read_bytes()
    RunDir.open(folder).close()
    assert tree(folder) == before
    assert path.read_bytes() == text


@pytest.mark.parametrize("kept", [0, 1])
def test_lost_lines_are_refused_while_the_checkpoints_of_their_rounds_are_there(
    tmp_path, make_run, kept
):
    folder = filled(tmp_path / "run", make_run(rounds=4))
    path = folder / "rounds.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept]))
    before = tree(folder)
    with pytest.raises(CheckpointError, match=rf"expected the line of round 4, .*got {kept} whole"):
        RunDir.open(folder)
    assert tree(folder) == before
    # The other way out that it names.
    for number in range(kept, 4):
        shutil.rmtree(folder / "checkpoints" / f"round-{number:04d}")
    with RunDir.open(folder) as opened:
        assert len(opened.rounds()) == kept


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_checkpoints_of_two_rounds_without_a_line_are_dropped(tmp_path, make_run, finished):
    """As other ranks leave them where the disk of the first one is slow."""
    folder = filled(tmp_path / "run", make_run(rounds=finished + 2))
    path = folder / "rounds.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:finished]))
    with RunDir.open(folder) as opened:
        assert len(opened.rounds()) == finished
        opened.drop_unfinished()
    left = [f"round-{number:04d}" for number in range(finished)]
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == left


@pytest.mark.parametrize(("lost", "end"), [(1, 0), (2, 0), (0, -2), (0, -41), (0, -201)])
def test_lost_lines_are_refused_where_nothing_is_left_to_go_on_from(tmp_path, make_run, lost, end):
    folder = filled(tmp_path / "run", make_run(rounds=4))
    with RunDir.open(folder) as run:
        run.drop_checkpoints("last")
    path = folder / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: 4 - lost])[: end or None])
    before = tree(folder)
    with pytest.raises(CheckpointError, match=r"expected the line of round 4, .*put it back"):
        RunDir.open(folder)
    assert tree(folder) == before


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_last_line_with_all_of_its_json_is_damaged_and_not_torn(tmp_path, make_run, end):
    folder = filled(tmp_path / "run", make_run(rounds=2))
    path = folder / "rounds.jsonl"
    text = path.read_bytes().replace(b'"tokens": 100', b'"tokens": 999')
    path.write_bytes(text.removesuffix(b"\n") + end)
    with pytest.raises(CheckpointError, match="sha256 does not match its contents"):
        RunDir.open(folder)


def test_a_last_line_that_ends_as_sealed_lines_do_is_damaged_and_not_torn(tmp_path, make_run):
    folder = filled(tmp_path / "run", make_run(rounds=2))
    path = folder / "rounds.jsonl"
    text = path.read_bytes()
    path.write_bytes(text[:-200] + b'"' + text[-199:].removesuffix(b"\n"))
    with pytest.raises(CheckpointError, match="line 2"):
        RunDir.open(folder)


def test_only_the_last_checkpoints_can_be_kept(tmp_path, make_run):
    folder = filled(tmp_path / "run", make_run(rounds=3))
    (folder / "checkpoints" / "round-0003" / "agent-00").mkdir(parents=True)  # of another rank
    with RunDir.open(folder) as run:
        run.drop_checkpoints("last")
    assert sorted(os.listdir(folder / "checkpoints")) == ["round-0002", "round-0003"]
    assert len(os.listdir(folder / "completions")) == 3


def test_a_folder_can_be_moved(tmp_path, make_run):
    records = make_run(rounds=2)
    filled(tmp_path / "run", records).rename(tmp_path / "elsewhere")
    with RunDir.open(tmp_path / "elsewhere") as run:
        assert run.rounds() == records
        for agent in records[-1].agents:
            assert (run.path / agent.checkpoint).is_dir()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "got no folder"),
        (lambda path: path.write_text("x"), "got no folder"),
        (lambda path: path.mkdir(), "got one without population.yaml and rounds.jsonl"),
        (
            lambda path: (path.mkdir(), (path / "population.yaml").write_text("x")),
            "got one without rounds.jsonl",
        ),
    ],
)
def test_what_is_no_run_is_said(tmp_path, make, message):
    make(tmp_path / "run")
    expected = rf"no run folder: expected one with rounds.jsonl and population.yaml .*{message}"
    for read in (RunDir.open, read_rounds, expect_run):
        with pytest.raises(RunNotFoundError, match=expected) as info:
            read(tmp_path / "run")
        assert info.value.exit_code == 2


# --- what somebody else put into the folder -------------------------------------------------------


def contents(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def through(folder, name, outside):
    """Put a link in the place of one of a run's files or folders, to one that is like it."""
    path, theirs = folder / name, outside / Path(name).name
    if path.is_dir():
        shutil.copytree(path, theirs)
        shutil.rmtree(path)
    else:
        theirs.write_bytes(path.read_bytes() if path.exists() else b"theirs")
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
    path.symlink_to(theirs)


PLACES = [
    *(".lock", "population.yaml", "rounds.jsonl", "journal.log", "leaderboard.csv", "summary.json"),
    *("study.db", "study.db-journal", "study.db-wal", "study.db-shm"),
    *("completions", "metrics", "checkpoints", "compare", "replay"),
    *(
        "completions/round-0000.jsonl",
        "metrics/round-0001.jsonl",
        "notes.jsonl",
        "readers",
        "readers/report.json",
        "checkpoints/best",
        "checkpoints/round-0001",
    ),
    *("trackers", "trackers/wandb", "trackers/wandb.json"),
    *("checkpoints/round-0001/agent-00", "checkpoints/round-0001/agent-00/attributes.json"),
]


@pytest.mark.parametrize("place", PLACES)
def test_a_planted_link_is_refused_and_its_target_untouched(tmp_path, make_run, place):
    folder = filled(tmp_path / "run", make_run(rounds=2))
    outside = tmp_path / "outside"
    outside.mkdir()
    through(folder, place, outside)
    before = contents(outside)
    for enter in (
        lambda: RunDir.open(folder),
        lambda: RunDir.create(folder, "population", YAML, force=True),
    ):
        with pytest.raises(RunDirError, match=rf"{place}: expected a regular file .* a link to"):
            enter()
        assert contents(outside) == before
        assert (folder / place).is_symlink()
    (folder / place).unlink()
    if place not in ("population.yaml", "rounds.jsonl"):
        RunDir.open(folder).close()  # the refusal holds nothing


@pytest.mark.parametrize("name", [".rounds.jsonl.tmp", ".leaderboard.csv.tmp"])
def test_a_planted_temporary_is_not_written_through(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        (run.path / name).symlink_to(victim)
        atomic_write(run.path / name.removeprefix(".").removesuffix(".tmp"), "ours")
    assert victim.read_text() == "theirs"
    assert [p for p in (tmp_path / "run").iterdir() if p.is_symlink()] == []


def test_a_file_with_a_second_name_elsewhere_is_not_changed(tmp_path, make_run):
    records = make_run(rounds=2)
    folder = filled(tmp_path / "run", records[:1])
    os.link(folder / "rounds.jsonl", tmp_path / "backup")
    before = (tmp_path / "backup").read_bytes()
    with (
        RunDir.open(folder) as run,
        pytest.raises(RunDirError, match=r"rounds.jsonl: .*2 names"),
    ):
        run.append_round(records[1])
    assert (tmp_path / "backup").read_bytes() == before


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "checkpoints/../../outside"])
def test_a_recorded_path_out_of_the_folder_is_refused(tmp_path, make_run, path):
    (record,) = make_run(rounds=1)
    agents = (replace(record.agents[0], checkpoint=path), *record.agents[1:])
    folder = filled(tmp_path / "run", [replace(record, agents=agents)], checkpoints=False)
    with pytest.raises(CheckpointError, match=r"line 1: .*expected a path below the folder"):
        RunDir.open(folder)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t=", "\r="])
def test_a_checkpoint_that_a_spreadsheet_takes_for_a_formula_is_refused(tmp_path, make_run, start):
    (record,) = make_run(rounds=1)
    path = f"{start}HYPERLINK(A1)"
    agents = (replace(record.agents[0], checkpoint=path), *record.agents[1:])
    folder = filled(tmp_path / "run", [replace(record, agents=agents)], checkpoints=False)
    for read in (RunDir.open, leaderboard):
        with pytest.raises(CheckpointError, match=r"expected a path below checkpoints/, got"):
            read(folder)


@pytest.mark.parametrize("name", ["no_such", "__class__", "model_fields", "get", "clip_x", ""])
@pytest.mark.parametrize("where", ["an agent", "a member", "mutable"])
def test_a_name_of_no_hyperparameter_is_refused(tmp_path, make_run, where, name):
    (record,) = make_run(rounds=1)
    changes = Mutation("mutate", {name: (1.0, 2.0)})
    if where == "an agent":
        changed = {"agents": (replace(record.agents[0], mutation=changes), *record.agents[1:])}
    elif where == "a member":
        changed = {"members": (replace(record.members[0], mutation=changes), *record.members[1:])}
    else:
        changed = {"mutable": (name,)}
    folder = filled(tmp_path / "run", [replace(record, **changed)], checkpoints=False)
    for read in (RunDir.open, write_report):
        with pytest.raises(CheckpointError, match=r"expected names of hyperparameters, got"):
            read(folder)


@pytest.mark.parametrize("gone", ["deleted", "replaced"])
def test_a_folder_that_is_gone_is_not_made_anew(tmp_path, make_run, gone):
    first, second = make_run(rounds=2)
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        run.append_round(first)
        shutil.rmtree(run.path)
        if gone == "replaced":  # as another process does that starts a run there
            run.path.mkdir()
            for name in (".lock", "population.yaml", "rounds.jsonl"):
                (run.path / name).write_text("")
        before = contents(run.path)
        for write in (
            lambda: run.append_round(second),
            lambda: run.write("completions/round-0001.jsonl", ""),
            lambda: run.write("summary.json", ""),
        ):
            with pytest.raises(RunFailedError, match=r"was deleted, moved or replaced"):
                write()
        assert contents(run.path) == before
        assert run.path.exists() == (gone == "replaced")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("agents", 5, "agents: .*valid array, got 5"),
        ("agents", [{}], r"agents\[0\]"),
        ("seconds", {"learn": "long"}, "seconds.learn: .*valid number, got 'long'"),
        ("round", "0", "round: .*valid integer, got '0'"),
        ("starts", -1.5, "starts"),
        ("members", [[]], r"members\[0\]"),
        ("next_hparams", [{"lr": "high"}], "next_hparams"),
        ("files", {"a": 1}, "files.a: .*valid string, got 1"),
    ],
)
def test_a_line_that_was_sealed_again_is_checked_field_by_field(
    tmp_path, make_run, field, value, message
):
    folder = filled(tmp_path / "run", make_run(rounds=1))
    path = folder / "rounds.jsonl"
    path.write_text(seal(unseal(path.read_bytes()) | {field: value}))
    for read in (read_rounds, RunDir.open):
        with pytest.raises(CheckpointError, match=rf"rounds.jsonl, line 1: .*{message}"):
            read(folder)


def test_braces_without_end_are_no_traceback(tmp_path, make_run):
    folder = filled(tmp_path / "run", make_run(rounds=1))
    (folder / "rounds.jsonl").write_bytes(b"[" * 3000 + b"]" * 3000 + b"\n")
    with pytest.raises(CheckpointError, match=r"line 1: .*it is not JSON"):
        read_rounds(folder)


@pytest.mark.parametrize("left", [(), ("optimizer.safetensors",), ("attributes.json",)])
def test_the_best_is_kept_where_a_kill_left_half_of_what_was_dropped(tmp_path, make_run, left):
    (record,) = make_run(rounds=1)
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        run.append_round(record)
        place = run.path / best_ever([record]).checkpoint
        place.mkdir(parents=True)
        for name in ("attributes.json", "optimizer.safetensors"):
            (place / name).write_text(f"the {name}")
        run.keep_best()
        for name in {"attributes.json", "optimizer.safetensors"} - set(left):
            (place / name).unlink()
        run.keep_best()
        best = run.path / "checkpoints" / "best"
        kept = {path.name: path.read_text() for path in best.iterdir()}
    assert kept == {name: f"the {name}" for name in ("attributes.json", "optimizer.safetensors")}


def of_rounds(records, *numbers):
    return {a.checkpoint for number in numbers for a in records[number].agents}


@pytest.mark.parametrize(
    ("policy", "rounds"),
    [("all", range(5)), ("last", [4]), (1, [4]), (3, [2, 3, 4]), (9, range(5))],
)
def test_whole_rounds_stay(make_run, policy, rounds):
    records = make_run(rounds=5)
    assert kept_checkpoints(records, policy) == of_rounds(records, *rounds)


def test_the_best_of_each_round_stays_beside_the_last(make_run):
    records = make_run(rounds=4)
    best = {best_agent(record).checkpoint for record in records[:3]}
    assert kept_checkpoints(records, "best") == of_rounds(records, 3) | best


def test_what_was_not_saved_is_not_kept(make_run):
    (record,) = make_run(rounds=1)
    agents = tuple(replace(agent, checkpoint=None) for agent in record.agents)
    assert kept_checkpoints([replace(record, agents=agents)], "best") == set()


@pytest.mark.parametrize(
    ("policies", "rounds"),
    [
        ([(5, "all")], range(5)),
        ([(2, "last"), (5, "all")], [1, 2, 3, 4]),
        ([(4, 2), (5, "all")], [2, 3, 4]),
        ([(2, "all"), (5, "last")], [4]),
        ([(0, "last"), (5, "all")], range(5)),
        ([(3, "last"), (3, "all"), (5, 3)], [2, 3, 4]),
    ],
)
def test_no_policy_brings_back_what_an_earlier_one_dropped(make_run, policies, rounds):
    records = make_run(rounds=5)
    assert kept_throughout(records, policies) == of_rounds(records, *rounds)


def test_policies_that_follow_one_another_keep_what_they_would_round_by_round(make_run):
    records, changes = make_run(rounds=8), {0: "all", 2: "best", 4: 3, 6: "best", 7: "all"}
    there, policy = set(), "all"
    for number, record in enumerate(records):
        policy = changes.get(number, policy)
        played = records[:number]
        there &= kept_checkpoints(played, policy)  # as a resume does
        there |= {agent.checkpoint for agent in record.agents}
        there &= kept_checkpoints(records[: number + 1], policy)
    policies = [(2, "all"), (4, "best"), (6, 3), (7, "best"), (8, "all")]
    assert kept_throughout(records, policies) == there


def test_no_round_keeps_nothing():
    assert kept_checkpoints([], "last") == set()


def test_the_best_ever_has_a_copy_unless_all_stay():
    records = [RecordConfig(checkpoints=policy) for policy in ("all", "last", "best", 2)]
    assert [r.keeps_best_apart(archive=False) for r in records] == [False, True, True, True]
    assert records[0].keeps_best_apart(archive=True)
