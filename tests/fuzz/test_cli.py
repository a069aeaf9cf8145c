"""Any arguments on the command line: an exit code and at most a message, never a traceback."""

from pathlib import Path

import pytest
from fuzzing import fuzz
from hypothesis import example
from hypothesis import strategies as st
from shown_run import run_folder
from typer.testing import CliRunner

from evo_grpo.cli.commands import app

CODES = (0, 1, 2)
COMMANDS = ("check", "leaderboard", "lineage", "export", "schema")
WORDS = [
    "population.yaml", "broken.yaml", "none.yaml", "runs", "runs/one", "runs/two", "runs/none", ".",
    "..", "", "-", "--", "--set", "--set=", "--json", "--csv", "--markdown", "--best", "--force",
    "--out", "-h", "--help", "--version", "--debug=1", "seed=3", "name=0x10", "a.b=c", "=", ".=1",
    "population.size=0", "env=[", "model={", "name='", "~", "~nobody", "é", "\0", "x" * 300,
]  # fmt: skip
#: Of no slash, so that nothing is written outside of the folder.
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="/"), max_size=8)
ARGUMENTS = st.lists(st.one_of(st.sampled_from(WORDS), TEXTS), max_size=5)


def some_files() -> None:
    """A configuration, a broken one, a finished run and one without its records."""
    if not Path("runs").exists():
        Path("population.yaml").write_text("model: tiny-sums\nenv: sums\n")
        Path("broken.yaml").write_text("model: [tiny-sums\n")
        run_folder("runs/one")
        run_folder("runs/two", rounds=0, summary=False)


@pytest.mark.slow
@fuzz(command=st.sampled_from(COMMANDS), arguments=ARGUMENTS)
@example(command="check", arguments=["\0"])
@example(command="check", arguments=["population.yaml", "--set", "model=~nobody"])
@example(command="leaderboard", arguments=["x" * 300])
@example(command="export", arguments=["runs/one", "--best", "\0"])
def test_any_arguments_end_with_a_code_and_a_message(command: str, arguments: list[str]):
    some_files()
    result = CliRunner().invoke(app, [command, *arguments])
    assert isinstance(result.exception, SystemExit | None), repr(result.exception)
    assert result.exit_code in CODES
    assert "Traceback" not in result.output
    assert result.exit_code == 0 or result.stderr.strip()
