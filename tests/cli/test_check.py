"""`check` in its usual form is read without typer, and prints the same either way."""

import gc
import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Group
from rich.text import Text

from evo_grpo import cli
from evo_grpo.cli.terminal.output import PLAIN_WIDTH, fits_as_it_is, show, standard_output

MINIMAL = "model: tiny-sums\nenv: sums\n"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    yield
    gc.enable()  # the command leaves it off


def written(text: str = MINIMAL, name: str = "population.yaml") -> str:
    Path(name).write_text(textwrap.dedent(text), encoding="utf-8")
    return name


def evo(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evo-grpo", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = leaving.code or 0
    out, err = capsys.readouterr()
    return code, out, err


CONFIGS = {
    "good": (MINIMAL, []),
    "overridden": (MINIMAL, ["seed=7", "algorithm.lr=3e-3"]),
    "with warnings": (MINIMAL, ["algorithm.update_epochs=1", "population.rounds=1"]),
    "to be folded": (
        "model: {name: tiny-sums, lora: {target_modules: [q_proj"
        + "".join(f", layers.{n}.some_projection" for n in range(12))
        + "]}}\nenv: sums\n",
        [],
    ),
    "beyond ASCII": ("name: population\nmodel: ./模型\nenv: sums\n", []),
    "misspelled key": (MINIMAL + "evolve: {selection: {sise: 3}}\n", []),
    "several problems": (MINIMAL + "optimiser: adam\nseed: many\n", []),
    "no YAML": ("model: [", []),
    "unknown task": ("model: tiny-sums\nenv: sumz\n", []),
    "no value": (MINIMAL, ["algorithm.lr"]),
    "a value that is no YAML": (MINIMAL, ["population.size=[1"]),
}


@pytest.mark.parametrize("file", ["./a.yaml", "sub//../a.yaml", "a.yaml/", "../gone.yaml"])
@pytest.mark.parametrize("setting", ["seed=1", "nope=1"])
def test_both_ways_tidy_the_name_of_the_file(
    file: str,
    setting: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    Path("sub").mkdir()
    written(name="a.yaml")
    quick = evo(["check", file, "--set", setting], capsys)
    monkeypatch.setattr(cli, "usual_check", lambda _: None)
    assert evo(["check", file, "--set", setting], capsys) == quick


@pytest.mark.skipif(os.name == "nt", reason="closes a descriptor by a shell of Unix")
def test_nobody_listens():
    command = f'"{sys.executable}" -m evo_grpo check {written()} >&-'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("case", CONFIGS)
def test_both_ways_print_the_same(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text, settings = CONFIGS[case]
    Path("模型").mkdir()
    Path("模型/config.json").write_text('{"model_type": "mamba"}')
    arguments = ["check", written(text)]
    arguments += [word for value in settings for word in ("--set", value)]
    assert cli.usual_check(arguments[:2]) is not None
    quick = evo(arguments, capsys)
    monkeypatch.setattr(cli, "usual_check", lambda _: None)
    assert evo(arguments, capsys) == quick
    assert quick[0] == (0 if list(CONFIGS).index(case) < 5 else 2)


@pytest.mark.parametrize("name", ["none.yaml", ".", "none/a.yaml"])
def test_both_ways_refuse_a_file_alike(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    quick = evo(["check", name], capsys)
    monkeypatch.setattr(cli, "usual_check", lambda _: None)
    assert evo(["check", name], capsys) == quick
    assert quick[0] == 2
    assert quick[2].startswith(f"error: {name}: ")


@pytest.mark.parametrize("way", ["usual", "typer"])
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(28, "No space left", "a.yaml"), 1, "error: a.yaml: No space left\n"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("a bug"), None, ""),
    ],
)
def test_both_ways_end_alike(
    way: str,
    error: BaseException,
    code: int | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("evo_grpo.settings.load", fail)
    if way == "typer":
        monkeypatch.setattr(cli, "usual_check", lambda _: None)
    if code is None:
        with pytest.raises(ZeroDivisionError):
            evo(["check", "a.yaml"], capsys)
    else:
        assert evo(["check", "a.yaml"], capsys) == (code, "", message)


def test_the_usual_form():
    assert cli.usual_check(["check", "a.yaml"]) == ("a.yaml", [])
    words = ["check", "--set", "a=1", "a.yaml", "--set", "b=--help"]
    assert cli.usual_check(words) == ("a.yaml", ["a=1", "b=--help"])


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["check"],
        ["check", ""],
        ["check", "-"],
        ["check", "--help"],
        ["check", "a.yaml", "-h"],
        ["check", "a.yaml", "b.yaml"],
        ["check", "a.yaml", "--set"],
        ["check", "a.yaml", "--set", "--debug"],
        ["check", "a.yaml", "--set="],
        ["check", "a.yaml", "--set=a=1"],
        ["check", "a.yaml", "--sett", "a=1"],
        ["check", "a.yaml", "--debug"],
        ["check", "--", "a.yaml"],
        ["--debug", "check", "a.yaml"],
        ["run", "a.yaml"],
    ],
)
def test_whatever_else_is_left_to_typer(words: list[str]):
    assert cli.usual_check(words) is None


def test_completion_is_left_to_typer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("_EVO_GRPO_COMPLETE", "complete_bash")
    assert cli.usual_check(["check", "a.yaml"]) is None


def test_the_console_script_and_the_module_print_the_same():
    arguments = ["check", written()]
    code = "import sys; from evo_grpo.cli import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = [
        subprocess.run(
            [sys.executable, *way, *arguments], capture_output=True, env=environment, check=True
        )
        for way in (["-c", code], ["-m", "evo_grpo"])
    ]
    assert done[0].stdout == done[1].stdout
    assert done[0].stdout.startswith(b"population.yaml is valid.")
    assert done[0].stderr == done[1].stderr == b""


@pytest.mark.parametrize("more", [[], ["--set=seed=1"]], ids=["usual", "typer"])
def test_a_reader_that_left_is_no_traceback(more: list[str]):
    with subprocess.Popen(
        [sys.executable, "-m", "evo_grpo", "check", written(), *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as command:  # fmt: skip
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 1


# --- without rich --------------------------------------------------------------------------------

FIT = ["", "a", "two  blanks ", "x" * (PLAIN_WIDTH - 1), "x" * PLAIN_WIDTH, "a[bold]b :smile: 1.5"]
DO_NOT_FIT = ["x" * (PLAIN_WIDTH + 1), "a\tb", "a\nb", "a\x1bb", "näher", "模型"]


@pytest.mark.parametrize("line", [*FIT, *DO_NOT_FIT])
def test_what_fits_is_what_rich_would_print(line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    show(standard_output(), Group(Text("first"), Text(line), Text("last")))
    lines = ["first", line, "last"]
    if fits_as_it_is(lines):
        assert sys.stdout.getvalue() == "\n".join(lines) + "\n"
    assert fits_as_it_is(lines) == (line in FIT and not line.endswith(" "))


def test_a_terminal_is_left_to_rich(monkeypatch: pytest.MonkeyPatch):
    assert fits_as_it_is(["a"])
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not fits_as_it_is(["a"])
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert not fits_as_it_is(["a"])
