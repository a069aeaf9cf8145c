"""Files that a repository's host and tools read: their keys, and that what they name is there."""

import re
import shlex
import tomllib
from datetime import date
from pathlib import Path

import yaml
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())


def test_the_citation_has_what_its_schema_asks_for():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    # Required by version 1.2.0 of the schema; an author is a person or an entity, which has a name.
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] == "software"
    assert cited["authors"] == PROJECT["authors"]
    for key, ours in (("title", "name"), ("license", "license")):
        assert cited[key] == PROJECT[ours]
    # The latest release is cited, which a version under development comes after.
    version, latest = Version(PROJECT["version"]), Version(cited["version"])
    assert version > latest if version.is_devrelease else version == latest
    released = date.fromisoformat(cited["date-released"])
    assert f"## [{cited['version']}] - {released}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_hooks_are_those_of_make_check():
    (local,) = HOOKS["repos"]
    assert local["repo"] == "local"
    check = (ROOT / "Makefile").read_text().partition("\ncheck: ")[2].partition("\n\n")[0]
    for hook in local["hooks"]:
        assert {"id", "name", "entry", "language"} <= hook.keys()
        assert hook["language"] == "system"
        command = [word for word in shlex.split(hook["entry"]) if not word.startswith("--")]
        assert command[0].startswith(".venv/bin/")
        assert " ".join(command).replace(".venv/bin/", "$(BIN)/") in check
    assert [hook["id"] for hook in local["hooks"]] == ["ruff-check", "ruff-format", "architecture"]


def test_the_security_policy_leads_to_pages_that_are_there():
    text = (ROOT / "SECURITY.md").read_text()
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", text)
    assert len(links) == 3
    for page, heading in links:
        titles = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert not heading or heading in [title.lower().replace(" ", "-") for title in titles]
