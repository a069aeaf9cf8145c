"""The story of a run, from its records."""

from dataclasses import replace
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


def won(agent, member, **changes):
    return {**SUMMARY, "best": {**SUMMARY["best"], "agent": agent, "member": member, **changes}}


def archive_won():
    """The best of the first round won over that of the last."""
    rounds = two_rounds()
    first = rounds[0].agents[0]
    better = replace(first, score=replace(first.score, mean=0.9))
    rounds[0] = replace(rounds[0], agents=(better, rounds[0].agents[1]))
    candidates = [candidate("last", 1, 2, [0], 0.7), candidate("archive", 0, 0, [], 0.8)]
    return rounds, {**won(0, 0, kind="archive", parents=[]), "candidates": candidates}


def with_last(number, **changes):
    """`two_rounds`, in which an agent of the last round has other fields."""
    rounds = two_rounds()
    agents = list(rounds[1].agents)
    agents[number] = replace(agents[number], **changes)
    return [rounds[0], replace(rounds[1], agents=tuple(agents))]


def alone():
    return [RoundRecord(n, (agent(0, 0, n, 0.5),), {}, mutable=("lr",)) for n in range(2)]


def came_home():
    def lived(slot, member, round, parent=None):
        return agent(slot, member, round, 0.5, parent=parent)

    return [
        RoundRecord(0, (lived(0, 0, 0), lived(1, 1, 0)), {}),
        RoundRecord(1, (lived(0, 0, 1), lived(1, 2, 1, parent=0)), {}),
        RoundRecord(2, (lived(0, 3, 2, parent=2), lived(1, 2, 2, parent=0)), {}),
    ]


def clipped():
    """A clip range moves at one end."""
    hparams = Hparams(lr=1e-3, clip_coef=(0.8, 1.3))
    moved = Mutation("mutate", {"clip_high": (1.2, 1.3)})
    first, second = with_last(1, hparams=hparams, mutation=moved)
    begun = replace(first.agents[0], hparams=Hparams(lr=1e-3, clip_coef=(0.8, 1.2)))
    return [
        replace(first, agents=(begun, first.agents[1])),
        replace(second, mutable=("clip_low", "clip_high", "lr")),
    ]


STORIES = {
    "a winner": (
        two_rounds(),
        SUMMARY,
        {
            "result": "Base 0.33 ± 0.02 → winner 0.81 ± 0.02: +0.48 ± 0.03 on 256 test prompts.",
            "winner": "The winner is agent 1, the best of the last round. It descends from agent 0 "
            "of the first round.",
            "schedule": "Its lr went 1e-3 → 1.2e-3.",
            "validation": "Its fitness in round 2 was 0.75 ± 0.05 on 64 validation prompts.",
            # Agent 1's last round, and the first of agent 0, which it was copied from.
            "share": "Its line of ancestors trained on 50% of all training tokens (2,000 of "
            "4,000).",
        },
    ),
    "a mean": (
        two_rounds(),
        mean_won(),
        {
            "winner": "The winner is the mean of agents 1 and 0, weight by weight; both descend "
            "from agent 0 of the first round.",
            "schedule": "Agent 1's lr went 1e-3 → 1.2e-3. Agent 0's values were fixed: no "
            "hyperparameter may mutate.",
            "choice": "It won the final comparison on 64 validation prompts: 0.72 ± 0.03 against "
            "0.70 (agent 1, a tie) and 0.60 (agent 0 as it was after round 2).",
            # Both rounds of agent 0 and the last of agent 1: what they share counts once.
            "share": "Its line of ancestors trained on 75% of all training tokens (3,000 of",
        },
    ),
    "the best of an earlier round": (
        *archive_won(),
        {
            "winner": "The winner is agent 0 as it was after round 1, which no later round has "
            "beaten. It has trained on weights of its own since the first round.",
            "choice": "It won the final comparison on 64 validation prompts: 0.80 ± 0.03 against "
            "0.70 (agent 1).",
            "share": "Its line of ancestors trained on 25% of all",
        },
    ),
    "one agent": (
        alone(),
        won(0, 0, parents=[]),
        {
            "winner": "One agent trained, so nothing was selected: the winner is agent 0.",
            "schedule": "Its lr stayed at 1e-3.",
            "validation": "Its fitness in round 2 was 0.50 ± 0.05 on 64 validation prompts.",
            "share": None,
        },
    ),
    "a clip range": (
        clipped(),
        SUMMARY,
        {"schedule": "Its clip went 0.8:1.2 → 0.8:1.3, its lr stayed at 1e-3."},
    ),
    "a line that comes home": (
        came_home(),
        won(0, 3),
        {
            "winner": "The winner is agent 0, the best of the last round. It goes back to its own "
            "weights of the first round, by way of agent 1.",
        },
    ),
    "a winner without a fitness": (
        with_last(1, score=None),
        SUMMARY,
        {
            "missing": "The winner has no fitness: it failed, or was never evaluated.",
            "validation": None,
        },
    ),
    "no test": (
        two_rounds(),
        None,
        {
            "leader": "At the end agent 1 is the best: 0.75",
            "missing": "No agent was judged on test prompts.",
        },
    ),
    "all failed": (
        [RoundRecord(0, (agent(0, 0, 0, None), agent(1, 1, 0, None)), {}),
         RoundRecord(1, (agent(0, 0, 1, None), agent(1, 1, 1, None)), {})],
        None,
        {"missing": "At the end no agent has a fitness: all of them failed. No agent was judged"},
    ),
    "the best collapsed": (
        [two_rounds()[0], replace(two_rounds()[1], decisions=(
            Decision("collapsed", 1, None, nan, nan, 0, "agent 1 collapsed: its KL"),
        ))],
        None,
        {"leader": "At the end agent 0 is the best: 0.62"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rounds", "summary", "expected"), STORIES.values(), ids=STORIES)
def test_a_story_tells_of(rounds, summary, expected):
    story = told(summary, rounds)
    for kind, text in expected.items():
        assert (kind in story) == (text is not None)
        assert text is None or story[kind].startswith(text)


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


@pytest.mark.parametrize(
    ("gain", "error", "words"),
    [
        (0.476, 0.025, "+0.48 ± 0.03 on 256 test prompts."),
        (0.03, 0.02, "may be chance: no agent of this run clearly beat the base model."),
        (0.0, 0.0, "may be chance"),
        (-0.2, 0.02, "-0.20 ± 0.02 on 256 test prompts. Training made it worse"),
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


@pytest.mark.parametrize(
    ("base", "best", "text"),
    [
        (0.331, None, "the winner has no finite score and the base model has 0.33"),
        (None, 0.807, "the winner has 0.81 ± 0.02 and the base model has no finite"),
        (None, None, "the winner has no finite score and the base model has no finite"),
    ],
)
def test_a_test_without_a_finite_score_is_missing(base, best, text):
    both = {
        name: {**SUMMARY[name], "mean": mean} for name, mean in (("base", base), ("best", best))
    }
    story = told({**SUMMARY, **both, "gain": None, "gain_se": None})
    assert story["missing"].startswith(f"On 256 test prompts {text}")
    assert "result" not in story


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


@pytest.mark.parametrize(("validation", "explained"), [(0.9, True), (0.81, False), (0.7, False)])
def test_a_test_score_below_that_of_the_final_comparison_is_explained(validation, explained):
    candidates = [candidate("last", 1, 2, [0], validation), candidate("archive", 0, 0, [], 0.5)]
    words = "is lower than its score in the final comparison: that score selected the winner"
    assert (words in told({**SUMMARY, "candidates": candidates})["validation"]) == explained


def lineage(lrs, ops):
    """One agent whose lr moved so, and another that never was its parent."""
    rounds = []
    for number, lr in enumerate(lrs):
        old = lrs[max(0, number - 1)]
        changes = {"lr": (old, lr)} if lr != old else {}
        first = agent(
            0,
            number,
            number,
            0.9,
            parent=number - 1 if number else None,
            hparams=Hparams(lr=lr),
            mutation=Mutation(ops.get(number, "mutate" if changes else "init"), changes),
        )
        rounds.append(RoundRecord(number, (first, agent(1, 100, number, 0.1)), {}, mutable=("lr",)))
    return rounds, won(0, len(lrs) - 1, parents=[], fitness=0.9)


@pytest.mark.parametrize(
    ("lrs", "ops", "text"),
    [
        ([1e-3, 1e-3], {}, "Its lr stayed at 1e-3."),
        ([1e-3, 8.5e-4, 8.5e-4], {}, "Its lr went 1e-3 → 8.5e-4."),
        ([n * 1e-3 for n in range(1, 8)], {}, "Its lr went 1e-3 → 2e-3 → 3e-3 → … → 7e-3."),
        (
            [1e-3, 2e-3, 3e-3],
            {2: "steer-set"},
            "Its lr went 1e-3 → 2e-3 → 3e-3. Its values were changed by hand before round 3.",
        ),
    ],
)
def test_a_schedule_tells_what_moved_and_what_did_not(lrs, ops, text):
    rounds, summary = lineage(lrs, ops)
    assert told(summary, rounds)["schedule"] == text


def test_what_the_first_guess_alone_reached():
    def arm(name, mean):
        return {"name": name, "test": {"mean": mean, "se": 0.01, "n": 256}}

    arms = [arm("guess", 0.34), arm("random", 0.8), arm("evolved", 0.92)]
    assert guess_sentence({"agents": 8, "arms": arms}) == (
        "With the same tokens and without evolution your first guess alone reached 0.34 ± 0.01 and "
        "the best of 8 random guesses 0.80 ± 0.01; this run reached 0.92 ± 0.01."
    )
    comparison = {"agents": 8, "arms": [arms[0], arms[2]]}
    assert told(SUMMARY, comparison=comparison)["guess"].endswith(
        "your first guess alone reached 0.34 ± 0.01; this run reached 0.92 ± 0.01."
    )
