"""Where a reward function of the user failed, and what one written for another trainer expects."""

from __future__ import annotations

import os
import sysconfig
import traceback
from contextlib import suppress
from pathlib import Path

PAGE = "docs/from_trl.md"
FOREIGN = {
    **dict.fromkeys(("completion_ids", "prompt_ids"), "TRL passes token ids; here text alone"),
    **dict.fromkeys(("trainer_state", "environments"), "TRL passes it; there is none here"),
    **dict.fromkeys(("log_metric", "log_extra"), "TRL passes it; here each reward is a metric"),
    "solution_str": "verl passes the completion so; name the parameter completion",
}
"""Parameters of reward functions that other trainers pass, each with what is here."""
_NOT_YOURS = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(__file__).parents[2], *map(sysconfig.get_path, ("stdlib", "purelib")))
)


def place_in_code(error: BaseException) -> str:
    """Return file, line and function of the user's code in which an exception was raised.

    It is the innermost call that is neither of this package nor of an installed one; "" if none is.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_NOT_YOURS, "<frozen"))]
    if not own:
        return ""
    file = Path(own[-1].filename)
    with suppress(ValueError, OSError):  # it lies elsewhere, or the working folder is gone
        file = file.relative_to(Path.cwd())
    named = [frame.name for frame in own if not frame.name.startswith("<")]  # no comprehension
    return f" in {file}, line {own[-1].lineno}, {(named or ['a lambda'])[-1]}"


def hint(error: BaseException) -> str:
    """Return what to change in a function that was written for another trainer, or ""."""
    # Not str(error), since the __str__ of a user's exception may raise.
    told = error.args[0] if error.args and isinstance(error.args[0], str) else ""
    if isinstance(error, KeyError) and told in FOREIGN:
        return f"; {FOREIGN[told]}: see {PAGE}"
    kind = isinstance(error, TypeError | AttributeError)
    if kind and told.startswith(("string indices must be", "'str' object has no attribute 'get'")):
        return (
            "; completions and prompts are strings here, where TRL has messages in conversations: "
            f"write completion in place of completion[0]['content'], see {PAGE}"
        )
    return ""
