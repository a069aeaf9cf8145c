"""Every code block and command of every page runs, or the tests print why not."""

import re
import sys
from pathlib import Path

import doc_blocks
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


def test_a_page_that_fails_names_its_block(tmp_path, monkeypatch):
    monkeypatch.setattr(doc_blocks, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    broken = {
        "```python\n1 / 0\n```": (ZeroDivisionError, "division"),
        "```sh\nevo-grpo check none.yaml\n```": (AssertionError, "exit code 2"),
        "<!-- fails: 1 -->\n```sh\nevo-grpo check none.yaml\n```": (AssertionError, "exit code 2"),
        "```yaml\npopulation: {sise: 3}\n```": (ValueError, "sise"),
        "```sh\nrm -r x\n```": (AssertionError, "expected pip, make, python or evo-grpo"),
        "```yaml\nenv: {kind: dataset, train: rows.csv, reward: no_module:f}\n```": (
            ValueError,
            "no_module",
        ),
    }
    (tmp_path / "rows.csv").write_text("question\n" + "".join(f"{n}\n" for n in range(20)))
    for text, (kind, message) in broken.items():
        page.write_text(f"# Page\n\n{text}\n")
        with pytest.raises(kind, match=re.escape(message)) as caught:
            play("page.md")
        assert caught.value.__notes__[0].startswith("page.md:")
    page.write_text("# Page\n\n<!-- not runn: why -->\n```sh\nls\n```\n")
    with pytest.raises(ValueError, match=re.escape("page.md:4: unknown mark 'not runn'")):
        blocks("page.md")


def test_marks_choose_what_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(doc_blocks, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text(
        "<!-- not run: there is no such thing -->\n```python\n1 / 0\n```\n"
        "```python\nran = ['fast']\n```\n"
        "<!-- fails: 2 -->\n```console\n$ evo-grpo check none.yaml\nno such file\n```\n"
        '```python title="mine.py"\nx = 3\n```\n'
    )
    played = play("page.md")
    assert played.space["ran"] == ["fast"]
    ((command, output),) = played.runs
    assert command == ["check", "none.yaml"]
    assert "none.yaml" in output
    assert (tmp_path / "mine.py").read_text() == "x = 3\n"
