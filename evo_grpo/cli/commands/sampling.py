"""The commands sample and evaluate."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import typer

from evo_grpo.cli.commands.app import (
    Agent,
    Allow,
    BestEver,
    Code,
    Debug,
    Member,
    Prefer,
    Round,
    Run,
    Settings,
    Split,
    app,
    from_zero,
    weights_of,
)
from evo_grpo.cli.commands.winner import PANEL
from evo_grpo.cli.output import say, warn, write

Base = Annotated[bool, typer.Option("--base/--no-base", help="Sample the base model too.")]


@app.command(rich_help_panel=PANEL)
def sample(  # noqa: PLR0913 -- each is an option of the command
    folder: Run,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="A prompt; without it, each line of standard input is one.",
        ),
    ] = None,
    row: Annotated[
        list[int] | None,
        typer.Option("--row", metavar="N", help="A row of the task (from 0). May be repeated."),
    ] = None,
    split: Split = "validation",
    agent: Agent = None,
    member: Member = None,
    round: Round = None,
    best_ever: BestEver = False,
    prefer: Prefer = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to each prompt.")] = 4,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            help="0 is greedy, with one answer; default: the temperature of the evaluations.",
        ),
    ] = None,
    base: Base = True,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draws.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the prompt without the template.")
    ] = False,
    allow: Allow = None,
    code: Code = None,
    debug: Debug = False,
) -> None:
    """Sample answers of the winner, or of another agent, to prompts or rows of its task."""
    from evo_grpo.places import looking_in
    from evo_grpo.readers.terminal.console import standard_output, warnings_to
    from evo_grpo.record.choice import choose_of
    from evo_grpo.record.folder import code_folder

    if prompt is not None and row:
        raise typer.BadParameter("expected a PROMPT or --row, got both")
    choice = choose_of(
        folder, agent, member, from_zero(round), best_ever=best_ever, prefer=weights_of(prefer)
    )
    say(f"loading {choice.title} of {folder} ...", err=True)
    from evo_grpo.analysis.sampling.answers import answers, show_sampled

    found = answers(
        choice, () if row else _prompts(prompt), row or (), n=n, temperature=temperature,
        base=base, seed=seed, split=split, raw=raw, allow=allow or (),
    )  # fmt: skip
    place = looking_in(code_folder(code), is_code=True)
    with place, warnings_to(warn), closing(found):
        for one in found:
            show_sampled(standard_output(), one)


def _prompts(prompt: str | None) -> Iterator[str]:
    """Yield the given prompt, or each line of standard input that is not empty."""
    if prompt is not None:
        yield prompt
        return
    given = sys.stdin is not None and sys.stdin.isatty()
    if given:
        say("one prompt per line; Ctrl-D ends the input", err=True)
    for line in sys.stdin or ():  # none after `<&-`
        if text := line.rstrip("\r\n"):
            given = True
            yield text
    if not given:
        raise typer.BadParameter(
            "expected a PROMPT, --row or lines of standard input, got none of them"
        )


# Longer than 60 lines because each option is a parameter with its help.
@app.command(rich_help_panel=PANEL)
def evaluate(  # noqa: PLR0913 -- each is an option of the command
    adapter: Annotated[
        Path,
        typer.Argument(metavar="ADAPTER", help="An export, another PEFT folder, or a run folder."),
    ],
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="Configuration of base and task; default: that of the run."
        ),
    ] = None,
    settings: Settings = None,
    split: Annotated[
        Literal["validation", "test"], typer.Option("--split", help="Split of the prompts.")
    ] = "test",
    prompts: Annotated[
        int | None,
        typer.Option("--prompts", metavar="N", min=1, help="How many; default: as in the run."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", metavar="N", min=1, help="Of each prompt; default: as in the run."
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", help="0 is greedy; default: the temperature of the evaluations."
        ),
    ] = None,
    pass_at: Annotated[
        list[int] | None,
        typer.Option("--pass-at", metavar="K", min=1, help="Print pass@K too. May be repeated."),
    ] = None,
    correct: Annotated[
        float | None,
        typer.Option(
            "--correct",
            metavar="REWARD",
            help="Least reward of a correct completion; default: as in the run, or 1.",
        ),
    ] = None,
    base: Base = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    allow: Allow = None,
    code: Code = None,
    debug: Debug = False,
) -> None:
    """Measure the mean reward and pass@k of an adapter on a task, and those of its base."""
    from evo_grpo import settings as config
    from evo_grpo.places import looking_in
    from evo_grpo.readers.terminal.console import standard_output, warnings_to
    from evo_grpo.record.folder import beside, code_folder

    if file is None and settings:
        raise typer.BadParameter("--set needs a CONFIG; give the run's own population.yaml")
    loaded = None if file is None else config.load(file, settings or ())
    say(f"loading {adapter} ...", err=True)
    places = looking_in(code_folder(code), is_code=True), looking_in(beside(file))
    with places[0], places[1], warnings_to(warn):
        from evo_grpo.analysis.sampling.evaluation import evaluate_adapter, show_judged
        from evo_grpo.record.files import to_line

        found = evaluate_adapter(
            adapter,
            loaded,
            split=split,
            prompts=prompts,
            samples=samples,
            temperature=temperature,
            pass_at=pass_at or (),
            correct=correct,
            base=base,
            allow=allow or (),
        )
    if as_json:
        write(to_line(found.to_json(), indent=1) + "\n")
        return
    show_judged(standard_output(), found)
