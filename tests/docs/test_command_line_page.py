"""docs/command_line.md: every command with an example, every event with its keys."""

import json
import re
from pathlib import Path

import pytest
import typer
from shown_run import SUMMARY, two_rounds

from evo_grpo.cli.commands import app
from evo_grpo.cli.showing import Events
from evo_grpo.errors import ConfigError
from evo_grpo.record.view import RunView

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")
COMMANDS = {
    name: one for name, one in typer.main.get_command(app).commands.items() if not one.hidden
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_options_and_an_example(name):
    section = PAGE.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    for one in COMMANDS[name].params:
        if one.name not in ("help", "debug"):
            argument = one.param_type_name == "argument"
            shown = (one.metavar or one.name.upper()) if argument else one.opts[0]
            assert f"`{shown}" in section, one.name
    # Where a new command has none: docs/generate/command_line.py, EXAMPLES.
    assert f"```console\n$ evo-grpo {name}" in section
    assert len(section.partition("```console")[2].splitlines()) >= 3


def test_every_event_has_its_keys_in_the_table(monkeypatch):
    told = []
    monkeypatch.setattr("evo_grpo.cli.showing.write", lambda line: told.append(json.loads(line)))
    events = Events(ends=True)
    events.write("loading", what="tiny-sums")
    events.started(Path("here"), 2, 0, None)
    events.stage(0, "learn", 1, 4)
    events.round_done(two_rounds()[0])
    events.finished(SUMMARY)
    events.ended(Path("here"), RunView("here", two_rounds(), summary=SUMMARY))
    events.write("comparison", agents=2, split="test", arms=[])
    events.write("warning", text="a")
    events.write("stopped", text="b")
    with pytest.raises(ConfigError), events.errors():
        raise ConfigError("c")
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (.+) \|$", PAGE, re.MULTILINE))
    assert set(rows) == {one["event"] for one in told}
    for one in told:
        keys = set(one) - {"event", "run"}
        if one["event"] == "round":
            keys |= {key for agent in one["agents"] for key in agent}
        assert keys <= set(re.findall(r"`(\w+)`", rows[one["event"]])), one["event"]
