"""Runs with two goals: the front in tables, trials and report, and the choice from it."""

import json

import pytest
from small_run import outcome, small, stopped_and_resumed, study_of
from typer.testing import CliRunner

from evo_grpo import GRPO, export, leaderboard, recipe, run, write_report
from evo_grpo.cli.commands import app
from evo_grpo.errors import ConfigError
from evo_grpo.evolve.protocols import Offspring
from evo_grpo.readers.trackers.base import values_of
from evo_grpo.record.family import front
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.log import RoundDone
from evo_grpo.settings import load

GOALS = ["contains", {"name": "tokens", "direction": "minimize"}]
#: Answers of tiny-foods have different lengths; three rounds of four agents.
TWO = {
    "seed": 6,  # its front has two agents, one of them after an earlier round
    "model__name": "tiny-foods",
    "env": {"kind": "foods"},
    "population__size": 4,
    "population__sizes": "constant",
    "evolve__selection": "pareto",
    "evolve__archive": True,
    "evolve__significance": 0.4,
    "evolve__fitness__prompts": 16,
    "evolve__fitness__final_samples": 2,
    "evolve__fitness__objectives": GOALS,
    "evolve__hyperparameters": {"lr": {"min": 1e-3, "max": 3e-2}},
    "algorithm__lr": 1e-2,
    "record__checkpoints": "last",
}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The folder of a run with two goals, which keeps only the checkpoints that it has to."""
    folder = tmp_path_factory.mktemp("two") / "run"
    run(small(**TWO), out=folder)
    return folder


def evo(*arguments):
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    return result.exit_code, result.output


def test_the_leaderboard_has_the_front_which_no_agent_dominates(played):
    frame = leaderboard(played)
    assert frame["front"].dtype == "boolean"
    best, others = frame[frame["front"]], frame[~frame["front"]]
    assert bool(frame["front"].iloc[0])  # the winner, best in the first objective
    assert frame["fitness"].iloc[0] == frame["fitness"].max()
    assert best["objective_tokens_se"].notna().all()
    points = [(a.score.mean, a.score.further[0].mean) for a in front(read_rounds(played))]
    assert list(zip(best["fitness"], best["objective_tokens"], strict=True)) == points
    assert 1 < len(points) <= 4
    for _, row in others.iterrows():
        fitness, tokens = row["fitness"], row["objective_tokens"]
        better = [(f, t) for f, t in points if f >= fitness and t <= tokens]
        assert better or len(points) == 4


def test_all_checkpoints_of_the_front_are_kept_and_verified(played):
    assert all((played / agent.checkpoint).is_dir() for agent in front(read_rounds(played)))
    assert any(agent.round < 2 for agent in front(read_rounds(played)))
    assert evo("verify", played)[0] == 0


def test_trials_have_a_value_for_each_objective(played):
    study = study_of(played)
    assert [one.name for one in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert study.metric_names == ["fitness", "tokens"]
    agents = [agent for record in read_rounds(played) for agent in record.agents]
    means = [[a.score.mean, a.score.further[0].mean] for a in agents]
    assert [trial.values for trial in study.trials] == means


def test_report_and_terminal_show_the_front(played, tmp_path):
    code, out = evo("leaderboard", played)
    assert code == 0
    assert "objective_tokens" in out
    page = write_report(played, tmp_path / "page.html").read_text()
    assert 'id="front"' in page
    assert "tokens (smaller is better)" in page


def test_prefer_chooses_from_the_front_by_weights_of_normalised_objectives(played, tmp_path):
    best = front(read_rounds(played))
    shortest = min(best, key=lambda one: one.score.further[0].mean)
    code, _ = evo("export", played, tmp_path / "a", "--prefer", "tokens=1")
    assert code == 0
    about = json.loads((tmp_path / "a" / "export.json").read_text())
    assert (about["agent"], about["round"]) == (shortest.agent, shortest.round)
    options = ("--row", "0", "--n", "1", "--no-base")
    code, out = evo("sample", played, *options, "--prefer", "tokens=1")
    assert code == 0
    assert f"agent {shortest.agent}" in out
    assert f"round {shortest.round + 1}" in out
    export(played, tmp_path / "b", prefer={"tokens": 0.0}, anyway=True)
    about = json.loads((tmp_path / "b" / "export.json").read_text())
    assert (about["agent"], about["round"]) == (best[0].agent, best[0].round)


def test_before_the_end_the_best_of_the_front_is_exported_also_from_an_earlier_round(tmp_path):
    folder = run(small(**{**TWO, "seed": 5}), out=tmp_path / "run")
    (folder / "summary.json").unlink()
    best = front(read_rounds(folder))[0]
    assert best.round < 2  # else this tests nothing
    assert evo("export", folder, tmp_path / "out")[0] == 0
    about = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (about["agent"], about["round"], about["kind"]) == (best.agent, best.round, "archive")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "validation tokens: " in card
    assert f"best agent of all rounds, as it was after round {best.round + 1}" in card


def test_trackers_receive_every_objective(played):
    last = read_rounds(played)[-1]
    values = values_of(RoundDone(1, last)).values
    for agent in last.agents:
        assert values[f"agent-{agent.agent:02d}"]["objective_tokens"] == agent.score.further[0].mean


def test_the_recipe_of_the_winner_measures_the_first_objective_alone(played, tmp_path):
    recipe(played, tmp_path / "one.yaml")
    found = load(tmp_path / "one.yaml").evolve
    assert (found.selection.kind, found.fitness.objectives) == ("none", [])
    assert found.fitness.reward == "contains"


@pytest.mark.parametrize(
    ("prefer", "message"),
    [
        ({"tokns": 0.2}, r"one of the objectives contains, tokens, got 'tokns'.*mean 'tokens'"),
        ({"tokens": 1.5}, "a weight from 0 to 1 for tokens, got 1.5"),
        ({"tokens": 0.7, "contains": 0.6}, "together at most 1, got 1.3"),
        ({"tokens": 0.0, "contains": 0.0}, "weights above 0"),
    ],
)
def test_a_wrong_preference_is_named(played, tmp_path, prefer, message):
    with pytest.raises(ConfigError, match=message):
        export(played, tmp_path / "out", prefer=prefer)
    assert not (tmp_path / "out").exists()


def test_a_run_with_one_goal_has_no_front(tmp_path):
    folder = run(small(population__rounds=1), out=tmp_path / "run")
    assert "front" not in leaderboard(folder)
    assert "objective" not in (folder / "leaderboard.csv").read_text()
    with pytest.raises(ConfigError, match=r"evolve\.fitness\.objectives, got one with one goal"):
        export(folder, tmp_path / "out", prefer={"tokens": 0.2})


def test_a_stopped_run_ends_as_if_it_had_not_been_stopped(played, tmp_path):
    resumed = stopped_and_resumed(small(**TWO), tmp_path / "run", ("evaluate", 2))
    assert outcome(resumed) == outcome(played)


class Shortest:
    """A selection of one's own, which reads the further objectives of the scores."""

    def plan(self, histories, places, rng):
        tokens = [history[-1].further[0].mean for history in histories]
        best = tokens.index(min(tokens))
        return tuple(Offspring(p, best, p == best) for p in range(places))


def test_a_selection_of_ones_own_sees_the_objectives(tmp_path):
    agents = GRPO.population(
        size=2, model="tiny-foods", device="cpu", seed=1, group_size=4, init="same",
        hyperparameters={"lr": {"min": 1e-3, "max": 1e-2}}, lr=5e-3,
    )  # fmt: skip
    agents.train(
        "foods", rounds=2, steps_per_round=1, selection=Shortest(),
        exploration="none", significance=None, sizes="constant",
        fitness={"objectives": GOALS, "prompts": 8, "test_prompts": 4, "test_samples": 1},
    )  # fmt: skip
    first = agents.rounds[0]
    tokens = {a.agent: a.score.further[0].mean for a in first.agents}
    sources = {m.agent if m.parent is None else m.parent for m in first.members}
    assert sources == {min(tokens, key=tokens.get)} or len(set(tokens.values())) == 1


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"objectives": []}, "evolve.fitness.objectives", "two or more with selection pareto, got"),
        ({"objectives": ["contains"]}, "evolve.fitness.objectives", "two or more, got a list ([Ob"),
        ({"objectives": [*GOALS, "contains"]}, "evolve.fitness.objectives[2].name", "once"),
        ({"objectives": ["contains", {"name": "tokens", "direction": "down"}]},
         "evolve.fitness.objectives[1].direction", "maximize"),
        ({"objectives": ["contains", "tokens"]}, "objectives[1].direction", "expected maximize or"),
        ({"objectives": GOALS[::-1]}, "evolve.fitness.objectives[0]", "put it after one"),
        ({"objectives": [*GOALS, "fitness"]}, "objectives[2].name", "fitness as the first"),
        ({"reward": "contains"}, "evolve.fitness.reward", "null unless 'fitness' is the first"),
        ({"racing": 1.0}, "evolve.fitness.racing", "expected 0 with objectives"),
        ({"window": 2}, "evolve.fitness.window", "expected 1 with objectives"),
        ({"selection": "tournament"}, "evolve.selection", "expected pareto or module:Class with"),
        ({"exploration": "optuna"}, "evolve.exploration", "several goals, got the string 'optuna'"),
    ],
)  # fmt: skip
def test_settings_that_contradict_objectives_are_refused(changes, path, message):
    own = {"selection", "archive", "exploration"}
    keys = {f"evolve__{k}" if k in own else f"evolve__fitness__{k}": changes[k] for k in changes}
    with pytest.raises(ConfigError) as info:
        small(**{**TWO, **keys})
    assert path in str(info.value)
    assert message in str(info.value)


def test_an_objective_that_the_task_lacks_is_named_before_anything_trains(tmp_path):
    goals = ["contain", {"name": "token", "direction": "minimize"}]
    config = small(**{**TWO, "evolve__fitness__objectives": goals})
    with pytest.raises(
        ConfigError, match=r"objectives\[0\].*'contain'; did you mean 'contains'"
    ) as e:
        run(config, out=tmp_path / "run")
    assert "objectives[1].name: expected one of contains, fitness, tokens" in str(e.value)
    assert "did you mean 'tokens'?" in str(e.value)
    assert not (tmp_path / "run").exists()
