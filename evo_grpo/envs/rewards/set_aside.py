"""Groups with a reward that cannot be used: set aside, counted, fatal when there are many."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from typing import final

from evo_grpo.errors import RewardError

LATEST_GROUPS = 100
"""Over so many groups the share of those that were set aside is taken."""


@final
class SetAside:
    """Counts the groups of an environment that were set aside.

    Args:
        share: Largest share of the latest `LATEST_GROUPS` groups.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._latest: deque[bool] = deque(maxlen=LATEST_GROUPS)
        self._warned = False

    def record(self, groups: Sequence[bool], reason: str) -> None:
        """Add the groups of one play.

        Args:
            groups: For each whether it was set aside.
            reason: What failed, of one of them.

        Raises:
            RewardError: There are more than the share allows.
        """
        self._latest.extend(groups)
        count = sum(self._latest)
        if not any(groups):
            return
        # With a share of 1 a run goes on until nothing at all is left to learn from.
        if count > self.share * LATEST_GROUPS or count == LATEST_GROUPS:
            several = "" if count == 1 else f" (of {count} such groups)"
            raise RewardError(
                f"{reason}{several}; mend the function, let it return None, or let more groups be "
                f"set aside with env.reward_failures, now {self.share:g} of the latest "
                f"{LATEST_GROUPS}"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{reason}; its group is set aside and counted as set_aside, and so are later "
                "ones, without a warning",
                stacklevel=2,
            )
