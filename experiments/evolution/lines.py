"""The results file of a task: one JSON line per finished run, appended, never changed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import evo_grpo

PACKAGES = ("evo-grpo", "torch", "transformers", "peft", "optuna", "numpy")

Line = dict[str, Any]
Settings = Callable[[str, int], Mapping[str, Any] | None]


def read(path: Path) -> list[Line]:
    """Return the whole lines of a results file; of one that is not there, none.

    What a stopped process left of a last line is cut off, so that the next one stands by itself.
    """
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line, on disk before this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def finished(lines: Sequence[Line], settings: Settings) -> set[tuple[str, int]]:
    """Return the (arm, seed) pairs that have a line made with the settings they have now.

    Args:
        lines: Of a results file.
        settings: (arm, seed) -> the settings of the run, None for an arm that is no more.
    """
    return {
        (line["arm"], line["seed"])
        for line in lines
        if line["overrides"] == settings(line["arm"], line["seed"])
    }


def circumstances(jobs: int) -> Line:
    """Return what all runs of one call share: commit, date, versions, machine.

    Args:
        jobs: Processes that run at once.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "versions": {name: version(name) for name in PACKAGES},
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "python": platform.python_version(),
        },
        "jobs": jobs,
    }


def commit() -> str:
    """Return the commit of the package, with a + where its files differ from it."""
    root = Path(evo_grpo.__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "none: installed without its repository"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.is_file() else []
    models = [name.partition(":")[2].strip() for name in names if name.startswith("model name")]
    return models[0] if models else platform.machine()
