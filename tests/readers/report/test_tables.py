import json
import re
from dataclasses import replace
from pathlib import Path

import shown_run
from random_runs import make_run

from evo_grpo.api.runs import RunFolder
from evo_grpo.readers.report import run_page as tables
from evo_grpo.readers.report.run_page import as_html
from evo_grpo.record.view import RunView, view_of


def write_completions(folder, rewards, round=0):
    (folder / "completions").mkdir(exist_ok=True)
    lines = [
        json.dumps({"round": round, "agent": 0, "prompt": f"p{i}", "completion": f"c{i}",
                    "reward": reward, "tokens": 4, "ended": i % 2 == 0, "error": ""})
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    (folder / "completions" / f"round-{round:04d}.jsonl").write_text("\n".join(lines) + "\n")


def test_the_leaderboard_counts_rounds_from_1_and_sorts_by_values(tmp_path):
    table = tables.leaderboard_table(view_of(shown_run.run_folder(str(tmp_path / "run"))))
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
    table = tables.leaderboard_table(RunView("run", make_run(4, 3, places=(2,))))
    left = table.titles.index("left after round")
    assert [row[left][0] for row in table.rows] == ["", "", "1", "1"]


def test_completions_are_newest_first_and_say_why_they_ended(tmp_path):
    folder = shown_run.run_folder(str(tmp_path / "run"))
    write_completions(folder, [0.5, None], round=0)
    write_completions(folder, [1.0], round=1)
    found = tables.completions_table(view_of(folder))
    assert found["total"] == 3
    assert [(row["round"], row["reward"], row["end"]) for row in found["rows"]] == [
        (2, 1.0, ""),
        (1, None, "cut"),
        (1, 0.5, ""),
    ]
    # The rounds of an earlier version have no right answers.
    assert [row["answer"] for row in found["rows"]] == ["", "", ""]


def test_of_many_completions_the_extremes_and_the_latest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "COMPLETIONS", 50)
    monkeypatch.setattr(tables, "EXTREMES", 5)
    folder = shown_run.run_folder(str(tmp_path / "run"))
    write_completions(folder, [i / 1000 if i != 500 else 9.0 for i in range(900)])
    found = tables.completions_table(view_of(folder))
    assert found["total"] == 900
    kept = [row["prompt"] for row in found["rows"]]
    assert len(kept) == 50
    assert {"p500", *(f"p{i}" for i in range(5)), *(f"p{i}" for i in range(860, 900))} <= set(kept)


def test_a_long_completion_is_cut(tmp_path):
    folder = shown_run.run_folder(str(tmp_path / "run"))
    (folder / "completions").mkdir()
    row = {"round": 0, "agent": 0, "prompt": "p", "completion": "x" * 10_000, "reward": 1.0}
    (folder / "completions" / "round-0000.jsonl").write_text(json.dumps(row) + "\n")
    (only,) = tables.completions_table(view_of(folder))["rows"]
    assert len(only["completion"]) == tables.CHARACTERS


def test_the_headline_has_the_test_result_of_a_finished_run_alone(tmp_path):
    contents = view_of(shown_run.run_folder(str(tmp_path / "run")))
    cards = {title: value for title, value, _ in tables.headline(contents)}
    assert cards == {
        "winner": "0.807 ± 0.020",
        "base model": "0.331 ± 0.020",
        "gain": "+0.476 ± 0.025",
        "rounds": "2 of 2",
        "tokens": "4,000",
        "time": "6 s",
    }
    unfinished = {title for title, *_ in tables.headline(replace(contents, summary=None))}
    assert unfinished == {"best fitness", "rounds", "tokens", "time"}


def test_a_run_folder_is_a_path_that_shows_the_result_of_its_run(tmp_path):
    folder = RunFolder(shown_run.run_folder(str(tmp_path / "run")))
    assert folder == Path(tmp_path / "run")
    assert isinstance(folder, Path)
    shown = folder._repr_html_()
    assert "winner <b>0.807 ± 0.020</b> (on 256 test prompts)" in shown
    assert shown.count("<tr>") == 3
    # Numbers stay in one line, and all columns fit into a notebook.
    assert '<td style="white-space: nowrap">0.750 ± 0.050</td>' in shown
    heads = re.findall(r"<th>(.*?)</th>", shown)
    assert heads == ["rank", "agent", "fitness", "test", "lr", "beta", "clip", "group"]


def test_another_path_is_shown_as_a_path(tmp_path):
    assert RunFolder(tmp_path)._repr_html_() is None


def test_rounds_are_shown_with_the_best_agents():
    shown = as_html(make_run(20, 2), "<b>mine</b>")
    assert "&lt;b&gt;mine&lt;/b&gt;" in shown
    assert shown.count("<tr>") == 17
    assert "4 more" in shown
    assert "<script" not in shown


def test_before_the_first_round_it_says_so():
    assert "No round is finished yet" in as_html([], "population")


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
