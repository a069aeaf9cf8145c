"""Rules of population.stop end a run early, with all that belongs to an end."""

import json
import shutil
from dataclasses import replace

import pytest
from small_run import Told, outcome
from small_run import small as smaller

from evo_grpo import resume, run
from evo_grpo.analysis.arms import compare
from evo_grpo.analysis.verify import verify
from evo_grpo.api.agent import GRPO
from evo_grpo.evolve.intervals import interval
from evo_grpo.record.files import seal
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.replay import read_schedule
from evo_grpo.record.stopping import RoundTotals, why_it_ended
from evo_grpo.record.summary import read_summary

ROUNDS = 5


def small(**changes):
    """With so many prompts the best fitness differs from round to round, each of which decides."""
    return smaller(evolve__fitness__prompts=16, population__decisions="every", **changes)


def played(folder, observer=None, **stop):
    run(small(population__rounds=ROUNDS, population__stop=stop), out=folder, observer=observer)
    return read_rounds(folder), read_summary(folder)


def sound(folder):
    found = verify(folder)
    assert (found.damage, found.notes) == ([], [])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without rules, by which the others are made to end where they should."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    played(folder)
    return folder


def rule_for(name, rounds, ends):
    """The rule of a name by which these rounds end after the one of number `ends`."""
    bests = [RoundTotals.of(record).best for record in rounds]
    if name in ("fitness", "rewards"):
        scores = [[agent.score for agent in record.agents] for record in rounds]
        sure = [max(interval(s.mean, s.se, s.n)[0] for s in of if s) for of in scores]
        ends = next(n for n in range(1, ROUNDS) if sure[n] > max(sure[:n]))
        return (sure[ends] if name == "fitness" else {"exact": sure[ends]}), ends
    if name == "tokens":
        of = [sum(a.tokens for a in r.agents) + r.evaluation_tokens for r in rounds]
        return float(sum(of[: ends + 1])), ends
    since = [n - bests.index(max(bests[: n + 1])) for n in range(ROUNDS)]
    ends = next(n for n in range(ROUNDS) if since[n] >= 1)
    return 1, ends


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fitness", "rewards", "patience", "tokens"])
def test_a_rule_ends_the_run_after_the_round_in_which_it_holds(tmp_path, whole, name):
    value, ends = rule_for(name, read_rounds(whole), 2)
    observer = Told()
    rounds, summary = played(tmp_path / "run", observer, **{name: value})
    assert len(rounds) == ends + 1 < ROUNDS
    assert [record.stopped for record in rounds] == [()] * ends + [(name,)]
    assert summary["stopped"] == {name: value}
    assert summary["rounds"] == ends + 1
    # The end is that of any run: final comparison, test, summary.
    assert observer.calls[-2:] == [("test", ends), ("finished", ends + 1)]
    short = outcome(run(small(population__rounds=ends + 1), out=tmp_path / "short"))
    found = outcome(tmp_path / "run")
    assert found["leaderboard"] == short["leaderboard"]
    assert found["summary"]["best"] == short["summary"]["best"]
    sound(tmp_path / "run")


def test_minutes_count_the_rounds_before_a_stop_too(tmp_path):
    config = small(population__rounds=ROUNDS, population__stop={"minutes": 1e-9})
    run(config, out=tmp_path / "at once")
    assert len(read_rounds(tmp_path / "at once")) == 1
    assert read_summary(tmp_path / "at once")["stopped"] == {"minutes": 1e-9}
    # Two rounds that took an hour, as their records say; the third one ends the run.
    config = small(population__rounds=ROUNDS, population__stop={"minutes": 60.0})
    with pytest.raises(KeyboardInterrupt):
        run(config, out=tmp_path / "run", observer=Told(("learn", 2)))
    _make_slow(tmp_path / "run", 1800.0)
    resume(tmp_path / "run")
    assert len(read_rounds(tmp_path / "run")) == 3


def _make_slow(folder, seconds):
    from evo_grpo.record.records import to_json

    rounds = [replace(record, ended=record.started + seconds) for record in read_rounds(folder)]
    (folder / "rounds.jsonl").write_text("".join(seal(to_json(record)) for record in rounds))


@pytest.fixture(scope="module")
def ended(tmp_path_factory, whole):
    """A run that the rule on tokens ended after its second round; copy it to change it."""
    value, _ = rule_for("tokens", read_rounds(whole), 1)
    folder = tmp_path_factory.mktemp("ended") / "run"
    played(folder, tokens=value)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("at", ["done", "test"])
def test_a_run_that_is_stopped_at_such_an_end_comes_to_it(tmp_path, whole, ended, at):
    value, ends = rule_for("tokens", read_rounds(whole), 1)
    with pytest.raises(KeyboardInterrupt):
        played(tmp_path / "run", Told((at, ends)), tokens=value)
    resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(ended)
    sound(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [4, ROUNDS, ROUNDS + 1])
@pytest.mark.parametrize("stop", [None, ("learn", 2), ("learn", 3)])
def test_more_rounds_are_those_of_a_run_without_the_rule(tmp_path, ended, rounds, stop):
    shutil.copytree(ended, tmp_path / "run")
    if stop is None:
        resume(tmp_path / "run", rounds=rounds)
    else:
        with pytest.raises(KeyboardInterrupt):
            resume(tmp_path / "run", rounds=rounds, observer=Told(stop))
        resume(tmp_path / "run")
    run(small(population__rounds=rounds), out=tmp_path / "long")
    first, second = outcome(tmp_path / "run"), outcome(tmp_path / "long")
    assert first["summary"] == second["summary"]
    assert first["leaderboard"] == second["leaderboard"]
    assert first["completions"] == second["completions"]
    assert [record.stopped for record in read_rounds(tmp_path / "run")][1] == ("tokens",)
    sound(tmp_path / "run")


@pytest.mark.slow
def test_a_comparison_has_the_tokens_of_the_rounds_that_were_played(tmp_path, ended):
    shutil.copytree(ended, tmp_path / "run")
    result = compare(tmp_path / "run")
    tokens = {arm["name"]: sum(arm["tokens"].values()) for arm in result["arms"]}
    for name in ("guess", "random"):
        text = (tmp_path / "run" / "compare" / name / "population.yaml").read_text()
        assert "\n    tokens: null" in text
        assert abs(tokens[name] / tokens["evolved"] - 1) < 0.25  # a step more, at most
        assert read_summary(tmp_path / "run" / "compare" / name)["stopped"] == {}
    sound(tmp_path / "run")
    schedule = read_schedule(tmp_path / "run")
    assert [one.round for one in schedule.rounds] == [0, 1]


def without_signal(folder, rounds=ROUNDS, observer=None, **changes):
    """A run whose completions of a prompt are all equal, so that no group has an advantage."""
    config = small(population__rounds=rounds, algorithm__temperature=1e-4, **changes)
    with pytest.warns(UserWarning, match="round 1 had nothing to learn from"):
        run(config, out=folder, observer=observer)
    return read_rounds(folder), read_summary(folder)


@pytest.mark.slow
def test_a_run_that_has_nothing_to_learn_from_ends_after_three_rounds(tmp_path):
    rounds, summary = without_signal(tmp_path / "run")
    assert [record.stopped for record in rounds] == [(), (), ("no_signal",)]
    assert summary["stopped"] == {"no_signal": 3}
    assert why_it_ended(summary) == (
        "population.stop ended it after round 3: 3 rounds in a row had no group with different "
        "rewards to learn from"
    )
    sound(tmp_path / "run")
    resume(tmp_path / "run", rounds=4)
    assert len(read_rounds(tmp_path / "run")) == 4
    # The last planned round ends the run, not the rule; without the rule all rounds are played.
    rounds, summary = without_signal(tmp_path / "three", rounds=3)
    assert (len(rounds), summary["stopped"]) == (3, {})
    rounds, summary = without_signal(tmp_path / "all", population__stop={"no_signal": None})
    assert (len(rounds), summary["stopped"]) == (ROUNDS, {})


def test_rules_may_change_between_two_rounds(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        played(tmp_path / "run", Told(("learn", 2)))
    file = tmp_path / "run" / "population.yaml"
    file.write_text(file.read_text().replace("\n    tokens: null", "\n    tokens: 1"))
    resume(tmp_path / "run")
    assert len(read_rounds(tmp_path / "run")) == 3
    changes = json.loads((tmp_path / "run" / "inputs.json").read_text())["changes"]
    assert [(one["name"], one["to"]) for one in changes] == [("population.stop.tokens", 1.0)]
    sound(tmp_path / "run")


def test_a_run_that_a_rule_ended_and_that_is_extended_says_that_it_goes_on(whole):
    last = replace(read_rounds(whole)[-1], stopped=("fitness",))
    assert last.is_end
    assert last.extended().stopped == ("fitness",)
    assert not last.extended().is_end


def test_a_population_in_python_goes_on_when_it_is_asked_to():
    population = GRPO.population(size=2, model="tiny-sums", seed=1, prompts_per_step=2)
    given = {"steps_per_round": 1, "progress": False, "fitness": {"prompts": 4}}
    first = population.train("sums", rounds=3, stop={"tokens": 1.0}, **given)
    assert len(first) == 1
    second = population.train("sums", rounds=2, stop={"tokens": 1.0}, **given)
    assert len(second) == 2
