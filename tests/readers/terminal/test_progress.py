"""Plain lines, the strings that all displays share, and how long a run takes still."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from shown_run import SUMMARY, small_config, two_rounds

from evo_grpo.readers.terminal.live import progress
from evo_grpo.readers.terminal.progress import (
    BESIDE_LEARNING,
    RECENT,
    Pace,
    PlainLines,
    RunProgress,
    clock,
    direction,
    evolution,
    shown_names,
)
from evo_grpo.record.observer import Observer
from evo_grpo.record.view import RunView
from evo_grpo.record.wording import changes_text, number
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Decision, Member, Mutation


def test_bounds_of_a_clip_range_share_the_column_of_clip_coef():
    names = shown_names(["clip_high", "temperature", "lr"])
    assert names == ["lr", "beta", "clip_coef", "group_size", "temperature"]
    moved = {"clip_high": (1.2, 1.3)}
    assert direction(moved, "clip_coef") == "up"
    assert direction(moved, "lr") == ""
    assert changes_text({"clip_coef": (0.2, 0.16)}) == "clip 0.2 -> 0.16"


@pytest.mark.parametrize(
    ("beta", "kl", "text"),
    [(0.0, 0.0123, "0.0123"), (0.1, 0.0, "0.0000"), (0.0, None, "-")],
)
def test_a_kl_that_was_not_computed_is_a_dash(beta: float, kl: float | None, text: str):
    one = two_rounds()[0].agents[0]
    metrics = {} if kl is None else {"kl": kl}
    agent = replace(one, hparams=Hparams(beta=beta), metrics=metrics)
    assert number(agent.metrics.get("kl"), 4) == text


def test_what_a_decision_tells_is_not_told_again():
    record = two_rounds()[0]
    assert evolution(record) == {"copied": "0 -> 1", "mutated": "1: lr 1e-3 -> 1.2e-3"}
    copied = Decision("copied", 1, 0, 0.25, 0.05, 64, "agent 1 took agent 0's weights at lr 0.0012")
    assert evolution(replace(record, decisions=(copied,))) == {}
    kept = replace(copied, kind="kept", sentence="agent 1 kept its weights")
    assert "mutated" in evolution(replace(record, decisions=(kept,)))
    moved = Mutation("mutate", {"lr": (1e-3, 1.2e-3), "beta": (0.1, 0.2)})
    members = (record.members[0], Member(2, 1, parent=0, born=1, mutation=moved))
    both = replace(record, members=members, decisions=(copied,))
    assert evolution(both) == {"mutated": "1: beta 0.1 -> 0.2"}


# --- the time that is left -----------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time():
    return Clock()


def record(number):
    return replace(two_rounds()[0], round=number, evaluation_tokens=1000)


def test_nothing_is_foreseen_before_anything_was_learned(time):
    pace = Pace(time)
    pace.start(10, 0)
    assert pace.left() is None
    assert pace.tokens_per_second is None
    pace.stage("evaluate", 1, 2)
    assert pace.left() is None
    time.now += 5
    pace.step_done({0: {"tokens": 40.0}, 1: {"tokens": 60.0}})
    assert pace.tokens_per_second == 20


def test_the_first_round_is_judged_by_its_steps(time):
    pace = Pace(time)
    pace.start(10, 0)
    time.now += 5
    pace.stage("learn", 1, 4)
    # A step took five seconds: a round takes four and what follows them.
    each = 20 * BESIDE_LEARNING
    assert pace.left() == pytest.approx(10 * each - 5)


def test_later_rounds_by_those_before_and_the_time_runs(time):
    pace = Pace(time)
    pace.start(10, 4)
    time.now += 12
    pace.round_done(record(4))
    assert pace.tokens_per_second == 1000  # 2,000 trained and 1,000 evaluated, in three seconds
    assert pace.left() == 5 * 12
    time.now += 10
    assert pace.left() == 5 * 12 - 10
    time.now += 100  # it takes longer than the others did
    assert pace.left() == 4 * 12


def test_old_rounds_are_forgotten_and_nothing_is_left_at_the_end(time):
    pace = Pace(time)
    pace.start(9, 0)
    for index, seconds in enumerate([1000.0, *[10.0] * RECENT]):
        time.now += seconds
        pace.round_done(record(index))
    assert pace.left() == (9 - 1 - RECENT) * 10
    pace.round_done(record(8))
    assert pace.left() == 0


def test_a_clock():
    assert (clock(0), clock(65.4), clock(97_200)) == ("0:00:00", "0:01:05", "27:00:00")


# --- plain lines, and no lines -------------------------------------------------------------------


def plain() -> PlainLines:
    return PlainLines(Console(file=io.StringIO(), width=200))


def test_long_stages_say_now_and_then_that_they_go_on(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("evo_grpo.readers.terminal.progress.time.monotonic", lambda: now[0])
    view = plain()
    view.pace.clock = lambda: now[0]
    view.started(Path("here"), 2, 0, None)
    for second in range(0, 100, 10):
        now[0] = float(second)
        view.step_done(0, second // 10, {0: {"tokens": 90.0 if second else 0.0}})
        view.stage(0, "learn", second // 10, 10)
    lines = view.console.file.getvalue().splitlines()[1:]
    # A step takes ten seconds, so two rounds of ten take four minutes with what follows them.
    left = {3: "0:03:30", 6: "0:03:00", 9: "0:02:30"}
    assert lines == [f"  round 1/2: learn {n}/10  9 tok/s  ETA {eta}" for n, eta in left.items()]


def test_the_ending_names_the_commands_that_read_the_run():
    view = plain()
    view.started(Path("here"), 2, 0, small_config())
    finished = RunView("here", two_rounds(), summary=SUMMARY)
    view.show_ending(finished)
    text = view.console.file.getvalue()
    assert "Next: evo-grpo report here, evo-grpo export here OUT" in text


def test_progress_that_is_not_shown_keeps_count(capsys: pytest.CaptureFixture[str]):
    with progress(title="mine") as shown:
        assert type(shown) is RunProgress  # the output of a test is no terminal
        observer: Observer = shown
        observer.started(Path("here"), 2, 0, small_config())
        observer.stage(0, "learn", 0, 1)
        observer.round_done(two_rounds()[0])
        observer.note("a note")
        assert shown.how_to_resume() == "stopped after round 1; continue with: evo-grpo resume here"
        observer.finished(SUMMARY)
        shown.show_ending(RunView("here", two_rounds(), summary=SUMMARY))
    assert capsys.readouterr() == ("", "")
