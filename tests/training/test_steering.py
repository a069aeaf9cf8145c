"""A run that is steered while it trains: done between rounds, recorded, repeated by a resume."""

import shutil
import threading
import time

import pytest
from small_run import Told, small, study_of
from steered_runs import OPERATIONS, Steers, steered_outcome, tensors

from evo_grpo import export, resume, run
from evo_grpo.analysis.verify import verify
from evo_grpo.errors import ConfigError, RunDirError
from evo_grpo.readers.report.figures.rounds import drawn_names
from evo_grpo.record.folder import is_trained, read_rounds
from evo_grpo.record.history import history
from evo_grpo.record.leaderboard import leaderboard
from evo_grpo.record.log import NoteWritten, entries
from evo_grpo.record.replay import read_schedule
from evo_grpo.record.steering import ask, cancel, read_requests, state_of
from evo_grpo.record.summary import read_summary
from evo_grpo.record.view import view_of

ROUNDS = {"population__rounds": 4}


def steered(folder, asked, stop=None, **changes):
    """A run that is asked for things; returns its rounds and the observer."""
    observer = Steers(dict(asked), stop)
    run(small(**{**ROUNDS, **changes}), out=folder, observer=observer)
    return read_rounds(folder), observer


def sound(folder):
    found = verify(folder)
    assert (found.damage, found.notes) == ([], [])


def stopped(folder, stop, asked=(), **changes):
    with pytest.raises(KeyboardInterrupt):
        steered(folder, asked, stop, **changes)
    assert not is_trained(folder)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A run of three agents that was stopped after two of its rounds; copy it to change it."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    stopped(folder, ("learn", 2))
    return folder


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Gives the run that was asked for some operations in its second round and never stopped."""
    made = {}

    def asked_for(*names):
        if names not in made:
            made[names] = tmp_path_factory.mktemp("whole") / "run"
            steered(made[names], {("learn", 1): [OPERATIONS[name] for name in names]})
        return made[names]

    return asked_for


# --- what is asked for is done --------------------------------------------------------------------


def test_an_agent_that_is_stopped_leaves_and_its_rows_go_to_the_others(tmp_path):
    rounds, observer = steered(tmp_path / "run", {("learn", 1): [OPERATIONS["stop"]]})
    assert [len(record.agents) for record in rounds] == [3, 3, 2, 2]
    assert [agent.agent for agent in rounds[2].agents] == [0, 2]
    rows = [sum(agent.metrics["rows"] for agent in record.agents) for record in rounds]
    assert abs(rows[2] - rows[1]) <= 3  # half of the smallest group, at most
    assert rounds[1].decisions[-1].sentence == "agent 1 was stopped by hand"
    board = leaderboard(tmp_path / "run").set_index("agent")
    assert board.loc[1, "left"] == 1
    assert observer.notes == []
    sound(tmp_path / "run")
    assert read_requests(tmp_path / "run").requests == ()


@pytest.fixture(scope="module")
def set_by_hand(tmp_path_factory):
    """The folder of a run of two rounds, between which values of all agents were set."""
    folder = tmp_path_factory.mktemp("set") / "run"
    values = [{"lr": 0.003, "group_size": 5, "temperature": 0.7}, {"lr": 0.003}, {"lr": 0.003}]
    asked = [("set", {"agent": agent, "values": given}) for agent, given in enumerate(values)]
    steered(folder, {("evaluate", 0): asked}, population__rounds=2)
    sound(folder)
    return folder


def test_what_is_set_and_does_not_mutate_has_a_column_in_every_table(set_by_hand):
    rounds = read_rounds(set_by_hand)
    assert "temperature" not in rounds[0].mutable
    board = leaderboard(set_by_hand).set_index("agent")
    trained = {agent.agent: agent.hparams.temperature for agent in rounds[-1].agents}
    assert board["temperature"].to_dict() == trained
    written = (set_by_hand / "leaderboard.csv").read_text().partition("\n")[0]
    assert "temperature" in written.split(",")
    past = history(set_by_hand).set_index(["round", "agent"])["temperature"]
    assert [past[number, 0] for number in (0, 1)] == [1.0, 0.7]
    schedule = read_schedule(set_by_hand)
    assert "temperature" in schedule.hyperparameters()
    assert "temperature" in drawn_names(view_of(set_by_hand))


def test_values_that_are_set_train_in_the_next_round(set_by_hand):
    rounds = read_rounds(set_by_hand)
    agent = rounds[1].agents[0]
    assert (agent.hparams.lr, agent.hparams.group_size) == (0.003, 5)
    assert agent.mutation.op == "steer-set"
    assert agent.parent in {one.member for one in rounds[0].agents}
    before = next(one for one in rounds[0].agents if one.member == agent.parent)
    assert agent.mutation.changes["lr"] == (before.hparams.lr, 0.003)
    table = history(set_by_hand)
    row = table[(table["round"] == 1) & (table["agent"] == 0)].iloc[0]
    assert row["op"] == "steer-set"
    assert set(row["mutated"].split(",")) == set(agent.mutation.changes)


def test_the_card_of_the_winner_says_what_was_set_by_hand(set_by_hand, tmp_path):
    card = (export(set_by_hand, tmp_path / "out") / "README.md").read_text()
    assert "| steer-set (lr " in card
    assert "→ 0.003" in card


def test_a_clone_trains_on_with_the_weights_and_moments_of_its_source(tmp_path):
    quiet = {"evolve__exploration": {"kind": "none"}, "evolve__selection": {"kind": "none"}}
    rounds, _ = steered(tmp_path / "run", {("learn", 1): [OPERATIONS["clone"]]}, **quiet)
    source, child = rounds[2].agents[0], rounds[2].agents[2]
    assert child.parent == source.member
    assert child.mutation.op == "steer-clone"
    assert child.hparams == source.hparams
    assert child.tokens > 0
    # Nobody else was touched, and nobody else has a new life.
    assert [a.member for a in rounds[3].agents] == [0, 1, 3]
    trials = {t.user_attrs["member"]: t for t in study_of(tmp_path / "run").trials}
    assert trials[3].user_attrs["op"] in ("steer-clone", "continue")
    sound(tmp_path / "run")


def test_requests_are_done_in_the_order_in_which_they_are_asked_for(tmp_path):
    asked = [
        ("clone", {"source": 1, "agent": 0}),
        ("set", {"agent": 0, "values": {"lr": 0.003}}),
        ("clone", {"source": 0, "agent": 2}),
        ("stop-agent", {"agent": 0}),
    ]
    rounds, _ = steered(tmp_path / "run", {("learn", 0): asked}, population__rounds=2)
    assert [one.request.op for one in rounds[0].steering] == [op for op, _ in asked]
    assert [one.refused for one in rounds[0].steering] == [""] * 4
    assert [agent.agent for agent in rounds[1].agents] == [1, 2]
    assert rounds[1].agents[1].hparams.lr == 0.003
    sound(tmp_path / "run")


# --- and repeated by a resume ---------------------------------------------------------------------

ASKED = {
    ("learn", 0): [OPERATIONS["set"]],
    ("evaluate", 1): [OPERATIONS["clone"], OPERATIONS["stop"]],
}


def order(when):
    stage, number = when
    return number, ("learn", "evaluate", "done", "test").index(stage)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "storage"),
    [
        (("learn", 1), "sqlite"),
        (("done", 1), None),
        (("learn", 2), "sqlite"),
        (("learn", 3), None),
        (("test", 3), "sqlite"),
    ],
)
def test_a_stop_after_steering_changes_nothing(tmp_path, at, storage):
    kept = {"record__storage": storage, "evolve__archive": True, "record__checkpoints": "last"}
    steered(tmp_path / "whole", ASKED, **kept)
    stopped(tmp_path / "run", at, ASKED, **kept)
    # What a person had not asked for yet is asked for now.
    later = {when: asked for when, asked in ASKED.items() if order(when) > order(at)}
    resume(tmp_path / "run", observer=Steers(later))
    assert steered_outcome(tmp_path / "run") == steered_outcome(tmp_path / "whole")
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")
    sound(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("killed_again", [False, True])
def test_what_is_asked_for_while_nobody_trains_is_done_before_the_next_round(
    tmp_path, stopped_run, whole_run, killed_again
):
    shutil.copytree(stopped_run, tmp_path / "run")
    for name in ("set", "stop"):
        op, given = OPERATIONS[name]
        _, standing = ask(tmp_path / "run", op, **given)
        assert not standing.trains
    if killed_again:
        with pytest.raises(KeyboardInterrupt):
            resume(tmp_path / "run", observer=Told(("learn", 2)))
    observer = Steers({})
    resume(tmp_path / "run", observer=observer)
    whole = whole_run("set", "stop")
    assert steered_outcome(tmp_path / "run") == steered_outcome(whole)
    assert tensors(tmp_path / "run") == tensors(whole)
    assert any("stop-agent 1: done" in note for note in observer.notes) != killed_again
    sound(tmp_path / "run")


# --- pause, continue, stop-after-round ------------------------------------------------------------


def noted(folder):
    """What the log of a run says that belongs to no round."""
    return [entry.text for _, entry in entries(folder) if isinstance(entry, NoteWritten)]


class Pauses(Steers):
    """Does something in another thread once the run says that it is paused."""

    def __init__(self, asked, meanwhile):
        super().__init__(asked)
        self.meanwhile = meanwhile

    def note(self, text):
        super().note(text)
        if text.startswith("paused"):
            threading.Thread(target=self._act).start()

    def _act(self):
        until = time.monotonic() + 30
        while not state_of(self.folder).paused and time.monotonic() < until:
            time.sleep(0.02)
        for op, given in self.meanwhile:
            ask(self.folder, op, **given)


@pytest.mark.slow
def test_a_paused_run_waits_does_what_it_is_asked_and_goes_on(tmp_path, whole_run):
    observer = Pauses({("learn", 1): [("pause", {})]}, [OPERATIONS["set"], ("continue", {})])
    run(small(**ROUNDS), out=tmp_path / "run", observer=observer)
    assert observer.notes[0] == (
        f"paused after round 2; continue with: evo-grpo steer {tmp_path / 'run'} continue"
    )
    assert observer.notes[-1] == "round 3 begins, as asked for"
    assert sum(note.startswith("paused") for note in observer.notes) == 1
    assert noted(tmp_path / "run") == observer.notes
    record = read_rounds(tmp_path / "run")[1]
    assert [one.request.op for one in record.steering] == ["pause", "set", "continue"]
    whole = whole_run("set")
    first, second = map(steered_outcome, (tmp_path / "run", whole))
    assert [r.members for r, _ in first["rounds"]] == [r.members for r, _ in second["rounds"]]
    assert first["leaderboard"] == second["leaderboard"]
    assert tensors(tmp_path / "run") == tensors(whole)
    assert read_requests(tmp_path / "run").requests == ()
    sound(tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_is_paused_goes_on_with_a_resume(tmp_path, whole_run):
    class Killed(Steers):
        def note(self, text):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small(**ROUNDS), out=tmp_path / "run",
            observer=Killed({("learn", 1): [("pause", {}), OPERATIONS["stop"]]}))  # fmt: skip
    sound_but_for_notes = verify(tmp_path / "run")
    assert sound_but_for_notes.damage == []
    assert len(read_rounds(tmp_path / "run")) == 2
    assert not state_of(tmp_path / "run").paused
    resume(tmp_path / "run")
    assert tensors(tmp_path / "run") == tensors(whole_run("stop"))
    assert read_requests(tmp_path / "run").requests == ()


@pytest.mark.slow
def test_stop_after_round_ends_the_process_with_a_folder_that_goes_on(tmp_path, whole_run):
    rounds, observer = steered(
        tmp_path / "run", {("learn", 1): [("stop-after-round", {}), OPERATIONS["set"]]}
    )
    assert len(rounds) == 2
    assert observer.notes == ["the process ends after round 2, as asked for"]
    assert ("finished", 4) not in observer.calls
    assert read_summary(tmp_path / "run") is None
    assert verify(tmp_path / "run").damage == []
    resume(tmp_path / "run")
    assert noted(tmp_path / "run") == observer.notes, "a resume keeps them"
    assert tensors(tmp_path / "run") == tensors(whole_run("set"))
    sound(tmp_path / "run")


def test_what_was_asked_of_a_process_that_has_ended_is_refused(tmp_path):
    asked = {("learn", 1): [("stop-after-round", {})]}
    stopped(tmp_path / "run", ("evaluate", 1), asked, population__rounds=3)
    resume(tmp_path / "run")
    rounds = read_rounds(tmp_path / "run")
    assert len(rounds) == 3
    (one,) = rounds[0].steering
    assert one.refused == "the process that it was asked of has ended"
    sound(tmp_path / "run")


@pytest.mark.parametrize("op", ["pause", "stop-after-round"])
def test_the_last_round_takes_no_request_to_its_process(tmp_path, op):
    class Asks(Told):
        said = ""

        def stage(self, round, name, done, total):
            super().stage(round, name, done, total)
            if (name, round) == ("evaluate", 1) and not self.said:
                with pytest.raises(ConfigError) as refused:
                    ask(tmp_path / "run", op)
                self.said = str(refused.value)

    asks = Asks()
    run(small(population__rounds=2), out=tmp_path / "run", observer=asks)
    assert "in round 2, its last one, after which it judges its winner and ends" in asks.said
    assert read_requests(tmp_path / "run").requests == ()


# --- what the command refuses ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "given", "said"),
    [
        ("stop-agent", {"agent": 3}, "expected one that trains in round 3, 0, 1, 2, got 3"),
        ("stop-after-round", {}, "which no process trains"),
        ("explode", {}, "expected one of stop-agent, clone"),
    ],
)
def test_bad_requests_are_refused_where_the_folder_knows(stopped_run, op, given, said):
    with pytest.raises(ConfigError) as refused:
        ask(stopped_run, op, **given)
    assert said in str(refused.value)
    assert read_requests(stopped_run).requests == ()


def test_requests_before_it_count(tmp_path, stopped_run):
    shutil.copytree(stopped_run, tmp_path / "run")
    for agent in (0, 1):
        ask(tmp_path / "run", "stop-agent", agent=agent)
    with pytest.raises(ConfigError, match="got the only one"):
        ask(tmp_path / "run", "stop-agent", agent=2)
    with pytest.raises(ConfigError, match=r"trains in round 3, 2, got 0"):
        ask(tmp_path / "run", "clone", source=0, agent=2)
    (tmp_path / "run" / "steering" / f"{'9' * 20}-00000000.json").write_text('{"op": "st')
    assert cancel(tmp_path / "run") == 3
    assert cancel(tmp_path / "run") == 0
    ask(tmp_path / "run", "stop-agent", agent=2)


def test_before_the_first_round_the_settings_say_who_trains(tmp_path):
    asked = {("started", 0): [OPERATIONS["stop"]]}
    rounds, _ = steered(tmp_path / "run", asked, population__rounds=2)
    assert [len(record.agents) for record in rounds] == [3, 2]


def test_a_finished_run_is_not_steered(tmp_path):
    run(small(population__rounds=1), out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"played all of its 1; .*resume .* --rounds N"):
        ask(tmp_path / "run", "stop-agent", agent=0)


@pytest.mark.slow
def test_a_population_of_a_comparison_is_not_steered(tmp_path):
    from evo_grpo.analysis.arms import compare

    run(small(population__rounds=1), out=tmp_path / "run")
    compare(tmp_path / "run")
    with pytest.raises(RunDirError, match="steer that run"):
        ask(tmp_path / "run" / "compare" / "guess", "stop-agent", agent=0)


# --- clocks that step ---------------------------------------------------------------------------


@pytest.fixture
def stepping_back(monkeypatch):
    """A clock that goes an hour back at every look; the one that tells how long stays."""
    hours = iter(range(10**6, 0, -1))
    monkeypatch.setattr(time, "time", lambda: 3600.0 * next(hours))
    monkeypatch.setattr(time, "time_ns", lambda: 3600 * 10**9 * next(hours))


def test_requests_keep_their_order_where_the_clock_steps_back(tmp_path, stepping_back):
    values = [("set", {"agent": 0, "values": {"lr": lr}}) for lr in (0.002, 0.003)]
    asked = [("pause", {}), values[0], ("continue", {}), values[1]]
    rounds, observer = steered(tmp_path / "run", {("learn", 1): asked})
    assert [one.request.op for one in rounds[1].steering] == [op for op, _ in asked]
    assert not any(one.refused for one in rounds[1].steering)
    assert (observer.notes, len(rounds)) == ([], 4)
    assert rounds[2].agents[0].hparams.lr == 0.003
