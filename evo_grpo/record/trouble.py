"""What went wrong in a run, in plain words with the remedy: from its records and settings alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evo_grpo.record.leaderboard import best_agent
from evo_grpo.record.winner import winning_lines
from evo_grpo.record.wording import count, listed
from evo_grpo.schema.shown import shown_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from evo_grpo.record.records import AgentRecord, RoundRecord
    from evo_grpo.settings import RunConfig

MUCH_KL = 1.0
"""Mean KL divergence from the reference, nats per token, from which an agent has left its base."""
FEW_ENDED = 0.5
"""Share of completions that end by themselves, below which the limit of tokens is too low."""
MOSTLY_EQUAL = 0.9
"""Share of groups with equal rewards from which a round teaches little."""
GOOD = 0.95
"""Mean reward from which equal rewards mean that a task of 0 and 1 is solved."""


@dataclass(frozen=True)
class Trouble:
    """Something that a person should know of, and what to do about it.

    Attributes:
        kind: "failed", "collapsed", "kl", "equal_rewards", "cut", "dropped", "memory" or "bound".
        text: What happened; rounds count from 1. Parts of it come from files: escape it.
        remedy: What to do, in the imperative; settings by their path in population.yaml.
        round: The 0-based round in which it first happened.
        agent: Whom it happened to, None where it was not one agent.
    """

    kind: str
    text: str
    remedy: str
    round: int
    agent: int | None = None

    @property
    def sentence(self) -> str:
        """Both as one line."""
        return f"{self.text}: {self.remedy}"


def find_trouble(
    rounds: Sequence[RoundRecord],
    summary: Mapping[str, Any] | None = None,
    config: RunConfig | None = None,
) -> list[Trouble]:
    """Return what went wrong in a run, by the round in which it began.

    Args:
        rounds: The finished rounds, first to last.
        summary: What summary.json holds, which says whose values ended at a bound of their range.
        config: The settings of the run, where they are known: the ranges.
    """
    found: list[Trouble] = []
    for look in (_failed, _collapsed, _far_from_base, _equal_rewards, _cut, _dropped, _memory):
        found += look(rounds)
    if config is not None and rounds:
        found += _at_bounds(rounds, summary, config)
    return sorted(found, key=lambda one: one.round)


def _failed(rounds: Sequence[RoundRecord]) -> Iterator[Trouble]:
    """Yield the first failure of each agent, and how often it failed."""
    failures: dict[int, list[AgentRecord]] = {}
    for record in rounds:
        for agent in record.agents:
            if agent.state != "ok":
                failures.setdefault(agent.agent, []).append(agent)
    for slot, failed in failures.items():
        where = [one.round + 1 for one in failed]
        rounds_of = f"round {where[0]}" if len(where) == 1 else f"rounds {listed(where)}"
        reason = f" ({failed[0].reason})" if failed[0].reason else ""
        yield Trouble(
            "failed",
            f"agent {slot} failed in {rounds_of}{reason}",
            "lower its lr or evolve.hyperparameters.lr.max, and see that rewards are finite",
            failed[0].round,
            slot,
        )


def _collapsed(rounds: Sequence[RoundRecord]) -> Iterator[Trouble]:
    for record in rounds:
        for decision in record.decisions:
            if decision.kind == "collapsed":
                yield Trouble(
                    "collapsed",
                    f"after round {record.round + 1} {decision.sentence}",
                    "lower evolve.hyperparameters.lr.max, or raise algorithm.beta",
                    record.round,
                    decision.agent,
                )


def _far_from_base(rounds: Sequence[RoundRecord]) -> Iterator[Trouble]:
    """Yield the first round in which an agent was far from its reference, unless it collapsed."""
    told = {d.agent for record in rounds for d in record.decisions if d.kind == "collapsed"}
    for record in rounds:
        for agent in record.agents:
            kl = agent.metrics.get("kl", 0.0)
            if kl > MUCH_KL and agent.agent not in told:
                told.add(agent.agent)
                yield Trouble(
                    "kl",
                    f"the KL divergence of agent {agent.agent} from the reference rose to {kl:.3g} "
                    f"nats per token in round {record.round + 1}",
                    "raise algorithm.beta or lower its lr",
                    record.round,
                    agent.agent,
                )


def _equal_rewards(rounds: Sequence[RoundRecord]) -> Iterator[Trouble]:
    """Yield the first round from which on nearly all groups taught nothing, to the last."""
    since: RoundRecord | None = None
    for record in reversed(rounds):
        share = _mean(record.agents, "zero_variance")
        if share is None or share < MOSTLY_EQUAL:
            break
        since = record
    if since is None:
        return
    share, reward = (_mean(since.agents, name) for name in ("zero_variance", "reward"))
    text = (
        f"from round {since.round + 1} on the completions of {share:.0%} of the groups had equal "
        "rewards, which teach nothing"
    )
    remedy = (
        "the task is solved, so stop earlier or take harder prompts"
        if reward is not None and reward >= GOOD
        else "take prompts that are sometimes answered right, give rewards for partial success, or "
        "raise algorithm.group_size or algorithm.temperature"
    )
    yield Trouble("equal_rewards", text, remedy, since.round)


def _cut(rounds: Sequence[RoundRecord]) -> Iterator[Trouble]:
    """Yield the last round, if most of its completions were cut."""
    if not rounds:
        return
    ended = _mean(rounds[-1].agents, "ended")
    if ended is not None and ended < FEW_ENDED:
        yield Trouble(
            "cut",
            f"in round {rounds[-1].round + 1} {1 - ended:.0%} of the completions were cut at the "
            "limit of tokens",
            "raise algorithm.max_output_tokens, or reward short answers",
            rounds[-1].round,
        )


def _dropped(rounds: Sequence[RoundRecord]) -> Iterator[Trouble]:
    amounts = [sum(a.metrics.get("dropped", 0.0) for a in r.agents) for r in rounds]
    if any(amounts):
        first = next(i for i, amount in enumerate(amounts) if amount)
        yield Trouble(
            "dropped",
            f"{count(int(sum(amounts)), 'episode')} had to be dropped, the first in round "
            f"{rounds[first].round + 1}, since the environment raised",
            "see the errors in completions/ and mend the environment",
            rounds[first].round,
        )


def _memory(rounds: Sequence[RoundRecord]) -> Iterator[Trouble]:
    for record in rounds:
        if record.reduced:
            lowered = listed([f"{name} to {value:,}" for name, value in record.reduced.items()])
            yield Trouble(
                "memory",
                f"the device ran out of memory in round {record.round + 1}, which lowered "
                f"{lowered}",
                "set that in the file, so that no step has to be repeated",
                record.round,
            )
            return


def _at_bounds(
    rounds: Sequence[RoundRecord], summary: Mapping[str, Any] | None, config: RunConfig
) -> Iterator[Trouble]:
    """Yield the values of the best agent that ended at a bound of their range."""
    best: Mapping[str, Any]
    if summary is not None:
        best = summary["best"]
    elif (leading := best_agent(rounds[-1])) is not None:
        best = {"kind": "last", "member": leading.member}
    else:
        return
    last = winning_lines(rounds, best)[0][-1]
    space = config.agents().search_space()
    for name in space.names():
        value = getattr(last.hparams, name, None)
        bounds = {"min": space[name].min, "max": space[name].max}
        if isinstance(value, tuple) or value is None or bounds["min"] == bounds["max"]:
            continue
        for end, bound in bounds.items():
            if value == bound != 0:
                yield Trouble(
                    "bound",
                    f"the best agent's {name} ended at the {end} of its range, "
                    f"{shown_value(bound)}",
                    f"widen it: evolve.hyperparameters.{name}.{end}",
                    last.round,
                    last.agent,
                )


def _mean(agents: Sequence[AgentRecord], name: str) -> float | None:
    """Return the mean of a metric over the agents that have it."""
    values = [a.metrics.get(name, math.nan) for a in agents]
    values = [value for value in values if math.isfinite(value)]
    return sum(values) / len(values) if values else None
