"""The peers: a virtual environment each, and a process that takes a sample whenever it is asked.

A peer stays alive between samples, so that its samples and ours can be taken in turns; it waits on
its standard input meanwhile.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from common import HERE, MARK

TORCH = "torch==2.13.0"


class PeerError(Exception):
    """A peer that cannot be installed or that stopped; the benchmark goes on without it."""


def python_of(name: str) -> Path:
    """Return the interpreter of a peer's virtual environment, installing it when it is not there.

    Args:
        name: agilerl, trl or vllm.

    Raises:
        PeerError: When the installation fails; with the last lines of what pip said.
    """
    requirements = HERE / f"requirements-{name}.txt"
    folder = HERE / ".venvs" / name
    python = folder / "bin" / "python"
    alone = HERE / f"requirements-{name}-nodeps.txt"
    text = requirements.read_bytes() + (alone.read_bytes() if alone.is_file() else b"")
    digest = hashlib.sha256(text).hexdigest()[:12]
    stamp = folder / f".installed-{digest}"
    if stamp.is_file():
        return python
    print(f"installing {name} into {folder.relative_to(HERE)}: some minutes", file=sys.stderr)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", TORCH]
    # torch first and alone: resolved with the rest, a much larger build may be taken.
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        pip,
        [*pip, "-r", str(requirements)],
    ]
    if alone.is_file():
        commands.append([*pip[:-1], "--no-deps", "-r", str(alone)])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerError(f"{name}: {' '.join(command[-4:])} failed: {done.stderr[-600:]}")
    stamp.touch()
    return python


class Peer:
    """A running peer.

    Args:
        name: agilerl, trl or vllm.
        job: What its adaptor is to do; see the adaptor.
        python: An interpreter that has the peer's packages; None for that of its own environment.
        script: What it runs, in this folder; None for its adaptor.

    Raises:
        PeerError: When it cannot be installed or does not start.
    """

    def __init__(
        self,
        name: str,
        job: Mapping[str, Any],
        python: Path | None = None,
        script: str | None = None,
    ) -> None:
        """Start the process and wait until it is ready."""
        self.name = name
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "WANDB_MODE": "disabled"}
        # The environment's own packages alone, whatever the caller's path holds.
        environment.pop("PYTHONPATH", None)
        python = python or python_of(name)
        # What a peer leaves in temporary folders goes with it, however it ends.
        self._folder = tempfile.TemporaryDirectory(prefix=f"bench-{name}-")
        environment["TMPDIR"] = self._folder.name
        # A file: nobody reads a pipe while the peer works, and a full one would stop it.
        self._log = Path(self._folder.name) / "stderr"
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), str(HERE / (script or f"{name}_adaptor.py")), json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if os.environ.get("BENCH_PEER_STDERR") else errors,
                text=True,
                env=environment,
            )
        try:
            self.facts = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, command: str) -> dict[str, Any]:
        """Let the peer do one thing.

        Args:
            command: One of its adaptor's commands.

        Returns:
            What it tells, `seconds` among it.

        Raises:
            PeerError: When it stopped.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerError(f"{self.name}: stopped before {command!r}") from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        code = self._process.wait()
        # The end says why: what stands before it are warnings of its libraries.
        lines = self._log.read_text(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        raise PeerError(f"{self.name}: stopped with {code}: {said[-1] if said else 'no message'}")

    def close(self) -> None:
        """End the process and remove what it left."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process."""
        self.close()
