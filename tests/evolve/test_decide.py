"""From fitness to the next generation: collapse, the way back from the archive, and the reasons."""

import numpy as np
import pytest

from evo_grpo.errors import RunFailedError
from evo_grpo.evolve.decide import (
    Standing,
    Strategy,
    decide,
    enters_archive,
    keep_all,
    why_collapsed,
)
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.explore.on_copy import NoExploration
from evo_grpo.evolve.protocols import Offspring
from evo_grpo.evolve.select.halving import NoSelection
from evo_grpo.evolve.select.tournament import TournamentSelection
from evo_grpo.evolve.select.truncation import TruncationSelection
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.types import Member, Score, Slot

PROMPTS = 40
SPACE = HyperparameterConfig(lr=RLParameter(1e-5, 1e-1))


def score(right):
    rewards = (1.0,) * right + (0.0,) * (PROMPTS - right)
    return Score(right / PROMPTS, 0.05, PROMPTS, rewards)


def standing(slot, right, *, lr=1e-3, collapsed=""):
    history = [] if right is None else [score(right)]
    return Standing(Slot(slot), Member(slot, Slot(slot)), Hparams(lr=lr), history, collapsed)


def archive(right, lr=1e-2):
    """The best ever: member 1, kept in slot 9."""
    return Standing(Slot(9), Member(1, Slot(2)), Hparams(lr=lr, beta=0.5), [score(right)])


def run(
    standings,
    places,
    *,
    kept=None,
    fresh=None,
    selector=None,
    explorer=None,
    level=0.1,
    space=SPACE,
):
    strategy = Strategy(selector or NoSelection(), explorer or NoExploration(), space, level)
    rng = np.random.default_rng(0)
    return decide(standings, places, kept, strategy, rng, fresh=fresh, round=4, next_id=20)


def behind(slot, archive=35, best=10):
    """Fresh draws of the archive and of the best agent, in this slot, that show a fall."""
    return {Slot(9): score(archive), Slot(slot): score(best)}


def kinds(decisions):
    return [(d.kind, d.agent) for d in decisions]


def test_reasons_name_agents_values_and_errors():
    selector = TournamentSelection(size=2)
    generation, decisions = run([standing(0, 30), standing(1, 2)], 2, selector=selector)
    assert generation.parents == (0, 0)
    (decision,) = decisions
    assert decision.sentence == (
        "agent 1 took agent 0's weights at lr 1e-3: +0.70 ± 0.07 on 40 shared prompts"
    )
    assert (decision.kind, decision.agent, decision.other) == ("copied", 1, 0)
    assert decision.difference == 0.7
    close = [standing(0, 12), standing(1, 11), standing(2, 11)]
    _, decisions = run(close, 3, selector=TournamentSelection(size=3))
    assert [d.sentence for d in decisions] == [
        f"agent {slot} kept its weights, since agent 0 is not significantly ahead: +0.03 ± 0.02 on "
        "40 shared prompts"
        for slot in (1, 2)
    ]
    _, decisions = run([standing(0, 30), standing(1, 2), standing(2, None)], 1)
    assert [d.sentence for d in decisions] == [
        "agent 1 left, since the next round has one place for 3 agents, and agent 0, which "
        "stays, is ahead: +0.70 ± 0.07 on 40 shared prompts",
        "agent 2 left: its update or its fitness was not finite",
    ]


def left_of(standings, places, level=0.1, selector=None):
    """Why agents left, by agent, without the beginning that all of these sentences share."""
    decisions = run(standings, places, level=level, selector=selector)[1]
    start = f"left, since the next round has {places} places for {len(standings)} agents, and "
    found = {d.agent: d.sentence for d in decisions if d.kind == "left"}
    return {agent: text.removeprefix(f"agent {agent} {start}") for agent, text in found.items()}


def test_an_agent_that_leaves_with_a_tie_leaves_by_lot_and_not_behind():
    tournament = TournamentSelection(size=1)
    close = [standing(0, 30), standing(1, 20), standing(2, 21), standing(3, 20)]
    found = left_of(close, 2, selector=tournament)
    (stays,) = {1, 2, 3} - set(found)
    for agent, text in found.items():
        ahead = close[stays].history[0].mean - close[agent].history[0].mean
        assert text.startswith(f"its tie with agent {stays}, which stays, was decided by lot: ")
        assert f": {ahead:+.2f} ± " in text
    # Truncation draws nothing: it goes by the mean.
    (text,) = left_of(close[:3], 2, selector=TruncationSelection()).values()
    assert text.startswith("its tie with agent 2, which stays, was decided by the selection: +")
    # Without a test, every difference counts.
    (text,) = left_of(close[:3], 2, level=None, selector=TruncationSelection()).values()
    assert text.startswith("agent 2, which stays, is ahead: +")


class First:
    """A selection that keeps the first agents, however well the others do."""

    def plan(self, histories, places, rng):
        return tuple(Offspring(n, n, elite=True) for n in range(places))


def test_a_selection_of_ones_own_may_keep_an_agent_that_is_behind():
    found = left_of([standing(0, 3), standing(1, 2), standing(2, 30)], 2, selector=First())
    assert found == {
        2: "the selection kept agent 1, which is behind: -0.70 ± 0.07 on 40 shared prompts"
    }


def test_collapsed_agents_are_no_parents_and_leave_first():
    standings = [standing(0, 30, collapsed="it diverged"), standing(1, 5), standing(2, 4)]
    generation, decisions = run(standings, 2)
    assert generation.slots == (1, 2)
    assert kinds(decisions) == [("collapsed", 0)]
    assert decisions[0].sentence == "agent 0 collapsed: it diverged"
    # Where all have collapsed there is nobody else to go on with.
    generation, _ = run([standing(0, 3, collapsed="x"), standing(1, 2, collapsed="x")], 1)
    assert generation.slots == (0,)


def test_a_population_behind_its_best_goes_on_from_it_at_lower_learning_rates():
    standings = [standing(0, 3), standing(1, 10), standing(2, 9), standing(3, 2)]
    generation, decisions = run(standings, 4, kept=archive(35), fresh=behind(1))
    assert generation.parents == (9, 1, 2, 9), "in the places of the worst"
    restored = {
        m.agent: (m, h) for m, h in zip(generation.members, generation.hparams, strict=True)
    }
    for slot, factor in ((0, 0.5), (3, 0.25)):
        member, hparams = restored[slot]
        assert member.parent == 1
        assert member.born == 5
        assert member.mutation.op == "restore"
        assert member.mutation.changes == {"lr": (1e-2, 1e-2 * factor)}
        assert hparams == Hparams(lr=1e-2 * factor, beta=0.5)
    assert len({m.id for m in generation.members}) == 4
    assert generation.next_id == 22
    assert kinds(decisions) == [("restored", 0), ("restored", 3)]
    assert decisions[0].sentence == (
        "agent 0 took the weights of the best agent so far (member 1) at lr 5e-3, since the "
        "population fell behind it: +0.62 ± 0.08 on 40 shared prompts"
    )


def test_the_archive_comes_back_on_fresh_draws_alone():
    standings = [standing(0, 30), standing(1, 29)]
    nothing = ({}, {Slot(9): score(40)}, {Slot(0): score(0)}, None)
    for fresh in nothing:
        # Its score of the round that it won says nothing: the greatest of many scores is lucky.
        generation, decisions = run(standings, 2, kept=archive(40), fresh=fresh)
        assert (generation.parents, decisions) == ((0, 1), ())
    assert run(standings, 2, fresh=behind(0))[0].parents == (0, 1), "there is no archive"
    for own, best in ((31, 30), (30, 31), (30, 30), (35, 31)):
        generation, decisions = run(standings, 2, kept=archive(40), fresh=behind(0, own, best))
        assert (generation.parents, decisions) == ((0, 1), ())
    # Whatever the archive was in its round, and whoever of the agents was measured.
    assert run(standings, 2, kept=archive(2), fresh=behind(1))[0].parents == (9, 9)
    # The level of the archive is its own.
    generation, _ = run(standings, 2, kept=archive(40), fresh=behind(0), level=None)
    assert generation.parents == (9, 9)


def test_the_level_of_the_archive_decides_when_it_comes_back():
    standings = [standing(0, 30), standing(1, 29)]
    fresh = behind(0, 30, 20)  # ten prompts differ, all in favour of the archive: p = 2 ** -10
    for level, parents in ((2**-9, (9, 9)), (2**-10, (9, 9)), (2**-11, (0, 1))):
        strategy = Strategy(NoSelection(), NoExploration(), SPACE, 0.1, archive_level=level)
        rng = np.random.default_rng(0)
        generation, _ = decide(
            standings, 2, archive(35), strategy, rng, fresh=fresh, round=4, next_id=20
        )
        assert generation.parents == parents


def test_an_archive_that_is_no_better_comes_back_no_more_often_than_its_level():
    rng = np.random.default_rng(3)
    level, runs = 0.05, 2000
    strategy = Strategy(NoSelection(), NoExploration(), SPACE, 0.1, archive_level=level)
    standings = [standing(0, 30), standing(1, 29)]
    restored = 0
    for _ in range(runs):
        hard = rng.random(PROMPTS)
        own, best = (tuple((rng.random(PROMPTS) < hard).astype(float)) for _ in range(2))
        fresh = {Slot(9): Score(sum(own) / PROMPTS, 0.1, PROMPTS, own),
                 Slot(0): Score(sum(best) / PROMPTS, 0.1, PROMPTS, best)}  # fmt: skip
        generation, _ = decide(
            standings, 2, archive(40), strategy, rng, fresh=fresh, round=4, next_id=20
        )
        restored += generation.parents == (9, 9)
    assert 0.02 < restored / runs < 0.065


def test_an_agent_enters_the_archive_unless_it_is_behind_on_fresh_draws():
    assert enters_archive(score(31), score(30))
    assert enters_archive(score(30), score(30))
    assert not enters_archive(score(29), score(30))


def test_of_two_agents_for_two_places_the_worse_becomes_a_copy():
    selector = TournamentSelection()
    generation, decisions = run([standing(0, 20), standing(1, 21)], 2, selector=selector)
    assert generation.parents == (1, 1)
    assert kinds(decisions) == [("copied", 0)]
    # Neither a third agent nor a further place leaves it without a test.
    three = [standing(0, 20), standing(1, 21), standing(2, 20)]
    selector = TournamentSelection(size=3)
    assert run(three, 3, selector=selector)[0].parents == (0, 1, 2)
    # Where three play for two places, two of them stay, and the best is one.
    generation, _ = run(three, 2, selector=selector)
    assert generation.parents == generation.slots
    assert Slot(1) in generation.slots


def test_where_all_have_failed_the_archive_goes_on_alone():
    standings = [standing(slot, None) for slot in range(4)]
    generation, decisions = run(standings, 3, kept=archive(35))
    assert generation.parents == (9, 9)
    assert generation.slots == (0, 1)
    assert [h.lr for h in generation.hparams] == [5e-3, 2.5e-3]
    assert kinds(decisions) == [("restored", 0), ("restored", 1), ("left", 2), ("left", 3)]
    with pytest.raises(RunFailedError, match="at least one agent with a finite fitness"):
        run(standings, 3)


def test_mutations_follow_the_tested_plan():
    selector = TournamentSelection(size=3)
    close = [standing(0, 12), standing(1, 11), standing(2, 11)]
    explorer = Mutations(step="factors")
    generation, _ = run(close, 3, selector=selector, explorer=explorer)
    assert generation.members[0] == Member(0, Slot(0)), "the elite is left as it is"
    # The selection wanted copies of agent 0; survivors mutate from their own values.
    assert generation.parents == (0, 1, 2)
    assert [m.parent for m in generation.members[1:]] == [1, 2]
    assert {m.mutation.op for m in generation.members[1:]} == {"mutate"}


def test_where_nothing_is_decided_all_stay_but_those_that_failed_or_collapsed():
    standings = [standing(0, 30), standing(1, 0, collapsed="it is dead"), standing(2, None)]
    generation, decisions = keep_all(standings, 7, drop=True)
    assert (generation.slots, generation.parents, generation.next_id) == ((0,), (0,), 7)
    assert kinds(decisions) == [("collapsed", 1), ("left", 2)]
    generation, decisions = keep_all(standings, 7, drop=False)  # after the last round
    assert (generation.slots, kinds(decisions)) == ((0, 1, 2), [("collapsed", 1)])
    generation, decisions = keep_all(standings[1:], 7, drop=True)
    assert generation.slots == (1, 2), "there are no others"
    assert decisions == ()


def test_why_an_agent_counts_as_collapsed():
    assert why_collapsed(score(20), score(21), 0.1, 0) == ""
    assert "12 nats per token" in why_collapsed(score(20), score(21), 12.0, 0)
    assert why_collapsed(score(40), score(40), 0.0, 30) == "", "always right is no collapse"
    text = why_collapsed(score(0), score(30), 0.0, 8)
    assert text.startswith("all groups of its last 8 steps had equal rewards")
    assert "+0.75" in text


def test_the_last_evaluation_shows_what_the_last_update_did():
    assert why_collapsed(score(0), score(30), 0.0, 0) == "", "its next steps will tell"
    text = why_collapsed(score(0), score(30), 0.0, 0, last=True)
    assert text.startswith("all prompts of its last evaluation had equal rewards")
    assert why_collapsed(score(1), score(30), 0.0, 0, last=True) == ""
    assert why_collapsed(score(40), score(40), 0.0, 0, last=True) == ""
