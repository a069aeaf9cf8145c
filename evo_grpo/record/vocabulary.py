"""Lists the metrics of a run, by the names that files, trackers, reports and pages all use."""

from dataclasses import dataclass
from typing import Literal

Summed = Literal["mean", "sum", "max", "none"]


@dataclass(frozen=True)
class Metric:
    """A metric of a run.

    Attributes:
        name: The name; `<...>` is replaced by a name from the run.
        per: Whether there is one value per GRPO step of an agent ("step"), per round of an agent
            ("round") or per round of the population ("population").
        over: How the value of a round is computed from the values of its steps; "none" if rounds
            have no value.
    """

    name: str
    meaning: str
    unit: str
    per: Literal["step", "round", "population"]
    over: Summed


REWARD_OF = "reward/"
"""Prefix of the metric of one of several reward functions; the function's name follows."""
VALIDATION = "validation/"
"""Prefix of the metric of one of several reward functions on validation prompts."""
LOGGED = "logged/"
"""Prefix of a metric that a reward function in TRL's style logged with `log_metric`."""
HYPERPARAMETER = "hyperparameters/"
"""Prefix of the metrics that have an agent's value of a hyperparameter."""
OBJECTIVE = "objective_"
"""Prefix of an objective beside fitness, in metrics and in columns of tables."""
SECONDS = "seconds/"
"""Prefix of the metrics that have the wall time of a phase of a round."""


def _of_step(name: str, meaning: str, unit: str = "", over: Summed = "mean") -> Metric:
    return Metric(name, meaning, unit, "step", over)


def _of_round(name: str, meaning: str, unit: str = "") -> Metric:
    return Metric(name, meaning, unit, "round", "none")


def _of_population(name: str, meaning: str, unit: str = "") -> Metric:
    return Metric(name, meaning, unit, "population", "none")


OF_STEPS = (
    _of_step("reward", "Mean weighted reward of the completions."),
    _of_step(
        f"{REWARD_OF}<function>",
        "Mean reward of one of several reward functions, without its weight; left out in a step "
        "in which it abstained from all completions.",
    ),
    _of_step(
        f"{LOGGED}<name>",
        "Mean of what reward functions with `env.reward_style: trl` logged by `log_metric`.",
    ),
    _of_step(
        "zero_variance",
        "Share of groups whose rewards are all equal: nothing is learned from them.",
        "share",
    ),
    _of_step(
        "resampled",
        "Groups sampled to replace groups with equal rewards; left out without "
        "`dynamic_sampling_tokens`.",
        "groups",
        "sum",
    ),
    _of_step("replaced", "Groups of `resampled` that are learned from.", "groups", "sum"),
    _of_step("loss", "Loss, mean over optimizer steps."),
    _of_step(
        "kl",
        "KL divergence from the reference; left out where `beta` is 0, which computes none.",
        "nats per token",
    ),
    _of_step("entropy", "Entropy of the policy.", "nats per token"),
    _of_step("clip_fraction", "Share of tokens whose ratio is clipped.", "share"),
    _of_step("clip_low", "Share of tokens clipped at the lower bound.", "share"),
    _of_step("clip_high", "Share of tokens clipped at the upper bound.", "share"),
    _of_step(
        "ratio_max", "Greatest ratio of a token's probability to that before the update.", "", "max"
    ),
    _of_step(
        "sampler_gap",
        "Mean distance between the log-probs of the engine that sampled and those of the model "
        "that learns; left out where the engine returns none.",
        "nats per token",
    ),
    _of_step("grad_norm", "Norm of the gradient before clipping."),
    _of_step("completion_length", "Mean length of a completion.", "tokens"),
    _of_step("ended", "Share of completions that sampled the end token.", "share"),
    _of_step(
        "overlong_penalty",
        "Mean of the overlong penalty, which training adds to the reward; left out without "
        "`overlong_buffer`.",
    ),
    _of_step("turns", "Mean number of turns of an episode.", "turns"),
    _of_step("cut", "Share of episodes that the bound of turns or the context ended.", "share"),
    _of_step("lr", "Learning rate in force, with its schedule.", "", "none"),
    _of_step("tokens", "Tokens sampled.", "tokens", "none"),
    _of_step("completions", "Completions sampled, one for each turn.", "completions", "none"),
    _of_step("rows", "Completions or episodes in the loss.", "rows", "sum"),
    _of_step("skipped_rows", "Rows of `rows` that give no gradient.", "rows", "sum"),
    _of_step("updates", "Optimizer steps taken.", "steps", "sum"),
    _of_step("failed", "Optimizer steps whose gradient was not finite.", "steps", "sum"),
    _of_step("set_aside", "Groups set aside because a reward could not be used.", "groups", "sum"),
    _of_step("dropped", "Episodes dropped because the environment raised.", "episodes", "sum"),
    _of_step("empty_steps", "1 for a step without an episode.", "steps", "sum"),
)
"""Metrics that have one value per GRPO step of an agent."""

OF_ROUNDS = (
    _of_round("fitness", "Mean reward on the validation prompts, of an evaluation."),
    _of_round("fitness_se", "Standard error of the fitness."),
    _of_round(
        f"{OBJECTIVE}<name>",
        "Mean of an objective beside fitness on the validation prompts, and with `_se` behind its "
        "name the standard error of it.",
    ),
    _of_round(
        f"{VALIDATION}<function>",
        "Mean of one of several reward functions on the validation prompts, without its weight.",
    ),
    _of_round(f"{HYPERPARAMETER}<name>", "Value that the agent trained with in the round."),
    _of_round(
        "dead_steps", "Latest steps in a row in which all its groups had equal rewards.", "steps"
    ),
    _of_round(
        "rank_error",
        "Relative error of the agent's update B A, in the Frobenius norm over all layers, where a "
        "smaller `lora.r`, or layers that `lora.target_modules` leaves out, cut it before the "
        "round; left out otherwise.",
        "share",
    ),
    _of_round("member", "Member id of the agent."),
    _of_round("parent", "Member it was copied from; left out in the first population."),
)
"""Metrics that have one value per round of an agent."""

OF_POPULATION = (
    _of_population("fitness/best", "Greatest fitness of the round."),
    _of_population("fitness/mean", "Mean fitness of the agents that could be ranked."),
    _of_population("round", "Number of the round, counted from 1."),
    _of_population("agents", "Agents that played the round.", "agents"),
    _of_population("tokens/training", "Tokens sampled in training.", "tokens"),
    _of_population("tokens/evaluation", "Tokens sampled to measure fitness.", "tokens"),
    _of_population(f"{SECONDS}<phase>", "Wall time of a phase of the round.", "s"),
    _of_population("test/best", "Test reward of the winner, once the run is over."),
    _of_population("test/base", "Test reward of the base, once the run is over."),
)
"""Metrics that have one value per round of the population, or one at the end of a run."""

VOCABULARY = (*OF_STEPS, *OF_ROUNDS, *OF_POPULATION)

_BY_NAME = {metric.name: metric for metric in VOCABULARY}
_FAMILIES = {
    metric.name.partition("<")[0]: metric for metric in VOCABULARY if metric.name.endswith(">")
}


def metric(name: str) -> Metric | None:
    """Return the metric with a name, None for a name that is not in the vocabulary."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    return next((m for begin, m in _FAMILIES.items() if name.startswith(begin)), None)


def over_steps(name: str) -> Summed:
    """Return how a metric's value of a round is computed from its steps; "mean" if unknown."""
    entry = metric(name)
    return "mean" if entry is None else entry.over
