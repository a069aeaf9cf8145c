import re
from pathlib import Path

import shown_run
from random_runs import make_run

from evo_grpo.api.runs import RunFolder
from evo_grpo.readers.report.notebook import as_html


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
