"""A run that a power cut ends, at any call, goes on with each round that it had called recorded.

POSIX promises of a file no more than its contents at its last fsync, and of a name in a folder no
more than that folder's names at its own last fsync. Two models of what else is there: nothing
(`strict`), or each call that was not synced by itself, or not (`lag`). The calls of a real run are
replayed against both, and each state is made as a folder. In every one of them the records are
read, the files are compared with them, and no round is missing whose line had been synced; from a
sample, and with `make torture-io` from all of them, the run goes on and ends as one that nobody
stopped.
"""

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
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


@dataclass(eq=False)
class Node:
    """A file, a folder or a link to `link`, whatever it is called."""

    folder: bool = False
    link: Path | None = None


@dataclass
class Step:
    """What a call does to the disk.

    It sets `names` (folder, name, node or None), `writes` (file, offset, data), `cuts` (file,
    length) and `syncs` a node. One of `touched` has to be synced for it to be certain.
    """

    touched: tuple = ()
    names: tuple = ()
    writes: tuple = ()
    cuts: tuple = ()
    syncs: Node | None = None


@dataclass
class Trace:
    """A run's calls as steps on nodes below `root`, beginning with a tree that is on disk."""

    top: Path
    root: Node = field(default_factory=lambda: Node(folder=True))
    steps: list[Step] = field(default_factory=list)

    @classmethod
    def of(cls, top, calls, before=()):
        """Turn the calls of a `disk.Disk` into steps, after what `tree` returned `before`."""
        trace = cls(Path(top).absolute())
        trace._names = {trace.root: {}}
        for path, data in before:
            trace._before(trace.top / path, data)
        trace.first = len(trace.steps)
        for call in calls:
            trace._add(call)
        return trace

    def _before(self, path, data):
        node = self._made(path, Node(folder=data is None))
        if data is not None:
            self.steps.append(Step((node,), writes=((node, 0, data),)))
        for synced in (node, self._node(path.parent)):
            self.steps.append(Step(syncs=synced))

    def _node(self, path):
        node = self.root
        for part in path.relative_to(self.top).parts:
            node = self._names[node][part]
        return node

    def _made(self, path, node):
        parent = self._node(path.parent)
        self._names[parent][path.name] = node
        if node.folder:
            self._names[node] = {}
        self.steps.append(Step((parent,), names=((parent, path.name, node),)))
        return node

    def _add(self, call):
        path, op = call.path, call.op
        if op == "create":
            self._made(path, Node())
        elif op == "mkdir":
            self._made(path, Node(folder=True))
        elif op == "symlink":
            self._made(path, Node(link=call.to))
        elif op == "write":
            node = self._node(path)
            self.steps.append(Step((node,), writes=((node, call.at, call.data),)))
        elif op == "truncate":
            node = self._node(path)
            self.steps.append(Step((node,), cuts=((node, call.at),)))
        elif op == "fsync":
            self.steps.append(Step(syncs=self._node(path)))
        elif op in ("unlink", "rmdir"):
            parent = self._node(path.parent)
            del self._names[parent][path.name]
            self.steps.append(Step((parent,), names=((parent, path.name, None),)))
        elif op == "rename":
            old, new = self._node(path.parent), self._node(call.to.parent)
            node = self._names[old].pop(path.name)
            self._names[new][call.to.name] = node
            names = ((old, path.name, None), (new, call.to.name, node))
            self.steps.append(Step((old, new), names=names))
        else:
            assert op == "open", op

    def strict(self, end):
        """What is left of the first steps where nothing that was not synced survives."""
        return self._left(end, lambda: False)

    def lag(self, end, rng):
        """What is left of the first steps where each that was not synced survives by a draw."""
        return self._left(end, lambda: rng.random() < 0.5)

    def whole(self, end):
        """What a reader saw after the first steps."""
        return self._left(end, lambda: True)

    def _left(self, end, survives):
        synced, kept = set(), []
        for step in reversed(self.steps[:end]):
            if step.syncs is not None:
                synced.add(step.syncs)
            elif any(node in synced for node in step.touched) or survives():
                kept.append(step)
        names, contents = {self.root: {}}, {}
        for step in reversed(kept):
            for folder, name, node in step.names:
                there = names.setdefault(folder, {})
                there.pop(name, None)
                if node is not None:
                    there[name] = node
            for node, at, data in step.writes:
                file = contents.setdefault(node, bytearray())
                file.extend(bytes(max(0, at - len(file))))
                file[at : at + len(data)] = data
            for node, length in step.cuts:
                file = contents.setdefault(node, bytearray())
                file.extend(bytes(max(0, length - len(file))))
                del file[length:]
        return State.of(self.root, names, contents)


@dataclass(frozen=True)
class State:
    """A tree: relative path and contents of each file, None for a folder, or a path for a link."""

    entries: tuple

    @classmethod
    def of(cls, root, names, contents):
        entries = []

        def walk(node, place):
            for name, child in sorted(names.get(node, {}).items()):
                path = f"{place}{name}"
                if child.link is not None:
                    entries.append((path, child.link))
                elif child.folder:
                    entries.append((path, None))
                    walk(child, f"{path}/")
                else:
                    entries.append((path, bytes(contents.get(child, b""))))

        walk(root, "")
        return cls(tuple(entries))

    def get(self, path):
        """The contents of a file, None where there is none."""
        return dict(self.entries).get(path)

    def put(self, top):
        """Make it anew below an empty folder."""
        for path, data in self.entries:
            place = Path(top) / path
            if data is None:
                place.mkdir()
            elif isinstance(data, Path):
                place.symlink_to(data)
            else:
                place.write_bytes(data)


def tree(top):
    """Relative path and contents of all that is below a folder; None for a folder in it."""
    found = []
    for path in sorted(Path(top).rglob("*")):
        data = None if path.is_dir() else path.read_bytes()
        found.append((path.relative_to(top).as_posix(), data))
    return found


class Watched:
    """A run of `RUNS` whose calls were noted as `trace`.

    `recorded` has, after each number of calls, how many rounds had a line that had been synced.
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
