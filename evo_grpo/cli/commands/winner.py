"""Commands on the winner of a run: export, recipe, replay, sample, evaluate."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from evo_grpo.cli.commands import options
from evo_grpo.cli.commands.options import app
from evo_grpo.cli.host_memory import keep_freed_memory
from evo_grpo.cli.output import say, warn, write
from evo_grpo.cli.stopping import interruptible
from evo_grpo.escaping import printable
from evo_grpo.places import expanded, searching

if TYPE_CHECKING:
    from rich.console import Console

    from evo_grpo.record.choice import ChosenAgent
    from evo_grpo.record.replay import Replay

PANEL = "The winner"
Base = Annotated[bool, typer.Option("--base/--no-base", help="Sample the base model too.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        help="0 is greedy, with one answer; default: the temperature of the evaluations.",
    ),
]


@app.command(rich_help_panel=PANEL)
def export(  # noqa: PLR0913 -- each is an option of the command
    folder: options.Run,
    out: Annotated[
        Path | None,
        typer.Argument(metavar="OUT", parser=expanded, help="Folder to write; new or empty."),
    ] = None,
    best: Annotated[
        Path | None,
        typer.Option(
            "--best", metavar="OUT", parser=expanded, help="Export the winner to this folder."
        ),
    ] = None,
    agent: options.Agent = None,
    member: options.Member = None,
    round: options.Round = None,
    best_ever: options.BestEver = False,
    prefer: options.Prefer = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write one ordinary model instead of an adapter.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="OWNER/NAME",
            help="Push it to the Hugging Face Hub too, with the token in HF_TOKEN.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Export a winner that is worse than the base model.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Write an agent, by default the winner, as a folder for PEFT, transformers and vLLM."""
    from evo_grpo.analysis.export.export import export_choice
    from evo_grpo.readers.terminal.console import warnings_to

    named = (agent, member, round, prefer) != (None,) * 4 or best_ever
    target = _target(out, best, named=named)
    choice = _choose(folder, agent, member, round, best_ever, prefer)
    if merge or push:
        say(f"exporting {choice.title} of {folder} ...", err=True)
    with warnings_to(warn):
        path = export_choice(choice, target, merge=merge, push=push, force=force, anyway=anyway)
    how = "AutoModelForCausalLM" if merge else "AutoPeftModelForCausalLM"
    say(f'wrote {path}: {choice.title}; in that folder, {how}.from_pretrained(".") loads it')
    if push is not None:
        say(f"pushed to https://huggingface.co/{push}; a new repository is private")


def _choose(
    folder: Path,
    agent: int | None,
    member: int | None,
    round: int | None,
    best_ever: bool,
    prefer: Sequence[str] | None,
) -> ChosenAgent:
    """Return the agent that the options of a command name."""
    from evo_grpo.record.choice import choose_of

    return choose_of(
        folder,
        agent,
        member,
        None if round is None else round - 1,
        best_ever=best_ever,
        prefer=_weights_of(prefer) if prefer else None,
    )


def _weights_of(given: Sequence[str]) -> dict[str, float]:
    """Return the weight of each objective in values of `--prefer`, such as `tokens=0.2`."""
    weights: dict[str, float] = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            weights[name] = float(number)
        except ValueError:
            raise typer.BadParameter(
                f"--prefer: expected OBJECTIVE=WEIGHT, for instance tokens=0.2, got {text!r}"
            ) from None
    return weights


def _target(out: Path | None, best: Path | None, *, named: bool) -> Path:
    """Return the output folder; `named` is whether an agent other than the winner is named."""
    target = out or best
    if target is None or (out is not None and best is not None):
        problem = "expected one output folder, as OUT or as --best OUT"
    elif best is not None and named:
        problem = "--best writes the winner; for another agent give OUT without it"
    else:
        return target
    raise typer.BadParameter(problem)


@app.command(rich_help_panel=PANEL)
def recipe(
    folder: options.Run,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", parser=expanded, help="The file to write."),
    ] = Path("recipe.yaml"),
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Another model; the values stay."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", min=1, help="Rounds; default: those of the winner's line."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="GRPO steps per round; default: those of the run."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    debug: options.Debug = False,
) -> None:
    """Write the winner's settings and schedule as a configuration, also for another model."""
    from evo_grpo.analysis.recipe import recipe as write_recipe

    path = write_recipe(folder, out, model=model, rounds=rounds, steps=steps, force=force)
    say(f"wrote {path}; next: evo-grpo check {path}, then evo-grpo run {path}")


@app.command(rich_help_panel=PANEL)
def replay(
    folder: options.Run,
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", min=1, help="Trainings of each kind; default: 3."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Train again where a finished replay is there.")
    ] = False,
    allow: options.Allow = None,
    code: options.Code = None,
    debug: options.Debug = False,
) -> None:
    """Train agents with the winner's schedule and with its last values, and compare them."""
    from evo_grpo.readers.terminal import console as screen
    from evo_grpo.readers.terminal import result as shown
    from evo_grpo.record.folder import code_folder
    from evo_grpo.record.names import REPLAY
    from evo_grpo.record.replay import read_replay, read_schedule

    console = screen.standard_output()
    schedule = read_schedule(folder)
    screen.say(console, shown.schedule_title(str(folder), schedule))
    screen.show(console, shown.schedule_table(schedule))
    trained = None if force else read_replay(folder)
    if trained is None or repeats not in (None, trained.repeats):
        with searching(code_folder(code), is_code=True):
            trained = _train_replay(console, folder, repeats, force, allow or ())
    shown.show_arms(console, trained.arms())
    screen.say(console, f"replay: {folder / REPLAY}")


def _train_replay(
    console: Console, folder: Path, repeats: int | None, force: bool, allow: Sequence[str]
) -> Replay:
    from evo_grpo.readers.terminal.console import warnings_to
    from evo_grpo.readers.terminal.live import progress_on
    from evo_grpo.readers.terminal.progress import Pace

    stopped = printable(
        f"stopped: nothing was written; start it again with: evo-grpo replay {folder}"
    )
    with interruptible(lambda: stopped) as begin:
        from evo_grpo.analysis.arms import replay as train

        keep_freed_memory()
        begin()
        title = "training with the schedule and with its last values, side by side"
        progress = progress_on(console, title=title, pace=Pace(whole=True))
        with progress, warnings_to(warn):
            return train(folder, repeats=repeats, force=force, allow=allow, observer=progress)


@app.command(rich_help_panel=PANEL)
def sample(  # noqa: PLR0913 -- each is an option of the command
    folder: options.Run,
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
    split: options.Split = "validation",
    agent: options.Agent = None,
    member: options.Member = None,
    round: options.Round = None,
    best_ever: options.BestEver = False,
    prefer: options.Prefer = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to each prompt.")] = 4,
    temperature: Temperature = None,
    base: Base = True,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draws.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the prompt without the template.")
    ] = False,
    allow: options.Allow = None,
    code: options.Code = None,
    debug: options.Debug = False,
) -> None:
    """Sample answers of the winner, or of another agent, to prompts or rows of its task."""
    from evo_grpo.readers.terminal.console import standard_output, warnings_to
    from evo_grpo.record.folder import code_folder

    if prompt is not None and row:
        raise typer.BadParameter("expected a PROMPT or --row, got both")
    choice = _choose(folder, agent, member, round, best_ever, prefer)
    say(f"loading {choice.title} of {folder} ...", err=True)
    from evo_grpo.analysis.sampling.answers import answers, show_sampled

    answered = answers(
        choice, () if row else _prompts(prompt), row or (), n=n, temperature=temperature,
        base=base, seed=seed, split=split, raw=raw, allow=allow or (),
    )  # fmt: skip
    place = searching(code_folder(code), is_code=True)
    with place, warnings_to(warn), closing(answered):
        for answer in answered:
            show_sampled(standard_output(), answer)


def _prompts(prompt: str | None) -> Iterator[str]:
    """Yield the given prompt, or each line of standard input that is not empty."""
    if prompt is not None:
        yield prompt
        return
    has_input = sys.stdin is not None and sys.stdin.isatty()
    if has_input:
        say("one prompt per line; Ctrl-D ends the input", err=True)
    for line in sys.stdin or ():  # none after `<&-`
        if text := line.rstrip("\r\n"):
            has_input = True
            yield text
    if not has_input:
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
    settings: options.Settings = None,
    split: Annotated[
        Literal["validation", "test"], typer.Option("--split", help="Split of the prompts.")
    ] = "test",
    prompts: Annotated[
        int | None,
        typer.Option(
            "--prompts", metavar="N", min=1, help="Number of prompts; default: as in the run."
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", metavar="N", min=1, help="Answers to each prompt; default: as in the run."
        ),
    ] = None,
    temperature: Temperature = None,
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
    as_json: options.AsDocument = False,
    allow: options.Allow = None,
    code: options.Code = None,
    debug: options.Debug = False,
) -> None:
    """Measure the mean reward and pass@k of an adapter on a task, and those of its base."""
    from evo_grpo import settings as config
    from evo_grpo.readers.terminal.console import standard_output, warnings_to
    from evo_grpo.record.folder import beside, code_folder

    if file is None and settings:
        raise typer.BadParameter("--set needs a CONFIG; give the run's own population.yaml")
    loaded = None if file is None else config.load(file, settings or ())
    say(f"loading {adapter} ...", err=True)
    places = searching(code_folder(code), is_code=True), searching(beside(file))
    with places[0], places[1], warnings_to(warn):
        from evo_grpo.analysis.sampling.evaluation import evaluate_adapter, show_judged
        from evo_grpo.record.files import to_line

        judged = evaluate_adapter(
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
        write(to_line(judged.to_json(), indent=1) + "\n")
        return
    show_judged(standard_output(), judged)
