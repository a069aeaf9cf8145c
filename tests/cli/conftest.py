"""A folder for each test, and a training loop without a model."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from shown_run import SUMMARY, run_folder, small_config, two_rounds

COMPARISON = {
    "agents": 2,
    "split": "test",
    "arms": [
        {
            "name": name,
            "folder": "x",
            "tokens": {"training": 900, "evaluation": 100},
            "test": {"mean": mean, "se": 0.01, "n": 256},
        }
        for name, mean in (("guess", 0.35), ("random", 0.8), ("evolved", 0.9))
    ],
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # --quiet sets it for good
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def _play(calls, path, done, observer):
    if calls.error is not None and calls.after < 0:
        raise calls.error
    if calls.error is None and not path.exists():
        run_folder(str(path))
    observer.started(path, 2, done, small_config())
    for record in two_rounds()[done:]:
        if calls.error is not None and record.round == calls.after:
            raise calls.error
        for name, total in (("learn", 4), ("evaluate", 1)):
            observer.stage(record.round, name, 0, total)
        observer.round_done(record)
    observer.stage(1, "test", 0, 1)
    observer.finished(SUMMARY)
    return path


@pytest.fixture
def loop(monkeypatch):
    """A loop that plays `two_rounds` and a comparison, or raises `error` after some rounds.

    `after` counts the rounds before the error; -1 raises before the run begins.
    """
    # With the loop itself, before a stand-in takes its place.
    import evo_grpo.analysis.arms
    import evo_grpo.analysis.sampling.evaluation  # noqa: F401 -- as above

    calls = SimpleNamespace(seen=[], error=None, after=-1, compared=[], compare_error=None)

    def run(config, *, out, force, observer, report):
        calls.seen.append((config, out, force))
        return _play(calls, out or Path("runs/population-1"), 0, observer)

    def resume(folder, *, rounds, allow, observer, report):
        calls.seen.append(folder if rounds is None and not allow else (folder, rounds, allow))
        return _play(calls, folder, 1, observer)

    def compare(folder, *, allow, observer):
        calls.compared.append((folder, list(allow)))
        if calls.compare_error is not None:
            raise calls.compare_error
        observer.started(folder / "compare" / "guess", 1, 0, small_config())
        observer.finished(SUMMARY)
        return COMPARISON

    training = SimpleNamespace(run=run, resume=resume)
    monkeypatch.setitem(sys.modules, "evo_grpo.training.run", training)
    monkeypatch.setitem(sys.modules, "evo_grpo.analysis.arms", SimpleNamespace(compare=compare))
    return calls
