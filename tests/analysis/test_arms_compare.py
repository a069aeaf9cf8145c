"""A run beside the same population without evolution, at equal tokens."""

import shutil

import pytest
from small_run import Told, outcome, small

import evo_grpo
from evo_grpo import run
from evo_grpo.analysis.arms import TokenLimit, _arm_config, compare
from evo_grpo.errors import ConfigError, RunDirError, RunNotFoundError
from evo_grpo.population.stats import Tally
from evo_grpo.record.arms import read_comparison
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.observer import Observer
from evo_grpo.record.summary import read_summary

CONFIG = small(
    population__size=4,
    population__rounds=2,
    population__sizes=None,
    population__steps_per_round=2,
    evolve__hyperparameters={"lr": {"min": 1e-4, "max": 1e-1}},
    evolve__archive=True,
    evolve__fitness={
        **{"prompts": 6, "test_prompts": 12, "test_samples": 2},
        **{"final_samples": 2, "racing": 0.5},
    },
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(CONFIG, out=tmp_path_factory.mktemp("runs") / "evolved")


@pytest.fixture(scope="module")
def compared(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "compared"
    shutil.copytree(finished, folder)
    return folder, compare(folder)


def tokens(folder):
    rounds, summary = read_rounds(folder), read_summary(folder)
    return {
        "training": sum(a.tokens for r in rounds for a in r.agents),
        "evaluation": sum(r.evaluation_tokens for r in rounds) + summary["final_tokens"],
    }


@pytest.mark.slow
def test_all_have_the_tokens_of_the_run_to_within_a_step(compared):
    folder, result = compared
    *others, evolved = result["arms"]
    assert [arm["name"] for arm in result["arms"]] == ["guess", "random", "evolved"]
    total = sum(evolved["tokens"].values())
    step = evolved["tokens"]["training"] / 4
    for arm in result["arms"]:
        assert arm["tokens"] == tokens(folder / arm["folder"])
    for arm in others:
        assert len(read_rounds(folder / arm["folder"])) == 1, "evaluated once, at the end"
        # As many and not more than a step above; an evaluation may be a few tokens shorter.
        assert -0.2 * step <= sum(arm["tokens"].values()) - total <= 1.2 * step
    assert others[0]["tokens"]["training"] > evolved["tokens"]["training"]


def test_nobody_is_selected_and_nothing_mutates(compared):
    folder, _ = compared
    guess, random = (read_rounds(folder / "compare" / name)[0] for name in ("guess", "random"))
    assert {agent.hparams for agent in guess.agents} == {CONFIG.algorithm.hparams()}
    lrs = [agent.hparams.lr for agent in random.agents]
    assert len(set(lrs)) == 4
    assert CONFIG.algorithm.lr not in lrs, "all of them are drawn, the first one too"
    assert all(1e-4 <= lr <= 1e-1 for lr in lrs)
    for record in (guess, random):
        assert len(record.agents) == 4
        assert record.decisions == ()


def test_the_best_by_validation_is_judged_on_the_same_prompts_with_the_same_draws(compared):
    folder, result = compared
    base = read_summary(folder)["base"]
    for arm in result["arms"]:
        place = folder / arm["folder"]
        summary = read_summary(place)
        assert arm["test"] == {key: summary["best"][key] for key in ("mean", "se", "n")}
        # The base model answers exactly as it did beside the run.
        assert summary["base"] == base
    for name in ("guess", "random"):
        (record,) = read_rounds(folder / "compare" / name)
        best = max(record.agents, key=lambda a: (a.score.mean, -a.agent))
        assert read_summary(folder / "compare" / name)["best"]["agent"] == best.agent


def test_the_run_is_compared_with_each_population_prompt_by_prompt(compared):
    folder, result = compared
    own = read_summary(folder)["best"]
    assert [one["second"] for one in result["differences"]] == ["guess", "random"]
    for one in result["differences"]:
        other = read_summary(folder / "compare" / one["second"])["best"]
        apart = [a - b for a, b in zip(own["per_prompt"], other["per_prompt"], strict=True)]
        assert one["first"] == "evolved"
        assert one["difference"] == pytest.approx(sum(apart) / len(apart))
        assert one["low"] <= one["difference"] <= one["high"]
        assert one["prompts"] == len(apart) == 12


def test_the_result_is_written_and_read_instead_of_trained_again(compared):
    folder, result = compared
    told = Told()
    assert compare(folder, observer=told) == result == read_comparison(folder)
    assert told.calls == []
    assert evo_grpo.compare is compare


@pytest.mark.slow
@pytest.mark.parametrize("stop", [("learn", 0), ("done", 0), ("test", 0)], ids=str)
def test_a_comparison_that_was_stopped_goes_on(finished, compared, tmp_path, stop):
    folder = shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        compare(folder, observer=Told(stop))
    assert read_comparison(folder) is None
    assert compare(folder) == compared[1]
    for name in ("guess", "random"):
        again, whole = (outcome(f / "compare" / name) for f in (folder, compared[0]))
        assert again["rounds"] == whole["rounds"]
        assert again["summary"] == whole["summary"]


def test_a_population_of_another_configuration_is_trained_anew(compared, tmp_path):
    folder = shutil.copytree(compared[0], tmp_path / "run")
    (folder / "compare" / "compare.json").unlink()
    config = folder / "compare" / "guess" / "population.yaml"
    config.write_text(config.read_text().replace("seed: 3", "seed: 4"))
    told = Told()
    assert compare(folder, observer=told) == compared[1]
    assert told.calls.count(("started", 0)) == 1


@pytest.mark.filterwarnings("ignore:evolve.hyperparameters is empty")
def test_where_nothing_may_differ_there_is_nothing_to_draw(tmp_path):
    config = small(population__size=2, population__rounds=1, evolve__hyperparameters={})
    result = compare(run(config, out=tmp_path / "run"))
    assert [arm["name"] for arm in result["arms"]] == ["guess", "evolved"]


def test_a_learning_rate_schedule_ends_as_far_from_the_end_as_it_did():
    config = small(algorithm__lr_schedule={"steps": 6}, population__steps_per_round=2)
    arm = _arm_config(config, "guess", "same", budget=1500, training=1000, rounds=3)
    assert arm.population.steps_per_round == 2 * 9  # six steps and a half more, and room
    assert arm.algorithm.lr_schedule.steps == 9
    # Of a run that a rule ended after one round of three.
    arm = _arm_config(config, "guess", "same", budget=1500, training=1000, rounds=1)
    assert arm.population.steps_per_round == 2 * 3
    assert arm.algorithm.lr_schedule.steps == 9


def test_an_observer_gets_the_training_in_tokens_of_its_limit():
    heard = []

    class Watching(Observer):
        def stage(self, round, name, done, total):
            heard.append((name, done, total))

        def note(self, text):
            heard.append(text)

    limit = TokenLimit(100)
    observer = limit.reported_to(Watching())
    observer.stage(0, "learn", 0, 40)
    limit.spent([Tally(tokens=60)])
    observer.stage(0, "learn", 3, 40)
    limit.spent([Tally(tokens=120)])
    observer.stage(0, "learn", 6, 40)
    observer.stage(0, "evaluate", 0, 1)
    observer.note("a sentence")
    tokens = [("learn", done, 100) for done in (0, 60, 100)]
    assert heard == [*tokens, ("evaluate", 0, 1), "a sentence"]


def test_what_cannot_be_compared_is_named(finished, tmp_path):
    with pytest.raises(RunNotFoundError, match="no run folder"):
        compare(tmp_path)
    alone = run(
        small(population__size=1, population__rounds=1, evolve__selection={"kind": "none"}),
        out=tmp_path / "alone",
    )
    with pytest.raises(ConfigError, match="expected at least 2 agents to compare"):
        compare(alone)
    folder = shutil.copytree(finished, tmp_path / "run")
    config = folder / "population.yaml"
    text = config.read_text()
    config.write_text(
        f"# Recorded by Population.train with objects that no file can name: x\n{text}"
    )
    with pytest.raises(RunDirError, match="compare a run whose settings"):
        compare(folder)
    config.write_text(text)
    (folder / "summary.json").unlink()
    with pytest.raises(RunDirError, match=r"finished run.*evo-grpo resume .* --compare"):
        compare(folder)


def test_nothing_is_written_or_removed_through_a_link(compared, tmp_path):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(compared[0], folder)
    (folder / "compare").rename(elsewhere)
    (folder / "compare").symlink_to(elsewhere)
    with pytest.raises(RunDirError, match="a link to"):
        compare(folder, force=True)
    assert (elsewhere / "compare.json").exists()
