from pathlib import Path

import shown_run
from random_runs import make_run

from evo_grpo.readers.report.notebook import RunFolder, as_html


def test_a_run_folder_is_a_path_that_shows_the_result_of_its_run(tmp_path):
    folder = RunFolder(shown_run.run_folder(str(tmp_path / "run")))
    assert folder == Path(tmp_path / "run")
    assert isinstance(folder, Path)
    shown = folder._repr_html_()
    assert "winner <b>0.807 ± 0.020</b>" in shown
    assert shown.count("<tr>") == 3


def test_another_path_is_shown_as_a_path(tmp_path):
    assert RunFolder(tmp_path)._repr_html_() is None


def test_rounds_are_shown_with_the_best_agents():
    shown = as_html(make_run(20, 2), "<b>mine</b>")
    assert "&lt;b&gt;mine&lt;/b&gt;" in shown
    assert shown.count("<tr>") == 17
    assert "4 more" in shown
    assert "<script" not in shown


def test_before_the_first_round_it_says_so():
    assert "no round is finished yet" in as_html([], "population")
