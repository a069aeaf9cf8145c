import sys
import time
import warnings

import pytest
import shown_run

from evo_grpo.errors import EngineUnavailable
from evo_grpo.record.run_dir import RunDir
from evo_grpo.report.live import LiveReport


@pytest.fixture
def run(tmp_path):
    return shown_run.run_folder(str(tmp_path / "run"), rounds=1, summary=False)


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_page_follows_the_run_to_its_end(run):
    live = LiveReport()
    live.started(run, 2, 0, None)
    until(live.page.exists)
    assert "unfinished" in live.page.read_text(encoding="utf-8")
    with RunDir.open(run) as folder:
        folder.append_round(shown_run.two_rounds()[1])
        folder.write_summary(shown_run.SUMMARY)
    live.finished(shown_run.SUMMARY)
    assert "2 rounds, finished" in live.page.read_text(encoding="utf-8")


@pytest.fixture
def slow_writer(tmp_path, monkeypatch):
    """In the place of Python, a script that notes each start and then sleeps."""
    log, script = tmp_path / "starts", tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho start >> {log}\nexec sleep 30\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return log


def test_the_training_thread_waits_for_no_page_and_one_is_written_at_a_time(run, slow_writer):
    live = LiveReport()
    begin = time.monotonic()
    live.started(run, 2, 0, None)
    for record in shown_run.two_rounds() * 3:
        live.round_done(record)
    assert time.monotonic() - begin < 15  # the writer sleeps for 30
    until(slow_writer.exists)
    assert slow_writer.read_text() == "start\n"
    live._writer.kill()
    live._writer.wait()


def test_a_page_that_cannot_be_written_is_one_warning(run):
    live = LiveReport()
    (run / "report.html").mkdir()
    live.started(run, 2, 0, None)
    live._writer.wait()
    with pytest.warns(UserWarning, match="could not be written; why, says: evo-grpo report"):
        live.round_done(shown_run.two_rounds()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        live.finished({})


def test_without_a_folder_there_is_no_page():
    live = LiveReport()
    live.started(None, 2, 0, None)
    live.round_done(shown_run.two_rounds()[0])
    live.finished({})
    assert live.page is None


def test_without_plotly_it_is_refused_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(EngineUnavailable, match="run --report: expected the package plotly"):
        LiveReport()
