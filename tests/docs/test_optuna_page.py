"""docs/optuna.md: its code runs on a run, and what it names of a trial is there."""

import re
import warnings
from pathlib import Path

from small_run import small

from evo_grpo.training import run

PAGE = (Path(__file__).parents[2] / "docs" / "optuna.md").read_text()


def test_the_code_runs_and_the_names_are_those_of_a_trial(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(small(record__storage="sqlite", population__rounds=2), out="runs/population-1")
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    names = {}
    with warnings.catch_warnings():
        # Optuna says that six trials are few for importances.
        warnings.simplefilter("ignore")
        exec(compile(code, "docs/optuna.md", "exec"), names)
    assert "lr" in capsys.readouterr().out
    study = names["study"]
    attributes = re.search(r"its user attributes are (.*?)\. ", PAGE, re.DOTALL)[1]
    assert set(study.user_attrs) == set(re.findall(r"`(\w+)`", attributes))
    table = PAGE.partition("## What a trial says")[2].partition("\nFitness")[0]
    named = {
        name
        for cell in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
        for name in re.findall(r"`([\w/]+)`", cell)
    }
    said = set(study.trials[0].user_attrs)
    assert named <= said
    assert {name for name in said if not name.startswith("train/")} <= named
