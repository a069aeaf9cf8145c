"""The process of readers beside a run: it ends no run, holds none up, and loses nothing."""

import os
import time
import warnings

import pytest
from fake_tracker import package  # noqa: F401 -- a fixture
from small_run import Told, outcome, small

from evo_grpo import follow, resume, run
from evo_grpo.record.names import READERS
from evo_grpo.training import followers

CONFIG = small(population__steps_per_round=2, record__trackers=["wandb"])
WHOLE = [1, 2, 2, 3, 4, 4, 5, 6, 6, 6]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    config = small(population__steps_per_round=2)
    return outcome(run(config, out=tmp_path_factory.mktemp("plain") / "run"))


def strict_run(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run(CONFIG, out=folder)


@pytest.mark.slow
def test_a_tracker_gets_the_whole_run_and_changes_nothing_of_it(tmp_path, package, plain):  # noqa: F811
    note = f"open({str(tmp_path / 'nice')!r}, 'w').write(str(os.nice(0)))"
    package.write(before=f"{note}; print('hello'); print('hello from a package')")
    folder = strict_run(tmp_path / "run")
    assert package.steps == WHOLE
    assert outcome(folder)["leaderboard"] == plain["leaderboard"]
    # It leaves the processor to the run, and what packages print to a file.
    assert int((tmp_path / "nice").read_text()) >= min(19, os.nice(0) + followers.NICENESS)
    assert "hello from a package" in (folder / READERS / "follow.log").read_text()


def test_a_run_that_names_no_reader_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(followers.subprocess, "Popen", None)
    folder = run(small(population__rounds=1), out=tmp_path / "run")
    assert not (folder / READERS).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"before": "raise ImportError('of another version')"}, "ImportError: of another version"),
        ({"log": "1 / 0"}, "ZeroDivisionError: division by zero"),
        ({"log": "os.kill(os.getpid(), 9)"}, "the process of readers ended with code -9"),
    ],
)
def test_a_package_that_fails_ends_nothing_and_loses_nothing(
    tmp_path,
    package,  # noqa: F811
    plain,
    broken,
    said,
):
    package.write(**broken)
    with pytest.warns(UserWarning, match="wandb|readers") as told:
        folder = run(CONFIG, out=tmp_path / "run")
    texts = [str(one.message) for one in told]
    assert said in texts[0]
    assert f"evo-grpo follow {folder} --to wandb" in texts[-1]
    assert outcome(folder)["leaderboard"] == plain["leaderboard"]
    package.write()
    follow(folder)
    assert package.steps == WHOLE


@pytest.mark.slow
def test_a_run_does_not_wait_for_a_package_that_hangs(tmp_path, package, monkeypatch):  # noqa: F811
    monkeypatch.setattr(followers, "SECONDS_TO_FINISH", 2.0)
    package.write(log="import time; time.sleep(600)")
    began = time.monotonic()
    with pytest.warns(UserWarning, match=r"still at work after 2 s.*evo-grpo follow .* --to wandb"):
        folder = run(CONFIG, out=tmp_path / "run")
    assert time.monotonic() - began < 120
    assert (folder / "summary.json").exists()
    process = followers._unfinished_processes[-1]
    process.kill()
    process.wait()
    package.write()
    follow(folder)
    assert package.steps == WHOLE


@pytest.mark.slow
def test_a_run_does_not_wait_for_what_a_package_does_at_its_end(tmp_path, package, monkeypatch):  # noqa: F811
    monkeypatch.setenv("MAY_END", str(tmp_path / "may-end"))
    package.write(
        before="import atexit, time\n"
        "def hold():\n"
        "    while not os.path.exists(os.environ['MAY_END']): time.sleep(0.05)\n"
        "atexit.register(hold)"
    )
    strict_run(tmp_path / "run")
    assert package.steps == WHOLE
    process = followers._unfinished_processes[-1]
    assert process.poll() is None
    (tmp_path / "may-end").touch()
    assert process.wait(30) == 0


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(tmp_path, package):  # noqa: F811
    package.write()
    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, out=tmp_path / "run", observer=Told(("evaluate", 1)))
    resume(tmp_path / "run")
    assert package.steps == WHOLE
    assert len(set(package.runs)) == 1


@pytest.mark.slow
def test_a_resume_of_a_finished_run_brings_readers_what_they_lack(tmp_path, package):  # noqa: F811
    package.write()
    folder = strict_run(tmp_path / "run")
    (folder / READERS / "wandb.json").unlink()
    resume(folder)
    assert package.steps == [*WHOLE, *WHOLE]


def test_a_disk_that_refuses_the_folder_of_readers_ends_nothing(tmp_path, package, monkeypatch):  # noqa: F811
    package.write()

    def refuse(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(followers.subprocess, "Popen", refuse)
    with pytest.warns(UserWarning, match="readers cannot be started .*No space left.* follow"):
        folder = run(CONFIG, out=tmp_path / "run")
    assert (folder / "summary.json").exists()
