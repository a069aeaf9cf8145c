"""Pages are linked, and what they name of the package is there; generated files are not stale."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer
import yaml

import evo_grpo
from evo_grpo.api.agilerl.arguments import KEYWORDS, Arguments
from evo_grpo.cli.commands import app
from evo_grpo.settings import RunConfig
from evo_grpo.settings.keywords import AGENT_KEYWORDS, POPULATION_KEYWORDS, TRAIN_KEYWORDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
GUIDES = ("from_trl.md", "from_ray_tune.md", "from_optuna.md", "large_models.md")
AXES = (DOCS / "architecture.md").read_text().partition("## Axes")[2].partition("## ")[0]
GROUPS = set(RunConfig.model_fields)


def paths():
    """Every path of population.yaml, as configuration.md lists them."""
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    group, found = "", set()
    for line in page.splitlines():
        if title := re.match(r"## `([\w.]+)", line):
            group = title[1]
            found.add(group)
        elif key := re.match(r"\| `(\w+)` \|", line):
            found.add(f"{group}.{key[1]}")
    return found


PATHS = paths()


@pytest.mark.parametrize("page", [path.name for path in PAGES])
def test_a_page_is_linked(page):
    assert f": {page}\n" in (ROOT / "mkdocs.yml").read_text()
    assert f"](docs/{page})" in (ROOT / "README.md").read_text()
    assert page == "index.md" or f"]({page})" in (ROOT / "docs" / "index.md").read_text()


def test_every_axis_of_a_shape_is_in_the_table():
    known = set(re.findall(r"^\| `(\w+)` \|", AXES, re.MULTILINE))
    used = {}
    for path in (ROOT / "evo_grpo").rglob("*.py"):
        for shape in re.findall(r"\(([A-Z]p?,(?: [\w ·*+]+,?)*)\)", path.read_text()):
            letters = re.findall(r"\b[A-Z]p?\b", shape)
            used.update(dict.fromkeys(letters, str(path.relative_to(ROOT))))
    assert set(used) == known, used


@pytest.mark.parametrize("page", GUIDES)
def test_a_path_of_a_page_is_one_of_the_configuration(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    named = {
        path
        for path in re.findall(r"`(\w+(?:\.\w+)+)", text)
        if path.partition(".")[0] in GROUPS and path.partition(".")[0] != "model_config"
    }
    assert named
    assert named <= PATHS, named - PATHS


@pytest.mark.parametrize("page", [path.name for path in PAGES])
def test_what_a_page_names_of_the_package_is_there(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    for name in re.findall(r"`evo_grpo\.(\w+)", text):
        module = DOCS.parent / "evo_grpo" / name
        assert hasattr(evo_grpo, name) or module.is_dir() or module.with_suffix(".py").is_file()
    commands = set(typer.main.get_command(app).commands)
    for name in re.findall(r"`evo-grpo ([a-z]+)", text):
        assert name in commands, name


def test_the_arguments_that_agilerl_calls_otherwise_are_all_listed():
    text = (DOCS / "from_agilerl.md").read_text(encoding="utf-8")
    table = text.partition("| AgileRL | `evo_grpo` |")[2].partition("\n\n")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|$", table, re.MULTILINE))
    assert listed == {theirs: ours for theirs, ours in KEYWORDS.items() if theirs != ours}
    assert set(listed) <= {field.name for field in fields(Arguments)}
    ours = {*AGENT_KEYWORDS, *POPULATION_KEYWORDS, *TRAIN_KEYWORDS}
    assert set(listed.values()) <= ours


def test_no_generated_file_is_stale():
    command = [sys.executable, "-X", "utf8", "docs/generate", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_schema_knows_every_key_of_the_shipped_file():
    schema = json.loads((ROOT / "population.schema.json").read_text())
    text = (ROOT / "population.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=population.schema.json\n")

    def resolved(node):
        return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    def check(node, value, path):
        if not isinstance(value, dict):
            return
        node = resolved(node)
        branches = [resolved(b) for b in node.get("anyOf") or node.get("oneOf") or [node]]
        for key, inner in value.items():
            places = [b["properties"][key] for b in branches if key in b.get("properties", {})]
            rest = [b.get("additionalProperties") for b in branches]
            places += [place for place in rest if isinstance(place, dict)]
            assert places, f"{path}.{key}"
            check(places[0], inner, f"{path}.{key}")

    check(schema, yaml.safe_load(text), "")
