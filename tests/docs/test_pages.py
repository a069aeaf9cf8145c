"""Every page is linked, and the letters of the axes are those of the code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
AXES = (ROOT / "docs" / "architecture.md").read_text().partition("## Axes")[2].partition("## ")[0]


@pytest.mark.parametrize("page", PAGES)
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
