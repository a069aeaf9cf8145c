"""Finds problems of a run in its records and settings, with remedies."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.summary import SelectedAgent
from evo_grpo.record.wording import count, listed
from evo_grpo.schema.problems import shown_value
from evo_grpo.schema.search_space import HyperparameterConfig

FEW_ENDED = 0.5
"""Share of completions that sample the end token, below which the limit of tokens is too low."""
MOSTLY_EQUAL = 0.9
"""Share of groups with equal rewards above which a round teaches little."""
GOOD = 0.95
"""Least mean of equal rewards at which a task of rewards 0 and 1 counts as solved."""
LOW_ENTROPY = 0.05
"""Share of the first round's entropy below which completions hardly vary."""


#: Metric -> the bound that it should stay below, the text for {agent}, {round} and {value}, remedy.
_BOUNDS = {
    "kl": (
        1.0,
        "the KL divergence of agent {agent} from the reference rose to {value:.3g} nats per token "
        "in round {round}",
        "raise algorithm.beta or lower its lr",
    ),
    # After an update; a healthy one stays below 10.
    "ratio_max": (
        100.0,
        "an update moved the probability of a token of agent {agent} {value:,.0f} times in round "
        "{round}",
        "lower its lr or algorithm.update_epochs, or clip more with a smaller clip_coef",
    ),
    # Common values are below 0.2 (Schulman et al. 2017, PPO).
    "clip_fraction": (
        0.4,
        "{value:.0%} of the tokens of agent {agent} were clipped in round {round}",
        "lower its lr or algorithm.update_epochs, or raise clip_coef",
    ),
    # Nats per token; different rounding of engines gives a hundredth of this bound.
    "sampler_gap": (
        0.05,
        "the log-probs with which agent {agent} was sampled were {value:.2g} nats per token off "
        "those of training in round {round}",
        "sample with the native engine or in float32; algorithm.sampler_correction weighs it",
    ),
}


@dataclass(frozen=True)
class Trouble:
    """A problem of a run, and a remedy in the imperative.

    Attributes:
        kind: "failed", "collapsed", "kl", "ratio_max", "clip_fraction", "sampler_gap",
            "equal_rewards", "entropy", "cut", "dropped", "set_aside", "memory" or "bound".
        text: The problem; rounds count from 1. Parts of it come from files: escape it.
        round: The first round (0-based) with the problem.
    """

    kind: str
    text: str
    remedy: str
    round: int
    agent: int | None = None

    @property
    def sentence(self) -> str:
        """The problem and its remedy in one line."""
        return f"{self.text}: {self.remedy}"


def find_trouble(
    rounds: Sequence[RoundRecord],
    winner: SelectedAgent | None = None,
    space: HyperparameterConfig | None = None,
    dropout: float = 0.0,
) -> list[Trouble]:
    """Return the problems of a run, ordered by their first round.

    The values of `winner`, the winner or the best agent so far, are compared with their bounds in
    `space`; `dropout` is the adapters' dropout.
    """
    checks = (
        _failed,
        _collapsed,
        _beyond_bounds,
        _equal_rewards,
        _last_round,
        _discarded_data,
        _memory,
    )
    troubles = [trouble for check in checks for trouble in check(rounds)]
    if dropout:
        # Dropout is on in training and off in sampling: a gap is no fault of the engine.
        troubles = [trouble for trouble in troubles if trouble.kind != "sampler_gap"]
    if space is not None and winner is not None:
        troubles += _at_bounds(winner.record, space)
    return sorted(troubles, key=lambda trouble: trouble.round)


def _failed(rounds: Sequence[RoundRecord]) -> Iterator[Trouble]:
    """Yield a problem for each agent that failed; its text names the rounds of the failures."""
    failures: dict[int, list[AgentRecord]] = {}
    for record in rounds:
        for agent in record.agents:
            if agent.state != "ok":
                failures.setdefault(agent.agent, []).append(agent)
    for slot, failed in failures.items():
        numbers = [failure.round + 1 for failure in failed]
        rounds_of = f"round {numbers[0]}" if len(numbers) == 1 else f"rounds {listed(numbers)}"
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


def _equal_rewards(rounds: Sequence[RoundRecord]) -> Iterator[Trouble]:
    """Yield a problem if nearly all groups had equal rewards in each of the last rounds."""
    start: RoundRecord | None = None
    for record in reversed(rounds):
        share = _mean(record.agents, "zero_variance")
        if share is None or share < MOSTLY_EQUAL:
            break
        start = record
    if start is None:
        return
    share, reward = (_mean(start.agents, name) for name in ("zero_variance", "reward"))
    text = (
        f"from round {start.round + 1} on the completions of {share:.0%} of the groups had equal "
        "rewards, which teach nothing"
    )
    remedy = (
        "the task is solved, so stop earlier or take harder prompts"
        if reward is not None and reward >= GOOD
        else "take prompts that are sometimes answered right, give rewards for partial success, or "
        "raise algorithm.group_size or algorithm.temperature"
    )
    yield Trouble("equal_rewards", text, remedy, start.round)


def _discarded_data(rounds: Sequence[RoundRecord]) -> Iterator[Trouble]:
    for kind, noun, event, remedy in (
        ("dropped", "episode", "dropped, the first in round {}: the environment raised an error",
         "see the errors in completions/ and fix the environment"),
        ("set_aside", "group", "set aside, the first in round {}: they had no finite rewards",
         "fix the reward function that returns NaN or infinity"),
    ):  # fmt: skip
        amounts = [sum(a.metrics.get(kind, 0.0) for a in r.agents) for r in rounds]
        if any(amounts):
            first_round = rounds[next(i for i, amount in enumerate(amounts) if amount)].round
            text = f"{count(int(sum(amounts)), noun)} had to be {event.format(first_round + 1)}"
            yield Trouble(kind, text, remedy, first_round)


def _beyond_bounds(rounds: Sequence[RoundRecord]) -> Iterator[Trouble]:
    """Yield a problem for the first round in which a metric of an agent exceeded its bound.

    The KL divergence of a collapsed agent is left out, because `_collapsed` reports it.
    """
    decisions = (decision for record in rounds for decision in record.decisions)
    reported = {
        ("kl", int(decision.agent)) for decision in decisions if decision.kind == "collapsed"
    }
    for record in rounds:
        for agent in record.agents:
            for kind, (bound, text, remedy) in _BOUNDS.items():
                value = agent.metrics.get(kind, 0.0)
                if bound < value < math.inf and (kind, agent.agent) not in reported:
                    reported.add((kind, agent.agent))
                    text = text.format(agent=agent.agent, round=record.round + 1, value=value)
                    yield Trouble(kind, text, remedy, record.round, agent.agent)


def _last_round(rounds: Sequence[RoundRecord]) -> Iterator[Trouble]:
    """Yield the problems of the completions of the last round."""
    if not rounds:
        return
    final = rounds[-1]
    early, late = (_mean(record.agents, "entropy") for record in (rounds[0], final))
    if early is not None and late is not None and late < LOW_ENTROPY * early:
        yield Trouble(
            "entropy",
            f"entropy fell from {early:.2g} to {late:.2g} nats per token: completions hardly vary "
            "any more",
            "raise algorithm.beta or temperature, or lower lr, if rewards have stopped rising",
            final.round,
        )
    ended = _mean(final.agents, "ended")
    if ended is not None and ended < FEW_ENDED:
        yield Trouble(
            "cut",
            f"in round {final.round + 1} {1 - ended:.0%} of the completions were cut at the limit "
            "of tokens",
            "raise algorithm.max_output_tokens, or reward short answers",
            final.round,
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


def _at_bounds(last: AgentRecord, space: HyperparameterConfig) -> Iterator[Trouble]:
    """Yield a problem for each hyperparameter of an agent that is at a bound of its range."""
    for name in space.names():
        value, ends = last.hparams.named().get(name), space[name]
        if isinstance(value, str) or ends.min == ends.max:
            continue  # a name has no bound
        for end, bound in (("min", ends.min), ("max", ends.max)):
            if value == bound != 0:
                chosen = space[name].choices is not None
                yield Trouble(
                    "bound",
                    f"the best agent's {name} ended at the {end} of its "
                    f"{'choices' if chosen else 'range'}, {shown_value(bound)}",
                    f"add one beyond it: evolve.hyperparameters.{name}.choices"
                    if chosen
                    else f"widen it: evolve.hyperparameters.{name}.{end}",
                    last.round,
                    last.agent,
                )


def _mean(agents: Sequence[AgentRecord], name: str) -> float | None:
    """Return the mean of a metric over the agents that have it."""
    values = [a.metrics.get(name, math.nan) for a in agents]
    values = [value for value in values if math.isfinite(value)]
    return sum(values) / len(values) if values else None
