"""How long the command line takes to answer, and whether it loads torch.

python experiments/bench/startup.py [--quick] [--out FILE]
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from common import ROOT, Report, interleaved, median, parser, ratio

LIBRARIES = "import typer, rich, pydantic, yaml"
CONFIG = ROOT / "population.yaml"
COMMAND = "import sys; from evo_grpo.cli import main; sys.argv = {}; main()"
LIMIT_SECONDS = 1.0
# An installed package is compiled; with this variable set, ours would be compiled at every start.
COMPILED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
# Runs after the command, whatever its exit code.
WATCH = (
    "import atexit, sys; atexit.register("
    "lambda: print('TORCH' if 'torch' in sys.modules else 'CLEAN', file=sys.stderr)); "
)


def python(code: str) -> Callable[[], object]:
    """Return a call that runs code in a fresh interpreter."""
    return lambda: run(code)


def run(code: str) -> str:
    """Run code in a fresh interpreter and return its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, cwd=ROOT, env=COMPILED,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"startup: {code!r} failed:\n{done.stderr[-1500:]}")
    return done.stderr


def on_a_terminal(code: str) -> None:
    """Run code in a fresh interpreter whose output is a terminal of 120 columns."""
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as reader:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=theirs, stderr=theirs, cwd=ROOT, env={**COMPILED, "COLUMNS": "120"},
        )  # fmt: skip
        os.close(theirs)
        shown = b""
        # Linux reports a closed other end as an error.
        with suppress(OSError):
            while part := reader.read(1 << 16):
                shown += part
        if process.wait():
            raise SystemExit(f"startup: {code!r} failed:\n{shown[-1500:].decode()}")


def main() -> int:
    """Measure import, --help and check."""
    given = parser(__doc__.partition("\n")[0]).parse_args()
    report = Report("startup", given)
    repeats = given.repeats or (3 if given.quick else 15)
    commands = {
        "evo-grpo --help": ["evo-grpo", "--help"],
        "evo-grpo check": ["evo-grpo", "check", str(CONFIG)],
    }
    on_terminal = COMMAND.format(commands["evo-grpo check"])
    sides: dict[str, Callable[[], object]] = {
        "python alone": python("pass"),
        LIBRARIES: python(LIBRARIES),
        "import evo_grpo": python("import evo_grpo"),
        "import evo_grpo.settings": python("import evo_grpo.settings"),
        **{name: python(COMMAND.format(argv)) for name, argv in commands.items()},
        "evo-grpo check, on a terminal": lambda: on_a_terminal(on_terminal),
    }
    samples = interleaved(sides, repeats)
    for name in sides:
        report.add(
            "Start-up (fresh interpreters)",
            what=name, milliseconds=1000 * median(samples, name),
            over_the_libraries=ratio(samples, name, LIBRARIES),
        )  # fmt: skip
    for name, argv in commands.items():
        report.at_most(f"{name}: seconds", median(samples, name), LIMIT_SECONDS)
        loaded = run(WATCH + COMMAND.format(argv)).strip().endswith("TORCH")
        report.at_most(f"{name}: torch imported (0 is no)", float(loaded), 0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
