"""One exception root; each subclass is also the builtin it refines.

Every message names the thing, what was expected, what came, and the remedy. `exit_code` is what
the command line returns when the error reaches it: 2 for bad input of any kind, 1 for a run that
failed.
"""

from __future__ import annotations

from typing import ClassVar


class EvoGrpoError(Exception):
    """Root of everything this library raises on purpose."""

    exit_code: ClassVar[int] = 2


class ConfigError(EvoGrpoError, ValueError):
    """A setting has a wrong name, type or range."""


class ShapeError(EvoGrpoError, ValueError):
    """A tensor or list has a shape that does not fit its neighbours."""


class DataError(EvoGrpoError, ValueError):
    """A dataset is missing, empty, or lacks a column."""


class RewardError(EvoGrpoError, ValueError):
    """A reward function raised, or returned something that is no finite number."""


class RewardAbortError(RewardError):
    """A reward function or an environment hangs, exited, or left the process changed.

    That ends a run whatever failures it allows.
    """


class ModelError(EvoGrpoError, ValueError):
    """A base model or tokenizer cannot be loaded, or an adapter does not fit it."""


class PromptTooLongError(EvoGrpoError, ValueError):
    """A prompt leaves no room for a completion in the model's context."""


class CheckpointError(EvoGrpoError, ValueError):
    """A checkpoint is missing files, truncated, of another model, or cannot be written there."""


class RunDirError(EvoGrpoError, FileExistsError):
    """A run folder is foreign, finished, or in use by another process."""


class RunNotFoundError(EvoGrpoError, FileNotFoundError):
    """A path is not a run folder."""


# Without "Error" at its end: the name that users of the design rely on.
class EngineUnavailable(EvoGrpoError, ImportError):
    """An engine or extra is asked for that is not installed or not supported here."""


class RunFailedError(EvoGrpoError, RuntimeError):
    """A run cannot go on: for instance every agent's update is not finite."""

    exit_code: ClassVar[int] = 1
