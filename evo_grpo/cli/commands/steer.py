"""The command that steers a run while it trains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evo_grpo.cli.commands.app import Debug, Run, app
from evo_grpo.cli.output import say, warn
from evo_grpo.errors import ConfigError

if TYPE_CHECKING:
    from evo_grpo.record.steering import RunState
    from evo_grpo.types import Request

PANEL = "Training"
FORMS = {
    "stop-agent": "stop-agent AGENT",
    "clone": "clone FROM TO",
    "set": "set AGENT NAME=VALUE [NAME=VALUE ...]",
    "pause": "pause",
    "continue": "continue",
    "stop-after-round": "stop-after-round",
    "cancel": "cancel",
}
_AGENTS = {"stop-agent": 1, "clone": 2, "set": 1}


@app.command(rich_help_panel=PANEL)
def steer(
    folder: Run,
    request: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REQUEST]",
            help=f"One of: {'; '.join(FORMS.values())}. Without a request, show earlier ones.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Change a run while it trains; requests are carried out between two rounds."""
    from evo_grpo.record.steering import ask, cancel, state_of

    if not request:
        _show(state_of(folder))
        return
    op, *rest = request
    if op not in FORMS:
        raise ConfigError(f"steer: expected {', '.join(FORMS)}, got {op!r}")
    agents, values = _agents(op, rest), _values(op, rest)
    if op == "cancel":
        withdrawn = cancel(folder)
        say(f"{folder}: {withdrawn} withdrawn" if withdrawn else f"{folder}: nothing was waiting")
        return
    agent, source = (agents[-1] if agents else None), (agents[0] if op == "clone" else None)
    asked, standing = ask(folder, op, agent=agent, source=source, values=values)
    say(f"{folder}: {asked}: {_when(asked, standing)}")


def _agents(op: str, rest: Sequence[str]) -> list[int]:
    """Return the agents that a request names."""
    count = _AGENTS.get(op, 0)
    given = rest[:count]
    if len(given) < count or (op != "set" and len(rest) > count):
        raise ConfigError(f"steer: expected {FORMS[op]}, got {' '.join([op, *rest])!r}")
    wrong = [one for one in given if not (one.isascii() and one.isdigit() and len(one) < 10)]
    if wrong:
        raise ConfigError(
            f"steer {op}: expected the number of an agent, as in the leaderboard, got {wrong[0]!r}"
        )
    return [int(one) for one in given]


def _values(op: str, rest: Sequence[str]) -> dict[str, Any]:
    """Return the hyperparameters of a request "set"; values are YAML, as for --set."""
    if op != "set":
        return {}
    from evo_grpo.settings.yaml import parse

    values: dict[str, Any] = {}
    for one in rest[1:]:
        name, _, text = one.partition("=")
        if not name or not text.strip():
            raise ConfigError(f"steer set: expected NAME=VALUE such as lr=1e-4, got {one!r}")
        if name in values:
            raise ConfigError(f"steer set: expected {name} once, got it twice; remove one")
        values[name] = parse(text, f"steer set {name}")
    if not values:
        raise ConfigError(f"steer: expected {FORMS['set']}, got no NAME=VALUE")
    return values


def _when(request: Request, standing: RunState) -> str:
    """Return when a request will be carried out, in words."""
    played = len(standing.rounds)
    if not standing.trains:
        resume = f"evo-grpo resume {standing.folder}"
        when = "after its first round" if not played else f"before round {played + 1}"
        return f"no process trains this run; it is saved and carried out {when}, with: {resume}"
    if request.op == "continue":
        return f"round {played + 1} begins" if standing.paused else "the pause is cancelled"
    if standing.paused:
        return "carried out now, since the run is paused"
    if standing.in_last_round:
        resume = f"evo-grpo resume {standing.folder} --rounds N"
        return f"kept, for round {request.after + 1} is the last one; carried out by: {resume}"
    return f"carried out after round {request.after + 1}, or a round later if that has ended"


def _show(standing: RunState) -> None:
    """Print the state of a run, the waiting requests, and the outcomes of earlier ones."""
    played, planned = len(standing.rounds), standing.config.population.rounds
    if standing.finished:
        state = f"finished after round {played}"
    elif not standing.trains:
        state = f"no process trains it; {played} of {planned} rounds are played"
    elif standing.paused:
        state = f"paused after round {played} of {planned}"
    elif standing.over:
        state = f"evaluates the base and the winner after round {played}, the last one"
    else:
        state = f"trains; {played} of {planned} rounds are played"
    say(f"{standing.folder}: {state}")
    for one in standing.waiting:
        say(f"  waiting: {one}, requested {_ago(one.asked)}")
    for number, one in standing.became:
        outcome = f"refused: {one.refused}" if one.refused else "done"
        say(f"  after round {number + 1}: {one.request}: {outcome}")
    if not standing.waiting and not standing.became:
        say("  no requests")
    for text in standing.unread:
        warn(f"{text}; withdraw it with: evo-grpo steer {standing.folder} cancel")


def _ago(asked: float) -> str:
    seconds = max(0, round(time.time() - asked))
    if seconds < 120:
        return f"{seconds} s ago"
    return f"{seconds // 60} min ago" if seconds < 7200 else f"{seconds // 3600} h ago"
