"""Python programs in forks of one process that has loaded torch, which takes seconds each time.

A `Forked` stands for a `subprocess.Popen` of this Python whose output is captured. The program gets
its arguments, environment and folder as it would from a shell; only the imports are there already.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import weakref
from pathlib import Path

LOADED = [
    "evo_grpo.cli.commands.options",
    "evo_grpo.training.run",
    "evo_grpo.population.ranks.ranks",
]
"""What the process has imported before it forks."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(LOADED)


class Forked:
    """A program that runs, as `python *arguments`.

    Args:
        arguments: `-m MODULE ...`, `-c CODE ...` or `SCRIPT ...`.
        cwd: Its folder; None is that of this process.
        env: Its environment; None is that of this process.
    """

    def __init__(self, arguments, cwd=None, env=None):
        made = [tempfile.mkstemp() for _ in range(2)]
        for descriptor, _ in made:
            os.close(descriptor)
        self._files = [Path(name) for _, name in made]
        weakref.finalize(self, _remove, self._files)
        names = [name for _, name in made]
        folder, given = str(cwd or Path.cwd()), dict(os.environ if env is None else env)
        words = [str(one) for one in arguments]
        self._process = CONTEXT.Process(target=_become, args=(words, folder, given, names))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("forked", timeout)
        return self.returncode

    def communicate(self, timeout=None):
        """Return standard output and standard error of the ended program."""
        self.wait(timeout)
        return tuple(file.read_text(errors="replace") for file in self._files)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _remove(files):
    for file in files:
        file.unlink(missing_ok=True)


def _become(words, folder, environment, names):
    for number, name in enumerate((os.devnull, *names)):
        descriptor = os.open(name, os.O_RDWR | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 -- as long as the program
    # Whoever runs the tests in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    code = 1
    try:
        _run(words, folder, environment)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(words, folder, environment):
    kind, *rest = words
    first = str(Path(kind).resolve().parent) if kind not in ("-m", "-c") else folder
    further = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [first, *further, *sys.path]
    if kind == "-m":
        sys.argv = [rest[0], *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = words
        runpy.run_path(kind, run_name="__main__")
