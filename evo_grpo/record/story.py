"""Tells a run in sentences: the winner, its ancestors, and the significance of its lead."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from evo_grpo.record import family, leaderboard, stopping, wording
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.summary import SelectedAgent, gain_sign
from evo_grpo.schema.problems import short_name
from evo_grpo.types import Score

VALUES_SHOWN = 5
"""Greatest number of values of a hyperparameter that a "schedule" sentence shows in full."""


@dataclass(frozen=True)
class Sentence:
    """One sentence of the story of a run. Escape `text` for HTML: it has names from files.

    `kind` is "ended" (a rule ended the run early), "result" (the winner's test score), "rewards"
    (the test score by reward function), "passes" (pass@k), "leader" (the best agent before the
    end), "winner" (the winner's ancestors), "schedule" (how the winner's hyperparameters changed),
    "choice" (the final comparison), "validation" (the score that selected the winner), "share" (the
    share of training tokens of the winner and its ancestors), "judge" (tokens and cost of the LLM
    judge), "guess" (test scores without evolution) or "missing" (a fact that the run lacks).
    """

    kind: str
    text: str


def tell_story(
    rounds: Sequence[RoundRecord],
    winner: SelectedAgent | None,
    rivals: Sequence[SelectedAgent] = (),
    *,
    summary: Mapping[str, Any] | None = None,
    comparison: Mapping[str, Any] | None = None,
    planned: int | None = None,
) -> tuple[Sentence, ...]:
    """Return the story of a run; the arguments are the fields of a `RunView`.

    `summary` is None if no agent was scored on test prompts; `planned` is None if not known.
    """
    if winner is not None and summary is not None:
        return tuple(_finished(rounds, winner, rivals, summary, comparison))
    return tuple(_not_judged(rounds, winner, planned or len(rounds)))


def guess_sentence(comparison: Mapping[str, Any]) -> str:
    """Return a sentence with the results of training without evolution, at the same tokens."""
    tests = {arm["name"]: arm["test"] for arm in comparison["arms"]}
    arms = {name: wording.with_error(test["mean"], test["se"]) for name, test in tests.items()}
    parts: list[str] = []
    if "guess" in arms:
        parts.append(f"your first guess alone reached {arms['guess']}")
    if "random" in arms:
        parts.append(f"the best of {comparison['agents']} random guesses {arms['random']}")
    text = f"With the same tokens and without evolution {wording.listed(parts)}"
    return f"{text}; this run reached {arms['evolved']}."


def rivals_text(winner: SelectedAgent, rivals: Sequence[SelectedAgent]) -> str:
    """Return the losing finalists with their scores, such as "0.70 (agent 1, a tie)"."""
    parts: list[str] = []
    for rival in rivals:
        mean = math.nan if rival.final is None else rival.final.mean
        note = ", a tie" if rival.tie else ""
        if winner.final is not None and mean > winner.final.mean:
            note = ", not significantly ahead"  # the archive wins only if it is
        score = "no finite score" if math.isnan(mean) else wording.number(mean, 2)
        parts.append(f"{score} ({rival.name}{note})")
    return " and ".join(parts)


def _finished(
    rounds: Sequence[RoundRecord],
    winner: SelectedAgent,
    rivals: Sequence[SelectedAgent],
    summary: Mapping[str, Any],
    comparison: Mapping[str, Any] | None,
) -> Iterator[Sentence]:
    alone = len(rounds[0].agents) == 1
    if reason := stopping.why_it_ended(summary):
        yield Sentence("ended", f"Ended early: {reason}.")
    yield _result(summary)
    if parts := _by_reward(summary):
        yield Sentence("rewards", f"By reward: {wording.listed(parts)}.")
    if passes := summary.get("passes"):
        yield Sentence("passes", _passes(passes))
    yield Sentence("winner", _winner(rounds, winner, alone=alone))
    yield from _schedules(winner.lines, rounds[-1].mutable)
    if winner.final is not None and rivals:
        yield Sentence(
            "choice",
            f"It won the final comparison on {wording.measured_on(winner.final)}: "
            f"{_scored(winner.final)} against {rivals_text(winner, rivals)}.",
        )
    yield from _validation(winner, alone=alone)
    if not alone:
        yield Sentence("share", _share(rounds, winner.lines))
    if (judge := summary.get("judge")) is not None:
        yield Sentence("judge", _judge(judge))
    if comparison is not None:
        yield Sentence("guess", guess_sentence(comparison))


def _not_judged(
    rounds: Sequence[RoundRecord], leader: SelectedAgent | None, planned: int
) -> Iterator[Sentence]:
    """Yield the story of a run without a test result, unfinished or ended before the test."""
    if not rounds:
        yield Sentence("missing", "No round is finished yet.")
        return
    unfinished = len(rounds) < planned
    when = (
        f"After {len(rounds)} of {wording.count(planned, 'round')}" if unfinished else "At the end"
    )
    if leader is None:
        yield Sentence("missing", f"{when} no agent has a fitness: all of them failed.")
    else:
        alone = len(rounds[0].agents) == 1
        yield Sentence("leader", _leader(rounds, leader, when))
        if not alone:
            yield Sentence("winner", f"It {_descent(rounds, leader.lines[0])}.")
        yield from _schedules(leader.lines, rounds[-1].mutable)
        if not alone:
            yield Sentence(
                "validation", "This score selects the agent, so it overestimates the agent."
            )
    yield Sentence(
        "missing",
        "No agent is judged on test prompts before the end of the run."
        if unfinished
        else "No agent was judged on test prompts.",
    )


def _leader(rounds: Sequence[RoundRecord], leader: SelectedAgent, when: str) -> str:
    assert leader.fitness is not None, "the leader has a finite fitness"
    text = (
        f"{when} {leader.name} is the best: {_scored(leader.fitness)} on "
        f"{wording.measured_on(leader.fitness)}"
    )
    tied = [agent for (agent, _), is_tie in leaderboard.ties(rounds, leader).items() if is_tie]
    if tied:
        verb = "tie" if len(tied) > 1 else "ties"
        text += f"; {'agents' if len(tied) > 1 else 'agent'} {wording.listed(tied)} {verb} with it"
    return f"{text}."


def _result(summary: Mapping[str, Any]) -> Sentence:
    base, best, gain, error = (summary[name] for name in ("base", "best", "gain", "gain_se"))
    prompts = wording.count(best["n"], f"{summary['split']} prompt")
    if None in (best["mean"], base["mean"]):
        scores = {"the winner": best, "the base model": base}
        parts = [
            f"{name} has {wording.with_error(score['mean'], score['se'])}"
            if score["mean"] is not None
            else f"{name} has no finite score"
            for name, score in scores.items()
        ]
        return Sentence("missing", f"On {prompts} {wording.listed(parts)}.")
    sign = "" if gain is None or gain < 0 else "+"
    text = (
        f"Base {wording.with_error(base['mean'], base['se'])} → winner "
        f"{wording.with_error(best['mean'], best['se'])}: "
        f"{sign}{wording.with_error(gain, error)} on {prompts}"
    )
    if gain is None or error is None or math.isnan(error):
        return Sentence("result", f"{text}.")
    sign = gain_sign(summary)
    if sign < 0:
        text += ". Training made it worse: no agent of this run beat the base model"
    elif not sign:
        text += ", which may be chance: no agent of this run clearly beat the base model"
    return Sentence("result", f"{text}.")


def _by_reward(summary: Mapping[str, Any]) -> list[str]:
    """Return a text per reward function, if there are several: its means for base and winner."""
    base, best = (summary[name].get("rewards", {}) for name in ("base", "best"))
    return [
        f"{name} {wording.with_error(base[name]['mean'], base[name]['se'])} → "
        f"{wording.with_error(score['mean'], score['se'])}"
        for name, score in best.items()
        if len(best) > 1 and name in base and None not in (score["mean"], base[name]["mean"])
    ]


def _passes(passes: Sequence[Mapping[str, Any]]) -> str:
    parts: list[str] = []
    for row in passes:
        base, best = (
            wording.with_error(row[name]["mean"], row[name]["se"]) for name in ("base", "best")
        )
        gain = row["gain"]
        sign = "" if gain is None or gain < 0 else "+"
        parts.append(
            f"pass@{row['k']} went from {base} to {best} "
            f"({sign}{wording.with_error(gain, row['gain_se'])})"
        )
    return (
        f"With a reward of at least {passes[0]['correct']:g} as correct, {wording.listed(parts)}."
    )


def _winner(rounds: Sequence[RoundRecord], winner: SelectedAgent, *, alone: bool) -> str:
    if alone:
        return f"One agent trained, so nothing was selected: the winner is {winner.name}."
    if winner.kind == "mean":
        founder = _founder(rounds, winner.record.member)
        return (
            f"The winner is {winner.name}, weight by weight; both descend from agent {founder} of "
            "the first round."
        )
    clause = ", the best of the last round"
    if winner.kind == "archive":
        later = len(rounds) - 1 - winner.record.round
        clause = ", which no later round has beaten" if later else ""
    return f"The winner is {winner.name}{clause}. It {_descent(rounds, winner.lines[0])}."


def _descent(rounds: Sequence[RoundRecord], line: Sequence[AgentRecord]) -> str:
    slot, founder = line[-1].agent, _founder(rounds, line[-1].member)
    agents = [agent for agent, _ in groupby(record.agent for record in line)]
    if agents == [slot]:
        return "has trained on weights of its own since the first round"
    intermediate = dict.fromkeys(agent for agent in agents[1:-1] if agent not in (slot, founder))
    detour = f", by way of agent {wording.listed(list(intermediate))}" if intermediate else ""
    if founder == slot:
        return f"goes back to its own weights of the first round{detour}"
    return f"descends from agent {founder} of the first round{detour}"


def _founder(rounds: Sequence[RoundRecord], member: int) -> int:
    """Return the agent of the first round that a member descends from."""
    founder = family.founder_of(rounds, member)
    agents = {agent.member: agent.agent for record in rounds for agent in record.agents}
    return agents[founder]


def _schedules(
    lines: Sequence[Sequence[AgentRecord]], mutable: Sequence[str]
) -> Iterator[Sentence]:
    """Yield sentences on how hyperparameters changed along each line of the winner's ancestors."""
    for line in lines:
        whose = "Its" if len(lines) == 1 else f"Agent {line[-1].agent}'s"
        yield Sentence("schedule", f"{whose} {_moves(line, mutable)}.")
        by_hand = [
            record.round + 1
            for record in line
            if record.mutation.changes and record.mutation.op.startswith("steer-")
        ]
        if by_hand:
            noun = "round" if len(by_hand) == 1 else "rounds"
            text = f"{whose} values were changed by hand before {noun} {wording.listed(by_hand)}."
            yield Sentence("schedule", text)


def _moves(line: Sequence[AgentRecord], mutable: Sequence[str]) -> str:
    """Return a text: which hyperparameters changed along a line of ancestors, and which did not."""
    changed = (name for agent in line for name in agent.mutation.changes)
    moved: list[str] = []
    unchanged: list[str] = []
    for name in wording.combined([*changed, *mutable]):
        values = [
            value
            for value, _ in groupby(wording.hyperparameter(agent.hparams, name) for agent in line)
        ]
        if len(values) == 1:
            unchanged.append(f"{short_name(name)} {'at' if unchanged else 'stayed at'} {values[0]}")
            continue
        if len(values) > VALUES_SHOWN:
            values = [*values[: VALUES_SHOWN - 2], "…", values[-1]]
        moved.append(f"{short_name(name)} went {' → '.join(values)}")
    return ", its ".join([*moved, *unchanged]) or "values were fixed: no hyperparameter may mutate"


def _validation(winner: SelectedAgent, *, alone: bool) -> Iterator[Sentence]:
    """Yield the fitness of the winner, and why its validation score differs from its test score."""
    fitness, test = winner.fitness, winner.test
    if fitness is not None:
        when = f"Its fitness in round {winner.record.round + 1}"
        text = f"{when} was {_scored(fitness)} on {wording.measured_on(fitness)}."
        yield Sentence("validation", text)
    elif winner.kind != "mean":
        yield Sentence("missing", "The winner has no fitness: it failed, or was never evaluated.")
    selecting = winner.final or fitness
    if alone or selecting is None or test is None or math.isnan(test.mean):
        return
    if (
        wording.number(test.mean, 2) != wording.number(selecting.mean, 2)
        and test.mean < selecting.mean
    ):
        score = "its fitness" if winner.final is None else "its score in the final comparison"
        yield Sentence(
            "validation",
            f"The test score is lower than {score}: that score selected the winner, so it "
            "overestimates it; the test prompts selected nothing.",
        )


def _share(rounds: Sequence[RoundRecord], lines: Sequence[Sequence[AgentRecord]]) -> str:
    by_agent = {(record.round, record.agent): record.tokens for line in lines for record in line}
    tokens = sum(by_agent.values())
    total = sum(agent.tokens for record in rounds for agent in record.agents)
    return (
        f"Its line of ancestors trained on {tokens / max(1, total):.0%} of all training tokens "
        f"({tokens:,} of {total:,})."
    )


def _judge(spent: Mapping[str, float]) -> str:
    tokens = spent["input_tokens"] + spent["output_tokens"]
    cost = f", which cost {spent['cost']:.2f}" if spent["cost"] else ""
    answers = wording.count(int(spent["answers"]), "answer")
    return f"The judge gave {answers}, of {tokens:,.0f} tokens{cost}."


def _scored(score: Score) -> str:
    return wording.with_error(score.mean, score.se)
