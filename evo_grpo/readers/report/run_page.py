"""Writes a run as a page, again after rounds while the run trains, and in a form for notebooks."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, final

import yaml

from evo_grpo.escaping import shorten
from evo_grpo.readers.report.figures import diagnostics, rounds
from evo_grpo.readers.report.figures.axes import WINNER, graph_objects
from evo_grpo.readers.report.figures.lineage import plot_lineage
from evo_grpo.readers.report.figures.traces import agent_name, looks, named
from evo_grpo.readers.report.page import Page, Table, cards, known, sortable, text
from evo_grpo.readers.terminal.result import cell, columns, difference_rows, redundant, scores
from evo_grpo.record.arms import Arms, comparison_arms
from evo_grpo.record.columns import objectives
from evo_grpo.record.files import atomic_write
from evo_grpo.record.folder import expect_run
from evo_grpo.record.log import Entry, RoundDone, RunFinished, RunStarted
from evo_grpo.record.names import REPORT, SUMMARY
from evo_grpo.record.replay import read_replay
from evo_grpo.record.view import Run, RunView, view_of
from evo_grpo.record.wording import count, in_words, measured_on, number, with_error
from evo_grpo.schema.problems import short_name
from evo_grpo.settings.env import without_rows

MOST = 32
"""Greatest number of drawn agents: with more, lines hide each other and the page loads slowly."""

SHARE = 10
"""Least pause before the page is written again, in multiples of the time of the last write."""
COMPLETIONS = 2000
"""Most completions in a page; if a run has more, the best, the worst and the latest are shown."""
CHARACTERS = 4000
"""Characters after which a prompt or a completion is cut in a page."""
EXTREMES = 200
"""Number of the best and number of the worst completions that are always shown."""
_WITHIN_OTHERS = ("checkpoint", "tie")
"""Columns of the leaderboard that the page leaves out, or shows in cells of another column."""
AGENTS = 16
"""Rows of the leaderboard that a notebook shows."""
WITHOUT = ("member", "parent", "round", "tokens", "wall_seconds")
"""Columns that a notebook leaves out, so that all others have room."""
_CELL_TAG = '<td style="white-space: nowrap">'  # notebooks break numbers at "-" and around "±"
_TITLES = {"wall_seconds": "seconds", "round": "last round", "left": "left after round"}


def write_report(run: str | Path, out: str | Path | None = None, *, samples: bool = True) -> Path:
    """Write a run as a page that a browser opens without a network.

    Args:
        run: The run folder, finished or not.
        out: The file to write and return; None writes report.html into the run folder.
        samples: Whether to show prompts, answers and completions, and rows in the settings.

    Raises:
        EngineUnavailable: plotly is not installed.
        EvoGrpoError: The run cannot be read, or `out` cannot be written.
    """
    graph_objects("report")
    folder = expect_run(run)
    file = folder / REPORT if out is None else Path(out)
    atomic_write(file, report_html(view_of(folder), samples=samples), "report")
    return file


@final
class ReportReader:
    """A reader that writes report.html when a run starts, after rounds, and when the run ends."""

    def __init__(self, run: Path, id: str = "") -> None:
        graph_objects("report")
        self.id = id
        self._run = run
        self._behind = False
        # The page of a finished run is written once, at the end of its log.
        self._next = math.inf if (run / SUMMARY).exists() else 0.0

    def read(self, entry: Entry) -> None:
        """Mark the page as out of date if the entry changes it."""
        self._behind |= isinstance(entry, RunStarted | RoundDone | RunFinished)

    def flush(self) -> bool:
        """Write an outdated page once a pause has passed; return whether the page is up to date."""
        if self._behind and time.monotonic() >= self._next:
            self._write()
        return not self._behind

    def close(self) -> None:
        """Write the page if it is out of date."""
        if self._behind:
            self._write()

    def _write(self) -> None:
        began = time.monotonic()
        write_report(self._run)
        ended = time.monotonic()
        self._behind, self._next = False, ended + SHARE * (ended - began)


def report_html(view: RunView, *, samples: bool = True) -> str:
    """Return the page of a run as HTML; without `samples`, it shows no rows of the user's data."""
    finished = view.summary is not None
    if not samples and view.text:
        settings = yaml.safe_dump(without_rows(view.config), sort_keys=False, allow_unicode=True)
        view = replace(view, text=settings)
    page = Page(view.name, _lead(view), live=not finished)
    page.section("overview", "Overview", _overview(view))
    if view.rounds:
        _add_figures(page, view)
        _add_tables(page, view, samples=samples)
    _add_arms(page, view)
    settings = f'<pre class="settings">{_lines(view.text)}</pre>' if view.text else ""
    page.section("settings", "Settings", settings, "As the run resolved them, defaults included.")
    return page.render()


def _lead(view: RunView) -> str:
    model, env = (_named(view.config, *keys) for keys in (("model", "name"), ("env", "kind")))
    played = count(len(view.rounds), "round")
    state = "finished" if view.summary is not None else f"unfinished, {view.planned} planned"
    return f"{model} on {env}: {played}, {state}"


def _named(config: Mapping[str, Any], group: str, key: str) -> str:
    setting = config.get(group)
    return str(setting.get(key)) if isinstance(setting, dict) else str(setting or "a population")


def _overview(view: RunView) -> str:
    parts = [cards(headline(view))]
    sentences = "".join(f"<p>{text(sentence.text)}</p>" for sentence in view.story)
    parts.append(f'<div class="story">{sentences}</div>')
    items = "".join(
        f"<li><strong>Warning:</strong> {text(trouble.text)}. "
        f"<em>Remedy: {text(trouble.remedy)}.</em></li>"
        for trouble in view.troubles
    )
    if items:
        parts.append(f'<ul class="findings">{items}</ul>')
    return "".join(parts)


def _legend(view: RunView) -> str:
    """Return the common legend of all figures as HTML: agents, and lines that are no agent's."""
    agent_looks, named_agents = looks(view), sorted(named(view))
    agents = "".join(
        f'<button type="button" data-agent="{agent_name(agent)}" aria-pressed="false">'
        f"{agent_looks[agent].named(agent_name(agent))}</button>"
        for agent in named_agents
    )
    unnamed_count = len(agent_looks) - len(named_agents)
    remark = f"<span>{unnamed_count} more: hover over a line</span>" if unnamed_count else ""
    return (
        f"{agents}{remark}"
        f'<span><i class="band"></i> {WINNER}</span>'
        '<span><i class="copied"></i> weights taken over</span>'
    )


def _add_figures(page: Page, view: RunView) -> None:
    drawn_view, total = drawn(view), len({agent.agent for agent in view.played})
    part = len({agent.agent for agent in drawn_view.played})
    which = f"the {part} of {total} agents that lead to the winner or are first in the leaderboard"
    note = f" The figures show {which}." if part < total else ""
    with page.legend(_legend(drawn_view)):
        _add_agents_figures(page, drawn_view, note)


def drawn(view: RunView) -> RunView:
    """Return a run reduced to the agents that its figures show.

    These are all ancestors of the winner, and from the leaderboard's top as many as make `MOST`.
    """
    all_agents = {agent.agent for agent in view.played}
    if len(all_agents) <= MOST:
        return view
    ancestors = [agent.agent for line in view.lines for agent in line]
    others = [row["agent"] for row in view.leaderboard if row["agent"] is not None]
    chosen = {*ancestors, *list(dict.fromkeys([*ancestors, *others]))[:MOST]}
    shown = [
        replace(record, agents=tuple(agent for agent in record.agents if agent.agent in chosen))
        for record in view.rounds
    ]
    return replace(view, rounds=shown)


def _add_agents_figures(page: Page, view: RunView, note: str) -> None:
    page.section(
        "fitness",
        "Fitness",
        page.chart(rounds.plot_fitness(view), legend=False),
        "Mean reward on validation prompts that all agents share, with standard errors. Each line "
        "is an agent; click on agents in the legend to see them alone. Flat lines are results on "
        f"the test split.{note}",
    )
    goals = objectives(view.rounds)
    if goals:
        page.section(
            "front",
            "Front",
            "".join(page.chart(rounds.plot_front(view, name), legend=False) for name in goals),
            "Every agent after every round, by its objectives on the validation prompts. Agents of "
            "the front, drawn strong with standard errors, are those that no other is better than "
            "in one objective without being worse in another. Choose among them with "
            "evo-grpo export RUN --prefer.",
        )
    page.section(
        "family",
        "Family tree",
        page.chart(plot_lineage(view), legend=False),
        "A row for each agent. Where weights were copied, an edge leads from the parent. A diamond "
        "is a mutation, the star the winner. Hover over a node for its values.",
    )
    page.section(
        "schedules",
        "Schedules",
        page.chart(rounds.plot_schedules(view), legend=False),
        "The hyperparameters of the agents. Agents of the last round are drawn strong, the others "
        "faint.",
    )
    changes = "".join(
        page.chart(rounds.plot_improvement(view, name), legend=False)
        for name in rounds.drawn_names(view)
    )
    page.section(
        "improvement",
        "Value and improvement",
        f'<div class="grid">{changes}</div>',
        "The change of an agent's fitness since the evaluation before, against the value that it "
        "trained with.",
    )
    measured = diagnostics.curves(view)
    metrics = "".join(
        page.chart(diagnostics.plot_metric(view, measured, name), legend=False)
        for name in diagnostics.metric_names(measured)
    )
    page.section(
        "training",
        "Training",
        f'<div class="grid">{metrics}</div>' if metrics else "",
        "The metrics of every step. Rewards are rolling means over 10 steps, drawn over the "
        "values themselves.",
    )


def _add_tables(page: Page, view: RunView, *, samples: bool) -> None:
    table = leaderboard_table(view)
    classes = [
        "gone" if row["left"] is not None else "first" if row["rank"] == 1 else ""
        for row in view.leaderboard
    ]
    page.section(
        "leaderboard",
        "Leaderboard",
        sortable(table, classes),
        "Click on a title to sort. Rounds count from 1. Fitness is the score on the validation "
        "prompts of the last round of an agent, final that in the final comparison, test that on "
        f"the test prompts. Agents that left come last. {view.order}".strip(),
    )
    if samples:
        completions = completions_table(view)
        page.data("completions", completions)
        page.section(
            "completions",
            "Completions",
            _COMPLETIONS if completions["rows"] else "",
            "Samples of every round, by prompt; agents of a round answer the same prompt.",
        )
    body = page.chart(diagnostics.plot_seconds(view)) + page.chart(diagnostics.plot_tokens(view))
    page.section("spending", "Time and tokens", f'<div class="grid">{body}</div>')


def _add_arms(page: Page, run: RunView) -> None:
    """Add the comparison and the replay of a run, if there are any, to the page of the run."""
    if run.comparison is not None:
        body = _arms_html(comparison_arms(run.comparison))
        page.section("comparison", "Without evolution", body, "The same population, not evolved.")
    replay = None if run.folder is None else read_replay(run.folder)
    if replay is not None:
        about = "Agents trained from scratch with the winner's schedule and with its last values."
        page.section("replay", "Replay", _arms_html(replay.arms()), about)


def _arms_html(compared: Arms) -> str:
    """Return a comparison as HTML: results of its arms, differences, and sentences on them."""
    titles = ["arm", "test", "spread", "tokens"]
    rows: list[list[tuple[str, object]]] = [
        [
            (compared.label(arm.name), arm.name),
            (with_error(arm.test.mean, arm.test.se, 3), known(arm.test.mean)),
            (number(arm.spread), known(arm.spread)),
            (f"{arm.tokens:,}", arm.tokens),
        ]
        for arm in compared.arms
    ]
    tables = [sortable(Table(titles, rows))]
    if compared.differences:
        names, cells = difference_rows(compared)
        tables.append(sortable(Table(names, [[(cell, cell) for cell in row] for row in cells])))
    return "".join([*tables, *(f"<p>{text(sentence)}</p>" for sentence in compared.sentences)])


def _lines(value: str) -> str:
    return "\n".join(text(line) for line in value.splitlines())


_COMPLETIONS = """<div class="controls">
<input type="search" id="search" placeholder="Search prompts and completions" aria-label="Search">
<select id="agent" aria-label="Agent"><option value="">all agents</option></select>
<select id="order" aria-label="Order"><option value="newest">newest first</option>
<option value="best">best first</option><option value="worst">worst first</option></select>
<span id="matches" role="status"></span></div>
<div id="completions-list"></div><button type="button" id="more" hidden>More prompts</button>"""


# --- tables --------------------------------------------------------------------------------------


def leaderboard_table(view: RunView, without: Sequence[str] = ()) -> Table:
    """Return the leaderboard as a table, `without` some columns; rounds count from 1."""
    rows = view.leaderboard
    visible = columns(rows, (*_WITHIN_OTHERS, *redundant(rows), *without))
    # The scores are beside the name: on a phone, only the first columns are in sight.
    leading = [name for name in ("rank", "agent", *scores(rows)) if name in visible]
    names = [*leading, *(name for name in visible if name not in leading)]
    cells = [[_cell(name, row) for name in names] for row in rows]
    return Table([_title(name) for name in names], cells)


def completions_table(view: RunView) -> dict[str, Any]:
    """Return {"rows": completions to show, newest first, "total": number of all completions}."""
    rows = list(view.completions())
    return {"total": len(rows), "rows": [_completion(row) for row in reversed(_chosen(rows))]}


def _chosen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choose at most `COMPLETIONS` rows, in order: those of extreme rewards, and the latest."""
    if len(rows) <= COMPLETIONS:
        return rows
    order = sorted(range(len(rows)), key=lambda i: _reward(rows[i]))
    indices = {*order[:EXTREMES], *order[-EXTREMES:]}
    for index in range(len(rows) - 1, -1, -1):
        if len(indices) >= COMPLETIONS:
            break
        indices.add(index)
    return [rows[index] for index in sorted(indices)]


def _reward(row: Mapping[str, Any]) -> float:
    value = row.get("reward")
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return -math.inf


def _completion(row: Mapping[str, Any]) -> dict[str, Any]:
    reward = _reward(row)
    return {
        "round": row.get("round", 0) + 1,
        "agent": row.get("agent"),
        "reward": None if reward == -math.inf else reward,
        "rewards": _values(row.get("rewards")),
        "tokens": row.get("tokens"),
        "end": row.get("error") or ("" if row.get("ended") else "cut"),
        "prompt": shorten(str(row.get("prompt", "")), CHARACTERS),
        "answer": shorten(str(row.get("answer", "")), CHARACTERS),
        "completion": shorten(str(row.get("completion", "")), CHARACTERS),
    }


def _values(rewards: object) -> dict[str, float | None]:
    """Return reward function -> value for a completion; {} if fewer than two are recorded."""
    values = cast("dict[str, Any]", rewards) if isinstance(rewards, dict) else {}
    if len(values) < 2:
        return {}
    return {
        shorten(name, 40): float(value) if isinstance(value, int | float) else None
        for name, value in values.items()
    }


def _title(name: str) -> str:
    return _TITLES.get(name, short_name(name))


def _cell(name: str, row: Mapping[str, Any]) -> tuple[str, object]:
    value = row[name]
    if value is None:
        return "mean" if name == "agent" else "", None
    if name in ("round", "left"):
        return str(value + 1), value
    if name == "rank":
        return f"{value} (tie)" if row["tie"] else str(value), value
    if f"{name}_se" in row:
        return with_error(value, row[f"{name}_se"], 3), value
    return cell(name, value), value


def headline(view: RunView) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of a report as (title, number as text, description)."""
    cards: list[tuple[str, str, str]] = []
    summary = view.summary
    winner, base = view.winner, view.base
    if summary is not None and winner is not None and winner.test is not None and base is not None:
        prompts = count(winner.test.n, f"{summary['split']} prompt")
        cards += [
            ("winner", with_error(winner.test.mean, winner.test.se, 3), f"on {prompts}"),
            ("base model", with_error(base.mean, base.se, 3), f"on the same {prompts}"),
            ("gain", _gain(summary), "paired, ± standard error"),
        ]
    elif winner is not None and winner.fitness is not None:
        fitness = winner.fitness
        title = "best reward" if fitness.steps else "best fitness"
        value = with_error(fitness.mean, fitness.se, 3)
        cards.append((title, value, f"on {measured_on(fitness)}"))
    cards += [
        ("rounds", f"{len(view.rounds)} of {view.planned}", count(view.agents, "agent")),
        ("tokens", f"{view.tokens:,}", "sampled in training"),
        ("time", in_words(view.seconds), "in rounds"),
    ]
    return cards


def _gain(summary: Mapping[str, Any]) -> str:
    if summary["gain"] is None:
        return "-"
    error = summary["gain_se"]
    return f"{summary['gain']:+.3f}" + ("" if error is None else f" ± {number(error)}")


def as_html(run: Run, title: str) -> str:
    """Return a run as HTML without scripts, for a notebook; `title` is a heading in plain text."""
    view = view_of(run)
    sentences = [text(sentence.text) for sentence in view.story]
    if view.rounds:
        cards = headline(view)
        numbers = [f"{name} <b>{text(value)}</b> ({about})" for name, value, about in cards]
        sentences.insert(0, "; ".join(numbers))
    parts = [f"<p>{paragraph}</p>" for paragraph in (f"<b>{text(title)}</b>", *sentences)]
    table = leaderboard_table(view, WITHOUT)
    heads = "".join(f"<th>{text(name)}</th>" for name in table.titles)
    rows = "".join(
        f"<tr>{''.join(f'{_CELL_TAG}{text(label)}</td>' for label, _ in row)}</tr>"
        for row in table.rows[:AGENTS]
    )
    if table.rows:
        parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>")
    if len(table.rows) > AGENTS:
        parts.append(f"<p>{len(table.rows) - AGENTS} more</p>")
    return "".join(parts)
