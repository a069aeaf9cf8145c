"""Every code block and command of every page runs, or the tests print why not."""

import sys
from pathlib import Path

import page_checks
import pytest
from doc_blocks import ROOT, blocks, play
from plotly.basedatatypes import BaseFigure

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
BLOCKS = {page: blocks(page) for page in PAGES}
NOT_RUN = [
    (f"{block.place} {what}".strip(), reason)
    for found in BLOCKS.values()
    for block in found
    for what, reason in [
        *([("", block.marks["not run"])] if "not run" in block.marks else []),
        *block.skipped_commands().items(),
    ]
]
PLAYED = [page for page in PAGES if BLOCKS[page]]


@pytest.fixture
def reader(tmp_path, monkeypatch, tmp_path_factory):
    """A folder of one's own, in which modules of the page are found, and are forgotten after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "100")
    # It would open a browser.
    monkeypatch.setattr(BaseFigure, "show", lambda figure: figure.to_html())
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    # Other tests, too, have had a my_rewards.py in their folders.
    forget_modules_below(tmp_path_factory.getbasetemp())
    yield tmp_path
    forget_modules_below(tmp_path)


def forget_modules_below(folder):
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).is_relative_to(folder):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", PLAYED)
def test_the_blocks_of_a_page_run(page, reader, capsys):
    played = play(page)
    check = page_checks.CHECKS.get(page)
    if check is not None:
        check(played, capsys.readouterr().out)


@pytest.mark.parametrize(("place", "reason"), NOT_RUN, ids=[place for place, _ in NOT_RUN])
def test_what_does_not_run_says_why(place, reason):
    assert len(reason.split()) > 2, place
    pytest.skip(f"{place}: {reason}")


def test_every_check_is_of_a_page():
    assert set(page_checks.CHECKS) <= set(PAGES)
