"""A package that stands for wandb, and notes what it is told in a file."""

import sys

import pytest

FAKE = """
import os
{before}
class Settings:
    def __init__(self, **settings): pass
class Run:
    def log(self, values, step):
        {log}
        with open({file!r}, "a") as file: file.write(f"{{step}} {{len(values)}}\\n")
    def finish(self): pass
def init(**arguments):
    {init}
    with open({file!r}, "a") as file: file.write("run " + arguments["id"] + "\\n")
    return Run()
"""


class Package:
    """Writes the package, and reads what it noted."""

    def __init__(self, folder):
        self.file = folder / "told"
        self._place = folder / "packages" / "wandb"

    def write(self, *, before="", init="pass", log="pass"):
        self._place.mkdir(parents=True, exist_ok=True)
        text = FAKE.format(before=before, init=init, log=log, file=str(self.file))
        (self._place / "__init__.py").write_text(text)
        sys.modules.pop("wandb", None)

    @property
    def lines(self):
        return self.file.read_text().splitlines() if self.file.exists() else []

    @property
    def steps(self):
        return [int(line.split()[0]) for line in self.lines if not line.startswith("run ")]

    @property
    def runs(self):
        return [line.split()[1] for line in self.lines if line.startswith("run ")]


@pytest.fixture
def package(tmp_path, monkeypatch):
    place = tmp_path / "packages"
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=":")
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it is written anew within a second
    yield Package(tmp_path)
    sys.modules.pop("wandb", None)
