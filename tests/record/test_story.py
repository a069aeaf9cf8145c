"""The story of a run, from its records."""

from dataclasses import replace
from itertools import pairwise
from math import nan

import pytest
from shown_run import SUMMARY, agent, candidate, mean_won, two_rounds

from evo_grpo.record.records import RoundRecord
from evo_grpo.record.story import guess_sentence
from evo_grpo.record.view import RunView
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Decision, Mutation


def told(summary, rounds=None, planned=2, **more):
    """The story as kind -> sentences of that kind."""
    rounds = two_rounds() if rounds is None else rounds
    config = {"population": {"rounds": planned}}
    found = {}
    for one in RunView("run", rounds, summary=summary, config=config, **more).story:
        assert one.text.endswith("."), one
        found.setdefault(one.kind, []).append(one.text)
    return {kind: " ".join(texts) for kind, texts in found.items()}


def archive_won():
    """The best of the first round won over that of the last."""
    rounds = two_rounds()
    first = rounds[0].agents[0]
    better = replace(first, score=replace(first.score, mean=0.9))
    rounds[0] = replace(rounds[0], agents=(better, rounds[0].agents[1]))
    best = {**SUMMARY["best"], "kind": "archive", "agent": 0, "member": 0, "parents": []}
    candidates = [candidate("last", 1, 2, [0], 0.7), candidate("archive", 0, 0, [], 0.8)]
    return rounds, {**SUMMARY, "best": best, "candidates": candidates}


def test_a_winner_its_descent_its_schedule_and_its_test():
    story = told(SUMMARY)
    assert list(story) == ["result", "winner", "schedule", "validation", "share"]
    assert story["validation"] == "Its fitness in round 2 was 0.75 ± 0.05 on 64 validation prompts."
    assert story["result"] == (
        "Base 0.33 ± 0.02 → winner 0.81 ± 0.02: +0.48 ± 0.03 on 256 test prompts."
    )
    assert story["winner"] == (
        "The winner is agent 1, the best of the last round. It descends from agent 0 of the first "
        "round."
    )
    assert story["schedule"] == "Its lr went 1e-3 → 1.2e-3."
    # Agent 1's last round, and the first of agent 0, which it was copied from.
    assert story["share"] == (
        "Its line of ancestors trained on 50% of all training tokens (2,000 of 4,000)."
    )


def test_a_mean_that_won_tells_both_lines():
    story = told(mean_won())
    assert story["winner"] == (
        "The winner is the mean of agents 1 and 0, weight by weight; both descend from agent 0 of "
        "the first round."
    )
    assert story["schedule"] == (
        "Agent 1's lr went 1e-3 → 1.2e-3. Agent 0's values were fixed: no hyperparameter may "
        "mutate."
    )
    assert story["choice"] == (
        "It won the final comparison on 64 validation prompts: 0.72 ± 0.03 against 0.70 (agent 1, "
        "a tie) and 0.60 (agent 0 as it was after round 2)."
    )
    # Both rounds of agent 0 and the last of agent 1: what they share counts once.
    assert "75% of all training tokens (3,000 of 4,000)" in story["share"]


def test_a_winner_with_a_smaller_score_than_another_finalist_says_that_it_may_be_chance():
    summary = mean_won()
    first, *others = summary["candidates"]
    greater = {**first, "validation": {**first["validation"], "mean": 0.74}}
    assert told({**summary, "candidates": [greater, *others]})["choice"].endswith(
        "0.72 ± 0.03 against 0.74 (agent 1, not significantly ahead) and 0.60 (agent 0 as "
        "it was after round 2)."
    )


def test_an_archive_that_won_tells_when_it_was_the_best():
    rounds, summary = archive_won()
    story = told(summary, rounds)
    assert story["winner"] == (
        "The winner is agent 0 as it was after round 1, which no later round has beaten. It has "
        "trained on weights of its own since the first round."
    )
    assert "0.80 ± 0.03 against 0.70 (agent 1)" in story["choice"]
    assert "25% of all" in story["share"]
    last = {**SUMMARY, "best": {**summary["best"], "agent": 1, "member": 2}}
    late = told(last)
    assert late["winner"].startswith("The winner is agent 1 as it was after round 2. It descends")


@pytest.mark.parametrize(
    ("gain", "error", "words"),
    [
        (0.476, 0.025, "+0.48 ± 0.03 on 256 test prompts."),
        (0.03, 0.02, "may be chance: no agent of this run clearly beat the base model."),
        (0.0, 0.0, "may be chance"),
        (-0.2, 0.02, "-0.20 ± 0.02 on 256 test prompts. Training made it worse"),
        (-0.01, 0.02, "may be chance"),
        (0.4, None, "+0.40 on 256 test prompts."),
        (None, None, ": - on 256 test prompts."),
    ],
)
def test_a_run_that_beat_the_base_and_one_that_did_not(gain, error, words):
    ahead = 0.0 if "chance" in words or not gain else gain
    base = SUMMARY["base"] | {"per_prompt": [0.807 - ahead] * 256}
    result = told({**SUMMARY, "base": base, "gain": gain, "gain_se": error})["result"]
    assert words in result
    assert ("chance" in result) == ("chance" in words)


def test_each_of_several_rewards_is_told():
    def moved(**means):
        return {name: {"mean": mean, "se": 0.02, "n": 256} for name, mean in means.items()}

    base = {**SUMMARY["base"], "rewards": moved(exact=0.33, format=0.1)}
    best = {**SUMMARY["best"], "rewards": moved(exact=0.81, format=0.9)}
    assert told({**SUMMARY, "base": base, "best": best})["rewards"] == (
        "By reward: exact 0.33 ± 0.02 → 0.81 ± 0.02 and format 0.10 ± 0.02 → 0.90 ± 0.02."
    )
    base, best = ({**one, "rewards": moved(exact=0.5)} for one in (base, best))
    assert "rewards" not in told({**SUMMARY, "base": base, "best": best})  # the same as the result


def test_pass_at_k_of_base_and_winner():
    passes = [
        {"k": k, "correct": 0.5, "base": {"mean": base, "se": 0.02, "n": 256}, "gain": best - base,
         "gain_se": 0.03, "best": {"mean": best, "se": None, "n": 256}}
        for k, base, best in ((1, 0.33, 0.81), (4, 0.9, 0.8))
    ]  # fmt: skip
    assert told({**SUMMARY, "passes": passes})["passes"] == (
        "With a reward of at least 0.5 as correct, pass@1 went from 0.33 ± 0.02 to 0.81 (+0.48 ± "
        "0.03) and pass@4 went from 0.90 ± 0.02 to 0.80 (-0.10 ± 0.03)."
    )


def test_a_test_score_below_that_of_the_final_comparison_is_explained():
    for validation, is_told in ((0.90, True), (0.81, False), (0.70, False)):
        candidates = [candidate("last", 1, 2, [0], validation), candidate("archive", 0, 0, [], 0.5)]
        told_of = told({**SUMMARY, "candidates": candidates})["validation"]
        words = "is lower than its score in the final comparison: that score selected the winner"
        assert (words in told_of) == is_told


def test_one_agent_alone_was_not_selected():
    rounds = [RoundRecord(n, (agent(0, 0, n, 0.5),), {}, mutable=("lr",)) for n in range(2)]
    best = {**SUMMARY["best"], "agent": 0, "member": 0, "parents": []}
    story = told({**SUMMARY, "best": best}, rounds)
    assert story["winner"] == "One agent trained, so nothing was selected: the winner is agent 0."
    assert story["schedule"] == "Its lr stayed at 1e-3."
    assert set(story) == {"result", "winner", "schedule", "validation"}
    assert story["validation"] == "Its fitness in round 2 was 0.50 ± 0.05 on 64 validation prompts."


def lineage(lrs, ops=None):
    """One agent whose lr moved so, and another that never was its parent."""
    rounds = []
    for number, lr in enumerate(lrs):
        old = lrs[max(0, number - 1)]
        changes = {"lr": (old, lr)} if lr != old else {}
        op = (ops or {}).get(number, "mutate" if changes else "init")
        first = agent(
            0,
            number,
            number,
            0.9,
            parent=number - 1 if number else None,
            hparams=Hparams(lr=lr),
            mutation=Mutation(op, changes),
        )
        rounds.append(RoundRecord(number, (first, agent(1, 100, number, 0.1)), {}, mutable=("lr",)))
    last = len(lrs) - 1
    best = {**SUMMARY["best"], "agent": 0, "member": last, "parents": [], "fitness": 0.9}
    return rounds, {**SUMMARY, "best": best}


@pytest.mark.parametrize(
    ("lrs", "text"),
    [
        ([1e-3, 1e-3], "Its lr stayed at 1e-3."),
        ([1e-3, 8.5e-4, 8.5e-4], "Its lr went 1e-3 → 8.5e-4."),
        ([n * 1e-3 for n in range(1, 8)], "Its lr went 1e-3 → 2e-3 → 3e-3 → … → 7e-3."),
    ],
)
def test_a_schedule_tells_what_moved_and_what_did_not(lrs, text):
    rounds, summary = lineage(lrs)
    assert told(summary, rounds)["schedule"] == text
    assert all(a < b for a, b in pairwise([r.round for r in rounds]))


def test_values_that_a_person_changed_are_told_as_such():
    rounds, summary = lineage([1e-3, 2e-3, 3e-3], ops={2: "steer-set"})
    schedule = told(summary, rounds)["schedule"]
    assert schedule == (
        "Its lr went 1e-3 → 2e-3 → 3e-3. Its values were changed by hand before round 3."
    )


def test_a_clip_range_is_told_once():
    moved = Mutation("mutate", {"clip_high": (1.2, 1.3)})
    rounds = two_rounds()
    first = replace(rounds[0].agents[0], hparams=Hparams(lr=1e-3, clip_coef=(0.8, 1.2)))
    second = rounds[1].agents[1]
    second = replace(second, hparams=Hparams(lr=1e-3, clip_coef=(0.8, 1.3)), mutation=moved)
    rounds[0] = replace(rounds[0], agents=(first, rounds[0].agents[1]))
    rounds[1] = replace(
        rounds[1], agents=(rounds[1].agents[0], second), mutable=("clip_low", "clip_high", "lr")
    )
    story = told(SUMMARY, rounds)
    assert story["schedule"] == "Its clip went 0.8:1.2 → 0.8:1.3, its lr stayed at 1e-3."


def test_a_line_that_comes_home_says_by_way_of_whom():
    def lived(slot, member, round, parent=None):
        return agent(slot, member, round, 0.5, parent=parent)

    rounds = [
        RoundRecord(0, (lived(0, 0, 0), lived(1, 1, 0)), {}),
        RoundRecord(1, (lived(0, 0, 1), lived(1, 2, 1, parent=0)), {}),
        RoundRecord(2, (lived(0, 3, 2, parent=2), lived(1, 2, 2, parent=0)), {}),
    ]
    best = {**SUMMARY["best"], "agent": 0, "member": 3}
    assert (
        "It goes back to its own weights of the first round, by way of agent 1."
        in (told({**SUMMARY, "best": best}, rounds)["winner"])
    )


def test_a_run_that_is_not_finished():
    story = told(None, planned=6)
    assert story["leader"] == (
        "After 2 of 6 rounds agent 1 is the best: 0.75 ± 0.05 on 64 validation prompts; agent 0 "
        "ties with it."
    )
    assert story["winner"] == "It descends from agent 0 of the first round."
    assert story["validation"].endswith("so it overestimates the agent.")
    assert story["missing"] == "No agent is judged on test prompts before the end of the run."
    assert told(None, []) == {"missing": "No round is finished yet."}


def test_a_run_without_a_test():
    story = told(None, planned=2)
    assert story["leader"].startswith("At the end agent 1 is the best: 0.75")
    assert story["missing"] == "No agent was judged on test prompts."


def test_a_round_in_which_all_failed():
    rounds = [RoundRecord(0, (agent(0, 0, 0, None), agent(1, 1, 0, None)), {})]
    assert told(None, rounds, planned=1) == {
        "missing": "At the end no agent has a fitness: all of them failed. No agent was judged on "
        "test prompts."
    }


def test_an_agent_that_collapsed_is_not_the_best():
    rounds = two_rounds()
    decision = Decision("collapsed", 1, None, nan, nan, 0, "agent 1 collapsed: its KL")
    rounds[-1] = replace(rounds[-1], decisions=(decision,))
    assert told(None, rounds)["leader"].startswith("At the end agent 0 is the best: 0.62")


@pytest.mark.parametrize(
    ("base", "best", "text"),
    [
        (
            0.331,
            None,
            "On 256 test prompts the winner has no finite score and the base model has 0.33",
        ),
        (
            None,
            0.807,
            "On 256 test prompts the winner has 0.81 ± 0.02 and the base model has no finite",
        ),
        (
            None,
            None,
            "On 256 test prompts the winner has no finite score and the base model has no finite",
        ),
    ],
)
def test_a_test_without_a_finite_score_is_missing(base, best, text):
    both = {
        name: {**SUMMARY[name], "mean": mean} for name, mean in (("base", base), ("best", best))
    }
    story = told({**SUMMARY, **both, "gain": None, "gain_se": None})
    assert story["missing"].startswith(text)
    assert "result" not in story


def test_a_winner_without_a_fitness_is_said_to_have_none():
    rounds = two_rounds()
    lost = replace(rounds[1].agents[1], score=None)
    rounds[1] = replace(rounds[1], agents=(rounds[1].agents[0], lost))
    story = told(SUMMARY, rounds)
    assert story["missing"] == "The winner has no fitness: it failed, or was never evaluated."
    assert "validation" not in story


def test_what_the_first_guess_alone_reached():
    def arm(name, mean):
        return {"name": name, "test": {"mean": mean, "se": 0.01, "n": 256}}

    arms = [arm("guess", 0.34), arm("random", 0.8), arm("evolved", 0.92)]
    assert guess_sentence({"agents": 8, "arms": arms}) == (
        "With the same tokens and without evolution your first guess alone reached 0.34 ± 0.01 and "
        "the best of 8 random guesses 0.80 ± 0.01; this run reached 0.92 ± 0.01."
    )
    comparison = {"agents": 8, "arms": [arms[0], arms[2]]}
    story = told(SUMMARY, comparison=comparison)
    assert story["guess"] == (
        "With the same tokens and without evolution your first guess alone reached 0.34 ± 0.01; "
        "this run reached 0.92 ± 0.01."
    )
