"""One exception root; each subclass is also the builtin it refines.

Every message names the thing, what was expected, what came, and the remedy. `exit_code` is what
the command line returns when the error reaches it: 2 for bad input of any kind, 1 for a run that
failed.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from evo_grpo.printable import printable

# A library stays silent until its user asks: logging.getLogger("evo_grpo"). Here, since whatever
# logs imports this module, and the package itself is to load at once.
logging.getLogger("evo_grpo").addHandler(logging.NullHandler())
# PEFT loads bitsandbytes wherever that is installed, and it then warns of a kernel for the CPU that
# it does not find and nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


class EvoGrpoError(Exception):
    """Root of everything this library raises on purpose."""

    exit_code: ClassVar[int] = 2

    def __str__(self) -> str:
        # Every message quotes something: a path, a key of a YAML file, an exception of others.
        # Escaped here, none of them can break out of the line, whoever prints the error.
        return printable(super().__str__())


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


class OtherRankError(RunFailedError):
    """Another process of the run failed or has ended, so this one ends too."""


class LostRankError(OtherRankError):
    """Another process of the run has ended without a word, is stopped, or is out of reach."""
