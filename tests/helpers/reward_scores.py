"""Rewards of some completions, where any reward that cannot be used is an error."""

from evo_grpo.envs.rewards.scoring import CompletionBatch, score_batch, warn_of_silence
from evo_grpo.errors import RewardError
from evo_grpo.settings.env import RewardCalls

#: Calls as long as they take, where an error stops all, or is a failure like others.
STOP = RewardCalls(reward_timeout=None)
SET_ASIDE = RewardCalls(reward_timeout=None, reward_errors="set_aside")


def score(rewards, completions, rows, prompts, numbers=None, *, timeout=None):
    """(B, K) rewards without weights, as an environment's own `score` has them."""
    numbers = range(len(completions)) if numbers is None else numbers
    batch = CompletionBatch(completions, rows, prompts, [f"row {n}" for n in numbers])
    scored = score_batch(rewards, batch, RewardCalls(reward_timeout=timeout))
    for failure in scored.failures:
        raise RewardError(failure.text)
    warn_of_silence(rewards, scored)
    return scored.rewards
