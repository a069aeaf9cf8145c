"""The names of AgileRL under their documented path; the code is in `evo_grpo.api.agilerl`."""

from __future__ import annotations

from typing import TYPE_CHECKING

# What looks a name up on first use there serves this module too.
from evo_grpo.api.agilerl import __all__ as __all__
from evo_grpo.api.agilerl import __dir__ as __dir__
from evo_grpo.api.agilerl import __getattr__ as __getattr__

if TYPE_CHECKING:
    from evo_grpo.api.agilerl import *  # noqa: F403 -- for type checkers alone
