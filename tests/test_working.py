"""What a run works at before its first result is in the log."""

import logging

import pytest
from small_run import small

from evo_grpo import run
from evo_grpo.working import LOGGER, working


def test_work_is_logged_when_it_begins_and_when_it_ends(caplog):
    caplog.set_level(logging.INFO, logger=LOGGER)
    during = []

    def fails():
        during.extend(caplog.messages)
        raise KeyError

    with pytest.raises(KeyError), working("load the weights"):
        fails()
    assert during == ["load the weights"]
    first, last = caplog.messages
    assert last.startswith(f"{first}: ")


def test_a_run_logs_what_its_first_minutes_go_to(caplog, tmp_path):
    caplog.set_level(logging.INFO, logger=LOGGER)
    run(small(), out=tmp_path / "run")
    begun = [text for text in caplog.messages if ": " not in text]
    assert begun == [
        "load the weights of tiny-sums",
        "render the prompts",
        "start the rollout engine",
        "take the first step",
    ]
