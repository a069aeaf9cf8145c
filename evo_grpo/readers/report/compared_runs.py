"""Compares runs: their results, their differences from the first run, and their settings.

`evo-grpo compare` prints the tables and writes them as a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evo_grpo.errors import ConfigError
from evo_grpo.escaping import shorten
from evo_grpo.evolve.claims import TEST_LEVEL, signs
from evo_grpo.evolve.intervals import interval
from evo_grpo.readers.report.figures import axes
from evo_grpo.readers.report.page import Page, Table, known, sortable
from evo_grpo.record.arms import Difference, summary_score, tokens_by_purpose
from evo_grpo.record.columns import fitness
from evo_grpo.record.family import best_ever
from evo_grpo.record.files import atomic_write
from evo_grpo.record.names import INPUTS
from evo_grpo.record.view import RunView, view_of
from evo_grpo.record.wording import claim_text, number, with_error
from evo_grpo.schema.problems import shown_value
from evo_grpo.settings.env import without_rows
from evo_grpo.settings.evolve import FITNESS
from evo_grpo.settings.yaml import REMOVED
from evo_grpo.training.recorded_inputs import DATA, flat, read_inputs_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

VALUE = 40
"""Characters of the longest value of a setting that is shown in full."""
_SAME_PROMPTS = ("seed", "env", "model.name", "evolve.fitness.test_prompts",
                 "evolve.fitness.test_samples", "evolve.fitness.temperature")  # fmt: skip
"""Settings that must be equal for two runs to be tested on the same prompts."""
_SAME_REWARD = ("env.kind", "env.reward", "env.reward_weights", "env.args")
"""Settings that must be equal for the rewards of two runs to have the same unit."""
_WITHOUT_EFFECT = ("name", "record")
"""Settings that have no effect on results."""


@dataclass(frozen=True)
class RunDifference(Difference):
    """The test result of a run minus that of the first run; NaN until both are tested.

    Attributes:
        why: Why the difference is not paired and has no interval; empty if it is paired.
        same_reward: Whether the rewards of both runs have the same unit and can be compared.
        shown: 1 if the run's winner is significantly ahead of the first run's winner on the test
            prompts, -1 if behind, else 0; `TEST_LEVEL` is the level for all pairs together.
    """

    why: str = ""
    same_reward: bool = True
    shown: int = 0

    @property
    def verdict(self) -> str:
        """A sentence that says which of the two winners is ahead, if any."""
        if math.isnan(self.difference):
            return "not known"
        if not self.same_reward:
            return "different rewards"
        return "not tested" if self.why else claim_text("winner", self.shown)


@dataclass(frozen=True)
class ComparedRuns:
    """Several runs under unique names.

    `differences` has, for each run after the first, its difference from the first run. `settings`
    has the settings that differ, each with its values in all runs.
    """

    runs: Sequence[RunView]
    names: Sequence[str]
    differences: Sequence[RunDifference]
    settings: Mapping[str, Sequence[object]]

    @property
    def caveat(self) -> str:
        """A sentence that says which uncertainty the differences include."""
        return (
            f"Results are claimed at {TEST_LEVEL:g} over all pairs of the {len(self.runs)} runs. "
            "They are about the winners on these prompts: one training each tells nothing of the "
            "settings of the runs."
        )


def compare_runs(runs: Sequence[str | Path]) -> ComparedRuns:
    """Read at least two different runs and compare each with the first."""
    if len(runs) < 2:
        raise ConfigError(
            f"compare: expected at least two run folders, got {len(runs)}; to compare one run with "
            "the same population without evolution: evo-grpo resume RUN --compare"
        )
    paths = [Path(run).resolve() for run in runs]
    twice = [str(run) for run, path in zip(runs, paths, strict=True) if paths.count(path) > 1]
    if twice:
        raise ConfigError(f"compare: expected different runs, got {twice[0]} twice; name each once")
    views = [view_of(run) for run in runs]
    names = _names(paths)
    named_runs = list(zip(names, views, strict=True))
    results = [_difference(*named_run, *named_runs[0]) for named_run in named_runs[1:]]
    claims = signs([d.difference for d in results], [d.p for d in results], len(runs), TEST_LEVEL)
    return ComparedRuns(
        runs=views,
        names=names,
        differences=[replace(d, shown=sign) for d, sign in zip(results, claims, strict=True)],
        settings=_differing([view.config for view in views]),
    )


def _names(places: Sequence[Path]) -> list[str]:
    """Return names for paths: the last parts of each path, as many as make all names unique."""
    depth = 1
    while True:
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(names):
            return names
        depth += 1


def _difference(name: str, run: RunView, first_name: str, first: RunView) -> RunDifference:
    score, first_score = summary_score(run.summary), summary_score(first.summary)
    reason, same_reward = _changed(run, first)
    if not score.n or not first_score.n:
        reason = "not judged yet"
    elif not reason and len(score.per_prompt) != len(first_score.per_prompt):
        reason = "they counted their prompts in different ways"
    if not reason:
        return RunDifference.between(name, [score], first_name, [first_score])
    gap, error = score.mean - first_score.mean, math.hypot(score.se, first_score.se)
    low = high = p = math.nan
    return RunDifference(name, first_name, gap, error, low, high, p, 0, 1, reason, same_reward)


def _changed(run: RunView, first: RunView) -> tuple[str, bool]:
    """Return why two runs cannot be paired ("" if they can), and whether the reward is the same."""
    configs = run.config, first.config
    reasons = [f"{name} differs" for name in _SAME_PROMPTS if _differs(name, *configs)]
    same_reward = not any(_differs(name, *configs) for name in _SAME_REWARD)
    if _measured(configs[0]) != _measured(configs[1]):
        reasons.append("what fitness measures differs (evolve.fitness)")
        same_reward = False
    if str(_setting(run.config, "env.kind")).startswith("object:"):
        reasons.append("env is an object of Python, whose rows and reward are not recorded")
    files = _files(run), _files(first)
    for name in dict.fromkeys(name for digests in files for name in digests):
        setting = "env.test" if any("env.test" in digests for digests in files) else "env.train"
        is_reward = name.startswith(("env.reward", "env.kind"))
        digest, first_digest = (digests.get(name) for digests in files)
        # Without a digest, a file cannot be recognised as the same.
        if (is_reward or name == setting) and (digest is None or digest != first_digest):
            both_known = digest is not None and first_digest is not None
            reasons.append(
                f"the file of {name} {'has changed' if both_known else 'is not on record for both'}"
            )
            same_reward &= not is_reward
    return "; ".join(reasons[:1]), same_reward


def _measured(config: Mapping[str, Any]) -> object:
    """Return what the test of a run measures: the first objective, else `evolve.fitness.reward`."""
    objectives: Any = _setting(config, "evolve.fitness.objectives") or [FITNESS]
    objective = objectives[0]
    name = objective["name"] if isinstance(objective, dict) else objective
    return _setting(config, "evolve.fitness.reward") if name == FITNESS else name


def _files(run: RunView) -> Mapping[str, str | None]:
    """Return the digests of the user's files that a run read, by the settings that name them."""
    assert run.folder is not None, "runs side by side are run folders"
    if not (run.folder / INPUTS).exists():  # stopped before its first round
        env = dict(flat({"env": _setting(run.config, "env") or {}}))
        return {name: None for name in (*DATA, "env.reward") if env.get(name)}
    return read_inputs_of(run.folder).files


def _differs(name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return _setting(first, name) != _setting(second, name)


def _setting(config: Mapping[str, Any], name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[object]]:
    flat_configs = [dict(flat(without_rows(config))) for config in configs]
    names = dict.fromkeys(name for settings in flat_configs for name in settings)
    values: dict[str, list[object]] = {
        name: [settings.get(name) for settings in flat_configs] for name in names
    }
    # Earlier versions wrote these settings; this value names what is done now.
    removed = {".".join(path): (None, harmless) for path, (harmless, _) in REMOVED.items()}
    return {
        name: row
        for name, row in values.items()
        if name.split(".")[0] not in _WITHOUT_EFFECT
        and any(value != row[0] for value in row)
        and not all(value in removed.get(name, ()) for value in row)
    }


# --- tables and page -----------------------------------------------------------------------------


def write_compared_runs(compared: ComparedRuns, out: str | Path) -> Path:
    """Write runs side by side as a page that needs no network."""
    axes.graph_objects("compare")
    lead = f"{', '.join(compared.names)}: differences are to {compared.names[0]}"
    page = Page("Runs side by side", lead)
    page.section("results", "Results", sortable(results_table(compared)), "On the test split.")
    page.section(
        "test",
        "Test split",
        page.chart(plot_tests(compared)),
        "The winner of each run with an interval of 95%, and its base model.",
    )
    page.section(
        "apart",
        "Differences",
        sortable(differences_table(compared)),
        f"Tested where both winners answered the same prompts. {compared.caveat}",
    )
    page.section(
        "progress",
        "Progress",
        page.chart(plot_progress(compared)),
        "The best validation fitness so far, against the tokens that a run had sampled.",
    )
    page.section("settings", "Settings that differ", sortable(settings_table(compared)))
    file = Path(out)
    atomic_write(file, page.render(), "compare")
    return file


def results_table(compared: ComparedRuns) -> Table:
    """Return a table of the results of runs, with all tokens of training and evaluation."""
    titles = ["run", "test", "base", "gain", "best fitness"]
    titles += ["rounds", "tokens", "seconds", "winner"]
    named_runs = zip(compared.names, compared.runs, strict=True)
    return Table(titles, [_result(name, run) for name, run in named_runs])


def _result(name: str, run: RunView) -> list[tuple[str, object]]:
    summary, ever = run.summary, best_ever(run.rounds)
    test, base = summary_score(summary), summary_score(summary, "base").mean
    best = math.nan if ever is None or ever.score is None else ever.score.mean
    tokens = sum(tokens_by_purpose(run.rounds, summary or {"final_tokens": 0}).values())
    winner = "" if summary is None or run.winner is None else run.winner.name
    return [
        (name, name),
        (with_error(test.mean, test.se, 3), known(test.mean)),
        *((number(value), known(value)) for value in (base, test.mean - base, best)),
        (f"{len(run.rounds)}{' (unfinished)' if summary is None else ''}", len(run.rounds)),
        (f"{tokens:,}", tokens),
        (number(run.seconds, 1), run.seconds),
        (winner or "-", winner),
    ]


def differences_table(compared: ComparedRuns) -> Table:
    """Return a table with the difference of each further run from the first run."""
    titles = ["run", f"minus {compared.names[0]}", "95% interval", "paired", "result"]
    rows: list[list[tuple[str, object]]] = [
        [
            (pair.first, pair.first),
            (number(pair.difference), known(pair.difference)),
            (
                "-" if math.isnan(pair.low) else f"[{number(pair.low)}, {number(pair.high)}]",
                known(pair.low),
            ),
            (f"no: {pair.why}" if pair.why else "yes", not pair.why),
            (pair.verdict, pair.verdict),
        ]
        for pair in compared.differences
    ]
    return Table(titles, rows)


def settings_table(compared: ComparedRuns) -> Table:
    """Return a table of the settings in which the runs differ."""
    titles = ["setting", *compared.names]
    rows: list[list[tuple[str, object]]] = [
        [(name, name), *((_shown(value), _shown(value)) for value in values)]
        for name, values in compared.settings.items()
    ]
    return Table(titles, rows or [[("none", "none")]])


def plot_tests(compared: ComparedRuns) -> go.Figure:
    """Draw the test scores of the winners, with intervals of 95%, and of the base models."""
    figure = axes.new_figure("mean reward (test)", "", height=120 + 48 * len(compared.names))
    tests, bases = (
        [summary_score(run.summary, key) for run in compared.runs] for key in ("best", "base")
    )
    figure.add_scatter(
        x=[score.mean for score in bases], y=compared.names, mode="markers", name="base model",
        marker={"symbol": "line-ns-open", "size": 14, "color": axes.GREY},
    )  # fmt: skip
    errors = [interval(0.0, score.se, score.n)[1] for score in tests]
    figure.add_scatter(
        x=[score.mean for score in tests], y=compared.names, mode="markers", name="winner",
        error_x={"array": errors, "thickness": 2},
        marker={"symbol": "circle", "size": 11, "color": axes.look_of(0).color},
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed")
    return figure


def plot_progress(compared: ComparedRuns) -> go.Figure:
    """Draw the best fitness so far of each run against the tokens that it has sampled."""
    figure = axes.new_figure("tokens sampled", "best fitness so far (validation)")
    figure.update_xaxes(exponentformat="none", separatethousands=True)
    for index, (name, run) in enumerate(zip(compared.names, compared.runs, strict=True)):
        spent = [r.evaluation_tokens + sum(a.tokens for a in r.agents) for r in run.rounds]
        # Between decisions, a maximum would be one of noise or of training rewards.
        decided = [n for n, record in enumerate(run.rounds) if not record.between]
        tokens = np.cumsum(spent)[decided]
        means = [[fitness(a) for a in run.rounds[n].agents] for n in decided]
        best = np.array([max((v for v in row if v == v), default=-np.inf) for row in means])
        top = np.maximum.accumulate(best) if len(best) else best
        line = axes.Line(tokens, np.where(np.isfinite(top), top, np.nan))
        options: dict[str, Any] = {"marker_size": 8, "line_shape": "hv", "hoverinfo": "all"}
        axes.draw(figure, line, axes.look_of(index), name, legend=True, **options)
    return figure


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return shown_value(value) if isinstance(value, float) else shorten(str(value), VALUE)
