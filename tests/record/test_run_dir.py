"""Run folders: nothing is lost, nothing is overwritten unasked, and a run can always go on."""

import hashlib
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from random_runs import make_run

from evo_grpo.errors import CheckpointError, RunDirError, RunFailedError, RunNotFoundError
from evo_grpo.readers.report.run_page import write_report
from evo_grpo.record.family import best_agent, best_ever
from evo_grpo.record.files import atomic_write, seal, unseal
from evo_grpo.record.folder import (
    config_text,
    expect_run,
    is_run,
    listed_objects,
    parse_rounds,
    read_rounds,
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


def test_a_run_that_was_killed_during_its_set_up_leaves_a_folder_for_another(tmp_path):
    RunDir.create(tmp_path, "population", YAML).close()
    (tmp_path / "population.yaml").unlink()
    (tmp_path / ".population.yaml.tmp").write_text("na")
    with RunDir.create(tmp_path, "population", YAML) as run:
        assert config_text(run.path) == YAML


def a_file(path):
    path.write_text("mine")


def with_files(*names):
    def make(path):
        path.mkdir()
        for name in names:
            (path / name).write_text(name)

    return make


def with_folders(*names):
    def make(path):
        for name in names:
            (path / name).mkdir(parents=True)

    return make


def a_run(*names):
    def make(path):
        with RunDir.create(path, "population", YAML) as run:
            for name in names:
                run.write(name, "{}")

    return make


@pytest.mark.parametrize(
    ("make", "force", "message"),
    [
        (a_file, True, r"cannot be written \(Not a directory\).*--out"),
        (with_files(*"dcba"), False, r"new or empty folder, found a, b, c, \.\.\.; .*--force"),
        (with_folders("population.yaml"), True, r"found population.yaml; choose another --out"),
        (with_folders("checkpoints", "mine"), True, r"found checkpoints; choose another --out"),
        (a_run(), False, r"found an unfinished run; continue with: evo-grpo resume .*run, choose"),
        (a_run("summary.json"), False, r"found a finished run; .*replace it with --force"),
    ],
)
def test_a_folder_that_is_not_new_is_refused_and_left_as_it_is(tmp_path, make, force, message):
    make(tmp_path / "run")
    before = tree(tmp_path)
    with pytest.raises(RunDirError, match=message) as info:
        RunDir.create(tmp_path / "run", "population", "name: other\n", force=force)
    assert info.value.exit_code == 2
    assert tree(tmp_path) == before
    if is_run(tmp_path / "run"):
        RunDir.open(tmp_path / "run").close()  # the refusal holds nothing


def test_force_in_a_foreign_folder_changes_none_of_its_files(tmp_path):
    (tmp_path / "notes.txt").write_text("notes")
    with RunDir.create(tmp_path, "population", YAML, force=True) as run:
        assert config_text(run.path) == YAML
    assert (tmp_path / "notes.txt").read_text() == "notes"


def test_force_replaces_a_run_and_keeps_what_is_not_its_own(tmp_path):
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
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
os._exit(0)
"""


def test_the_lock_dies_with_its_process_and_not_with_a_worker_that_outlives_it(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        worker = int(process.stdout.readline())
        try:
            with pytest.raises(RunDirError, match=rf"in use by process {process.pid};"):
                RunDir.open(folder)
            process.kill()
            process.wait(timeout=30)
            with RunDir.open(folder) as run:
                assert run.rounds() == []
        finally:
            process.kill()
            os.kill(worker, signal.SIGKILL)


# --- rounds ---------------------------------------------------------------------------------------


def test_rounds_are_read_back_as_they_were_and_earlier_ones_kept_as_outlines(tmp_path):
    records = make_run(size=3, rounds=4, failures=0.5)
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        for record in records:
            run.append_round(record)
        assert run.rounds() == [*map(outline, records[:-1]), records[-1]]
    assert read_rounds(run.path) == records
    with RunDir.open(run.path) as run:
        assert run.rounds() == records


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


def test_what_was_asked_for_after_a_round_stands_in_a_line_of_its_own(tmp_path):
    first, second, third = make_run(rounds=3)
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        for record in (first, second):
            run.append_round(record)
        path = run.path / "rounds.jsonl"
        before = path.stat().st_size
        run.amend_round(amended(second))
        assert run.rounds()[1].members == amended(second).members
        # Who has read up to here reads on without that round.
        rest = path.stat().st_size - before
        assert parse_rounds(path, start=before, first=2) == ([], rest, [])
        run.append_round(third)
    lines = path.read_bytes().splitlines(keepends=True)
    for order in ((2, 0, 1), (0, 1, 3, 2)):  # an amendment of another round is damage
        path.write_bytes(b"".join(lines[number] for number in order))
        with pytest.raises(CheckpointError, match="it amends round 1, expected round"):
            read_rounds(run.path)
    path.write_bytes(b"".join(lines))
    assert str(read_rounds(run.path)) == str([first, amended(second), third])
    with RunDir.open(run.path) as again:
        assert str(again.rounds()) == str([first, amended(second), third])
        again.amend_round(amended(third))
    assert str(read_rounds(run.path)) == str([first, amended(second), amended(third)])


def test_a_run_that_goes_on_after_its_end_carries_out_the_plan_of_its_last_round(tmp_path):
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
@pytest.mark.parametrize("line", ["round", "amendment"])
def test_a_torn_last_line_is_dropped(tmp_path, line, kept, caplog):
    first, second = make_run(rounds=2)
    folder = filled(tmp_path / "run", [first])

    def write_last():
        with RunDir.open(folder) as run:
            run.append_round(second) if line == "round" else run.amend_round(amended(first))

    write_last()
    path = folder / "rounds.jsonl"
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[:kept])
    assert read_rounds(folder) == [first]
    write_last()
    assert path.read_bytes() == b"".join([*whole, last])
    assert f"removed a truncated last line of {len(last[:kept])} bytes" in caplog.text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [lines[0], lines[1].replace(b'"tokens": 100', b'"tokens": 999'), lines[2]],
         r"line 2: expected round 2 as it was written, but its sha256 does not match"),
        # A last line that is complete JSON, or ends as sealed lines do, is not torn.
        (lambda lines: [lines[0], lines[1].replace(b'"tokens": 100', b'"tokens": 999').rstrip()],
         r"line 2: .*its sha256 does not match"),
        (lambda lines: [lines[0], lines[1][:-200] + b'"' + lines[1][-199:].rstrip()], "line 2"),
        (lambda lines: [lines[0], lines[1][:50] + b"\n", lines[2]], r"line 2: .*it is not JSON"),
        (lambda lines: [b"[" * 3000 + b"]" * 3000 + b"\n"], r"line 1: .*it is not JSON"),
        (lambda lines: [lines[0], lines[2]], r"line 2: .*it is round 3, expected 2"),
        (lambda lines: [*lines, b"{}\n"], r"line 4: .*it has no sha256"),
        (lambda lines: [b"\n", *lines], r"line 1: .*it is not JSON"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(tmp_path, damage, message):
    folder = filled(tmp_path / "run", make_run(rounds=3), checkpoints=False)
    path = folder / "rounds.jsonl"
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    for read in (read_rounds, RunDir.open):
        with pytest.raises(CheckpointError, match=message):
            read(folder)
    assert path.read_bytes() == before, "nothing is dropped but a torn end"
    path.write_text("")
    RunDir.open(folder).close()  # the failed open holds nothing


def with_format(line, version):
    """A line as another version of this library wrote it; None is 0.1, which wrote no version."""
    data = unseal(line)
    del data["format"]
    return seal(data if version is None else {"format": version, **data}).encode()


@pytest.mark.parametrize(
    ("version", "place", "end"), [(None, 0, b"\n"), (None, 1, b""), (5, 0, b""), (5, 1, b"\n")]
)
def test_a_run_of_another_format_is_refused_and_left_as_it_is(tmp_path, version, place, end):
    folder = filled(tmp_path / "run", make_run(rounds=2))
    path = folder / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[place] = with_format(lines[place], version)
    path.write_bytes(b"".join(lines).removesuffix(b"\n") + end)
    before = path.read_bytes()
    expected = (
        rf"rounds\.jsonl, line {place + 1}: expected a run in format 4, got {version}: another "
        "version of evo-grpo wrote it; finish or read it with that version"
    )
    for read in (read_rounds, RunDir.open):
        with pytest.raises(RunDirError, match=expected):
            read(folder)
    assert path.read_bytes() == before
    path.write_text('{"round": 0, "agents": [], "sha256": "a6cb"}\n')  # of 0.2, sealed otherwise
    with pytest.raises(RunDirError, match="format 4, got None: another version of evo-grpo wrote"):
        read_rounds(folder)


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


def test_what_belongs_to_unfinished_rounds_is_dropped(tmp_path):
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


@pytest.mark.parametrize(
    ("policy", "kept", "end"),
    [("all", 0, 0), ("all", 1, 0), ("last", 3, 0), ("last", 2, 0), ("last", 4, -2),
     ("last", 4, -41), ("last", 4, -201)],
)  # fmt: skip
def test_lost_lines_are_refused_and_the_folder_left_as_it_is(tmp_path, policy, kept, end):
    """With checkpoints of several later rounds, or none of the last round that has a line."""
    folder = filled(tmp_path / "run", make_run(rounds=4))
    with RunDir.open(folder) as run:
        run.drop_checkpoints(policy)
    path = folder / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:kept])[: end or None])
    before, text = tree(folder), path.read_bytes()
    with pytest.raises(CheckpointError, match=r"expected the line of round 4, .*put it back"):
        RunDir.open(folder)
    assert (tree(folder), path.read_bytes()) == (before, text)
    if policy == "all":  # the other way out that it names
        for number in range(kept, 4):
            shutil.rmtree(folder / "checkpoints" / f"round-{number:04d}")
        with RunDir.open(folder) as opened:
            assert len(opened.rounds()) == kept


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_checkpoints_of_two_rounds_without_a_line_are_dropped(tmp_path, finished):
    """As other ranks leave them where the disk of the first one is slow."""
    folder = filled(tmp_path / "run", make_run(rounds=finished + 2))
    path = folder / "rounds.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:finished]))
    with RunDir.open(folder) as opened:
        assert len(opened.rounds()) == finished
        opened.drop_unfinished()
    left = [f"round-{number:04d}" for number in range(finished)]
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == left


def test_only_the_last_checkpoints_can_be_kept(tmp_path):
    folder = filled(tmp_path / "run", make_run(rounds=3))
    (folder / "checkpoints" / "round-0003" / "agent-00").mkdir(parents=True)  # of another rank
    with RunDir.open(folder) as run:
        run.drop_checkpoints("last")
    assert sorted(os.listdir(folder / "checkpoints")) == ["round-0002", "round-0003"]
    assert len(os.listdir(folder / "completions")) == 3


def test_a_folder_can_be_moved(tmp_path):
    records = make_run(rounds=2)
    filled(tmp_path / "run", records).rename(tmp_path / "elsewhere")
    with RunDir.open(tmp_path / "elsewhere") as run:
        assert run.rounds() == records
        for agent in records[-1].agents:
            assert (run.path / agent.checkpoint).is_dir()


@pytest.mark.parametrize("name", ["population.yaml", "rounds.jsonl"])
def test_what_is_no_run_is_said(tmp_path, name):
    expected = "no run folder: expected one with rounds.jsonl and population.yaml in it, got"
    with_files(name)(tmp_path / "half")
    for read in (RunDir.open, read_rounds, expect_run):
        with pytest.raises(RunNotFoundError, match=f"{expected} no folder") as info:
            read(tmp_path / "run")
        assert info.value.exit_code == 2
        with pytest.raises(RunNotFoundError, match=f"{expected} one without "):
            read(tmp_path / "half")


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
    *(".lock", "population.yaml", "rounds.jsonl", "study.db", "study.db-journal", "summary.json"),
    *("checkpoints", "checkpoints/round-0001/agent-00", "compare", "replay", "completions"),
    *("checkpoints/best", "checkpoints/round-0001/agent-00/attributes.json", "notes.jsonl"),
    *("metrics/round-0001.jsonl", "readers/report.json", "trackers", "trackers/wandb"),
    f"steering/{'9' * 20}-00000000.json",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_planted_link_is_refused_and_its_target_untouched(tmp_path, place):
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


def test_a_planted_link_where_a_run_writes_is_replaced_and_not_its_target(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    with RunDir.create(tmp_path / "run", "population", YAML) as run:
        (run.path / ".leaderboard.csv.tmp").symlink_to(victim)
        atomic_write(run.path / "leaderboard.csv", "ours")
        metrics = run.path / "metrics" / "round-0000.jsonl"
        metrics.parent.mkdir()
        metrics.symlink_to(victim)
        run.append_step(0, 0, [{"step": 0}])
    assert victim.read_text() == "theirs"
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_symlink()] == []


def of_agent(**changes):
    return lambda record: {"agents": (replace(record.agents[0], **changes), *record.agents[1:])}


NAMES = r"expected names of hyperparameters, got"
BELOW = r"expected a path below the folder"
FORMULA = r"expected a path below checkpoints/, got"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_agent(checkpoint="../outside"), BELOW),
        (of_agent(checkpoint="/etc/passwd"), BELOW),
        (of_agent(checkpoint="checkpoints/../../outside"), BELOW),
        (of_agent(checkpoint="=HYPERLINK(A1)"), FORMULA),
        (of_agent(checkpoint="\t=HYPERLINK(A1)"), FORMULA),
        (of_agent(mutation=Mutation("mutate", {"__class__": (1.0, 2.0)})), NAMES),
        (
            lambda record: {
                "members": (
                    replace(record.members[0], mutation=Mutation("mutate", {"": (1.0, 2.0)})),
                    *record.members[1:],
                )
            },
            NAMES,
        ),
        (lambda record: {"mutable": ("model_fields",)}, NAMES),
    ],
)
def test_a_sealed_record_that_leads_astray_is_refused(tmp_path, change, message):
    """Out of the folder, to a formula of a spreadsheet, or to an attribute of an object."""
    (record,) = make_run(rounds=1)
    folder = filled(tmp_path / "run", [replace(record, **change(record))], checkpoints=False)
    for read in (RunDir.open, leaderboard, write_report):
        with pytest.raises(CheckpointError, match=message):
            read(folder)


@pytest.mark.parametrize("gone", ["deleted", "replaced"])
def test_a_folder_that_is_gone_is_not_made_anew(tmp_path, gone):
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
        ("agents", [{}], r"agents\[0\]"),
        ("seconds", {"learn": "long"}, "seconds.learn: .*valid number, got 'long'"),
        ("next_hparams", [{"lr": "high"}], "next_hparams"),
    ],
)
def test_a_line_that_was_sealed_again_is_checked_field_by_field(tmp_path, field, value, message):
    folder = filled(tmp_path / "run", make_run(rounds=1))
    path = folder / "rounds.jsonl"
    path.write_text(seal(unseal(path.read_bytes()) | {field: value}))
    for read in (read_rounds, RunDir.open):
        with pytest.raises(CheckpointError, match=rf"rounds.jsonl, line 1: .*{message}"):
            read(folder)


@pytest.mark.parametrize("left", [(), ("optimizer.safetensors",), ("attributes.json",)])
def test_the_best_is_kept_where_a_kill_left_half_of_what_was_dropped(tmp_path, left):
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


def test_checkpoints_are_kept_as_the_policy_says():
    records = make_run(rounds=5)
    kept = {"all": range(5), "last": [4], 1: [4], 3: [2, 3, 4], 9: range(5)}
    for policy, rounds in kept.items():
        assert kept_checkpoints(records, policy) == of_rounds(records, *rounds)
    best = {best_agent(record).checkpoint for record in records[:4]}
    assert kept_checkpoints(records, "best") == of_rounds(records, 4) | best
    agents = tuple(replace(agent, checkpoint=None) for agent in records[0].agents)
    assert kept_checkpoints([replace(records[0], agents=agents)], "best") == set()
    assert kept_checkpoints([], "last") == set()


def test_policies_that_follow_one_another_keep_what_they_would_round_by_round():
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


def test_the_best_ever_has_a_copy_unless_all_stay():
    records = [RecordConfig(checkpoints=policy) for policy in ("all", "last", "best", 2)]
    assert [r.keeps_best_apart(archive=False) for r in records] == [False, True, True, True]
    assert records[0].keeps_best_apart(archive=True)
