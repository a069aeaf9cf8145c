"""The tables of names: what they call ours is there, and AgileRL's arguments are those we take."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import typer

import evo_grpo
from evo_grpo.api.agilerl.arguments import KEYWORDS, Arguments
from evo_grpo.cli.commands import app
from evo_grpo.settings import RunConfig
from evo_grpo.settings.keywords import AGENT_KEYWORDS, POPULATION_KEYWORDS, TRAIN_KEYWORDS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("from_trl.md", "from_ray_tune.md", "from_optuna.md", "large_models.md")
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


@pytest.mark.parametrize("page", PAGES)
def test_a_path_of_a_page_is_one_of_the_configuration(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    named = {
        path
        for path in re.findall(r"`(\w+(?:\.\w+)+)", text)
        if path.partition(".")[0] in GROUPS and path.partition(".")[0] != "model_config"
    }
    assert named
    assert named <= PATHS, named - PATHS


@pytest.mark.parametrize("page", [path.name for path in sorted(DOCS.glob("*.md"))])
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
