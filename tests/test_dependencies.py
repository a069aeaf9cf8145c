"""The versions that pyproject.toml allows, those that the tests run on, and the lists of them."""

import ast
import contextlib
import json
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from evo_grpo.settings.trackers import KINDS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# These make the pages and check the source: nobody runs the library on them.
TOOLS = {"browser", "docs", "dev"}
# Tested at the versions of a file of its own: it does not resolve beside constraints.txt.
TRACKERS = "tests/readers/trackers/requirements-trackers.txt"
APART = {
    "vllm": "tests/rollout/vllm/requirements-vllm.txt",
    **dict.fromkeys((kind for kind in KINDS if kind != "tensorboard"), TRACKERS),
}


def requirements(*extras):
    """The requirements of the library itself, and of some of its extras."""
    listed = [*PROJECT["dependencies"]]
    listed += [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    found = [Requirement(line) for line in listed]
    return {canonicalize_name(r.name): r for r in found if r.name != PROJECT["name"]}


def pins(name):
    """The lines `name==version` of a file of constraints, in order."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return [
        (canonicalize_name(name), Version(version))
        for name, version in (line.split("==") for line in lines if line)
    ]


EXTRAS = sorted(PROJECT["optional-dependencies"])


def test_the_lower_bounds_are_what_test_minimum_installs():
    minimum = dict(pins("constraints-minimum.txt"))
    tested = requirements(*(extra for extra in EXTRAS if extra not in {*TOOLS, *APART}))
    bounds = {}
    for name, requirement in tested.items():
        (specifier,) = requirement.specifier
        assert specifier.operator == ">=", requirement
        bounds[name] = Version(specifier.version)
    assert len(bounds) > 20
    assert bounds == {name: minimum.get(name) for name in bounds}


def code_of(tests):
    """The modules that a room or a module of tests is named after."""
    place = ROOT / "evo_grpo" / Path(tests).relative_to("tests")
    if place.suffix:
        module = place.with_name(place.name.removeprefix("test_"))
        return [module] if module.exists() else []
    return sorted(place.rglob("*.py"))


def imported(module):
    """The distributions that a module imports, wherever in it."""
    heads = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            heads |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            heads.add(node.module.partition(".")[0])
    return {{"yaml": "pyyaml"}.get(head, canonicalize_name(head)) for head in heads}


def test_what_test_minimum_leaves_out_imports_no_older_package():
    minimum, tested = dict(pins("constraints-minimum.txt")), dict(pins("constraints.txt"))
    older = {name for name, version in minimum.items() if tested.get(name, version) != version}
    assert {"transformers", "peft", "pandas", "plotly", "typer", "rich"} <= older
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    rooms = re.search(r"^OWN_CODE := (.*)$", makefile, re.MULTILINE)[1].split()
    assert sum(len(code_of(room)) for room in rooms) > 60
    for room in rooms:
        assert (ROOT / room).exists(), room
        for module in code_of(room):
            assert imported(module) & older <= {"numpy", "pydantic"}, (room, module)


def test_every_pin_takes_the_oldest_python():
    """Not the newest 3.11 alone: Debian 12 has 3.11.2."""
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    refuse = {}
    for name, version in pins("constraints.txt"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found = metadata.distribution(name)
            bound = SpecifierSet(found.metadata["Requires-Python"] or "")
            if Version(found.version) == version and oldest not in bound:
                refuse[name] = str(bound)
    assert not refuse


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-minimum.txt"])
def test_a_package_is_pinned_once(name):
    names = [package for package, _ in pins(name)]
    assert sorted(names) == sorted(set(names))


def test_the_pinned_versions_are_allowed():
    pinned = dict(pins("constraints.txt"))
    together = (extra for extra in EXTRAS if extra not in APART)
    for name, requirement in requirements(*together).items():
        assert pinned[name] in requirement.specifier, requirement


@pytest.mark.parametrize("extra", APART)
def test_what_is_tested_apart_is_pinned_at_its_lower_bound(extra):
    (line,) = PROJECT["optional-dependencies"][extra]
    (specifier,) = Requirement(line).specifier
    pinned = dict(pins(APART[extra]))
    # vLLM's build for CPUs, MLflow's client.
    own = canonicalize_name(Requirement(line).name)
    names = (own, f"{own}-cpu", f"{own}-skinny")
    (tested,) = (pinned[name] for name in names if name in pinned)
    assert (specifier.operator, Version(specifier.version).release) == (">=", tested.release[:2])


def test_the_bill_of_materials_lists_the_pinned_packages():
    text = (ROOT / "sbom.cdx.json").read_text()
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    listed = [(canonicalize_name(c["name"]), Version(c["version"])) for c in bill["components"]]
    assert sorted(listed) == sorted(pins("constraints.txt")), "it is stale; run: make sbom"
    for part in bill["components"]:
        name = canonicalize_name(part["name"])
        assert part["purl"] == f"pkg:pypi/{name}@{part['version']}"
    subject = bill["metadata"]["component"]
    assert (subject["name"], subject["version"]) == (PROJECT["name"], PROJECT["version"])
    # Equal pins, equal file.
    assert "serialNumber" not in bill
    assert "timestamp" not in bill["metadata"]


# --- docs/dependencies.md: each direct dependency has a row -----------------------------------

WRITTEN, _, TABLE = (
    (ROOT / "docs" / "dependencies.md").read_text().partition("<!-- Written by docs/generate")
)
# Not pinned in constraints.txt, which the table is made from.
UNPINNED = {
    **{"vllm": "Apache-2.0", "mlflow": "Apache-2.0"},
    **dict.fromkeys(("wandb", "trackio", "comet-ml"), "MIT"),
}
LICENCES = UNPINNED | {
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
