import re

import pytest
import shown_run
from random_runs import make_run
from typer.testing import CliRunner

from evo_grpo.analysis.verify import verify
from evo_grpo.cli.commands import app
from evo_grpo.errors import CheckpointError, RunFailedError, RunNotFoundError
from evo_grpo.readers.report.run_page import drawn, report_html, write_report
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.view import RunView
from evo_grpo.settings import to_yaml


@pytest.fixture
def run(tmp_path):
    return shown_run.run_folder(str(tmp_path / "run"))


def visible(page):
    return re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)


def test_a_finished_run_has_every_section(run):
    page = visible(write_report(run).read_text(encoding="utf-8"))
    ids = re.findall(r'<section id="(\w+)"', page)
    assert ids == [
        "overview", "fitness", "family", "schedules", "improvement", "leaderboard",
        "spending", "settings",
    ]  # fmt: skip
    assert "0.807 ± 0.020" in page
    assert "tiny-sums on sums: 2 rounds, finished" in page
    assert 'id="refresh"' not in page


def test_an_unfinished_run_is_shown_as_far_as_it_is_and_refreshes(tmp_path):
    run = shown_run.run_folder(str(tmp_path / "run"), rounds=1, summary=False)
    page = visible(write_report(run).read_text(encoding="utf-8"))
    assert "1 round, unfinished, 2 planned" in page
    assert 'id="refresh"' in page


def test_a_run_before_its_first_round_has_a_page(tmp_path):
    RunDir.create(tmp_path / "run", "run", to_yaml(shown_run.small_config())).close()
    page = visible(write_report(tmp_path / "run").read_text(encoding="utf-8"))
    assert "No round is finished yet" in page
    assert re.findall(r'<section id="(\w+)"', page) == ["overview", "settings"]
    assert "model:\n  name: tiny-sums" in page


def test_rounds_in_memory_have_a_page():
    page = visible(report_html(RunView("population", shown_run.two_rounds())))
    ids = re.findall(r'<section id="(\w+)"', page)
    assert {"fitness", "family", "leaderboard"} <= set(ids)
    assert "settings" not in ids


def test_figures_of_many_agents_show_those_that_matter():
    few, many = (RunView("population", make_run(size=size, rounds=4)) for size in (32, 45))
    assert drawn(few) is few
    own = drawn(many)
    shown = {agent.agent for agent in own.played}
    leading = {agent.agent for line in many.lines for agent in line}
    assert leading <= shown
    assert len(shown) == 32
    assert own.leaderboard[0]["member"] == many.leaderboard[0]["member"]
    first = [row["agent"] for row in many.leaderboard][: 32 - len(leading)]
    assert set(first) <= shown
    page = visible(report_html(many))
    assert "The figures show the 32 of 45 agents that lead to the winner or are first" in page
    assert page.count("<tr") > 45  # the table has all
    assert "The figures show" not in visible(report_html(few))


def test_a_report_is_no_part_of_a_run(run):
    before = verify(run)
    written = write_report(run)
    assert written.is_relative_to(run)
    assert "0.807 ± 0.020" in visible(written.read_text(encoding="utf-8"))
    assert verify(run) == before


def test_a_planted_link_is_not_followed(run, tmp_path):
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("mine")
    (run / "report.html").symlink_to(foreign)
    write_report(run)
    assert foreign.read_text() == "mine"
    assert not (run / "report.html").is_symlink()
    assert "0.807 ± 0.020" in visible((run / "report.html").read_text(encoding="utf-8"))


def test_a_page_that_cannot_be_written_is_named(run, tmp_path):
    with pytest.raises(RunFailedError, match="cannot be written"):
        write_report(run, tmp_path / "no" / "such" / "folder.html")


def test_what_is_no_run_and_what_is_damaged_is_named(run, tmp_path):
    with pytest.raises(RunNotFoundError):
        write_report(tmp_path)
    (run / "completions").mkdir()
    (run / "completions" / "round-0000.jsonl").write_text("no json\n")
    with pytest.raises(CheckpointError, match=r"round-0000.jsonl, line 1: expected a JSON object"):
        write_report(run)
    (run / "completions" / "round-0000.jsonl").write_text('{"round": 0, "agent": "0"}\n')
    with pytest.raises(CheckpointError, match=r"line 1: expected .*, but agent is '0'"):
        write_report(run)


def test_the_command_says_where_it_wrote(run, tmp_path):
    result = CliRunner().invoke(app, ["report", str(run), "-o", str(tmp_path / "page.html")])
    assert result.exit_code == 0
    assert result.stdout == f"wrote {tmp_path / 'page.html'}\n"
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "0.807 ± 0.020" in visible(page)
    assert len(page) > 4_000_000  # plotly is inside
