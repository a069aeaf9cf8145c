"""`evo_grpo.follow`: readers get what they have not read, each once, whatever one of them does."""

import json
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import yaml
from fake_tracker import package  # noqa: F401 -- a fixture
from small_run import small
from typer.testing import CliRunner

import evo_grpo
from evo_grpo.cli.commands import app
from evo_grpo.errors import (
    ConfigError,
    RunDirError,
    RunFailedError,
)
from evo_grpo.readers import follow as following
from evo_grpo.record.run_dir import RunDir

WHOLE = [1, 2, 2, 3, 4, 4, 5, 6, 6, 6]
"""Two steps and a round, three times, then the end."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = small(population__steps_per_round=2)
    return evo_grpo.run(config, out=tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def run(finished, tmp_path):
    """A finished run that no reader has seen."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(following, "_FIRST_WAIT", 0.05)


def test_a_run_of_yesterday_comes_into_a_tracker_once(run, package):  # noqa: F811
    package.write()
    (first,) = evo_grpo.follow(run, ["wandb"])
    assert (first.name, first.rounds, first.error) == ("wandb", 3, None)
    assert package.steps == WHOLE
    assert package.runs == [first.id]
    (second,) = evo_grpo.follow(run, ["wandb"])
    assert second.id == first.id
    assert package.steps == WHOLE


def test_one_that_fails_while_the_run_trains_goes_on_from_where_it_was(run, package):  # noqa: F811
    flag = run.parent / "failed"
    package.write(
        log=f"if step == 3 and not os.path.exists({str(flag)!r}): "
        f"os.mkdir({str(flag)!r}); raise OSError('no network')"
    )
    opened, said = RunDir.open(run), []

    def release():
        while package.steps != WHOLE:
            time.sleep(0.02)
        opened.close()

    threading.Thread(target=release, daemon=True).start()
    (found,) = following.follow_all(run, ["wandb"], storage=None, warn=said.append)
    assert found.error is None
    assert package.steps == WHOLE
    assert package.runs == [found.id, found.id]
    assert said == ["wandb: OSError: no network; retrying while the run continues"]


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise RuntimeError('no more \\x1b[31m room')", r"RuntimeError: no more \x1b[31m room"),
    ],
)
def test_one_that_fails_keeps_no_other_and_says_how_to_go_on(run, package, log, said):  # noqa: F811
    package.write(log=log)
    storage = f"sqlite:///{run.parent / 'trials.db'}"
    one, two = following.follow_all(run, ["wandb", "optuna"], storage=storage, warn=print)
    assert str(one.error) == f"wandb: {said}; continue with: evo-grpo follow {run} --to wandb"
    assert (two.rounds, two.error) == (3, None)
    with pytest.raises(RunFailedError, match=r"wandb: .*continue with"):
        evo_grpo.follow(run, ["wandb"])
    package.write()
    evo_grpo.follow(run, ["wandb"])
    assert package.steps == WHOLE


def until_the_report_is_done():
    """A clock that jumps by an hour once the thread of the report has ended."""
    began = threading.Event()

    def monotonic():
        alive = any(thread.name == "reader-report" for thread in threading.enumerate())
        if alive:
            began.set()
        return time.monotonic() + 3600 * (began.is_set() and not alive)

    return monotonic


def test_one_that_hangs_is_left_once_the_others_are_done(run, package, monkeypatch):  # noqa: F811
    patient = SimpleNamespace(monotonic=until_the_report_is_done(), sleep=time.sleep)
    monkeypatch.setattr(following, "time", patient)
    package.write(before="import threading; go_on = threading.Event()", log="go_on.wait(60)")
    one, two = following.follow_all(run, ["wandb", "report"], storage=None, warn=print)
    import wandb

    (thread,) = [thread for thread in threading.enumerate() if thread.name == "reader-wandb"]
    wandb.go_on.set()
    assert str(one.error) == (
        "wandb: nothing was read for 600 s after the end of the run; continue with: "
        f"evo-grpo follow {run} --to wandb"
    )
    assert two.error is None
    assert "3 rounds, finished" in (run / "report.html").read_text(encoding="utf-8")
    thread.join(30)


@pytest.mark.slow
def test_the_database_of_another_run_is_kept_apart(run):
    first, second = (f"sqlite:///{run.parent / name}.db" for name in ("one", "two"))
    (one,) = evo_grpo.follow(run, ["optuna"], storage=first)
    (two,) = evo_grpo.follow(run, ["optuna"], storage=second)
    assert (one.rounds, two.rounds) == (3, 3)
    assert one.id == two.id
    assert len(list((run / "readers").glob("optuna-*.json"))) == 2


@pytest.mark.parametrize(
    ("to", "storage", "said"),
    [
        (["wandbb"], None, "run: expected readers of optuna, report, .*got 'wandbb'"),
        ("report", None, "to: expected a list of names, of optuna, report, .*got 'report'"),
        ([], None, "expected the name of a reader, got none.* with --to, of optuna"),
        (["optuna"], "sqlite", "expected the URL of a database, got sqlite; leave it out"),
        (["optuna"], "postgresql+psycopg://me:secret@host/runs", "without a password"),
    ],
)
def test_what_cannot_be_followed_is_refused(run, to, storage, said):
    with pytest.raises(ConfigError, match=said) as error:
        evo_grpo.follow(run, to, storage=storage)
    assert "secret" not in str(error.value)
    assert not (run / "readers").exists()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"trackers": [{"kind": "wandb", "folder": "{outside}"}]}, "wandb write to .*outside"),
        ({"trackers": [{"kind": "wandb", "folder": "~/boards"}]}, "wandb write to /.*boards"),
        ({"trackers": [{"kind": "wandb", "online": True}]}, "wandb write to its service"),
        ({"storage": "sqlite:///{outside}"}, "names the database sqlite:///.*"),
    ],
)
def test_a_place_that_a_strangers_settings_name_is_used_where_the_command_allows_it(
    run,
    package,  # noqa: F811
    tmp_path,
    record,
    said,
):
    package.write()
    outside = tmp_path / "outside"
    text = json.dumps(record).replace("{outside}", str(outside))
    config = yaml.safe_load((run / "population.yaml").read_text())
    config["record"] |= json.loads(text)
    (run / "population.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=f"{said}.*allow it with --outside"):
        evo_grpo.follow(run)
    assert not outside.exists()
    assert not (run / "readers").exists()
    # A folder inside of the run is the run's own.
    config["record"] |= {"storage": None, "trackers": [{"kind": "wandb", "folder": f"{run}/w"}]}
    (run / "population.yaml").write_text(yaml.safe_dump(config))
    evo_grpo.follow(run)
    if str(outside) in text:
        config["record"] |= json.loads(text)
        (run / "population.yaml").write_text(yaml.safe_dump(config))
        shutil.rmtree(run / "readers")
        evo_grpo.follow(run, outside=True)
        assert outside.exists()


@pytest.mark.parametrize("name", ["readers", "trackers", "readers/.tensorboard.json.tmp"])
def test_a_link_of_a_strangers_folder_is_not_followed(run, name):
    outside = run.parent / "outside"
    outside.mkdir()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(outside)
    with pytest.raises(RunDirError, match=r"outside|link"):
        evo_grpo.follow(run, ["tensorboard"])
    assert list(outside.iterdir()) == []


def follow(*arguments):
    return CliRunner().invoke(app, ["follow", *map(str, arguments)])


@pytest.mark.slow
def test_the_command_says_how_far_each_reader_is(run, package):  # noqa: F811
    package.write()
    result = follow(run, "--to", "report, wandb")
    assert result.exit_code == 0, result.output
    (name,) = package.runs
    assert result.stdout.splitlines() == [
        f"{run}: report has 3 rounds",
        f"{run}: wandb has 3 rounds, as {name}",
    ]
    assert follow(run, "--to", "report", "--quiet").stdout == ""


def test_the_command_fails_with_the_reader(run, package):  # noqa: F811
    package.write(log="1 / 0")
    result = follow(run, "--to", "wandb")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: wandb: ZeroDivisionError")
    quiet = follow(run, "--to", "wandb", "--quiet")
    assert (quiet.exit_code, quiet.stderr) == (1, "")
    assert quiet.stdout.startswith("wandb: ZeroDivisionError: division by zero; continue with: ")
