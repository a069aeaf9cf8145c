"""Freed memory stays with the process, unless the user has told the C library otherwise."""

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import sys
import numpy as np
from evo_grpo.cli.host_memory import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

told = keep_freed_memory() if sys.argv[1] == "told" else False
before = resident()
blocks = [np.ones(1 << 20) for _ in range(16)]  # of 8 MiB
del blocks
print(told, resident() - before > 64 << 20)
"""


def tell(*arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    return done.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_memory_is_kept_only_where_nobody_chose_otherwise():
    assert tell("no") == ["False", "False"]
    assert tell("told") == ["True", "True"]
    assert tell("told", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
    assert tell("told", GLIBC_TUNABLES="glibc.malloc.arena_max=2")[0] == "False"
