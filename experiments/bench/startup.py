"""How long the command line takes to answer, against importing the libraries that it needs.

python experiments/bench/startup.py [--quick] [--out FILE]
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec

from common import ROOT, Report, interleaved, median, parser, ratio

LIBRARIES = "import typer, rich, pydantic, yaml"
CONFIG = ROOT / "evo_grpo" / "settings" / "population.yaml"
COMMAND = "import sys; from evo_grpo.cli import main; sys.argv = {}; main()"
# The least that a command of these libraries takes: a path, one model, one table, nothing else.
LEAST = """
import sys
from pathlib import Path
import typer
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
@app.command()
def check(file: Path) -> None:
    import yaml
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table
    class Settings(BaseModel):
        size: int
    table = Table.grid()
    table.add_row(str(Settings(size=8)))
    Console().print(table)
sys.argv = ["least", "population.yaml"]
app()
"""
# An installed package is compiled; with this variable set, ours would be compiled at every start.
COMPILED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
# Runs after the command, whatever exit code it chose.
WATCH = (
    "import atexit, sys; atexit.register("
    "lambda: print('TORCH' if 'torch' in sys.modules else 'CLEAN', file=sys.stderr)); "
)


def python(code: str) -> Callable[[], object]:
    """Return a call that runs code in a fresh interpreter."""
    return lambda: run(code)


def run(code: str) -> str:
    """Run code in a fresh interpreter and return what it said on standard error."""
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
        # Linux says that the other end has been closed by an error.
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
    sides = {
        "python alone": python("pass"),
        LIBRARIES: python(LIBRARIES),
        "the least command of these libraries": python(LEAST),
        "import evo_grpo": python("import evo_grpo"),
        "import evo_grpo.settings": python("import evo_grpo.settings"),
    }
    there = find_spec("evo_grpo.cli") is not None
    if there:
        sides |= {name: python(COMMAND.format(argv)) for name, argv in commands.items()}
        shown = COMMAND.format(commands["evo-grpo check"])
        sides["evo-grpo check, on a terminal"] = lambda: on_a_terminal(shown)
    samples = interleaved(sides, repeats)
    for name in sides:
        report.add(
            "Start-up (fresh interpreters)",
            what=name, milliseconds=1000 * median(samples, name),
            over_the_libraries=ratio(samples, name, LIBRARIES),
        )  # fmt: skip
    for name, argv in commands.items():
        what = f"{name} over importing typer, rich, pydantic and yaml"
        if not there:
            report.at_most(what, None, 1.3, "this tree has no evo_grpo/cli")
            continue
        report.at_most(what, ratio(samples, name, LIBRARIES), 1.3)
        loaded = run(WATCH + COMMAND.format(argv)).strip().endswith("TORCH")
        report.at_most(f"{name}: torch imported (0 is no)", float(loaded), 0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
