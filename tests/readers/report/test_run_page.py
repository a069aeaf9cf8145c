import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import shown_run
from random_runs import make_run
from typer.testing import CliRunner

from evo_grpo.analysis.verify import verify
from evo_grpo.api.calls import RunFolder
from evo_grpo.cli.commands import app
from evo_grpo.errors import CheckpointError, RunFailedError, RunNotFoundError
from evo_grpo.readers.report import run_page as page_module
from evo_grpo.readers.report.run_page import (
    as_html,
    completions_table,
    drawn,
    headline,
    leaderboard_table,
    report_html,
    write_report,
)
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.view import RunView, view_of
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


def test_what_is_no_run_and_what_is_damaged_is_named(run, tmp_path):
    with pytest.raises(RunNotFoundError):
        write_report(tmp_path)
    with pytest.raises(RunFailedError, match="cannot be written"):
        write_report(run, tmp_path / "no" / "such" / "folder.html")
    (run / "completions").mkdir()
    (run / "completions" / "round-0000.jsonl").write_text("no json\n")
    with pytest.raises(CheckpointError, match=r"round-0000.jsonl, line 1: expected a JSON object"):
        write_report(run)
    (run / "completions" / "round-0000.jsonl").write_text('{"round": 0, "agent": "0"}\n')
    with pytest.raises(CheckpointError, match=r"line 1: expected .* agent and tokens, but got"):
        write_report(run)


def test_the_command_says_where_it_wrote(run, tmp_path):
    result = CliRunner().invoke(app, ["report", str(run), "-o", str(tmp_path / "page.html")])
    assert result.exit_code == 0
    assert result.stdout == f"wrote {tmp_path / 'page.html'}\n"
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "0.807 ± 0.020" in visible(page)
    assert len(page) > 4_000_000  # plotly is inside


# --- tables --------------------------------------------------------------------------------------


def write_completions(folder, rewards, round=0):
    (folder / "completions").mkdir(exist_ok=True)
    lines = [
        json.dumps({"round": round, "agent": 0, "prompt": f"p{i}", "completion": f"c{i}",
                    "reward": reward, "tokens": 4, "ended": i % 2 == 0, "error": ""})
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    (folder / "completions" / f"round-{round:04d}.jsonl").write_text("\n".join(lines) + "\n")


def test_the_leaderboard_counts_rounds_from_1_and_sorts_by_values(tmp_path):
    table = leaderboard_table(view_of(shown_run.run_folder(str(tmp_path / "run"))))
    first = dict(zip(table.titles, table.rows[0], strict=True))
    assert first["rank"] == ("1", 1)
    assert first["agent"] == ("1", 1)
    assert first["last round"] == ("2", 1)
    assert first["fitness"] == ("0.750 ± 0.050", 0.75)
    assert first["lr"] == ("1.2e-3", 0.0012)
    assert first["tokens"] == ("2,000", 2000)
    assert first["test"] == ("0.807 ± 0.020", 0.807)
    # No agent left, and no finalists were compared; the bounds are those of clip.
    assert not {"left after round", "final", "checkpoint", "clip_low"} & set(table.titles)
    # On a phone, only the first columns are in sight.
    assert list(table.titles[:4]) == ["rank", "agent", "fitness", "test"]


def test_those_that_left_say_after_which_round():
    table = leaderboard_table(RunView("run", make_run(4, 3, places=(2,))))
    left = table.titles.index("left after round")
    assert [row[left][0] for row in table.rows] == ["", "", "1", "1"]


def test_completions_are_newest_first_and_say_why_they_ended(tmp_path):
    folder = shown_run.run_folder(str(tmp_path / "run"))
    write_completions(folder, [0.5, None], round=0)
    write_completions(folder, [1.0], round=1)
    found = completions_table(view_of(folder))
    assert found["total"] == 3
    assert [(row["round"], row["reward"], row["end"]) for row in found["rows"]] == [
        (2, 1.0, ""),
        (1, None, "cut"),
        (1, 0.5, ""),
    ]
    # The rounds of an earlier version have no right answers.
    assert [row["answer"] for row in found["rows"]] == ["", "", ""]


def test_of_many_completions_the_extremes_and_the_latest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "COMPLETIONS", 50)
    monkeypatch.setattr(page_module, "EXTREMES", 5)
    folder = shown_run.run_folder(str(tmp_path / "run"))
    write_completions(folder, [i / 1000 if i != 500 else 9.0 for i in range(900)])
    found = completions_table(view_of(folder))
    assert found["total"] == 900
    kept = [row["prompt"] for row in found["rows"]]
    assert len(kept) == 50
    assert {"p500", *(f"p{i}" for i in range(5)), *(f"p{i}" for i in range(860, 900))} <= set(kept)


def test_the_headline_has_the_test_result_of_a_finished_run_alone(tmp_path):
    contents = view_of(shown_run.run_folder(str(tmp_path / "run")))
    cards = {title: value for title, value, _ in headline(contents)}
    assert cards == {
        "winner": "0.807 ± 0.020",
        "base model": "0.331 ± 0.020",
        "gain": "+0.476 ± 0.025",
        "rounds": "2 of 2",
        "tokens": "4,000",
        "time": "6 s",
    }
    unfinished = {title for title, *_ in headline(replace(contents, summary=None))}
    assert unfinished == {"best fitness", "rounds", "tokens", "time"}


def test_a_run_folder_is_a_path_that_shows_the_result_of_its_run(tmp_path):
    folder = RunFolder(shown_run.run_folder(str(tmp_path / "run")))
    assert folder == Path(tmp_path / "run")
    assert RunFolder(tmp_path)._repr_html_() is None  # no run: shown as a path
    shown = folder._repr_html_()
    assert "winner <b>0.807 ± 0.020</b> (on 256 test prompts)" in shown
    assert shown.count("<tr>") == 3
    # Numbers stay in one line, and all columns fit into a notebook.
    assert '<td style="white-space: nowrap">0.750 ± 0.050</td>' in shown
    heads = re.findall(r"<th>(.*?)</th>", shown)
    assert heads == ["rank", "agent", "fitness", "test", "lr", "beta", "clip", "group"]


def test_rounds_are_shown_with_the_best_agents():
    shown = as_html(make_run(20, 2), "<b>mine</b>")
    assert "&lt;b&gt;mine&lt;/b&gt;" in shown
    assert shown.count("<tr>") == 17
    assert "4 more" in shown
    assert "<script" not in shown


def test_a_population_that_was_judged_shows_its_test_and_one_that_trained_on_does_not():
    class Judged:
        rounds = shown_run.two_rounds()
        summary = shown_run.SUMMARY

    assert "winner <b>0.807 ± 0.020</b> (on 256 test prompts)" in as_html(Judged(), "population")
    Judged.rounds = [*Judged.rounds, shown_run.two_rounds()[1]]
    shown = as_html(Judged(), "population")
    assert "test prompts</p>" not in shown
    assert "best fitness <b>0.750 ± 0.050</b> (on 64 validation prompts)" in shown
    assert "No agent was judged on test prompts." in shown
