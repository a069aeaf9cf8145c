"""Ctrl-C and SIGTERM, at every moment of a command: a sentence, an exit code, no traceback."""

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from small_run import Told, small

from evo_grpo import resume, run
from evo_grpo.cli.stopping import INTERRUPTED, SECONDS_TO_END, TERMINATED

CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
BOTH = pytest.mark.parametrize("sent", CODES, ids=lambda one: one.name)

WITHIN = """
import atexit, hashlib, os, signal, sys, time
from evo_grpo.cli import stopping
stopping.install()
with stopping.interruptible(lambda: "continue with: this") as begin:
    begin()
{work}
stopping.leave()
print("came through", flush=True)
{after}
"""


def started(
    script: str, *, stdout: int = subprocess.PIPE, ctrl_c: object = signal.SIG_DFL
) -> subprocess.Popen[bytes]:
    """A script that has come to where it says "ready"."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=stdout,
        stderr=subprocess.PIPE,
        bufsize=0,  # what stands behind "ready" is still to be read
        # Whoever runs the tests in the background has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, ctrl_c),
    )
    if process.stdout is not None:
        while (line := process.stdout.readline()) and line != b"ready\n":
            pass
    return process


HANGING = """
stopping.SECONDS_TO_END = 0.3
while True:
    try:
        print("ready", flush=True)
        {}
    except:  # as in many a reward function
        pass
"""


def within(work: str, after: str = "") -> str:
    """A script that does some work which a signal may interrupt."""
    return WITHIN.format(work=textwrap.indent(textwrap.dedent(work), "    "), after=after)


def ended(process: subprocess.Popen[bytes], seconds: float = 20) -> tuple[int, str, str]:
    """How a process ended, within so many seconds."""
    read = process.communicate(timeout=seconds)
    out, err = (None if one is None else one.decode() for one in read)
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    return process.returncode, out, err


# --- within a command ----------------------------------------------------------------------------

READY = "print('ready', flush=True)\n"
TIDIES = f"""
try:
    {READY}
    time.sleep(30)
finally:
    print("tidied", flush=True)
"""
TURNS_INTO_AN_ERROR = f"""
try:
    {READY}
    time.sleep(30)
except BaseException as error:
    raise RuntimeError("cannot go on") from error
"""
BEFORE = f"    {READY}    try:\n        time.sleep(30)\n    finally:\n        print('tidied')\n"
MOMENTS = {
    "at work": (within(TIDIES), "tidied\n", "continue with: this\n"),
    "turned into an error": (within(TURNS_INTO_AN_ERROR), "", "continue with: this\n"),
    # There is nothing to put in order yet, or any more.
    "before": (within("pass").replace("    begin()\n", BEFORE), "", "continue with: this\n"),
    "after": (within("pass").replace("stopping.leave()", f"{READY}time.sleep(9)"), "", "stopped\n"),
}


@BOTH
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_first_signal_ends_a_command_in_order(moment: str, sent: signal.Signals):
    script, out, err = MOMENTS[moment]
    process = started(script)
    process.send_signal(sent)
    assert ended(process) == (CODES[sent], out, err)


@BOTH
def test_while_python_takes_itself_apart_nothing_is_said(sent: signal.Signals):
    after = "atexit.register(lambda: (print('ready', flush=True), time.sleep(30)))"
    process = started(within("pass", after))
    process.send_signal(sent)
    assert ended(process) == (-sent, "", "")


FORK = f"""
child = os.fork()
if child == 0:
    time.sleep(30)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
time.sleep(0.2)
{READY}
"""
OTHER_SIGNALS = f"""
signal.signal(signal.SIGURG, lambda *_: None)
for _ in range(3):
    os.kill(os.getpid(), signal.SIGURG)
time.sleep(0.2)
{READY}
"""


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (FORK, (0, "came through\n", "")),
        (OTHER_SIGNALS, (0, "came through\n", "")),
        ("raise SystemExit('mine')", (1, "", "mine\n")),
    ],
    ids=["a signal to a fork", "the signal of the reward clock", "an error of its own"],
)
def test_what_is_no_signal_to_the_command_passes(work: str, expected):
    assert ended(started(within(work))) == expected


@BOTH
@pytest.mark.parametrize("first", CODES, ids=lambda one: one.name)
def test_a_second_signal_ends_a_command_at_once(first: signal.Signals, sent: signal.Signals):
    script = within("""
        try:
            print("ready", flush=True)
            time.sleep(30)
        finally:
            print("tidying", flush=True)
            time.sleep(30)
    """)
    process = started(script)
    process.send_signal(first)
    assert process.stdout.readline() == b"tidying\n"
    process.send_signal(sent)
    assert ended(process) == (CODES[sent], "", "continue with: this\n")


@pytest.mark.parametrize(
    ("hangs", "sent"),
    [
        ("time.sleep(30)", signal.SIGINT),
        # Lets no handler run.
        ("hashlib.pbkdf2_hmac('sha256', b'', b'', 500_000_000)", signal.SIGTERM),
        # Python drops what is raised there.
        (
            "sys.unraisablehook = str; type('Slow', (), {'__del__': lambda _: time.sleep(30)})()",
            signal.SIGINT,
        ),
    ],
)
def test_what_does_not_end_is_ended_with_the_same_words(hangs: str, sent: signal.Signals):
    process = started(within(HANGING.format(hangs)))
    assert 5 < SECONDS_TO_END < 10  # supervisors kill ten seconds after SIGTERM
    began = time.monotonic()
    process.send_signal(sent)
    code, _, err = ended(process)
    assert (code, err) == (CODES[sent], "continue with: this\n")
    assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize(
    ("work", "sent"),
    [
        # No handler runs, so the thread hears it; nobody wakes the thread, so the handler does.
        (HANGING.format("hashlib.pbkdf2_hmac('sha256', b'', b'', 500_000_000)"), signal.SIGINT),
        ("signal.set_wakeup_fd(-1)\n" + HANGING.format("time.sleep(30)"), signal.SIGTERM),
    ],
    ids=["in C", "without the thread"],
)
def test_a_second_one_ends_what_hangs_at_once(work: str, sent: signal.Signals):
    process = started(within(work.replace("0.3", "30")))
    process.send_signal(sent)
    time.sleep(0.3)
    process.send_signal(sent)
    code, _, err = ended(process)
    assert (code, err) == (CODES[sent], "continue with: this\n")


def test_what_a_process_was_started_to_ignore_stays_ignored():
    process = started(within("print('ready', flush=True)\ntime.sleep(0.3)"), ctrl_c=signal.SIG_IGN)
    process.send_signal(signal.SIGINT)
    assert ended(process) == (0, "came through\n", "")


def test_the_cursor_comes_back():
    """The live table hides it, and a process that is ended draws nothing more."""
    ours, theirs = pty.openpty()
    process = started(within(HANGING.format("time.sleep(30)")), stdout=theirs)
    seen = b""
    while b"ready" not in seen:
        seen += os.read(ours, 100)
    process.send_signal(signal.SIGINT)
    assert ended(process)[::2] == (INTERRUPTED, "continue with: this\n")
    while b"\x1b[?25h" not in seen:
        seen += os.read(ours, 100)
    for descriptor in (ours, theirs):
        os.close(descriptor)


# --- before and after it -------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {
        "model": "tiny-sums",
        "env": {"kind": "sums", "args": {"high": 20}},
        "population": {"size": 2, "rounds": 200, "steps_per_round": 1},
        "algorithm": {"group_size": 4, "prompts_per_step": 4, "lr": 1e-4},
        "evolve": {"fitness": {"prompts": 4, "test_prompts": 4}},
        "engine": {"device": "cpu"},
    }
    Path("population.yaml").write_text(json.dumps(config))
    return tmp_path


COMMAND = (
    "import signal, sys\n"
    # Until our code runs it is Python that answers.
    "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "print('ready', flush=True)\n"
    "sys.argv = ['evo-grpo', 'run', '--out', 'one']\n"
    "from evo_grpo.cli import main\n"
    "main()\n"
)


@pytest.mark.parametrize(
    ("sent", "milliseconds"),
    [
        *((signal.SIGINT, after) for after in (0, 40, 200)),
        *((signal.SIGTERM, after) for after in (10, 80, 300)),
    ],
)
@pytest.mark.usefixtures("folder")
def test_right_after_the_start(sent: signal.Signals, milliseconds: int):
    process = started(COMMAND)
    time.sleep(milliseconds / 1000)
    process.send_signal(sent)
    code, out, err = ended(process, 20)
    assert out in ("", "loading tiny-sums …\n")
    assert (code, err) in (
        (-sent, ""),  # the first lines of `main`, before a handler is set
        (CODES[sent], "stopped\n"),
        (CODES[sent], "stopped before the run began\n"),
    )
    assert not Path("one").exists()


def test_until_the_handlers_are_there_ctrl_c_ends_the_process():
    script = """
        import signal, sys
        import evo_grpo.cli
        class Spy:
            def find_spec(self, name, *_):
                if name == "evo_grpo.cli.stopping":
                    print(signal.getsignal(signal.SIGINT) is signal.SIG_DFL)
        sys.meta_path.insert(0, Spy())
        sys.argv = ["evo-grpo", "--version"]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        evo_grpo.cli.main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "True"


# --- a run ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_run_says_how_to_resume_and_can_be():
    sent = signal.SIGINT  # the other one ends what hangs in the same way
    process = started(COMMAND)
    for line in process.stdout:
        if line.startswith(b"round 2/"):
            break
    process.send_signal(sent)
    code, _, err = ended(process, 20)
    assert code == CODES[sent]
    assert err.startswith("stopped after round ")
    assert err.endswith("; continue with: evo-grpo resume one\n")
    told = Told(("done", int(err.split()[3].rstrip(";")) + 1))
    with pytest.raises(KeyboardInterrupt):
        resume("one", observer=told)
    assert told.calls[0][0] == "started"
    assert told.calls[0][1] >= 2


# --- the library ---------------------------------------------------------------------------------


def handlers() -> tuple[object, ...]:
    return tuple(map(signal.getsignal, (*CODES, signal.SIGHUP)))


def test_the_library_leaves_signals_to_the_program(tmp_path: Path):
    before, seen = handlers(), []
    # Commands that other tests called in this process may have left theirs.
    wake = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wake)

    class Watching(Told):
        def _note(self, what, round):
            seen.append(handlers())

    run(small(population__rounds=1), out=tmp_path / "run", observer=Watching())
    assert set(seen) == {before}
    assert handlers() == before
    assert signal.set_wakeup_fd(wake) == wake
