"""The exceptions of this package: one root; each subclass also derives from a builtin exception.

A message names the argument, the expected value, the value found and the remedy. `exit_code` is
the exit status of the command line after the error: 2 for bad input, 1 for a run that failed.
"""

import logging
from typing import ClassVar

from evo_grpo.escaping import printable

# A library logs nothing until its user configures logging. Each module that logs imports this one;
# `evo_grpo/__init__.py` imports nothing, so that it loads fast.
logging.getLogger("evo_grpo").addHandler(logging.NullHandler())
# PEFT imports bitsandbytes if it is installed, which warns about a missing CPU kernel that this
# package does not use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


class EvoGrpoError(Exception):
    """Root of the exceptions that this package raises."""

    exit_code: ClassVar[int] = 2

    def __str__(self) -> str:
        # Messages quote text from outside: paths, YAML keys, other exceptions. Escape it here, so
        # that it cannot contain line breaks or control characters wherever the error is printed.
        return printable(super().__str__())


class ConfigError(EvoGrpoError, ValueError):
    """A setting has a wrong name, type or range."""


class ShapeError(EvoGrpoError, ValueError):
    """A tensor or list has another shape than the other arguments require."""


class DataError(EvoGrpoError, ValueError):
    """A dataset is missing, empty, or lacks a column."""


class RewardError(EvoGrpoError, ValueError):
    """A reward function raised an exception, or returned a value that is not a finite number."""


class RewardAbortError(RewardError):
    """A reward function or an environment hung, exited, or changed the state of the process.

    The error ends a run even if its settings allow reward failures.
    """


class ModelError(EvoGrpoError, ValueError):
    """A base model or tokenizer cannot be loaded, or the model cannot have adapters."""


class PromptTooLongError(EvoGrpoError, ValueError):
    """A prompt leaves no room for a completion in the model's context."""


class CheckpointError(EvoGrpoError, ValueError):
    """A checkpoint lacks files, is truncated, belongs to another model, or cannot be written."""


class RunDirError(EvoGrpoError, FileExistsError):
    """A folder cannot be used for a run; for example, its run is finished or in use."""


class RunNotFoundError(EvoGrpoError, FileNotFoundError):
    """A path is not a run folder."""


# The name lacks the suffix "Error"; it is public and stays.
class EngineUnavailable(EvoGrpoError, ImportError):
    """An engine or an optional dependency is not installed, or not supported on this machine."""


class RunFailedError(EvoGrpoError, RuntimeError):
    """A run cannot continue; for example, no agent's update is finite."""

    exit_code: ClassVar[int] = 1


class FailedDeviceError(RunFailedError):
    """The GPU of this process failed in a round; its memory is lost."""


class OtherRankError(RunFailedError):
    """Another process of the run failed or ended, so this process ends too."""


class LostRankError(OtherRankError):
    """Another process of the run was killed, is suspended, or cannot be reached."""
