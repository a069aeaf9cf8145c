"""Processes of runs and readers, killed at any instant or at a chosen touch of the disk.

    python killed_runs.py

reads a JSON request per line and answers with one: a run, a resume or readers that follow, in a
forked child, so that torch is loaded once. A touch of the disk is a write (once when half of it is
written, and once when all of it is), an fsync, a rename, a removal, a new folder or a link; and a
statement or a commit of a database.
"""

import builtins
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from sqlalchemy import Engine, event


class Touches:
    """Counts touches of the disk, and kills the process at one of them.

    Args:
        at: The touch before which it dies, counted from 1; None lets it live.
    """

    def __init__(self, at):
        self.at, self.count = at, 0

    def touch(self):
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self):
        """Wrap what writes, as Python sees it."""
        for module, names in (
            (os, ("fsync", "replace", "rename", "unlink", "remove", "rmdir", "mkdir", "symlink",
                  "truncate", "ftruncate")),
            (shutil, ("copyfile",)),
        ):  # fmt: skip
            for name in names:
                setattr(module, name, self._before(getattr(module, name)))
        os.fdopen = self._opened(os.fdopen)
        builtins.open = io.open = self._opened(io.open)
        pathlib.Path.write_bytes = self._write_bytes()
        for name in ("before_cursor_execute", "commit"):
            event.listen(Engine, name, lambda *of: self.touch())

    def _before(self, real):
        def call(*arguments, **given):
            self.touch()
            return real(*arguments, **given)

        return call

    def _write_bytes(self):
        def write_bytes(path, data):
            with builtins.open(path, "wb") as file:
                return file.write(data)

        return write_bytes

    def _opened(self, real):
        def opened(file, mode="r", *arguments, **given):
            found = real(file, mode, *arguments, **given)
            writes = set(mode) & set("wa+x") and "b" in mode
            return _Halves(found, self) if writes else found

        return opened


class _Halves:
    """A file of which a kill may leave half a write."""

    def __init__(self, file, touches):
        self._file, self._touches = file, touches

    def write(self, data):
        data = bytes(data)
        half = len(data) // 2
        for part in (data[:half], data[half:]):
            rest = memoryview(part)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._file.flush()
            self._touches.touch()
        return len(data)

    def writelines(self, pieces):
        self.write(b"".join(pieces))

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def __iter__(self):
        return iter(self._file)

    def __getattr__(self, name):
        return getattr(self._file, name)


def child(request, answer):
    """Run, resume or follow, and tell how often the disk was touched."""
    from small_run import small

    from evo_grpo import follow, resume, run

    touches = Touches(request["at"])
    observer = None
    if request.get("steer"):
        from steered_runs import AsksOnce

        observer = AsksOnce(folder=Path(request["folder"]))
    folder = Path(request["folder"])
    config = small(**request["settings"])
    touches.install()
    if request["do"] == "run":
        run(config, out=folder, observer=observer)
    elif request["do"] == "follow":
        follow(folder, [request["to"]], storage=request["storage"])
    else:
        resume(folder, rounds=request.get("rounds"), observer=observer)
    os.write(answer, str(touches.count).encode())


def kill_after(process, seconds):
    """Kill a child after some seconds, or do nothing where it ends before."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(min(left, 0.01))
    os.kill(process, signal.SIGKILL)


def serve():
    """Answer requests until the input ends."""
    import steered_runs  # noqa: F401 -- with torch and all that is slow, before the first fork

    for line in sys.stdin:
        request = json.loads(line)
        reading, answer = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reading)
            status = 9
            try:
                child(request, answer)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        os.close(answer)
        if request["after"] is not None:
            kill_after(process, request["after"])
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        told = os.read(reading, 100)
        os.close(reading)
        print(json.dumps({"status": status, "touches": int(told or 0)}), flush=True)


class Runs:
    """A server of runs to be killed; use it as a context manager."""

    def __enter__(self):
        folders = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
        path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        environment.pop("PYTEST_CURRENT_TEST", None)
        # A file: the server would wait for somebody to read a full pipe.
        self._errors = tempfile.TemporaryFile("w+")
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, *error):
        self._server.stdin.close()
        self._server.wait(30)
        self._server.stdout.close()
        self._errors.close()

    def ask(
        self, do, folder, settings, *, at=None, after=None, rounds=None, steer=False, to=None,
        storage=None,
    ):  # fmt: skip
        """Play, go on or follow; returns (whether it was killed, touches of the disk).

        Args:
            do: "run", "resume" or "follow".
            folder: The run folder.
            settings: Changes of the small run.
            at: The touch of the disk at which it dies.
            after: Seconds after which it dies.
            rounds: As `resume` takes it.
            steer: Whether it is steered, as `steered_runs.AsksOnce` does.
            to: The reader to follow with.
            storage: The database of that reader.
        """
        request = {"do": do, "folder": str(folder), "settings": settings, "rounds": rounds}
        request |= {"steer": steer, "to": to, "storage": storage}
        self._server.stdin.write(json.dumps({**request, "at": at, "after": after}) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        if not line:
            raise AssertionError(f"the server of runs died: {self._said()}")
        told = json.loads(line)
        if told["status"] not in (0, -signal.SIGKILL):
            raise AssertionError(f"{do} {folder} failed: {self._said()}")
        return told["status"] != 0, told["touches"]

    def _said(self):
        """The end of what the server wrote to standard error."""
        self._errors.seek(0)
        return self._errors.read()[-2000:]


if __name__ == "__main__":
    serve()
