"""The commands of evo-grpo, called in this process."""

from typer.testing import CliRunner, Result

from evo_grpo.cli.commands import app


def evo(*arguments, expected=None) -> Result:
    """Call a command, which exits with the code `expected`, if one is given."""
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert expected is None or result.exit_code == expected, result.output
    return result


def refused(*arguments) -> str:
    """The message of a command that must fail as bad input, without a traceback or any output."""
    result = evo(*arguments, expected=2)
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return result.stderr
