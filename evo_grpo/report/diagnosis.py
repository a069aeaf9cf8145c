"""What a run should be looked at for, in plain words, each with its remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from evo_grpo.printable import printable
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.report.run_contents import RunContents
from evo_grpo.terminal.formatting import count, setting, short_name

KL = 0.5
"""Nats per token from the base; far beyond what a policy that still speaks its language has."""
RATIO = 100.0
"""Probability ratio of one token after an update; a healthy one stays below 10."""
CLIPPED = 0.4
"""Share of clipped tokens; common values are below 0.2 (Schulman et al. 2017, PPO)."""
GAP = 0.05
"""Nats between the log-probs of the sampler and of the learner, per token."""
DEAD = 0.9
"""Share of groups whose rewards are all equal: they teach nothing."""
CUT = 0.5
"""Share of completions that ended by themselves, below which most are cut."""
ENTROPY = 0.05
"""Share of the first round's entropy below which a policy says one thing alone."""
AT_THE_END = 0.02
"""How near to a bound counts as at it, as a share of the range, in decades where it has several."""


@dataclass(frozen=True)
class Finding:
    """One thing to know about a run.

    Attributes:
        what: What was found, a sentence.
        remedy: What to do about it, a sentence.
        serious: Whether results are in doubt; else it is a hint.
    """

    what: str
    remedy: str
    serious: bool = True


@dataclass(frozen=True)
class _Sign:
    """A metric beyond a bound.

    Attributes:
        metric: Its name.
        beyond: Whether a value of it is.
        what: What is said, with {who}, {value} and {bound}.
        remedy: What to do.
    """

    metric: str
    beyond: Callable[[float], bool]
    what: str
    remedy: str
    serious: bool = True


_SIGNS = (
    _Sign("kl", lambda v: v > KL, "KL from the base exploded in {who}: {value:.2g} nats per token",
          "Raise beta, or lower lr."),
    _Sign("ratio_max", lambda v: v > RATIO,
          "An update moved a token's probability {value:,.0f} times in {who}",
          "Lower lr or update_epochs; a smaller clip_coef bounds it too."),
    _Sign("clip_fraction", lambda v: v > CLIPPED, "{value:.0%} of the tokens were clipped in {who}",
          "Lower lr or update_epochs, or raise clip_coef."),
    _Sign("sampler_gap", lambda v: v > GAP,
          "The sampler's log-probs were {value:.2g} nats off those of training in {who}",
          "Use the native engine, or engine.dtype: float32; loss.sampler_correction weighs it."),
    _Sign("ended", lambda v: v < CUT, "Only {value:.0%} of the completions ended by themselves in "
          "{who}", "Raise algorithm.max_output_tokens, or reward shorter answers.", serious=False),
)  # fmt: skip


def diagnose(contents: RunContents) -> list[Finding]:
    """Return what a reader of a run should know, the serious first; empty where all is well."""
    if not contents.rounds:
        return []
    found = [
        *_failures(contents.rounds),
        *_collapses(contents.rounds),
        *_signs(contents.rounds),
        *_equal_rewards(contents.rounds),
        *_entropy(contents.rounds),
        *_left_out(contents.rounds),
        *_reduced(contents.rounds),
        *_at_bounds(contents),
        *_end(contents),
    ]
    return sorted(found, key=lambda one: not one.serious)


def _where(hits: Sequence[AgentRecord]) -> str:
    """Return which agents in which rounds, the first three of them."""
    named = [f"agent {one.agent} at round {one.round + 1}" for one in hits[:3]]
    more = f" and {len(hits) - 3} more times" if len(hits) > 3 else ""
    return ", ".join(named) + more


def _agents(rounds: Sequence[RoundRecord]) -> Iterator[AgentRecord]:
    for record in rounds:
        yield from record.agents


def _failures(rounds: Sequence[RoundRecord]) -> Iterator[Finding]:
    failed = [agent for agent in _agents(rounds) if agent.state != "ok"]
    if failed:
        yield Finding(
            f"Failed: {_where(failed)} ({printable(failed[0].reason)}).",
            "Lower the upper bound of lr, or max_grad_norm.",
        )


def _collapses(rounds: Sequence[RoundRecord]) -> Iterator[Finding]:
    gone = {
        (record.round, one.agent)
        for record in rounds
        for one in record.decisions
        if one.kind == "collapsed"
    }
    hits = [agent for agent in _agents(rounds) if (agent.round, agent.agent) in gone]
    if hits:
        values = ", ".join(setting(one.hparams.lr) for one in hits[:3])
        yield Finding(
            f"Collapsed and left: {_where(hits)} (lr {values}).",
            "Nothing to do while others go on; with many, lower the upper bound of lr.",
            serious=False,
        )


def _signs(rounds: Sequence[RoundRecord]) -> Iterator[Finding]:
    for sign in _SIGNS:
        hits = [
            (value, agent)
            for agent in _agents(rounds)
            if math.isfinite(value := agent.metrics.get(sign.metric, math.nan))
            and sign.beyond(value)
        ]
        if hits:
            value = hits[0][0]
            what = sign.what.format(who=_where([agent for _, agent in hits]), value=value)
            yield Finding(f"{what}.", sign.remedy, sign.serious)


def _equal_rewards(rounds: Sequence[RoundRecord]) -> Iterator[Finding]:
    hits = [agent for agent in _agents(rounds) if agent.metrics.get("zero_variance", 0.0) >= DEAD]
    if not hits:
        return
    share = hits[0].metrics["zero_variance"]
    yield Finding(
        f"{share:.0%} of the groups had equal rewards in {_where(hits)}, so that they taught "
        "nothing.",
        "Where rewards are low, the task is too hard or the reward never pays: give partial "
        "reward, easier prompts or a larger group_size. Where they are high, it is solved.",
        serious=len(hits) * 2 > sum(len(record.agents) for record in rounds),
    )


def _entropy(rounds: Sequence[RoundRecord]) -> Iterator[Finding]:
    first = [a.metrics["entropy"] for a in rounds[0].agents if a.metrics.get("entropy", 0.0) > 0]
    if not first:
        return
    start = sorted(first)[len(first) // 2]
    hits = [a for a in rounds[-1].agents if 0 <= a.metrics.get("entropy", 1.0) < ENTROPY * start]
    if hits:
        yield Finding(
            f"Entropy fell below {ENTROPY:.0%} of the first round's in {_where(hits)}: its answers "
            "hardly vary any more.",
            "Raise beta or temperature, or lower lr, if rewards have stopped rising.",
            serious=False,
        )


def _left_out(rounds: Sequence[RoundRecord]) -> Iterator[Finding]:
    for metric, noun, remedy in (
        ("dropped", "episode", "See `error` in completions/ for what the environment raised."),
        ("set_aside", "group", "A reward function returned NaN, infinity or raised: mend it."),
    ):
        total = sum(agent.metrics.get(metric, 0.0) for agent in _agents(rounds))
        if total:
            yield Finding(f"{count(int(total), noun)} {metric.replace('_', ' ')}.", remedy)


def _reduced(rounds: Sequence[RoundRecord]) -> Iterator[Finding]:
    reduced = {name: value for record in rounds for name, value in record.reduced.items()}
    for name, value in reduced.items():
        yield Finding(
            f"The device ran out of memory; {name} was lowered to {value:,}.",
            f"Set engine.{name}: {value} to begin with it.",
            serious=False,
        )


def _at_bounds(contents: RunContents) -> Iterator[Finding]:
    """Tell of a winner at the end of a range: beyond it may be better."""
    evolve = contents.config.get("evolve")
    ranges = evolve.get("hyperparameters") if isinstance(evolve, dict) else None
    lines = contents.winning_lines()
    if not isinstance(ranges, dict) or not lines or not lines[0]:
        return
    for name, given in cast("dict[str, Any]", ranges).items():
        value = lines[0][-1].hparams.get(name) if name in contents.mutable else None
        end = None if value is None else _end_of(given, value)
        if end is not None:
            yield Finding(
                f"The winner's {short_name(name)}, {setting(value)}, is at the {end} end of its "
                "range.",
                f"Widen evolve.hyperparameters.{name}, for the best value may lie beyond.",
                serious=False,
            )


def _end_of(given: object, value: float) -> str | None:
    """Return at which end of a range a value is."""
    if not isinstance(given, dict):
        return None
    bounds = cast("dict[str, Any]", given)
    low, high = bounds.get("min"), bounds.get("max")
    if not isinstance(low, int | float) or not isinstance(high, int | float) or not low < high:
        return None
    place = (value - low) / (high - low)
    if low > 0 and value > 0 and high >= 10 * low:
        place = math.log(value / low) / math.log(high / low)
    # A bound of 0 is no bound to go beyond.
    if place <= AT_THE_END and low > 0:
        return "lower"
    return "upper" if place >= 1 - AT_THE_END else None


def _end(contents: RunContents) -> Iterator[Finding]:
    summary = contents.summary
    if summary is None or summary["gain"] is None:
        return
    error = summary["gain_se"] or 0.0
    if summary["gain"] <= 2 * error:
        yield Finding(
            f"The winner is not significantly better than the base: {summary['gain']:+.3f} ± "
            f"{error:.3f} on the test split.",
            "Train for more rounds, widen the range of lr, or look at whether the reward tells "
            "good answers from bad ones.",
        )
    if any(one["tie"] for one in summary["candidates"]):
        yield Finding(
            "A paired test cannot tell the winner from another finalist.",
            "Raise evolve.fitness.prompts or final_samples to tell them apart.",
            serious=False,
        )
