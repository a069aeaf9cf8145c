"""A run that a power cut ends, at any call, goes on with each round that it had called recorded.

The calls of a real run are replayed against two models of what is on disk afterwards; see
`crash_states`. Each state is made as a folder. In every one of them the records are read, the files
are compared with them, and no round is missing whose line had been synced; from a sample, and with
`make torture-io` from all of them, the run goes on and ends as one that nobody stopped.
"""

import os
import random
import shutil

import pytest
from crash_states import Trace, tree
from disk import Disk
from small_run import outcome, small
from torture_table import count, tried

from evo_grpo import resume, run
from evo_grpo.analysis.verify import verify
from evo_grpo.errors import EvoGrpoError
from evo_grpo.record.folder import is_run
from evo_grpo.record.run_dir import refuse_taken

TWO = {"population__size": 2}
LAST = {**TWO, "record__checkpoints": "last", "evolve__archive": True}
RUNS = {
    "checkpoints: all": (TWO, None),
    "checkpoints: last": (LAST, None),
    "more rounds": (LAST, 4),
}
"""Settings, and the rounds that a finished run is given while it is watched."""

FOLDER = "runs/first"


class Watched:
    """A run whose calls were noted.

    Attributes:
        name: Which of `RUNS`.
        settings: Its changes of the small run.
        rounds: As `resume` takes them.
        expected: Its outcome.
        trace: Its calls.
        recorded: After each number of calls, how many rounds had a line that had been synced.
    """

    def __init__(self, name, top):
        self.name = name
        self.settings, self.rounds = RUNS[name]
        folder, before = top / FOLDER, ()
        if self.rounds is not None:
            run(small(**self.settings), out=folder)
            before = tree(top)
        with Disk(top) as disk:
            self.go_on(folder)
        self.expected = outcome(folder)
        self.trace = Trace.of(top, disk.calls, before)
        self.seen = self.trace.whole(len(self.trace.steps))
        assert dict(self.seen.entries) == dict(tree(top))
        self.recorded = self._recorded()
        shutil.rmtree(top)

    def go_on(self, folder):
        """Start it, or go on with it."""
        if is_run(folder):
            resume(folder, rounds=self.rounds)
        else:
            run(small(**self.settings), out=folder)

    def states(self, model, draws=0, seed=0):
        """Yield each different state after a call, with the rounds that were recorded by then."""
        steps, rng = self.trace.steps, random.Random(seed)
        first = self.trace.first
        if model == "strict":
            ends = range(first, len(steps) + 1)
            found = ((end, self.trace.strict(end)) for end in ends)
        else:
            ends = (rng.randint(first, len(steps)) for _ in range(draws))
            found = ((end, self.trace.lag(end, rng)) for end in ends)
        known = set()
        for end, state in found:
            one = state, self.recorded[end]
            if one not in known:
                known.add(one)
                yield one

    def _recorded(self):
        """After each number of calls, how many rounds had a line that had been synced."""
        steps, lines, found = self.trace.steps, 0, [0]
        for number, step in enumerate(steps, start=1):
            if step.syncs is not None and not step.syncs.folder:
                text = self.trace.whole(number).get(f"{FOLDER}/rounds.jsonl") or b""
                lines = max(lines, text.count(b"\n") - text.count(b'"amends"'))
            found.append(lines)
        return found


@pytest.fixture(scope="module", params=RUNS)
def watched(tmp_path_factory, request):
    return Watched(request.param, tmp_path_factory.mktemp("watched"))


def trouble(folder, recorded):
    """What keeps a run from going on, as far as its folder says; None if nothing."""
    try:
        if not is_run(folder):
            refuse_taken(folder)
            return f"{recorded} recorded rounds are lost" if recorded else None
        found = verify(folder)
    except EvoGrpoError as error:
        return str(error)
    if found.damage:
        return found.damage[0]
    if found.rounds < recorded:
        return f"{found.rounds} of {recorded} recorded rounds are there"
    return None


def made(state, top):
    """Make a state as a folder, and return that of the run."""
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir()
    state.put(top)
    return top / FOLDER


def check_all(watched, model, draws, top):
    """See that no state keeps a run from going on; returns the states."""
    states = list(watched.states(model, draws))
    found = [trouble(made(state, top), recorded) for state, recorded in states]
    assert [one for one in found if one] == []
    return [state for state, _ in states]


def check_goes_on(watched, states, top):
    """See that a run goes on from each state and ends as one that nobody stopped."""
    for state in states:
        folder = made(state, top)
        watched.go_on(folder)
        assert outcome(folder) == watched.expected


@pytest.mark.slow
@pytest.mark.parametrize("model", ["strict", "lag"])
def test_no_power_cut_loses_a_recorded_round(watched, model, tmp_path):
    states = check_all(watched, model, 30, tmp_path / "top")
    check_goes_on(watched, random.Random(0).sample(states, 3), tmp_path / "top")


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", ["strict", "lag"])
def test_after_any_power_cut_a_run_ends_as_an_unbroken_one(watched, model, tmp_path):
    states = check_all(watched, model, count("EVO_GRPO_CRASHES", 200), tmp_path / "top")
    distinct = set(states)
    check_goes_on(watched, distinct, tmp_path / "top")
    what = {
        "strict": "a power cut after any call: all that was not synced is lost",
        "lag": "a power cut: of what was not synced each call survives or not, by chance",
    }
    tried(what[model], watched.name, len(distinct))


def test_both_models_lose_what_was_not_synced(tmp_path):
    """Without a sync of the folders, as runs were written once, rounds are lost in both models."""
    top = tmp_path / "top"
    with Disk(top) as disk:
        top.mkdir()
        (top / "folder").mkdir()
        file = top / "folder" / "file"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, b"contents")
        os.fsync(descriptor)
        os.close(descriptor)
    trace = Trace.of(top, [call for call in disk.calls if call.path != top])
    end = len(trace.steps)
    assert trace.whole(end).get("folder/file") == b"contents"
    assert trace.strict(end).entries == ()
    drawn = {trace.lag(end, random.Random(seed)).entries for seed in range(20)}
    whole = (("folder", None), ("folder/file", b"contents"))
    assert drawn == {(), (("folder", None),), whole}
