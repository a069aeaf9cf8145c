"""docs/dependencies.md: each direct dependency has a row, with its bound and its licence."""

import importlib
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "dependencies.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WRITTEN, MARK, TABLE = PAGE.partition("<!-- Written by docs/generate")
# Not pinned in constraints.txt, which the table is made from.
APART = {
    **{"vllm": "Apache-2.0", "mlflow": "Apache-2.0"},
    **dict.fromkeys(("wandb", "trackio", "comet-ml"), "MIT"),
}
LICENCES = APART | {
    canonicalize_name(name): licence
    for name, licence in re.findall(r"^\| (\S+) \| \S+ \| (.+) \|$", TABLE, re.MULTILINE)
}


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Makes the table from constraints and from the table that was there."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "generate")
    packages = importlib.import_module("packages")
    monkeypatch.setattr(packages, "PAGE", tmp_path / "dependencies.md")
    monkeypatch.setattr(packages, "CONSTRAINTS", tmp_path / "constraints.txt")

    def make(constraints, before=""):
        (tmp_path / "constraints.txt").write_text(constraints)
        (tmp_path / "dependencies.md").write_text(f"# Words\n\n{packages.MARK}\n\n{before}")
        words, mark, rows = packages.page().partition(f"{packages.MARK}\n\n")
        assert (words, bool(mark)) == ("# Words\n\n", True)
        return rows.splitlines()[2:]

    return make


def test_each_dependency_has_a_row_with_its_bound_and_its_licence():
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) \| ([^|]+?) \| [^|]+ \|$", WRITTEN, re.MULTILINE)
    assert len(rows) == len(PROJECT["dependencies"])
    shown = {canonicalize_name(name): (Version(bound), said) for name, bound, said in rows}
    for requirement in map(Requirement, PROJECT["dependencies"]):
        bound, said = shown[canonicalize_name(requirement.name)]
        (specifier,) = requirement.specifier
        assert bound == Version(specifier.version), requirement
        # "Apache-2.0 and others" for a list of them.
        short = said.removesuffix(" and others")
        licence = LICENCES[canonicalize_name(requirement.name)]
        assert licence.partition(" AND ")[0] == short, requirement
        assert (short != said) == (" AND " in licence), requirement


def test_each_extra_has_a_row_with_its_packages_and_their_licences():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", WRITTEN, re.MULTILINE))
    assert sorted(rows) == sorted(PROJECT["optional-dependencies"])
    for extra, lines in PROJECT["optional-dependencies"].items():
        for requirement in map(Requirement, lines):
            if requirement.name == PROJECT["name"]:
                assert all(f"`{name}`" in rows[extra] for name in requirement.extras)
            else:
                assert requirement.name in rows[extra], requirement
                licence = LICENCES[canonicalize_name(requirement.name)]
                assert licence in rows[extra], requirement


BEFORE = "| no-such-package | 1.0 | ISC |\n| pydantic | 0.1 | wrong |\n"


def test_the_table_has_what_installed_packages_say_and_keeps_the_rest(table):
    installed = version("pydantic")
    assert table(f"pydantic=={installed}\nno-such-package==1.0  # why\n", BEFORE) == [
        "| no-such-package | 1.0 | ISC |",
        f"| pydantic | {installed} | MIT |",
    ]


def test_a_licence_that_nobody_knows_is_asked_for(table):
    # That of another version may be another.
    for line in ("no-such-package==2.0", "pydantic==0.2"):
        with pytest.raises(SystemExit, match=r"expected it to be installed.*write its row by hand"):
            table(line, BEFORE)
