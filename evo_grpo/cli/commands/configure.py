"""Commands before a run: init, check, schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from evo_grpo.cli.commands.app import AsDocument, Debug, File, Settings, app, refuse_folder
from evo_grpo.cli.output import say, write, write_file
from evo_grpo.errors import ConfigError

PANEL = "Before a run"


@app.command(rich_help_panel=PANEL)
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("population.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    debug: Debug = False,
) -> None:
    """Write a commented configuration, and its JSON Schema for editors."""
    from evo_grpo import settings as config

    if path.is_dir():
        raise ConfigError(
            f"{path}: expected the name of a file to write, got a folder; for instance "
            f"{path / 'population.yaml'}"
        )
    if path.exists() and not force:
        raise ConfigError(
            f"{path}: already exists; choose another name, or replace it with --force"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; create it first")
    write_file(path, config.template())
    # The first line of the template names this file, for editors.
    beside = path.parent / "population.schema.json"
    if force or not beside.exists():
        write_file(beside, _schema_text())
    say(f"wrote {path}; next: evo-grpo check {path}, then evo-grpo run {path}")


@app.command(rich_help_panel=PANEL)
def check(
    file: File = Path("population.yaml"),
    settings: Settings = None,
    as_json: AsDocument = False,
    debug: Debug = False,
) -> None:
    """Validate a configuration; print tokens, memory and files."""
    from evo_grpo import settings as config
    from evo_grpo.cli.plan.document import plan_document
    from evo_grpo.cli.plan.plan import make_plan
    from evo_grpo.cli.plan.render import render_plan
    from evo_grpo.terminal.console import show, standard_output

    refuse_folder(file)
    plan = make_plan(config.load(file, settings or ()))
    if as_json:
        write(json.dumps(plan_document(plan, str(file)), indent=2) + "\n")
        return
    show(standard_output(), render_plan(plan, str(file)))


@app.command(rich_help_panel=PANEL)
def schema(
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write it to a file instead.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Print the JSON Schema of a configuration, for editors."""
    if out is None:
        write(_schema_text())
        return
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: there is no folder {out.parent}; create it first")
    if out.is_dir():
        raise ConfigError(f"{out}: expected the name of a file to write, got a folder")
    write_file(out, _schema_text())
    say(f"wrote {out}; name it in a YAML file: # yaml-language-server: $schema={out}")


def _schema_text() -> str:
    from evo_grpo.settings import json_schema

    return json.dumps(json_schema(), indent=1) + "\n"
