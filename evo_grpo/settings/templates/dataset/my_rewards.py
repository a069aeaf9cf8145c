"""Rewards of a completion: functions that `env.reward` names.

`completion` is what the model wrote; the other arguments are columns of the row, by their names. A
function returns a number, or None to abstain.
"""


def right(completion: str, answer: str) -> float:
    """Return 1 if the completion is the right answer and nothing else, otherwise 0."""
    return float(completion.strip() == answer)


def digits(completion: str, answer: str) -> float:
    """Return the share of the answer's digits that are right, to reward near misses too."""
    given = completion.strip()[: len(answer)]
    return sum(a == b for a, b in zip(given, answer, strict=False)) / len(answer)
