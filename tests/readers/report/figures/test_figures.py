import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import shown_run
from random_runs import make_run, timed

import evo_grpo
from evo_grpo.errors import EngineUnavailable
from evo_grpo.readers.report.figures import axes, lineage
from evo_grpo.readers.report.figures.axes import Scale, apart, scale_of, set_axis
from evo_grpo.readers.report.figures.diagnostics import (
    ROLLING,
    Curve,
    curves,
    metric_names,
    plot_diagnostics,
    plot_seconds,
    plot_tokens,
    rolling,
    thinned,
)
from evo_grpo.readers.report.figures.lineage import plot_lineage
from evo_grpo.readers.report.figures.rounds import (
    plot_fitness,
    plot_improvement,
    plot_schedules,
)
from evo_grpo.readers.report.figures.traces import copies, described, stretches
from evo_grpo.record.family import ancestry, best_agent
from evo_grpo.record.view import RunView, view_of
from evo_grpo.types import Mutation


def drawn(figure, prefix="agent"):
    """All points of the traces whose names begin so: (trace, x, y, text)."""
    return [
        (trace.name, x, y, text)
        for trace in figure.data
        if (trace.name or "").startswith(prefix) and trace.text is not None
        for x, y, text in zip(trace.x, trace.y, trace.text, strict=True)
        if not math.isnan(x)
    ]


@pytest.mark.parametrize("seed", range(2))
def test_every_agent_of_every_round_is_one_point_of_its_line(seed):
    rounds = make_run(5, 6, seed, places=(5, 4, 3))
    figure = plot_fitness(rounds)
    found = {(name, x, y) for name, x, y, _ in drawn(figure)}
    expected = {
        (f"agent {a.agent}", a.round + 1, a.score.mean) for record in rounds for a in record.agents
    }
    assert found == expected
    assert len(drawn(figure)) == sum(len(record.agents) for record in rounds)


def test_a_line_is_parted_where_an_agent_takes_the_weights_of_another_one():
    rounds = make_run(4, 8, 3)
    parts = stretches(RunView("run", rounds))
    assert sum(len(part) for own in parts.values() for part in own) == 4 * 8
    for slot, own in parts.items():
        for part in own:
            assert {agent.agent for agent in part} == {slot}
            numbers = [agent.round for agent in part]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            for before, agent in itertools.pairwise(part):
                assert before.member in (agent.member, agent.parent)
    begun = [(part[0].agent, part[0].round) for own in parts.values() for part in own]
    taken = [(agent.agent, agent.round) for _, agent in copies(RunView("run", rounds))]
    assert taken
    assert sorted(begun) == sorted([(slot, 0) for slot in range(4)] + taken)


@pytest.mark.parametrize("plot", [plot_fitness, plot_schedules, plot_diagnostics])
def test_agents_of_the_last_round_are_named_where_their_lines_end(plot):
    rounds = timed(make_run(5, 4, 2, places=(5, 3)))
    figure = plot(rounds)
    last = {f"agent {agent.agent}" for agent in rounds[-1].agents}
    names = [one for one in figure.layout.annotations if (one.name or "").startswith("agent")]
    assert {one.name for one in names} == last
    assert all(one.text.endswith(one.name) for one in names)
    for one in names:
        ends = [
            trace.x[~np.isnan(np.array(trace.y, dtype=float))][-1]
            for trace in figure.data
            if trace.name == one.name
            and (trace.yaxis or "y") == (one.yref or "y")
            and len(trace.x) > 1
        ]
        assert one.x in ends


@pytest.mark.parametrize("seed", range(8))
def test_names_are_moved_apart_and_no_further_than_needed(seed):
    rng = np.random.default_rng(seed)
    heights = (rng.random(rng.integers(1, 9)) * 60).tolist()
    moved = apart(heights, 14)
    order = np.argsort(heights, kind="stable")
    assert (np.diff(np.array(moved)[order]) >= 14 - 1e-9).all()
    # Against a search: no small move of one block of neighbours brings them closer to their places.
    cost = np.square(np.array(moved) - heights).sum()
    for first, last in itertools.combinations(range(len(heights) + 1), 2):
        for step in (-0.01, 0.01):
            other = np.array(moved)
            other[order[first:last]] += step
            if (np.diff(other[order]) >= 14 - 1e-9).all():
                assert np.square(other - heights).sum() >= cost - 1e-9


@pytest.mark.parametrize(
    ("span", "labels"),
    [
        ((9e-6, 2e-2), ["1e-5", "1e-4", "1e-3", "0.01"]),
        ((2e-4, 6e-3), ["3e-4", "1e-3", "3e-3"]),
        ((0.04, 0.6), ["0.05", "0.1", "0.2", "0.5"]),
    ],
)
def test_every_label_of_a_logarithmic_axis_is_a_whole_number(span, labels):
    figure = axes.new_figure("x", "y")
    set_axis(figure, "y", Scale(*span, log=True))
    assert list(figure.layout.yaxis.ticktext) == labels
    assert all(span[0] <= tick <= span[1] for tick in figure.layout.yaxis.tickvals)


def test_a_failed_agent_has_a_point_that_is_not_drawn_and_says_why():
    rounds = make_run(4, 4, 1, failures=0.5)
    failed = [a for record in rounds for a in record.agents if a.state != "ok"]
    assert failed
    hidden = [text for _, _, y, text in drawn(plot_fitness(rounds)) if math.isnan(y)]
    assert len(hidden) == len(failed)
    assert all("failed: loss is nan" in text for text in hidden)


def test_error_bars_are_those_of_the_records_until_there_are_too_many(monkeypatch):
    rounds = make_run(3, 4)
    errors = [t.error_y.array for t in plot_fitness(rounds).data if t.error_y.array is not None]
    assert {e for one in errors for e in one if not math.isnan(e)} == {0.05}
    monkeypatch.setattr("evo_grpo.readers.report.figures.rounds.ERROR_BARS", 11)
    (line,) = [t for t in plot_fitness(rounds).data if t.error_y.array is not None]
    assert line.name == axes.WINNER


@pytest.mark.parametrize("plot", [plot_fitness, plot_lineage, plot_schedules])
def test_the_winners_line_is_its_ancestry(plot):
    rounds = make_run(4, 6, 2)
    path = ancestry(rounds, best_agent(rounds[-1]).member)
    line = next(trace for trace in plot(rounds).data if trace.name == axes.WINNER)
    assert [x - 1 for x in line.x] == [agent.round for agent in path]


def test_a_finished_run_has_the_base_and_the_populations_without_evolution_as_flat_lines(tmp_path):
    contents = view_of(shown_run.run_folder(str(tmp_path / "run")))
    comparison = shown_run.comparison(guess=0.4, random=0.6, evolved=0.8)
    figure = plot_fitness(replace(contents, comparison=comparison))
    flat = {t.name: set(t.y) for t in figure.data if t.name.endswith("(test)")}
    assert flat == {
        "base model (test)": {0.331},
        "eight agents at your guess (test)": {0.4},
        "eight random guesses (test)": {0.6},
    }
    assert len({t.line.dash for t in figure.data if t.name.endswith("(test)")}) == 3


def test_the_tree_has_a_node_for_each_member_where_it_begins():
    rounds = make_run(4, 6, 2)
    first = {}
    for record in rounds:
        for agent in record.agents:
            first.setdefault(agent.member, (agent.round + 1, agent.agent))
    nodes = [(x, y) for _, x, y, _ in drawn(plot_lineage(rounds))]
    assert sorted(nodes) == sorted(first.values())


@pytest.mark.parametrize("seed", range(2))
def test_labels_of_mutations_cover_neither_each_other_nor_a_node(seed):
    rounds = make_run(6, 6, seed)
    labels = plot_lineage(rounds).layout.annotations
    assert len(labels) > 3
    scale = np.array([lineage.WIDTH / 6, lineage.LANE])
    boxes = [
        (scale * (one.x, one.y), np.array([
            lineage.LETTER * max(map(len, one.text.split("<br>"))),
            lineage.LINE * (one.text.count("<br>") + 1),
        ]))
        for one in labels
    ]  # fmt: skip
    nodes = [(scale * (x, y), np.zeros(2)) for _, x, y, _ in drawn(plot_lineage(rounds))]
    for (middle, size), (other, its) in itertools.chain(
        itertools.combinations(boxes, 2), itertools.product(boxes, nodes)
    ):
        assert (abs(middle - other) >= (size + its) / 2).any()


def test_what_comes_from_a_file_is_no_markup_in_a_figure():
    first, second = shown_run.two_rounds()
    planted = replace(
        second.agents[0],
        state="failed",
        score=None,
        reason="<img src=x onerror=alert(1)>\x1b[2J",
        mutation=Mutation("<b>clone</b>"),
        parent=0,
    )
    text = described(planted, ["lr"])
    assert "<img" not in text
    assert "\x1b" not in text
    assert "&lt;b&gt;clone&lt;/b&gt;" in text
    figure = plot_fitness([first, replace(second, agents=(planted, second.agents[1]))])
    assert "<img" not in figure.to_json()


def test_schedules_have_a_row_for_each_hyperparameter_and_a_logarithmic_axis_for_decades():
    rounds = make_run(4, 6, 2)
    figure = plot_schedules(rounds)
    kinds = [figure.layout[f"yaxis{'' if i == 1 else i}"].type for i in range(1, 5)]
    names = [figure.layout[f"yaxis{'' if i == 1 else i}"].title.text for i in range(1, 5)]
    assert names == ["lr", "beta", "clip", "group"]
    values = {n: [a.hparams.get(n) for r in rounds for a in r.agents] for n in rounds[0].mutable}
    expected = ["log" if scale_of(own).log else "linear" for own in values.values()]
    assert kinds == expected
    assert "log" in kinds
    (chosen,) = {trace.yaxis for trace in plot_schedules(rounds, ["lr"]).data}
    assert chosen == "y"


def test_improvement_is_the_change_of_fitness_from_the_weights_that_a_round_began_with():
    rounds = make_run(3, 5, 4)
    points = {(x, y) for _, x, y, _ in drawn(plot_improvement(rounds, "lr"))}
    expected = set()
    for before, after in itertools.pairwise(rounds):
        earlier = {agent.member: agent for agent in before.agents}
        for agent in after.agents:
            old = earlier.get(agent.member) or earlier[agent.parent]
            expected.add((agent.hparams.lr, agent.score.mean - old.score.mean))
    assert points == expected


def test_seconds_and_tokens_add_up_to_those_of_the_rounds():
    rounds = [replace(record, evaluation_tokens=7) for record in make_run(3, 4)]
    seconds = plot_seconds(rounds)
    assert {t.name: list(t.y) for t in seconds.data} == {"generate": [1.0] * 4, "learn": [2.0] * 4}
    tokens = {t.name: sum(t.y) for t in plot_tokens(rounds).data}
    assert tokens == {"training": sum(a.tokens for r in rounds for a in r.agents), "evaluation": 28}
    assert len({t.marker.pattern.shape for t in seconds.data}) == 2


def test_a_rolling_mean_is_that_of_the_last_ten_known_values():
    rng = np.random.default_rng(0)
    values = rng.random(37)
    values[[0, 5, 6, 20]] = np.nan
    means = rolling(values)
    for end in range(1, len(values) + 1):
        window = values[max(0, end - ROLLING) : end]
        known = window[~np.isnan(window)]
        assert means[end - 1] == pytest.approx(known.mean() if len(known) else np.nan, nan_ok=True)


@pytest.mark.parametrize("width", [1, 2, 5, 50])
def test_a_thinned_curve_has_the_means_of_its_neighbours(width):
    rng = np.random.default_rng(1)
    values = [*rng.random(22), math.nan]
    steps, means = thinned(Curve(0, list(range(1, 24)), values), width)
    for i, start in enumerate(range(0, 23, width)):
        block = values[start : start + width]
        known = [value for value in block if not math.isnan(value)]
        assert means[i] == pytest.approx(np.mean(known) if known else math.nan, nan_ok=True)
        assert steps[i] == pytest.approx(np.mean(range(start + 1, start + 1 + len(block))))


def test_without_metrics_of_steps_rewards_are_those_of_steps_and_the_others_of_rounds():
    rounds = timed(make_run(2, 3))
    measured = curves(RunView("run", rounds))
    assert {s for curve in measured["reward"] for s in curve.steps} == set(range(1, 10))
    assert {s for curve in measured["kl"] for s in curve.steps} == {3, 6, 9}


def test_a_metric_that_never_moves_gets_no_figure():
    measured = {
        "kl": [Curve(0, [1, 2], [0.0, 0.0])],
        "loss": [Curve(0, [1], [0.1]), Curve(1, [1], [0.2])],
        "reward/b": [Curve(0, [1, 2], [0.1, 0.3])],
        "reward/a": [Curve(0, [1, 2], [0.1, 0.4])],
        "reward": [Curve(0, [1, 2], [0.1, math.nan, 0.2])],
    }
    assert metric_names(measured) == ["reward", "reward/a", "reward/b", "loss"]


def test_diagnostics_of_a_recorded_run_are_drawn_step_by_step(tmp_path):
    folder = shown_run.run_folder(str(tmp_path / "run"))
    rows = [
        f'{{"round": {r}, "step": {s}, "agent": {a}, "reward": 0.{s}, "loss": {s}, "kl": null}}'
        for r in range(2)
        for s in range(3)
        for a in range(2)
    ]
    (folder / "metrics").mkdir()
    for number in range(2):
        mine = [row for row in rows if f'"round": {number}' in row]
        (folder / "metrics" / f"round-000{number}.jsonl").write_text("\n".join(mine) + "\n")
    figure = plot_diagnostics(folder)
    titles = {one.text for one in figure.layout.annotations if one.name is None}
    assert titles == {"reward", "loss"}
    losses = [t for t in figure.data if t.yaxis == "y2"]
    assert {y for t in losses for y in t.y if not math.isnan(y)} == {0.0, 1.0, 2.0}


@pytest.mark.parametrize("name", ["plot_fitness", "plot_lineage", "plot_schedules"])
def test_no_rounds_are_an_empty_figure(name):
    figure = getattr(evo_grpo, name)([])
    assert all(len(trace.x) == 0 or trace.x[0] is None for trace in figure.data)


def test_without_plotly_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotly.graph_objects", None)
    with pytest.raises(EngineUnavailable, match=r"pip install \"evo-grpo\[report\]\""):
        plot_fitness(make_run(2, 1))
