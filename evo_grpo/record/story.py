"""The story of a run, in sentences: who won, where it came from, by how much, and how sure that is.

Made from records alone, as plain values, so that a terminal and a page tell the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from evo_grpo.record.family import founder_of
from evo_grpo.record.leaderboard import best_agent, tied
from evo_grpo.record.stopping import why_it_ended
from evo_grpo.record.winner import finalist_name, leading_lines, other_finalists, winning_lines
from evo_grpo.record.wording import count, hyperparameter, listed, number, with_error
from evo_grpo.schema.shown import short_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from evo_grpo.record.records import AgentRecord, RoundRecord

VALUES_SHOWN = 5
"""Values of a hyperparameter up to which a schedule shows all of them."""
CERTAIN = 2.0
"""Standard errors from which on a gain over the base is called one."""
#: How members come to be without anybody's hand in it.
_BY_ITSELF = ("init", "clone", "mutate", "restore", "mean")


@dataclass(frozen=True)
class Sentence:
    """One sentence of the story of a run.

    Attributes:
        kind: "ended" (by which rule, before its last round), "result" (the test), "winner" (who
            won, and whom it descends from), "schedule" (how its hyperparameters moved), "choice"
            (against whom it won), "validation" (why that score is another one than the test's),
            "share" (its part of the training tokens), "guess" (what a population without
            evolution reached), or "unfinished".
        text: The sentence, with a capital and a full stop. Names in it come from files: escape it.
    """

    kind: str
    text: str


def tell_story(
    rounds: Sequence[RoundRecord],
    summary: Mapping[str, Any] | None,
    *,
    comparison: Mapping[str, Any] | None = None,
    planned: int | None = None,
) -> list[Sentence]:
    """Return what a run came to.

    The summary is None where nobody was judged on the test split, `planned` where the rounds of the
    whole run are not known.
    """
    if summary is not None and rounds:
        return list(_finished(rounds, summary, comparison))
    return list(_not_judged(rounds, planned))


def guess_sentence(comparison: Mapping[str, Any]) -> str:
    """Return what the tokens of a run would have bought without evolution."""
    tests = {arm["name"]: arm["test"] for arm in comparison["arms"]}
    arms = {name: with_error(test["mean"], test["se"]) for name, test in tests.items()}
    parts: list[str] = []
    if "guess" in arms:
        parts.append(f"your first guess alone reached {arms['guess']}")
    if "random" in arms:
        parts.append(f"the best of {comparison['agents']} random guesses {arms['random']}")
    text = f"With the same tokens and without evolution {listed(parts)}"
    return f"{text}; this run reached {arms['evolved']}."


def _finished(
    rounds: Sequence[RoundRecord],
    summary: Mapping[str, Any],
    comparison: Mapping[str, Any] | None,
) -> Iterator[Sentence]:
    best = summary["best"]
    lines = winning_lines(rounds, best)
    if why := why_it_ended(summary):
        yield Sentence("ended", f"Ended early: {why}.")
    yield Sentence("result", _result(summary))
    yield Sentence("winner", _winner(rounds, best, lines))
    yield from _schedules(lines, rounds[-1].mutable)
    if (chosen := _choice(rounds, summary)) is not None:
        yield Sentence("choice", chosen)
    alone = len(rounds[0].agents) == 1
    if not alone and (differs := _validation(summary)) is not None:
        yield Sentence("validation", differs)
    if not alone:
        yield Sentence("share", _share(rounds, lines))
    if comparison is not None:
        yield Sentence("guess", guess_sentence(comparison))


def _not_judged(rounds: Sequence[RoundRecord], planned: int | None) -> Iterator[Sentence]:
    """Tell of a run that nobody was judged in: it is not finished, or has no test at its end."""
    if not rounds:
        yield Sentence("unfinished", "No round is finished yet.")
        return
    unfinished = planned is not None and len(rounds) < planned
    when = f"After {len(rounds)} of {count(planned or 0, 'round')}" if unfinished else "At the end"
    best = best_agent(rounds[-1])
    if best is None or best.score is None:
        yield Sentence("unfinished", f"{when} no agent has a fitness: all have failed.")
        return
    score = with_error(best.score.mean, best.score.se)
    text = f"{when} agent {best.agent} is the best by validation, at {score}"
    others = [one.agent for one in rounds[-1].agents if tied(best, one)]
    if others:
        are = "agents" if len(others) > 1 else "agent"
        text += f"; {are} {listed(others)} cannot be told from it"
    yield Sentence("unfinished", f"{text}.")
    lines = leading_lines(rounds, None)
    if len(rounds[0].agents) > 1:
        yield Sentence("winner", f"It {_descent(rounds, lines[0])}.")
    yield from _schedules(lines, rounds[-1].mutable)
    why = "before the end nobody is" if unfinished else "nobody was"
    yield Sentence(
        "validation",
        f"That score flatters the agent, since it chose it; {why} judged on test prompts.",
    )


def _result(summary: Mapping[str, Any]) -> str:
    base, best = summary["base"], summary["best"]
    gain, error = summary["gain"], summary["gain_se"]
    sign = "" if gain is None or gain < 0 else "+"
    text = (
        f"Base {with_error(base['mean'], base['se'])} → winner "
        f"{with_error(best['mean'], best['se'])}: {sign}{with_error(gain, error)} on "
        f"{count(best['n'], summary['split'] + ' prompt')}"
    )
    if gain is None or error is None or math.isnan(error):
        return f"{text}."
    if gain <= -CERTAIN * error and gain < 0:
        return f"{text}. Training made it worse: nothing of this run beat the base model."
    if gain < CERTAIN * error or gain <= 0:
        return f"{text}, which may be chance: nothing of this run clearly beat the base model."
    return f"{text}."


def _winner(
    rounds: Sequence[RoundRecord], best: Mapping[str, Any], lines: Sequence[Sequence[AgentRecord]]
) -> str:
    name = finalist_name(rounds, best)
    if len(rounds[0].agents) == 1:
        return f"One agent trained, so nothing was selected: the winner is {name}."
    if best["kind"] == "mean":
        founder = _founder(rounds, lines[0][-1].member)
        return (
            f"The winner is {name}, weight by weight; both descend from agent {founder} of the "
            "first round."
        )
    where = ", the best of the last round"
    if best["kind"] == "archive":
        later = len(rounds) - 1 - lines[0][-1].round
        where = ", which no later round has beaten" if later else ""
    return f"The winner is {name}{where}. It {_descent(rounds, lines[0])}."


def _descent(rounds: Sequence[RoundRecord], line: Sequence[AgentRecord]) -> str:
    own, founder = line[-1].agent, _founder(rounds, line[-1].member)
    agents = [agent for agent, _ in groupby(record.agent for record in line)]
    if agents == [own]:
        return "has trained on weights of its own since the first round"
    through = dict.fromkeys(agent for agent in agents[1:-1] if agent not in (own, founder))
    by = f", by way of agent {listed(list(through))}" if through else ""
    if founder == own:
        return f"goes back to its own weights of the first round{by}"
    return f"descends from agent {founder} of the first round{by}"


def _founder(rounds: Sequence[RoundRecord], member: int) -> int:
    """Return the agent of the first round that a member descends from."""
    first = founder_of(rounds, member)
    agents = {one.member: one.agent for record in rounds for one in record.agents}
    return agents[first]


def _schedules(
    lines: Sequence[Sequence[AgentRecord]], mutable: Sequence[str]
) -> Iterator[Sentence]:
    """Yield how the values moved, for each line of ancestors that the winner is made of."""
    shown: list[str] = []
    for line in lines:
        own = "Its" if len(lines) == 1 else f"Agent {line[-1].agent}'s"
        text = f"{own} {_moves(line, mutable)}."
        if text not in shown:
            shown.append(text)
            yield Sentence("schedule", text)
        by_hand = sorted(
            {
                one.round + 1
                for one in line
                if one.mutation.changes and one.mutation.op not in _BY_ITSELF
            }
        )
        if by_hand:
            which = "round" if len(by_hand) == 1 else "rounds"
            text = f"{own} values were changed by hand before {which} {listed(by_hand)}."
            yield Sentence("schedule", text)


def _moves(line: Sequence[AgentRecord], mutable: Sequence[str]) -> str:
    """Return what a line of ancestors trained with: what moved, and what might have and did not."""
    changed = dict.fromkeys(_combined(name) for one in line for name in one.mutation.changes)
    names = [*changed, *(name for name in map(_combined, mutable) if name not in changed)]
    moved: list[str] = []
    still: list[str] = []
    for name in dict.fromkeys(names):
        values = [value for value, _ in groupby(hyperparameter(one.hparams, name) for one in line)]
        if len(values) == 1:
            still.append(f"{short_name(name)} {'at' if still else 'stayed at'} {values[0]}")
            continue
        if len(values) > VALUES_SHOWN:
            values = [*values[: VALUES_SHOWN - 2], "…", values[-1]]
        moved.append(f"{short_name(name)} went {' → '.join(values)}")
    return ", its ".join([*moved, *still]) or "values were fixed: no hyperparameter may mutate"


def _combined(name: str) -> str:
    return "clip_coef" if name.startswith("clip_") else name


def _choice(rounds: Sequence[RoundRecord], summary: Mapping[str, Any]) -> str | None:
    compared = other_finalists(rounds, summary)
    if compared is None:
        return None
    own, others = compared
    return (
        f"It won the final comparison on {count(own['n'], 'validation prompt')}: "
        f"{with_error(own['mean'], own['se'])} against {others}."
    )


def _validation(summary: Mapping[str, Any]) -> str | None:
    """Return why the winner's validation score is not what the test says."""
    best, split = summary["best"], summary["split"]
    own = [c for c in summary["candidates"] if c["kind"] == best["kind"] and c["validation"]]
    scored = own[0]["validation"] if own else {"mean": best["fitness"], "se": None, "n": best["n"]}
    mean = scored["mean"]
    if mean is None or best["mean"] is None:
        return None
    reached = f"On validation it had {with_error(mean, scored['se'])}"
    if number(mean, 2) == number(best["mean"], 2):
        return f"{reached}, as on {split}."
    if mean > best["mean"]:
        return (
            f"{reached}, more than on {split}: that score chose the winner, so it flatters it; the "
            f"{split} prompts chose nobody."
        )
    fewer = ", and fewer of them" if scored["n"] < best["n"] else ""
    return (
        f"{reached}, less than on {split}: those are other prompts{fewer}. More often it is the "
        "other way round, since the validation score chose the winner."
    )


def _share(rounds: Sequence[RoundRecord], lines: Sequence[Sequence[AgentRecord]]) -> str:
    line = {(one.round, one.agent): one.tokens for records in lines for one in records}
    total = sum(agent.tokens for record in rounds for agent in record.agents)
    own = sum(line.values())
    return (
        f"Its line of ancestors trained on {own / max(1, total):.0%} of all training tokens "
        f"({own:,} of {total:,})."
    )
