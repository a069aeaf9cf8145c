"""The metrics of a run, with the one name that files, trackers, reports and pages use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Summed = Literal["mean", "sum", "max", "none"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: The name; `<...>` is replaced by a name from the run.
        meaning: The definition.
        unit: The unit of its values, empty for a plain number.
        per: Whether there is one value per GRPO step of an agent ("step"), per round of an agent
            ("round") or per round of the population ("population").
        over: How the round's value is computed from those of its steps; "none" if it has none.
    """

    name: str
    meaning: str
    unit: str
    per: Literal["step", "round", "population"]
    over: Summed = "none"


REWARD_OF = "reward/"
"""Prefix of the metric of one of several reward functions; the function's name follows."""
VALIDATION = "validation/"
"""Prefix of the metric of one of several reward functions on validation prompts."""
LOGGED = "logged/"
"""Prefix of what a reward function in TRL's style logged with `log_metric`."""
HYPERPARAMETER = "hyperparameters/"
"""Prefix of the metric of a hyperparameter."""
OBJECTIVE = "objective_"
"""Prefix of an objective beside fitness, in metrics and in columns of tables."""
SECONDS = "seconds/"
"""Prefix of the metric of a phase of a round."""

OF_STEPS = (
    Metric("reward", "Mean weighted reward of the completions.", "", "step", "mean"),
    Metric(
        f"{REWARD_OF}<function>",
        "Mean reward of one of several reward functions, without its weight; left out in a step "
        "in which it abstained from all completions.",
        "",
        "step",
        "mean",
    ),
    Metric(
        f"{LOGGED}<name>",
        "Mean of what reward functions with `env.reward_style: trl` logged by `log_metric`.",
        "",
        "step",
        "mean",
    ),
    Metric(
        "zero_variance",
        "Share of groups whose rewards are all equal: nothing is learned from them.",
        "share",
        "step",
        "mean",
    ),
    Metric(
        "resampled",
        "Groups sampled to replace groups with equal rewards; left out without "
        "`dynamic_sampling_tokens`.",
        "groups",
        "step",
        "sum",
    ),
    Metric("replaced", "Of these, groups that are learned from.", "groups", "step", "sum"),
    Metric("loss", "Loss, mean over optimizer steps.", "", "step", "mean"),
    Metric(
        "kl",
        "KL divergence from the reference; left out where `beta` is 0, which computes none.",
        "nats per token",
        "step",
        "mean",
    ),
    Metric("entropy", "Entropy of the policy.", "nats per token", "step", "mean"),
    Metric("clip_fraction", "Share of tokens whose ratio is clipped.", "share", "step", "mean"),
    Metric("clip_low", "Share of tokens clipped at the lower bound.", "share", "step", "mean"),
    Metric("clip_high", "Share of tokens clipped at the upper bound.", "share", "step", "mean"),
    Metric(
        "ratio_max",
        "Greatest ratio of a token's probability to that before the update.",
        "",
        "step",
        "max",
    ),
    Metric(
        "sampler_gap",
        "Mean distance between the log-probs of the engine that sampled and those of the model "
        "that learns; left out where the engine returns none.",
        "nats per token",
        "step",
        "mean",
    ),
    Metric("grad_norm", "Norm of the gradient before clipping.", "", "step", "mean"),
    Metric("completion_length", "Mean length of a completion.", "tokens", "step", "mean"),
    Metric("ended", "Share of completions that sampled the end token.", "share", "step", "mean"),
    Metric(
        "overlong_penalty",
        "Mean of the overlong penalty, which training adds to the reward; left out without "
        "`overlong_buffer`.",
        "",
        "step",
        "mean",
    ),
    Metric("turns", "Mean number of turns of an episode.", "turns", "step", "mean"),
    Metric(
        "cut",
        "Share of episodes that the bound of turns or the context ended.",
        "share",
        "step",
        "mean",
    ),
    Metric("lr", "Learning rate in force, with its schedule.", "", "step"),
    Metric("tokens", "Tokens sampled.", "tokens", "step"),
    Metric("completions", "Completions sampled, one for each turn.", "completions", "step"),
    Metric("rows", "Completions or episodes in the loss.", "rows", "step", "sum"),
    Metric("skipped_rows", "Of these, rows that give no gradient.", "rows", "step", "sum"),
    Metric("updates", "Optimizer steps taken.", "steps", "step", "sum"),
    Metric("failed", "Optimizer steps whose gradient was not finite.", "steps", "step", "sum"),
    Metric(
        "set_aside",
        "Groups set aside because a reward could not be used.",
        "groups",
        "step",
        "sum",
    ),
    Metric(
        "dropped", "Episodes dropped because the environment raised.", "episodes", "step", "sum"
    ),
    Metric("empty_steps", "1 for a step without an episode.", "steps", "step", "sum"),
)
"""Metrics of an agent, per step."""

OF_ROUNDS = (
    Metric("fitness", "Mean reward on the validation prompts, of an evaluation.", "", "round"),
    Metric("fitness_se", "Standard error of the fitness.", "", "round"),
    Metric(
        f"{OBJECTIVE}<name>",
        "Mean of an objective beside fitness on the validation prompts, and with `_se` behind its "
        "name the standard error of it.",
        "",
        "round",
    ),
    Metric(
        f"{VALIDATION}<function>",
        "Mean of one of several reward functions on the validation prompts, without its weight.",
        "",
        "round",
    ),
    Metric(
        f"{HYPERPARAMETER}<name>", "Value that the agent trained with in the round.", "", "round"
    ),
    Metric(
        "dead_steps",
        "Latest steps in a row in which all its groups had equal rewards.",
        "steps",
        "round",
    ),
    Metric(
        "rank_error",
        "Relative error of the agent's update B A, in the Frobenius norm over all layers, where a "
        "smaller `lora.r`, or layers that `lora.target_modules` leaves out, cut it before the "
        "round; left out otherwise.",
        "share",
        "round",
    ),
    Metric("member", "Member id of the agent.", "", "round"),
    Metric("parent", "Member it was copied from; left out in the first population.", "", "round"),
)
"""Metrics of an agent, per round."""

OF_POPULATION = (
    Metric("fitness/best", "Greatest fitness of the round.", "", "population"),
    Metric("fitness/mean", "Mean fitness of the agents that could be ranked.", "", "population"),
    Metric("round", "Number of the round, counted from 1.", "", "population"),
    Metric("agents", "Agents that played the round.", "agents", "population"),
    Metric("tokens/training", "Tokens sampled in training.", "tokens", "population"),
    Metric("tokens/evaluation", "Tokens sampled to measure fitness.", "tokens", "population"),
    Metric(f"{SECONDS}<phase>", "Wall time of a phase of the round.", "s", "population"),
    Metric("test/best", "Test reward of the winner, once the run is over.", "", "population"),
    Metric("test/base", "Test reward of the base, once the run is over.", "", "population"),
)
"""Metrics of the population, per round and at the end of a run."""

VOCABULARY = (*OF_STEPS, *OF_ROUNDS, *OF_POPULATION)

_BY_NAME = {metric.name: metric for metric in VOCABULARY}
_FAMILIES = {
    metric.name.partition("<")[0]: metric for metric in VOCABULARY if metric.name.endswith(">")
}


def metric(name: str) -> Metric | None:
    """Return the metric with a name, None for a name that is not in the vocabulary."""
    found = _BY_NAME.get(name)
    if found is not None:
        return found
    return next((m for begin, m in _FAMILIES.items() if name.startswith(begin)), None)


def over_steps(name: str) -> Summed:
    """Return how the round's value of a metric is computed from its steps; "mean" if unknown."""
    known = metric(name)
    return "mean" if known is None else known.over


def table() -> str:
    """Return the vocabulary as the Markdown table of docs/metrics.md."""
    per = {"step": "step and agent", "round": "round and agent", "population": "round"}
    lines = ["| metric | meaning | unit | one for each | in a round |", "|---|---|---|---|---|"]
    lines += [
        f"| `{m.name}` | {m.meaning} | {m.unit} | {per[m.per]} "
        f"| {'' if m.over == 'none' else m.over} |"
        for m in VOCABULARY
    ]
    return "\n".join(lines) + "\n"
