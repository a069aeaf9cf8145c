"""Environments as `pip install` leaves them, without a network.

`install` makes one of links to the packages of the Python that runs the tests, and only of those
that pip would have installed: what a command needs beside them is missing, as it is for a user.
"""

import os
import shutil
import subprocess
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCRIPT = "#!{python}\nimport sys\nfrom evo_grpo.cli import main\nsys.exit(main())\n"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def install(place, extras, source):
    """Make an environment with evo-grpo from a wheel, or, as `pip install -e`, from a checkout.

    Args:
        place: The folder of the environment.
        extras: Names of extras of pyproject.toml.
        source: A wheel, or the folder of a checkout.
    """
    venv.create(place, symlinks=True, with_pip=False)
    (packages,) = place.glob("lib/python*/site-packages")
    for name in {"pip", *_needed(extras)}:
        for entry in _top_level(name):
            if not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    if source.suffix == ".whl":
        with zipfile.ZipFile(source) as wheel:
            wheel.extractall(packages)
    else:
        (packages / "evo_grpo.pth").write_text(f"{source}\n", encoding="utf-8")
    script = place / "bin" / "evo-grpo"
    script.write_text(SCRIPT.format(python=place / "bin" / "python"), encoding="utf-8")
    script.chmod(0o755)


def shell(command, folder, *bins):
    """Run a command in a shell of its own, as a user who has activated `bins`; return its output.

    The package of the tests is not importable in it: neither PYTHONPATH nor PATH lead there.
    """
    own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PATH")}
    path = os.pathsep.join([*map(str, bins), SYSTEM_PATH])
    environ = {**own, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def clone(place, *more):
    """Copy what a run from a clone reads, and `more` files."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "evo_grpo", place / "evo_grpo", ignore=ignored)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "population.yaml", *more):
        shutil.copy(ROOT / name, place)
    return place


def _needed(extras):
    """The distributions that evo-grpo with some extras needs, directly or not."""
    wanted = [Requirement(text) for text in PROJECT["dependencies"]]
    optional = PROJECT["optional-dependencies"]
    wanted += [Requirement(text) for extra in extras for text in optional[extra]]
    found = {}
    while wanted:
        one = wanted.pop()
        if one.name == PROJECT["name"]:
            wanted += [Requirement(text) for extra in one.extras for text in optional[extra]]
            continue
        known = found.setdefault(one.name.lower(), set())
        new = {"", *one.extras} - known
        known |= new
        for text in metadata.requires(one.name) or () if new else ():
            part = Requirement(text)
            if part.marker is None or any(part.marker.evaluate({"extra": e}) for e in new):
                wanted.append(part)
    return found


def _top_level(name):
    """The files and folders of a distribution directly in site-packages."""
    distribution = metadata.distribution(name)
    parts = {file.parts[0] for file in distribution.files or () if len(file.parts) > 0}
    places = {Path(str(distribution.locate_file(part))) for part in parts - {"..", "__pycache__"}}
    return sorted(place for place in places if place.exists())
