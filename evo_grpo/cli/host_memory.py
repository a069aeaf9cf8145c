"""What the C library does with memory that a learn pass frees.

A pass allocates its activations and frees them, again and again. glibc gives the free end of its
heap back to the system each time, which hands it out anew, one zeroed page after another: on some
machines several per cent of a learn pass of a small model. Memory that is kept makes no peak
higher, since the next pass asks for as much. It is a choice for a whole process, so the command
line makes it for its own, and the library for nobody's.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

#: Names of mallopt's settings in malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Blocks from here on come from the system and go back to it: the highest that glibc's own rule
#: (mallopt(3)) goes to.
_MMAP_BYTES = 32 << 20
#: Trim when more than this is free: the most that the setting's type holds.
_TRIM_BYTES = (1 << 31) - 1
#: Variables by which a user has chosen already.
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


@cache
def keep_freed_memory() -> bool:
    """Tell glibc, once per process, to keep what is freed for the next allocation.

    Returns:
        Whether it was told: not on another C library, and not where an environment variable of its
        own says what it is to do.
    """
    chosen = any(name in os.environ for name in _CHOSEN)
    chosen = chosen or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None or not hasattr(library, "gnu_get_libc_version"):
        return False
    return all(
        mallopt(setting, value) == 1
        for setting, value in ((_MMAP_THRESHOLD, _MMAP_BYTES), (_TRIM_THRESHOLD, _TRIM_BYTES))
    )
