"""A disk that refuses a call ends a run with a sentence, and with nothing that a resume cannot use.

The cases are made from the calls of a run that nothing stops, and of one that is resumed: each kind
of file that it touches, by each call, each error, at the first and the third time, with a fast and
a slow fsync. Once the disk is well again the run goes on, and ends as the
unbroken one: leaderboard, lineage, and every adapter and moment to the bit. `make torture-io` tries
all of them, `make test` a sample.
"""

import errno
import os
import re
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from disk import Disk, kind
from small_run import Told, outcome, small
from torture_table import shares, tried

from evo_grpo import resume, run
from evo_grpo.analysis.verify import verify
from evo_grpo.errors import ConfigError, EvoGrpoError, RunDirError
from evo_grpo.record.folder import is_run

SETTINGS = {
    "population__size": 2,
    "record__checkpoints": "last",
    "evolve__archive": True,
    "algorithm__separate_reference": True,
}
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS)
LASTING = (errno.ENOSPC, errno.EROFS)
"""What stays until somebody does something about it."""
OPS = ("open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "symlink", "truncate")
OCCURRENCES = (1, 3)
FSYNC_SECONDS = {"fast": 0.0, "slow": 0.004}
"""A round takes a tenth of a second and syncs dozens of files: slow ones make rounds wait."""


@dataclass(frozen=True)
class Case:
    """A fault: a call `op` on a `kind` of file is refused with an errno at an occurrence, from 1.

    If it is `lasting`, from then on every such call is refused until the run has ended.
    """

    kind: str
    op: str
    error: int
    occurrence: int
    fsync: str
    lasting: bool

    def __str__(self):
        often = f"from the {self.occurrence}. time" if self.lasting else f"{self.occurrence}. time"
        name = errno.errorcode[self.error]
        return f"{name} at {self.op} of {self.kind}, {often}, fsync {self.fsync}"


@dataclass
class Fault:
    """Refuses the calls of a case."""

    case: Case
    top: Path
    seen: int = 0
    struck: list[Path] = field(default_factory=list)

    def __call__(self, op, path):
        if op != self.case.op:
            return None
        if not (self.case.lasting and self.struck):
            if kind(path, self.top) != self.case.kind:
                return None
            self.seen += 1
            if self.seen != self.case.occurrence:
                return None
        self.struck.append(path)
        return OSError(self.case.error, os.strerror(self.case.error), str(path))


class Unbroken:
    """A run that nothing stops, and the faults (`cases`) that could have struck it.

    `begun` is a folder of the run that was stopped before; None for a run from its start.
    """

    def __init__(self, settings, top, *, resumed=False):
        self.settings, self.begun = settings, None
        folder = top / "run"
        if resumed:
            self.begun = stopped(settings, top.with_name(f"{top.name}-stopped"))
            shutil.copytree(self.begun, folder)
        with Disk(top) as disk:
            self._go_on(folder)
        self.expected = outcome(folder)
        times = Counter((kind(call.path, top), call.op) for call in disk.calls)
        made = {call.path for call in disk.calls} | {call.to for call in disk.calls}
        for path in () if resumed else top.rglob("*"):
            assert made & {path, *path.parents}, f"{path}: made by a call that was not seen"
        self.cases = [
            Case(name, op, error, occurrence, fsync, lasting)
            for name, op in sorted(times)
            if op in OPS
            for error in ERRORS
            for occurrence in OCCURRENCES
            if times[name, op] >= occurrence
            for fsync in FSYNC_SECONDS
            for lasting in (False, True)
            if not lasting or error in LASTING
        ]

    def strike(self, case, top):
        """Run into a fault, then go on without it; returns what was wrong, None if nothing."""
        folder = top / "run"
        if self.begun is not None:
            shutil.copytree(self.begun, folder)
        fault = Fault(case, top)
        error = None
        with Disk(top, fault=fault, fsync_seconds=FSYNC_SECONDS[case.fsync]):
            try:
                self._go_on(folder)
            except EvoGrpoError as refused:
                error = refused
            except Exception as bug:
                return f"{case}: a traceback: {bug!r}"
        if not fault.struck:
            return f"{case}: never came to it"
        wrong = None if error is None else _unclear(error, case, top)
        if is_run(folder) and (damage := verify(folder).damage):
            wrong = wrong or f"called damage: {damage[0]}"
        self._go_on(folder)
        if outcome(folder) != self.expected:
            wrong = wrong or "ends otherwise than an unbroken run"
        return None if wrong is None else f"{case}: {wrong}"

    def _go_on(self, folder):
        if is_run(folder):
            resume(folder)
        else:
            run(small(**self.settings), out=folder)


def stopped(settings, folder):
    """A run that was killed in its last round, while it wrote."""
    with suppress(KeyboardInterrupt):
        run(small(**settings), out=folder, observer=Told(("learn", 2)))
    half = folder / "checkpoints" / "round-0002" / "agent-00"
    half.mkdir(parents=True)
    (half / "optimizer.safetensors").write_bytes(b"half")
    (folder / "completions" / ".round-0002.jsonl.tmp").write_text("half")
    for name in ("rounds.jsonl", "journal.log"):
        with (folder / name).open("a") as file:
            file.write('{"half": ')
    return folder


def _unclear(error, case, top):
    """What a message lacks: the file, what happened, or the remedy; None if nothing."""
    text = str(error)
    where = str(top / case.kind.partition("/")[0])
    if "\n" in text or where not in text:
        return f"names no file: {text}"
    # Another --out is the way out, or another file.
    at_start = (case.kind in (".", "run", "run/.lock") and isinstance(error, RunDirError)) or (
        case.kind == "run/population.yaml" and isinstance(error, ConfigError)
    )
    if error.exit_code != 1 and not at_start:
        return f"exit code {error.exit_code}: {text}"
    if os.strerror(case.error) not in text:
        return f"says not what happened: {text}"
    if not re.search("; .*(go on with|choose another|permission)", text):
        return f"names no remedy: {text}"
    return None


@pytest.fixture(scope="module", params=["a run", "a resume"])
def unbroken(tmp_path_factory, request):
    top = tmp_path_factory.mktemp("unbroken")
    return Unbroken(SETTINGS, top, resumed=request.param == "a resume")


def strike(unbroken, case, tmp_path):
    """Try a case in a folder that is removed afterwards."""
    top = tmp_path / "top"
    top.mkdir()
    try:
        return unbroken.strike(case, top)
    except EvoGrpoError as error:
        return f"{case}: does not go on: {error}"
    finally:
        shutil.rmtree(top)


@shares(8, cases=8)
def test_no_fault_costs_a_run(unbroken, tmp_path, part):
    cases = part(unbroken.cases)
    assert [wrong for case in cases if (wrong := strike(unbroken, case, tmp_path))] == []
    tried("a call of the disk refused: ENOSPC, EIO, EACCES or EROFS",
          "a run" if unbroken.begun is None else "a resume", len(cases))  # fmt: skip
