"""Configures glibc's allocator to keep freed memory.

Each learn pass allocates and frees its activations. By default, glibc returns the free end of its
heap to the system each time and gets zeroed pages again, which takes several per cent of a small
model's learn pass on some machines. Keeping the memory does not raise the peak, because the next
pass needs as much. The setting affects a whole process, so only the command line uses it.
"""

import ctypes
import os
import sys
from functools import cache

#: Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Larger blocks are mapped from the system and returned to it. This is the maximum of glibc's
#: dynamic threshold; see mallopt(3).
_MMAP_BYTES = 32 << 20
#: Return memory to the system if more than this is free; the largest value of the parameter.
_TRIM_BYTES = (1 << 31) - 1
#: Environment variables with which users set these parameters themselves.
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


@cache
def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for later allocations; return whether this was done.

    Nothing is done with another C library, or if an environment variable sets the parameters.
    """
    chosen = any(name in os.environ for name in _CHOSEN)
    chosen = chosen or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and all(
        mallopt(setting, value) == 1
        for setting, value in ((_MMAP_THRESHOLD, _MMAP_BYTES), (_TRIM_THRESHOLD, _TRIM_BYTES))
    )
