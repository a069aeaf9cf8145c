"""docs/dependencies.md: each direct dependency has a row, with its bound and its licence."""

import re
import tomllib
from pathlib import Path

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
