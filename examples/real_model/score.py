"""The reward of an answer: how near it is, whether it is right, and whether it stands alone."""

import re


def reward(completion: str, answer: str, **columns: object) -> float:
    """Return up to .3 for a near number, .4 for the right one, and .3 for nothing behind it."""
    del columns
    found = re.match(r"\s*(-?\d+)", completion)
    if not found:
        return 0.0
    off = abs(int(found[1]) - int(answer))
    alone = completion.strip().rstrip(".") == found[1]
    return 0.3 * max(0.0, 1 - off / 9) + 0.4 * (off == 0) + 0.3 * alone
