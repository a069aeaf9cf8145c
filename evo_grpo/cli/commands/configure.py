"""Commands before a run: init, check, try, schema; `install` has fetch and doctor."""

import json
from pathlib import Path
from typing import Annotated

import typer

from evo_grpo.cli.commands import options
from evo_grpo.cli.commands.options import app
from evo_grpo.cli.output import say, warn, write
from evo_grpo.errors import ConfigError
from evo_grpo.places import expanded, searching

PANEL = "Before a run"


@app.command(rich_help_panel=PANEL)
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("population.yaml"),
    template: Annotated[
        str, typer.Option("--template", "-t", metavar="NAME", help="The template; see --list.")
    ] = "sums",
    list_them: Annotated[bool, typer.Option("--list", help="List the templates.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    debug: options.Debug = False,
) -> None:
    """Write a commented configuration to start from, and its JSON Schema for editors."""
    from evo_grpo.settings.templates import TEMPLATES, companions
    from evo_grpo.settings.templates import template as read_template

    if list_them:
        for name, purpose in TEMPLATES.items():
            say(f"{name:<{max(map(len, TEMPLATES))}}  {purpose}")
        return
    if template not in TEMPLATES:
        raise ConfigError(f"--template: expected one of {', '.join(TEMPLATES)}, got {template!r}")
    files = {path.parent / name: text for name, text in companions(template, path.name).items()}
    problem = ""
    if path in files:
        problem = f"{path}: expected another name; the template {template!r} writes it too"
    elif not force and (existing := [file for file in (path, *files) if file.exists()]):
        problem = (
            f"{existing[0]}: already exists; choose another name or folder, or replace it with "
            "--force"
        )
    if problem:
        raise ConfigError(problem)
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    path.write_text(read_template(template, path.name), encoding="utf-8")
    # The first line of the template names this file, for editors.
    beside = path.parent / "population.schema.json"
    if force or not beside.exists():
        beside.write_text(_schema_text(), encoding="utf-8")
    paths = ", ".join(map(str, [path, *files]))
    say(f"wrote {paths}; next: evo-grpo check {path}, then evo-grpo run {path}")


@app.command(rich_help_panel=PANEL)
def check(
    file: options.File = Path("population.yaml"),
    settings: options.Settings = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="GPU",
            help="Plan for a card: its memory, such as 24GB, or its name, such as a100-80gb. "
            "Fails if the run does not fit.",
        ),
    ] = None,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Do not fetch the config.json of a hub model."),
    ] = False,
    as_json: options.AsDocument = False,
    debug: options.Debug = False,
) -> None:
    """Validate a configuration; print its tokens, memory and files.

    Of a hub model, only config.json and the files of the chat template are fetched.
    """
    from evo_grpo import settings as config
    from evo_grpo.cli.plan.plan import make_plan, plan_document
    from evo_grpo.cli.plan.render import render_plan
    from evo_grpo.readers.terminal.console import show, standard_output
    from evo_grpo.record.folder import beside
    from evo_grpo.training.sizing.cards import parse_gpu

    card = None if gpu is None else parse_gpu(gpu)
    with searching(beside(file)):
        plan = make_plan(config.load(file, settings or ()), gpu=card, online=not offline)
    if as_json:
        write(json.dumps(plan_document(plan, str(file)), indent=2) + "\n")
    else:
        show(standard_output(), render_plan(plan, str(file)))
    if card is not None and (plan.fit is None or not plan.fit.fits):
        raise ConfigError(
            f"--gpu {gpu}: the run does not fit; see the warning"
            if plan.fit is not None
            else f"--gpu {gpu}: the memory of the run is unknown: {plan.base.note}"
        )


@app.command("try", rich_help_panel=PANEL)
def try_(  # noqa: PLR0913 -- each is an option of the command
    file: options.File,
    settings: options.Settings = None,
    rows: Annotated[
        str | None,
        typer.Option("--rows", metavar="N,N", help="Rows of the task (from 0), such as 3,17."),
    ] = None,
    split: options.Split = "train",
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", metavar="N", min=2, help="Answers to each prompt; default: group_size."
        ),
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option("--answer", metavar="TEXT", help="Score this answer, without a model."),
    ] = None,
    as_json: options.AsDocument = False,
    code: options.Code = None,
    debug: options.Debug = False,
) -> None:
    """Sample the model before training, and show prompts, answers and the value of each reward.

    Exits with 1 if no group of answers has different rewards, so that a run would learn nothing.
    """
    from evo_grpo import settings as config
    from evo_grpo.readers.terminal.console import standard_output, warnings_to
    from evo_grpo.record.folder import beside

    numbers = _numbers(rows)
    loaded = config.load(file, settings or ())
    with searching(beside(file)), warnings_to(warn):
        say(f"loading {loaded.model.name} ...", err=True)
        from evo_grpo.analysis.sampling.first_step import show_tried, try_config
        from evo_grpo.record.files import to_line

        tried = try_config(
            loaded, rows=numbers, split=split, samples=samples, answer=answer, code=code
        )
    if as_json:
        write(to_line(tried.to_json(), indent=1) + "\n")
    else:
        show_tried(standard_output(), tried)
    if answer is None and not tried.signal:
        raise typer.Exit(1)


def _numbers(text: str | None) -> list[int]:
    """Return the row numbers in the value of `--rows`, such as "3,17"."""
    parts = [] if text is None else text.split(",")
    if bad_parts := [part for part in parts if not (part.isascii() and part.strip().isdigit())]:
        raise typer.BadParameter(f"--rows: expected numbers such as 3,17, got {bad_parts[0]!r}")
    return [int(part) for part in parts]


@app.command(rich_help_panel=PANEL)
def schema(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", parser=expanded, help="Write it to this file."),
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Print the JSON Schema of a configuration, for editors."""
    if out is None:
        write(_schema_text())
        return
    out.write_text(_schema_text(), encoding="utf-8")
    say(f"wrote {out}; name it in a YAML file: # yaml-language-server: $schema={out}")


def _schema_text() -> str:
    from evo_grpo.settings import json_schema

    return json.dumps(json_schema(), indent=1) + "\n"
