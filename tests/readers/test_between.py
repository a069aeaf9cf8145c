"""Rounds after which nothing is decided: their fitness is the mean reward of their training."""

import io
import math
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from small_run import small

from evo_grpo import history, run
from evo_grpo.readers.dashboard import trial_note
from evo_grpo.readers.report.compared_runs import compare_runs, plot_progress
from evo_grpo.readers.report.figures.lineage import plot_lineage
from evo_grpo.readers.report.figures.rounds import plot_fitness, plot_improvement
from evo_grpo.readers.report.run_page import headline, report_html
from evo_grpo.readers.terminal.progress import PlainLines
from evo_grpo.readers.terminal.result import family_tree, show_ending
from evo_grpo.readers.trackers.base import values_of
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.log import RoundDone
from evo_grpo.record.view import view_of

STEPS = 2
DECISIONS = [2, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small(
        population__rounds=4,
        population__steps_per_round=STEPS,
        population__decisions=DECISIONS,
        evolve__archive=True,
    )
    return Path(run(config, out=tmp_path_factory.mktemp("between") / "run"))


@pytest.fixture(scope="module")
def rounds(folder: Path):
    return read_rounds(folder)


def printed(show) -> str:
    console = Console(width=200, file=io.StringIO())
    show(console)
    return console.file.getvalue()


def test_what_is_recorded_says_where_it_comes_from(rounds):
    assert [record.between for record in rounds] == [True, False, True, False]
    for record in rounds:
        for agent in record.agents:
            assert agent.score.steps == (STEPS if record.between else 0)
            assert bool(agent.score.per_prompt) is not record.between
        assert (record.evaluation_tokens == 0) is record.between


def test_lines_name_the_reward_of_training_and_no_fitness(rounds):
    def lines(record):
        def show(console):
            plain = PlainLines(console)
            plain.started(None, 4, 0, None)
            plain.round_done(record)

        return printed(show).splitlines()

    between, decided = lines(rounds[0]), lines(rounds[1])
    assert "best reward " in between[1]
    assert all("fitness - " in line and "reward 0." in line for line in between[2:5])
    assert "best reward" not in decided[1]
    assert all("fitness 0." in line for line in decided[2:5])


def test_an_unfinished_run_says_what_its_fitness_is(rounds):
    text = printed(lambda console: show_ending(console, view_of(rounds[:3])))
    assert "Fitness after round 3 is the mean reward of its training" in text
    assert "on 2 steps of training" in text
    assert "validation prompt" not in text
    cards = {title: about for title, _, about in headline(view_of(rounds[:3]))}
    assert cards["best reward"] == "on 2 steps of training"
    assert "mean reward of its training" in report_html(view_of(rounds[:3]))
    decided = printed(lambda console: show_ending(console, view_of(rounds[:2])))
    assert "mean reward of its training" not in decided
    assert "on 6 validation prompts" in decided


def test_the_family_tree_shows_fitness_where_there_is_one(rounds):
    tree = printed(lambda console: console.print(family_tree(view_of(rounds[:1]))))
    assert all("reward 0." in line for line in tree.splitlines()[1:])
    tree = printed(lambda console: console.print(family_tree(view_of(rounds[:2]))))
    shown = [f"{agent.score.mean:.3f}" for agent in rounds[1].agents]
    for line, fitness in zip(tree.splitlines()[1:], shown, strict=True):
        assert f"rounds 1-2  {fitness}  " in line
        assert "reward" not in line


def test_figures_tell_fitness_from_rewards_of_training(rounds):
    texts = [t for one in plot_fitness(rounds).data for t in one.text or () if "round 3" in t]
    assert texts
    assert all("mean reward of training" in text for text in texts)
    nodes = [t for one in plot_lineage(rounds[:1]).data for t in one.text or ()]
    assert any("mean reward of training" in node for node in nodes)
    nodes = [t for one in plot_lineage(rounds[:2]).data for t in one.text or ()]
    assert not any("mean reward of training" in node for node in nodes)
    drawn = [
        y for one in plot_improvement(rounds, "lr").data for y in one.y if not math.isnan(float(y))
    ]
    assert len(drawn) == len(rounds[3].agents), "from the evaluation after round 2, alone"


def test_progress_takes_no_maximum_over_rounds_in_between(folder, rounds, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    figure = plot_progress(compare_runs([folder, other]))
    assert [len(one.x) for one in figure.data] == [2, 2]
    best = [max(a.score.mean for a in rounds[n - 1].agents) for n in DECISIONS]
    assert list(figure.data[0].y) == [best[0], max(best)]


def test_trackers_get_no_fitness_of_a_round_in_between(rounds):
    owners = [values_of(RoundDone(STEPS * (n + 1), one)).values for n, one in enumerate(rounds)]
    assert ["fitness/best" in one["population"] for one in owners] == [False, True, False, True]
    assert ["fitness" in one["agent-00"] for one in owners] == [False, True, False, True]
    assert all("member" in one["agent-00"] for one in owners)


def test_the_history_tells_rounds_in_between(folder):
    frame = history(folder)
    assert frame.groupby("round")["between"].first().tolist() == [True, False, True, False]


def test_the_note_of_a_trial_says_what_its_fitness_is(rounds):
    notes = [trial_note(record.agents[0], record) for record in rounds[:2]]
    assert "on 2 steps of training: nothing was decided" in notes[0]
    assert "nothing was decided" not in notes[1]
