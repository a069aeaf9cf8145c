"""An unknown option that has the name of a setting is refused with the right way to write it."""

import pytest
from typer.testing import CliRunner

from evo_grpo.cli.commands import app


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["run", "--rounds", "3"], "run: there is no option --rounds, but a setting: --set popul"),
        (["run", "--rounds", "3"], "--set population.rounds=3"),
        (["run", "my.yaml", "--rounds=3", "--quiet"], "--set population.rounds=3"),
        (["check", "--learning-rate", "1e-5"], "--set algorithm.lr=1e-5"),
        (["check", "--model", "a b"], "--set model='a b'"),
        (["run", "--size"], "--set population.size=VALUE or --set evolve.selection.size=VALUE"),
    ],
)
def test_the_name_of_a_setting(arguments, remedy):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert remedy in result.stderr


@pytest.mark.parametrize("arguments", [["run", "--nonsense", "3"], ["leaderboard", "--rounds"]])
def test_other_unknown_options_are_refused_as_before(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"No such option: {arguments[1]}" in result.stderr
    assert "--set" not in result.stderr
