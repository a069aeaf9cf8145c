"""How long the command line takes to answer, and whether it loads torch; a run's first two rounds.

python experiments/bench/startup.py [--quick] [--out FILE]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

from common import ROOT, Report, child, elapsed, interleaved, median, parser, ratio, tell

LIBRARIES = "import typer, rich, pydantic, yaml"
CONFIG = ROOT / "population.yaml"
COMMAND = "import sys; from evo_grpo.cli import main; sys.argv = {}; main()"
LIMIT_SECONDS = 1.0
STANDARD = sys.stdlib_module_names
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
        capture_output=True, text=True, check=False, cwd=ROOT,
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
            stdout=theirs, stderr=theirs, cwd=ROOT, env={**os.environ, "COLUMNS": "120"},
        )  # fmt: skip
        os.close(theirs)
        shown = b""
        # Linux reports a closed other end as an error.
        with suppress(OSError):
            while part := reader.read(1 << 16):
                shown += part
        if process.wait():
            raise SystemExit(f"startup: {code!r} failed:\n{shown[-1500:].decode()}")


def first_rounds(started: float) -> None:
    """Play two rounds of the default run, and tell when they and its first token were there.

    Args:
        started: time.time() when this process was started.
    """
    import evo_grpo
    from evo_grpo.settings.yaml import as_config

    when = {"python and import evo_grpo": elapsed(started)}

    class Watch(evo_grpo.Observer):
        def started(self, *given: object) -> None:
            when["the agents"] = elapsed(started)

        def round_done(self, record: object) -> None:
            names = ("the end of the first round", "the end of the second round")
            when[names["the end of the first round" in when]] = elapsed(started)

    config = as_config(CONFIG)
    config = config.replace(population=config.population.replace(rounds=2))
    play = evo_grpo.run
    when["its other imports: torch, transformers, peft, Optuna"] = elapsed(started)
    from evo_grpo.rollout.native.loop import Batch

    draw = Batch.draw

    def drawn(*given: object, **named: object) -> None:
        draw(*given, **named)  # type: ignore[arg-type]
        when.setdefault("the first token", elapsed(started))

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Batch, "draw", drawn):
        play(config, out=Path(folder) / "run", observer=Watch())
    order = sorted(when.items(), key=lambda each: each[1]["seconds"])
    tell({"when": dict(order)})


def imports_by_library() -> Counter[str]:
    """Return the seconds that the imports of the default run take, by library, without nesting."""
    script = ["-X", "importtime", __file__, "--child", json.dumps({"started": time.time()})]
    done = subprocess.run([sys.executable, *script], capture_output=True, text=True, check=True)
    seconds = Counter[str]()
    for line in done.stderr.splitlines():
        own, *_, name = line.removeprefix("import time:").split("|")
        if line.startswith("import time:") and own.strip().isdigit():
            top = name.strip().partition(".")[0]
            seconds["the standard library" if top in STANDARD else top] += int(own) / 1e6
    return seconds


def main() -> int:
    """Measure import, --help and check, and the first two rounds."""
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--child", type=json.loads)
    given = arguments.parse_args()
    if given.child:
        first_rounds(given.child["started"])
        return 0
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
    starts = [
        child(Path(__file__), {"started": time.time()})["when"]
        for _ in range(1 if given.quick else 5)
    ]
    for what in starts[0]:
        report.add(
            f"From the start of python to ... of {CONFIG.name}",
            what=what, seconds=statistics.median(each[what]["seconds"] for each in starts),
            cpu_seconds=statistics.median(each[what]["cpu_seconds"] for each in starts),
        )  # fmt: skip
    found = imports_by_library()
    for name, seconds in found.most_common(12):
        report.add("What its imports cost, without what they import", library=name, seconds=seconds)
    report.add(
        "What its imports cost, without what they import", library="all", seconds=found.total()
    )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
