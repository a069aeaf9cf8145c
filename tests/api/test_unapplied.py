"""Several calls of `train` give what one call gives, also where one is interrupted."""

import warnings

import pytest
from small_run import Told
from tiny_cohort import assert_same_agents, same, weights

from evo_grpo import GRPO, Population, leaderboard
from evo_grpo.api.agilerl.evolution import Mutations, TournamentSelection
from evo_grpo.errors import ConfigError
from evo_grpo.learn.updates import OwnOptimizers
from evo_grpo.record.observer import Observer

AGENTS = {
    "model": "tiny-sums",
    "lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
    "group_size": 4,
    "prompts_per_step": 2,
    "lr": 1e-2,
    "seed": 5,
    "device": "cpu",
    "hyperparameters": {"lr": {"min": 1e-4, "max": 1e-1}, "beta": {"min": 0.0, "max": 0.1}},
}
ROUND = {
    "steps_per_round": 1,
    "fitness": {"prompts": 6, "test_prompts": 4, "test_samples": 1},
    # What a call does not say follows from its own length.
    "decisions": "every",
    "sizes": [6, 3, 2],
    "progress": False,
}
SUMS = {"kind": "sums", "args": {"high": 20}}
#: Two of the agents learn so fast that their KL divergence explodes.
WILD = {
    "beta": 1e-3,
    "hyperparameters": {"lr": {"min": 1e-4, "max": 10.0}},
    "init": [{"lr": 1e-3}] * 4 + [{"lr": 5.0}] * 2,
}
CASES = {
    "as it comes": {},
    "every difference": {"significance": None},
    "constant": {"sizes": "constant", "significance": None, "archive": True},
    "window": {
        "significance": None,
        "sizes": "constant",
        "fitness": {**ROUND["fitness"], "window": 2},
    },
    "collapsed": {"dead_steps": 1, "significance": None, "sizes": "constant"},
    "optuna": {"exploration": {"kind": "optuna"}, "significance": None},
    "tournament": {"selection": {"kind": "tournament", "size": 2}, "significance": None},
    "afresh": {"inherit_optimizer": False, "significance": None},
}


def make(size=6, **given):
    return GRPO.population(size=size, **{**AGENTS, **given})


def test_a_call_that_is_refused_selects_nothing(tmp_path):
    population = make()
    population.train(SUMS, rounds=1, **ROUND)
    before = [(agent.slot, agent.state.member, agent.hparams) for agent in population]
    with pytest.raises(ConfigError, match="expected a population without rounds"):
        population.train(SUMS, rounds=1, out=tmp_path / "run", **ROUND)
    assert [(agent.slot, agent.state.member, agent.hparams) for agent in population] == before
    population.train(SUMS, rounds=1, **ROUND)  # this one does
    assert len(population) < len(before)


def board(population):
    return population.leaderboard().drop(columns=["wall_seconds", "checkpoint"])


def assert_alike(first, second):
    assert_same_agents(first, second)
    members = [[agent.state.member for agent in population] for population in (first, second)]
    assert members[0] == members[1]
    assert board(first).equals(board(second))
    assert [r.members for r in first.rounds] == [r.members for r in second.rounds]
    # As text, for NaN is not equal to itself.
    assert repr([r.decisions for r in first.rounds]) == repr([r.decisions for r in second.rounds])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_four_calls_of_a_round_are_one_call_of_four(case):
    given = {**ROUND, **CASES[case]}
    once, often = (make(**WILD) if case == "collapsed" else make() for _ in range(2))
    once.train(SUMS, rounds=4, **given)
    for _ in range(4):
        often.train(SUMS, rounds=1, **given)
    assert_alike(once, often)
    lives = {member.id for record in once.rounds for member in record.members}
    assert max(lives) > 5  # somebody was copied, or mutated


def test_a_further_call_keeps_the_decisions_and_the_places_of_the_first():
    once, twice = make(4), make(4)
    given = {name: ROUND[name] for name in ("steps_per_round", "fitness", "progress")}
    once.train(SUMS, rounds=8, decisions=[2, 4], sizes=[4, 4, 2], **given)
    twice.train(SUMS, rounds=4, decisions=[2, 4], **given)
    twice.train(SUMS, rounds=3, **given)
    twice.train(SUMS, rounds=1, **given)
    assert [len(r.agents) for r in twice.rounds] == [4, 4, 2, 2, 2, 2, 2, 2]
    assert [n for n, r in enumerate(once.rounds, start=1) if not r.between] == [2, 4, 6, 8]
    # The end of a call is evaluated too.
    assert [n for n, r in enumerate(twice.rounds, start=1) if not r.between] == [2, 4, 6, 7, 8]


def test_a_call_into_a_folder_and_one_without_are_one_call(tmp_path):
    once, twice = make(), make()
    once.train(SUMS, rounds=3, **ROUND)
    twice.train(SUMS, rounds=1, out=tmp_path / "run", **ROUND)
    twice.train(SUMS, rounds=2, **ROUND)
    assert board(once).equals(board(twice))
    for one, other in zip(once, twice, strict=True):
        assert same(weights(once.cohort, one.slot), weights(twice.cohort, other.slot))


def test_a_call_that_a_rule_ended_goes_on_with_its_selection():
    once, twice = make(), make()
    once.train(SUMS, rounds=3, **ROUND)
    twice.train(SUMS, rounds=9, stop={"tokens": 1}, **ROUND)
    assert len(twice.rounds) == 1
    twice.train(SUMS, rounds=2, **ROUND)
    assert board(once).equals(board(twice))


@pytest.mark.slow
def test_looking_at_agents_changes_no_selection(tmp_path):
    once, twice = make(), make()
    once.train(SUMS, rounds=2, **ROUND)
    twice.train(SUMS, rounds=1, **ROUND)
    twice.test(SUMS["kind"])
    twice[0].test(SUMS["kind"])
    twice[1].clone()
    twice.save(tmp_path)
    twice[2].get_action("1+1=")
    twice.train(SUMS, rounds=1, **ROUND)
    assert [r.decisions for r in once.rounds] == [r.decisions for r in twice.rounds]
    assert board(once).drop(columns="member").equals(board(twice).drop(columns="member"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["collapsed", "constant"])
def test_a_population_that_was_saved_in_between_is_the_same(case, tmp_path):
    given = {**ROUND, **CASES[case]}
    once, twice = (make(**WILD) if case == "collapsed" else make() for _ in range(2))
    once.train(SUMS, rounds=3, **given)
    twice.train(SUMS, rounds=1, **given)
    for _ in range(2):
        twice.save(tmp_path)
        twice = Population.load(tmp_path, device="cpu")
        twice.train(SUMS, rounds=1, **given)
    assert_alike(once, twice)


def hand_lr(population, folder):
    population[1].hparams = population[1].hparams.replace(lr=3e-3)
    return "agents were changed (1)"


def hand_weights(population, folder):
    population[2].save_checkpoint(folder)
    population[1].load_checkpoint(folder, load_optimizer=True)
    return "agents were changed (1)"


def hand_moments(population, folder):
    state = population[3].state
    state.optimizer = population.cohort.fresh_optimizer(state.slot, state.hparams)
    return "agents were changed (3)"


def hand_mutations(population, folder):
    Mutations(no_mutation=0, rl_hp=1).mutation(population)
    return "agents were changed (0, "


def hand_keep(population, folder):
    population.keep(population.slots[:3])
    return "agents were changed (0, 1, 2)"


@pytest.mark.parametrize("change", [hand_lr, hand_weights, hand_moments, hand_mutations, hand_keep])
def test_what_a_person_changed_stays_and_is_said(change, tmp_path):
    population = make()
    population.train(SUMS, rounds=1, significance=None, **ROUND)
    told = change(population, tmp_path)
    slots = list(population.slots)
    members = [agent.state.member.id for agent in population]
    hparams = [agent.hparams for agent in population]
    with pytest.warns(UserWarning, match="the selection after round 1 is skipped") as c:
        population.train(SUMS, rounds=1, significance=None, **ROUND)
    assert told in str(c[0].message)
    assert [a.agent for a in population.rounds[1].agents] == slots
    assert [a.member for a in population.rounds[1].agents] == members
    assert [a.hparams for a in population.rounds[1].agents] == hparams


def test_a_clone_between_two_calls_is_no_member_of_the_plan():
    population = make(4)
    given = {**ROUND, "sizes": "constant", "significance": None}
    population.train(SUMS, rounds=1, **given)
    clone = population[0].clone()
    population.train(SUMS, rounds=1, **given)
    members = [agent.state.member.id for agent in (*population, clone)]
    members += [member.id for member in population.rounds[0].members]
    assert members.count(clone.state.member.id) == 1


class _Exhausted:
    def explore(self, candidate, ranges, rng):
        raise KeyError("nothing more to try")


def test_a_call_without_a_plan_says_so_and_the_next_call_warns():
    population, notes = make(2), []
    given = {**ROUND, "sizes": "constant", "significance": None, "exploration": _Exhausted()}
    told = Observer()
    told.note = notes.append
    population.train(SUMS, rounds=1, observer=told, **given)
    assert len(population.rounds) == 1, "the last round is not lost"
    assert notes[0].startswith("no round can follow round 1: explore in ")
    assert "KeyError: 'nothing more to try'" in notes[0]
    with pytest.warns(UserWarning, match="round 1 is skipped, .* ended without a plan"):
        population.train(SUMS, rounds=1, **{**given, "exploration": "none"})


def test_a_selection_by_hand_takes_the_place_of_the_plan():
    population = make(4)
    population.train(SUMS, rounds=1, **{**ROUND, "sizes": "constant"})
    TournamentSelection(2, True, 4).select(population)
    members = [agent.state.member.id for agent in population]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        population.train(SUMS, rounds=1, **{**ROUND, "sizes": "constant"})
    assert [a.member for a in population.rounds[1].agents] == members


@pytest.mark.slow
def test_a_call_selects_after_its_last_round_by_its_own_settings():
    population = make()
    population.train(SUMS, rounds=1, significance=None, **ROUND)
    assert len(population) == 6
    given = {**ROUND, "selection": {"kind": "none"}, "exploration": "none", "sizes": None}
    population.train(SUMS, rounds=1, **given)
    assert len(population.rounds[1].agents) == 3
    population.train(SUMS, rounds=1, **{**ROUND, "significance": None, "sizes": [6, 3, 1]})
    assert len(population.rounds[2].agents) == 3
    assert population.rounds[0].decisions
    assert not population.rounds[1].decisions


# --- calls that are interrupted -------------------------------------------------------------------

#: The weights move at every step, agents are copied, agents leave, and the archive is overwritten.
LEAVING = {**ROUND, "steps_per_round": 2, "sizes": [5, 3, 2], "significance": None}
LEAVING.pop("decisions")
INTERRUPTED = {"hyperparameters": {"lr": {"min": 1e-4, "max": 1e-1}}}


@pytest.fixture(scope="module")
def uninterrupted():
    """A population after each of three rounds, by the number of rounds."""
    made = {}
    for rounds in (1, 3):
        made[rounds] = make(5, **INTERRUPTED)
        made[rounds].train(SUMS, rounds=rounds, **LEAVING)
    return made


@pytest.mark.parametrize(
    ("stop", "played", "records"),
    [
        (("learn", 0), 0, False),
        (("done", 1), 1, False),
        (("evaluate", 2), 2, False),
        (("evaluate", 1), 1, True),
        (("test", 0), 1, True),  # with the selection that the first call has left out
    ],
)
def test_the_next_call_gives_what_one_call_gives(stop, played, records, uninterrupted, tmp_path):
    population, out = make(5, **INTERRUPTED), tmp_path / "run" if records else None
    rounds = 1 if stop[0] == "test" else 3
    with pytest.raises(KeyboardInterrupt):
        population.train(SUMS, rounds=rounds, out=out, observer=Told(stop), **LEAVING)
    assert population.summary is None
    assert len(population.rounds) == played
    assert not records or len(leaderboard(out)["round"].unique()) == played
    assert [agent.steps for agent in population] == [2 * played] * len(population)
    assert len(population) == (5 if stop[0] == "test" else [5, 3, 2][played])
    population.train(SUMS, rounds=3 - played, **LEAVING)
    assert_alike(population, uninterrupted[3])


def test_a_call_after_an_interrupted_one_keeps_its_decisions():
    population, given = make(3, **INTERRUPTED), {**LEAVING, "sizes": "constant"}
    first = {"rounds": 5, "decisions": [1, 4, 5], "observer": Told(("learn", 2))}
    with pytest.raises(KeyboardInterrupt):
        population.train(SUMS, **first, **given)
    population.train(SUMS, rounds=3, **given)
    decided = [n for n, record in enumerate(population.rounds, start=1) if not record.between]
    assert decided == [1, 4, 5]


def test_gradients_of_an_unfinished_step_are_dropped(uninterrupted, monkeypatch):
    population, calls = make(5, **INTERRUPTED), []

    def interrupted(*_):
        calls.append(1)
        if len(calls) == 2:  # the second minibatch or step
            raise KeyboardInterrupt
        return step(*_)

    step = OwnOptimizers.step
    with monkeypatch.context() as patch:
        patch.setattr(OwnOptimizers, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            population.train(SUMS, rounds=1, **LEAVING)
    assert population.rounds == []
    population.train(SUMS, rounds=1, **LEAVING)
    assert_alike(population, uninterrupted[1])
