"""What may be on a disk after a power cut, from the calls that a run had made until then.

POSIX promises of a file no more than its contents at its last fsync, and of a name in a folder no
more than that folder's names at its own last fsync: a file that was synced is lost with a folder
that nobody synced. Two models of what else is there: nothing (`strict`), or each call that was not
synced by itself, or not (`lag`).
"""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(eq=False)
class Node:
    """A file, a folder or a link, whatever it is called.

    Attributes:
        link: What it points to, for a link.
        folder: Whether it is a folder.
    """

    folder: bool = False
    link: Path | None = None


@dataclass
class Step:
    """What a call does to the disk.

    Attributes:
        touched: What has to be synced for it to be certain; either of them will do.
        names: (folder, name, node or None) that are set.
        writes: (file, offset, data) that are written.
        cuts: (file, length) that are cut or filled up.
        syncs: What is synced.
    """

    touched: tuple = ()
    names: tuple = ()
    writes: tuple = ()
    cuts: tuple = ()
    syncs: Node | None = None


@dataclass
class Trace:
    """A run's calls as steps on nodes, beginning with a tree that is on disk.

    Attributes:
        top: The folder below which everything lies.
        steps: In order.
        root: The node of `top`.
    """

    top: Path
    root: Node = field(default_factory=lambda: Node(folder=True))
    steps: list[Step] = field(default_factory=list)

    @classmethod
    def of(cls, top, calls, before=()):
        """Turn calls into steps.

        Args:
            top: The folder.
            calls: Of a `disk.Disk`.
            before: What was on disk before, as `tree` returns it.
        """
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
