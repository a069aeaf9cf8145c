import csv
import io
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import shown_replay
import yaml
from shown_run import SUMMARY, run_folder, small_config, two_rounds
from typer.testing import CliRunner, Result

from evo_grpo.cli.commands import app
from evo_grpo.errors import RewardError, RunDirError, RunFailedError
from evo_grpo.record.observer import Observer
from evo_grpo.record.replay import Replay, write_replay
from evo_grpo.record.schedule import read_schedule
from evo_grpo.settings import RunConfig, json_schema, load, template, to_yaml

MINIMAL = "model: tiny-sums\nenv: sums\n"
PLANNED = """
    model: tiny-sums
    env: sums
    population: {size: 8, rounds: 6, steps_per_round: 8}
    evolve: {hyperparameters: {lr: {min: 1e-4, max: 3e-3}, group_size: {min: 4, max: 16}}}
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def evo(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    """The message of a command that must fail as bad input, without a traceback."""
    result = evo(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return result.stderr


def written(text: str = MINIMAL, name: str = "population.yaml") -> str:
    Path(name).write_text(textwrap.dedent(text), encoding="utf-8")
    return name


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A loop that plays `two_rounds` without a model, and stops where a test says."""
    import evo_grpo.analysis.arms  # noqa: F401 -- with the loop itself, before a stand-in takes its place

    calls = SimpleNamespace(seen=[], interrupt_after=None, error=None, began=False)

    def play(path: Path, done: int, observer: Observer) -> Path:
        if calls.error is not None:
            if calls.began:
                observer.started(path, 2, done, small_config())
            raise calls.error
        if calls.interrupt_after is None:
            return _play_all(path, done, observer)
        if calls.interrupt_after < 0:
            raise KeyboardInterrupt
        observer.started(path, 2, done, small_config())
        for record in two_rounds()[: calls.interrupt_after]:
            observer.stage(record.round, "learn", 0, 4)
            observer.round_done(record)
        raise KeyboardInterrupt

    def run(
        config: RunConfig, *, out: Path | None, force: bool, observer: Observer, report: bool
    ) -> Path:
        calls.seen.append((config, out, force))
        return play(out or Path("runs/population-1"), 0, observer)

    def resume(
        folder: Path, *, rounds: int | None, allow: Sequence[str], observer: Observer, report: bool
    ) -> Path:
        calls.seen.append(folder if rounds is None and not allow else (folder, rounds, allow))
        return play(folder, 1, observer)

    monkeypatch.setitem(
        sys.modules, "evo_grpo.training.run", SimpleNamespace(run=run, resume=resume)
    )
    return calls


def _play_all(path: Path, done: int, observer: Observer) -> Path:
    if not path.exists():
        run_folder(str(path))
    observer.started(path, 2, done, small_config())
    for record in two_rounds()[done:]:
        for name, total in (("learn", 4), ("evaluate", 1)):
            observer.stage(record.round, name, 0, total)
        observer.round_done(record)
    observer.stage(1, "test", 0, 1)
    observer.finished(SUMMARY)
    return path


# --- the command itself --------------------------------------------------------------------------


def test_version_and_help():
    assert evo("--version").stdout.startswith("evo-grpo 0.")
    commands = re.findall(r"^│ ([a-z]+)  ", evo("--help").stdout, re.MULTILINE)
    assert commands == [
        *("init", "check", "try", "schema", "fetch", "doctor", "run", "resume", "steer"),
        *("leaderboard", "lineage", "report", "compare", "verify", "follow", "dashboard"),
        *("export", "recipe", "replay", "sample", "evaluate"),
    ]
    for command in commands:
        told = evo(command, "--help")
        assert told.exit_code == 0
        assert f" {command} [OPTIONS]" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["check", "--sett", "a=1"], "No such option: --sett"),
        (["resume"], "Missing argument 'RUN'"),
        (["run", "a", "b"], "unexpected extra argument"),
    ],
)
def test_usage_errors_are_bad_input(arguments: list[str], message: str):
    assert message in refused(*arguments)


def test_python_m_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    import runpy

    monkeypatch.setattr(sys, "argv", ["evo-grpo", "--version"])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_module("evo_grpo", run_name="__main__")
    assert not leaving.value.code
    assert capsys.readouterr().out.startswith("evo-grpo ")


def test_debug_adds_the_traceback_and_keeps_the_code():
    for arguments in (["check", "none.yaml", "--debug"], ["--debug", "check", "none.yaml"]):
        result = evo(*arguments)
        assert result.exit_code == 2
        assert "Traceback" in result.stderr
        assert "error: none.yaml: no such file" in result.stderr


# --- init ----------------------------------------------------------------------------------------


def test_init_writes_a_file_that_passes_check():
    assert "evo-grpo check population.yaml" in evo("init").stdout
    assert Path("population.yaml").read_text(encoding="utf-8") == template()
    assert evo("check").exit_code == 0


def test_init_writes_the_schema_that_its_file_names():
    evo("init")
    first = Path("population.yaml").read_text(encoding="utf-8").partition("\n")[0]
    assert first == "# yaml-language-server: $schema=population.schema.json"
    schema = Path("population.schema.json")
    assert schema.read_text() == evo("schema").stdout
    schema.write_text("mine")
    evo("init", "other.yaml")
    assert schema.read_text() == "mine"


def test_init_never_replaces_a_file_unasked():
    written("mine: 1\n")
    message = refused("init")
    assert message.startswith("error: population.yaml: already exists; choose another name or")
    assert Path("population.yaml").read_text() == "mine: 1\n"
    assert evo("init", "--force").exit_code == 0
    assert Path("population.yaml").read_text(encoding="utf-8") == template()


def test_init_needs_a_place_for_a_file():
    assert "there is no folder none; create it first" in refused("init", "none/a.yaml")
    assert "got a folder" in refused("init", ".")


# --- check ---------------------------------------------------------------------------------------


def test_check_prints_the_plan():
    result = evo("check", written(PLANNED))
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = {line[:12].strip(): line[12:] for line in result.stdout.splitlines()[2:]}
    assert lines["population"].startswith("8 agents, 6 rounds of 8 steps, grpo, selection tour")
    assert "lr in [1e-4, 3e-3]" in lines["mutates"]
    assert lines["task"] == "sums: 9,000 train, 500 validation, 500 test rows"
    assert lines["decides"] == "after rounds 2 (8 agents), 3 (4), 4 (2) and 6 (2)"
    assert lines["places"] == "8 agents in rounds 1-2, 4 in round 3, 2 in rounds 4-6"
    assert lines["a step"].startswith("256 rows in all, of at most 4 tokens: 32 per agent")
    assert lines["a round"] == "at most 8,224 tokens to train on"
    assert lines["evaluation"].startswith("at most 4,096 tokens, 7% of the run: 64 prompts x 1")
    assert "up to 2 finalists on 64 validation prompts x 2: at most 1,024" in lines["the end"]
    assert "256 test prompts x 4: at most 8,192 tokens" in result.stdout
    assert lines["the run"] == "at most 62,656 tokens"
    assert "453,216 parameters, 1.8 MB in float32 on the CPU" in lines["base model"]
    assert "58,368 parameters, 934 kB with gradient and Adam" in lines["an agent"]
    assert lines["memory"].startswith("about ")
    assert "in float32 on the CPU or " in lines["memory"]
    assert "agents 7.5 MB, checkpoints being written 5.6 MB, activations" in result.stdout
    for name in ("rounds.jsonl", "journal.log", "leaderboard.csv", "summary.json", "checkpoints/"):
        assert name in lines["writes"]
    assert all(line == line.rstrip() for line in result.stdout.splitlines())


def test_check_as_one_json_document():
    result = evo("check", written(PLANNED), "--json")
    assert result.exit_code == 0
    plan = json.loads(result.stdout)
    assert plan["file"] == "population.yaml"
    assert plan["places"] == [8, 8, 4, 2, 2, 2]
    assert plan["decisions"] == [2, 3, 4, 6]
    assert plan["tokens"]["evaluations"] == [0, 2_048, 1_024, 512, 0, 512]
    assert plan["tokens"]["run"] == 62_656
    assert plan["tokens"]["a_round"] == 8_224
    assert plan["base"]["parameters"] == 453_216
    assert plan["config"]["population"]["steps_per_round"] == 8
    assert sum(plan["memory"][0]["parts"].values()) == plan["memory"][0]["peak"]
    assert plan["warnings"] == []
    warned = evo("check", "population.yaml", "--json", "--set", "evolve.hyperparameters={}")
    assert "hyperparameters is empty" in json.loads(warned.stdout)["warnings"][0]
    assert refused("check", "none.yaml", "--json").startswith("error: none.yaml")


def test_check_warns_and_passes():
    name = written(MINIMAL)
    overrides = [
        "algorithm.update_epochs=1",
        "population.sizes=constant",  # fewer agents would take more rows, in minibatches
        "evolve.hyperparameters.clip_coef={min: 0.1, max: 0.3}",
    ]
    result = evo("check", name, *(word for value in overrides for word in ("--set", value)))
    assert result.exit_code == 0
    assert "warning: hyperparameters.clip_coef cannot act" in result.stdout


def test_check_says_what_it_cannot_know():
    folder = Path("mamba")
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    result = evo("check", written("model: ./mamba\nenv: sums\n"))
    assert result.exit_code == 0
    assert "the layers of architecture 'mamba' are not known here" in result.stdout
    assert "size unknown" in result.stdout


BAD_YAML = {
    "misspelled key": (
        MINIMAL + "evolve: {selection: {sise: 3}}",
        "evolve.selection.sise: unknown key; did you mean 'size'?",
    ),
    "no env": ("model: tiny-sums", "env: missing"),
    "empty file": ("", "expected a mapping with the keys"),
    "no YAML": ("model: [", "expected YAML"),
    "unknown task": (
        "model: tiny-sums\nenv: sumz",
        'env.kind: no task "sumz". Did you mean "sums"?',
    ),
    "unknown argument of a task": (
        "model: tiny-sums\nenv: {kind: sums, args: {lowest: 3}}",
        'env.args.lowest: no such argument of "sums". Did you mean "low"?',
    ),
    "model folder that is none": (
        "model: ./here\nenv: sums",
        "model: './here' is neither an embedded model",
    ),
    "missing rows": (
        "model: tiny-sums\nenv: {kind: dataset, train: none.csv, reward: 'rewards:exact'}",
        "train: no file 'none.csv'",
    ),
    "empty rows": (
        "model: tiny-sums\nenv: {kind: dataset, train: empty.csv, reward: 'rewards:exact'}",
        "train (empty.csv): expected at least one row, got none",
    ),
    "missing column": (
        "model: tiny-sums\n"
        "env: {kind: dataset, train: rows.csv, prompt: '{qestion}', reward: 'rewards:exact'}",
        'train (rows.csv), line 2: no column "qestion", which the prompt template needs',
    ),
    "missing reward function": (
        "model: tiny-sums\nenv: {kind: dataset, train: rows.csv, reward: 'rewards:exakt'}",
        "has no 'exakt'. Did you mean \"exact\"?",
    ),
    "layers that do not exist": (
        "model: {name: tiny-sums, lora: {target_modules: [qproj]}}\nenv: sums",
        "model.lora.target_modules: ['qproj'] matches no layer of tiny-sums",
    ),
}


@pytest.fixture
def rows():
    lines = "".join(f"{n}+1=,{n + 1}\n" for n in range(40))
    Path("rows.csv").write_text(f"question,answer\n{lines}")
    Path("empty.csv").write_text("question,answer\n")
    Path("rewards.py").write_text(
        "def exact(completion, answer):\n    return float(completion == str(answer))\n"
    )


@pytest.mark.parametrize("case", BAD_YAML)
@pytest.mark.usefixtures("rows")
def test_bad_input_is_one_message_and_code_2(case: str):
    text, message = BAD_YAML[case]
    found = refused("check", written(text))
    assert found.startswith("error: ")
    assert message in found


@pytest.mark.usefixtures("rows")
def test_check_takes_a_dataset():
    text = "model: tiny-sums\nenv: {kind: dataset, train: rows.csv, reward: 'rewards:exact'}\n"
    assert evo("check", written(text)).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "evolve.selection.sise=3"], "did you mean 'size'?"),
        (["--set", "algorithm.lr"], "--set algorithm.lr: expected a.b.c=value"),
        (["--set", "population.size=[1"], "--set population.size=[1, line 1"),
        (["--set", "evolve.exploration={a:1}"], "a space after the colon in 'a:1'"),
        (["--set", "evolve={exploration: [{a:1}]}"], "write {a: 1}"),
    ],
)
@pytest.mark.parametrize("command", ["check", "run"])
def test_bad_overrides(command: str, arguments: list[str], message: str, loop: SimpleNamespace):
    assert message in refused(command, written(), *arguments)
    assert loop.seen == []


def test_a_file_that_cannot_be_written_is_no_traceback(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "population.yaml")

    monkeypatch.setattr(Path, "write_text", refuse)
    result = evo("init")
    assert result.exit_code == 1
    assert result.stderr == "error: population.yaml: Permission denied\n"


# --- schema --------------------------------------------------------------------------------------


def test_the_schema_is_that_of_the_settings():
    schema = json.loads(evo("schema").stdout)
    assert schema == json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["model", "env"]
    assert set(schema["properties"]) == set(RunConfig.model_fields)


def test_the_shipped_configuration_is_valid_by_the_schema():
    schema = json.loads(evo("schema").stdout)
    jsonschema.validate(yaml.safe_load(template()), schema)
    jsonschema.validate({"model": "tiny-sums", "env": "sums"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": "tiny-sums", "env": "sums", "engin": {}}, schema)


def test_the_schema_accepts_the_short_form_of_model_and_env():
    properties = json.loads(evo("schema").stdout)["properties"]
    for name in ("model", "env"):
        assert [one.get("type") for one in properties[name]["anyOf"]] == ["string", None]


def test_the_schema_in_a_file():
    assert "yaml-language-server: $schema=out.json" in evo("schema", "-o", "out.json").stdout
    assert json.loads(Path("out.json").read_text()) == json.loads(evo("schema").stdout)
    assert "there is no folder none; create it first" in refused("schema", "--out", "none/a.json")
    assert "got a folder" in refused("schema", "--out", ".")


# --- run and resume ------------------------------------------------------------------------------


def test_run_hands_on_the_configuration_and_prints_the_result(loop: SimpleNamespace):
    result = evo("run", written(), "--set", "seed=7", "--out", "here", "--force")
    assert result.exit_code == 0, result.output
    ((config, out, force),) = loop.seen
    assert config == load("population.yaml", ["seed=7"])
    assert (out, force) == (Path("here"), True)
    lines = result.stdout.splitlines()
    assert lines[0] == "loading tiny-sums …"
    assert lines[1] == "here: tiny-sums on sums, 2 agents, 2 rounds of 4 steps"
    result = "Base 0.33 ± 0.02 → winner 0.81 ± 0.02: +0.48 ± 0.03 on 256 test prompts."
    assert result in lines
    assert lines[-2:] == [
        "Run folder: here",
        "Next: evo-grpo report here, evo-grpo export here OUT",
    ]
    table = lines.index(next(line for line in lines if line.startswith("rank")))
    assert lines[table + 1].split()[:3] == ["1", "1", "2"]  # rank, agent, member


def test_plain_lines_of_a_round(loop: SimpleNamespace):
    lines = evo("run", written(), "--out", "here").stdout.splitlines()
    assert lines[2].startswith(
        "round 1/2  best 0.500 ± 0.050 (agent 0)  mean 0.375  2,000 tokens  3.0 s  667 tok/s  ETA "
    )
    assert lines[6].startswith("round 2/2  best 0.750")
    assert lines[3] == (
        "  agent 0  fitness 0.500 ± 0.050  reward 0.400  kl 0.0123  zero-var 0.25  "
        "lr 1e-3  beta 0  clip 0.2  group 8  temperature 1"
    )
    assert lines[5] == "  copied 0 -> 1  mutated 1: lr 1e-3 -> 1.2e-3"
    assert "lr 1.2e-3 (up)" in lines[8]
    assert "\x1b" not in "".join(lines)


def test_run_prints_warnings_apart(loop: SimpleNamespace):
    name = written(MINIMAL + "evolve: {hyperparameters: {}}")
    result = evo("run", name, "--out", "here")
    assert result.stderr.startswith("warning: evolve.hyperparameters is empty")
    assert "warning" not in result.stdout


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (1, "stopped after round 1; continue with: evo-grpo resume here\n"),
        (0, "stopped before the first round was finished; continue with: evo-grpo resume here\n"),
        (-1, "stopped before the run began\n"),
    ],
)
def test_ctrl_c_says_how_to_go_on(loop: SimpleNamespace, done: int, message: str):
    loop.interrupt_after = done
    name = written(to_yaml(small_config()))
    result = evo("run", name, "--out", "here")
    assert result.exit_code == 130
    assert result.stderr == message


def test_resume_takes_more_rounds_and_files_that_changed(loop):
    run_folder()
    given = ("--rounds", "9", "--allow", "env.train", "--allow", "env.reward: a:b")
    assert evo("resume", "runs/one", *given).exit_code == 0
    assert loop.seen == [(Path("runs/one"), 9, ["env.train", "env.reward: a:b"])]
    assert "--rounds" in refused("resume", "runs/one", "--rounds", "0")


def test_resume_goes_on_and_prints_the_result(loop: SimpleNamespace):
    run_folder("runs/one", rounds=1, summary=False)
    result = evo("resume", "runs/one")
    assert result.exit_code == 0, result.output
    assert loop.seen == [Path("runs/one")]
    assert ", going on after round 1" in result.stdout
    assert "round 2/2" in result.stdout
    assert "round 1/2" not in result.stdout
    loop.interrupt_after = -1
    stopped = evo("resume", "runs/one")
    assert stopped.exit_code == 130
    assert "continue with: evo-grpo resume runs/one" in stopped.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(RunFailedError("no agent is left"), 1), (RunDirError("here: is in use by process 3"), 2)],
)
def test_errors_of_a_run_keep_their_codes(loop: SimpleNamespace, error: Exception, code: int):
    loop.error = error
    result = evo("run", written(to_yaml(small_config())))
    assert result.exit_code == code
    assert result.stderr == f"error: {error}\n"


@pytest.mark.parametrize(
    "error", [RewardError("reward function 'r', row 3: it raised"), OSError(28, "No space left")]
)
def test_an_error_on_the_way_says_how_to_go_on(loop: SimpleNamespace, error: Exception):
    loop.error, loop.began = error, True
    result = evo("run", written(to_yaml(small_config())), "--out", "here")
    assert result.stderr.endswith("\nfix the cause, then continue with: evo-grpo resume here\n")
    assert result.stderr.startswith("error: ")


@pytest.fixture
def rewarded(monkeypatch: pytest.MonkeyPatch):
    """Write a run over a small dataset whose reward function is an expression; return its file."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(body: str) -> str:
        sys.modules.pop("cli_reward", None)
        Path("cli_reward.py").write_text(f"def score(completion):\n    return {body}\n")
        Path("rows.jsonl").write_text("".join(f'{{"q": "{n}+1="}}\n' for n in range(12)))
        return written(
            """
            model: tiny-sums
            env: {kind: dataset, train: rows.jsonl, prompt: "{q}", reward: "cli_reward:score"}
            population: {size: 2, rounds: 1, steps_per_round: 1}
            algorithm: {group_size: 2, prompts_per_step: 2, max_output_tokens: 3}
            evolve: {fitness: {prompts: 2, test_prompts: 2}}
            engine: {device: cpu}
            """
        )

    yield write
    sys.modules.pop("cli_reward", None)


@pytest.mark.filterwarnings("ignore:round 1 had nothing to learn from")
def test_a_reward_function_that_raises_leaves_a_run_to_go_on_with(rewarded):
    name = rewarded("__import__('sys').exit(3)")
    result = evo("run", name, "--out", "here")
    assert result.exit_code == 2
    assert re.search(
        r"^error: reward function 'score', train \(.*\), line \d+.* it raised SystemExit: 3 in "
        r"cli_reward.py, line 2, score\n"
        r"fix the cause, then continue with: evo-grpo resume here\n\Z",
        result.stderr,
        re.M,
    )
    rewarded("float(len(completion))")
    assert evo("resume", "here").exit_code == 0


@pytest.mark.filterwarnings("default")
def test_rewards_that_all_abstain_are_reported_in_one_line(rewarded):
    result = evo("run", rewarded("None"), "--out", "here")
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if "abstained on all" in line]
    assert lines
    assert all(line.startswith("warning: every reward function (score)") for line in lines)
    assert ".py" not in result.stderr
    assert "UserWarning" not in result.stderr


def test_a_bug_is_not_hidden(loop: SimpleNamespace):
    loop.error = ZeroDivisionError("a bug")
    result = evo("run", written())
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_folder_in_place_of_a_configuration(command: str, loop: SimpleNamespace):
    run = str(run_folder())
    message = refused(command, run)
    assert f"{run}: expected a YAML file, got a folder" in message
    assert f"evo-grpo resume {run}" in message
    assert "write one with: evo-grpo init none.yaml" in refused(command, "none.yaml")
    assert loop.seen == []


def test_resume_of_a_configuration(loop: SimpleNamespace):
    name = written()
    assert f"start a run of this configuration with: evo-grpo run {name}" in refused("resume", name)
    assert loop.seen == []


def test_resume_of_no_run():
    message = refused("resume", "nowhere")
    assert "rounds.jsonl and population.yaml" in message


# --- compare -------------------------------------------------------------------------------------

COMPARISON = {
    "agents": 2,
    "split": "test",
    "arms": [
        {
            "name": name,
            "folder": "x",
            "tokens": {"training": 900, "evaluation": 100},
            "test": {"mean": mean, "se": 0.01, "n": 256},
        }
        for name, mean in (("guess", 0.35), ("random", 0.8), ("evolved", 0.9))
    ],
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A comparison without a model, which stops or fails where a test says."""
    calls = SimpleNamespace(seen=[], allowed=[], error=None)

    def compare(folder: Path, *, allow: Sequence[str], observer: Observer) -> dict:
        calls.seen.append(folder)
        calls.allowed.append(list(allow))
        if calls.error is not None:
            raise calls.error
        observer.started(folder / "compare" / "guess", 1, 0, small_config())
        return COMPARISON

    monkeypatch.setitem(sys.modules, "evo_grpo.analysis.arms", SimpleNamespace(compare=compare))
    return calls


@pytest.mark.parametrize(
    "arguments", [["run", "population.yaml", "--out", "one"], ["resume", "one"]]
)
def test_a_comparison_follows_the_run_where_it_is_asked_for(
    arguments: list[str], loop: SimpleNamespace, compared: SimpleNamespace
):
    written(to_yaml(small_config()))
    if arguments[0] == "resume":
        run_folder("one")
    plain = evo(*arguments)
    assert plain.exit_code == 0, plain.output
    assert compared.seen == []
    assert "your guess" not in plain.stdout
    shutil.rmtree("one")
    if arguments[0] == "resume":
        run_folder("one")
    lines = evo(*arguments, "--compare").stdout.splitlines()
    assert compared.seen == [Path("one")]
    assert any(" of at most 4 steps" in line for line in lines)
    (guess,) = [line for line in lines if line.startswith("two agents at your guess")]
    assert guess.endswith("0.35 ± 0.01  1,000 tokens")
    assert "comparison: one/compare/compare.json" in lines
    assert lines[-1].startswith("Next: evo-grpo report one")
    guess = (
        "your first guess alone reached 0.35 ± 0.01 and the best of 2 random guesses 0.80 ± 0.01"
    )
    assert any(f"without evolution {guess}; this run reached 0.90" in line for line in lines)


def test_a_comparison_takes_files_that_changed(loop: SimpleNamespace, compared: SimpleNamespace):
    run_folder("one")
    assert evo("resume", "one", "--compare").exit_code == 0
    assert evo("resume", "one", "--compare", "--allow", "env.train").exit_code == 0
    assert compared.allowed == [[], ["env.train"]]


def test_a_comparison_that_stops_says_how_to_go_on(
    loop: SimpleNamespace, compared: SimpleNamespace
):
    name = written(to_yaml(small_config()))
    compared.error = KeyboardInterrupt()
    result = evo("run", name, "--out", "here", "--compare")
    assert result.exit_code == 130
    assert result.stderr == (
        "stopped in the comparison; continue with: evo-grpo resume here --compare\n"
    )
    compared.error = RunFailedError("no agent is left")
    shutil.rmtree("here")
    result = evo("run", name, "--out", "here", "--compare")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: no agent is left\nfix the cause, then continue with: "
        "evo-grpo resume here --compare\n"
    )
    loop.interrupt_after = 1
    result = evo("run", name, "--out", "there", "--compare")
    assert result.stderr.endswith("continue with: evo-grpo resume there --compare\n")


def test_a_run_that_cannot_be_compared_does_not_begin(loop: SimpleNamespace):
    name = written(MINIMAL + "population: {size: 1}\nevolve: {selection: none}\n")
    message = refused("run", name, "--compare")
    assert "population.size: expected at least 2 agents to compare" in message
    assert loop.seen == []
    assert evo("run", name, "--out", "here").exit_code == 0


# --- leaderboard, lineage, export ----------------------------------------------------------------


def test_leaderboard_as_a_table():
    lines = evo("leaderboard", str(run_folder())).stdout.splitlines()
    assert lines[0].split()[:5] == ["rank", "agent", "member", "parent", "fitness"]
    assert lines[1].split()[:6] == ["1", "1", "2", "0", "0.75", "±0.05"]
    assert lines[2].split()[:7] == ["2", "tie", "0", "0", "-", "0.62", "±0.05"]
    assert lines[1].endswith("checkpoints/round-0001/agent-01")


def test_leaderboard_as_json_csv_and_markdown():
    run = str(run_folder())
    rows = json.loads(evo("leaderboard", run, "--json").stdout)
    assert [row["member"] for row in rows] == [2, 0]
    assert rows[1]["parent"] is None
    assert rows[0]["lr"] == 1.2e-3
    table = list(csv.DictReader(io.StringIO(evo("leaderboard", run, "--csv").stdout)))
    assert [row["member"] for row in table] == ["2", "0"]
    markdown = evo("leaderboard", run, "--markdown").stdout.splitlines()
    assert markdown[0].startswith("| rank | agent | member | parent |")
    assert markdown[1].startswith("| ---: | ---: |")
    assert len({line.count("|") for line in markdown}) == 1
    assert list(table[0]) == list(rows[0]) == markdown[0].strip("| ").split(" | ")


def test_leaderboard_in_one_form_only():
    result = evo("leaderboard", str(run_folder()), "--json", "--csv")
    assert result.exit_code == 2
    assert "expected one of --json, --csv and --markdown" in result.stderr


def test_leaderboard_before_the_first_round():
    run = str(run_folder(rounds=0, summary=False))
    assert "no round is finished yet" in evo("leaderboard", run).stdout
    assert json.loads(evo("leaderboard", run, "--json").stdout) == []
    assert "no round is finished yet" in evo("lineage", run).stdout


@pytest.mark.parametrize("command", ["leaderboard", "lineage"])
def test_no_run_folder(command: str):
    assert "no run folder" in refused(command, "nowhere")
    Path("empty").mkdir()
    assert "rounds.jsonl and population.yaml" in refused(command, "empty")


def test_lineage_is_a_tree():
    lines = evo("lineage", str(run_folder())).stdout.splitlines()
    assert lines == [
        "runs/one: 3 members in 2 rounds",
        "├── member 0  agent 0, rounds 1-2  0.500 -> 0.625  lr 1e-3",
        "│   └── member 2  agent 1, round 2  0.750  lr 1e-3 -> 1.2e-3  winner, test 0.807",
        "└── member 1  agent 1, round 1  0.250  lr 1e-3",
    ]


def test_lineage_as_one_json_document():
    found = json.loads(evo("lineage", str(run_folder()), "--json").stdout)
    assert (found["run"], found["rounds"], found["best"]["member"]) == ("runs/one", 2, 2)
    assert [one["id"] for one in found["members"]] == [0, 1, 2]
    child = found["members"][2]
    assert (child["parent"], child["born"], child["alive"], child["op"]) == (0, 1, True, "mutate")
    assert child["changes"] == {"lr": [1e-3, 1.2e-3]}
    assert child["fitness"] == [0.75]
    assert found["members"][1]["alive"] is False
    empty = str(run_folder("runs/two", rounds=0, summary=False))
    assert json.loads(evo("lineage", empty, "--json").stdout)["members"] == []


def test_export_writes_the_best_agent():
    run = run_folder(adapter=True)
    result = evo("export", str(run), "--best", "out")
    assert result.exit_code == 0, result.output
    assert "wrote out" in result.stdout
    assert {"README.md", "adapter_config.json"} <= set(os.listdir("out"))
    assert "not empty" in refused("export", str(run), "--best", "out")
    assert evo("export", str(run), "--best", "out", "--force").exit_code == 0


def test_export_needs_a_checkpoint():
    folder = run_folder(adapter=True)
    shutil.rmtree(folder / "checkpoints")
    assert "got no file); put the file back" in refused("export", str(folder), "--best", "out")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "expected one output folder"),
        (["a", "--best", "b"], "expected one output folder"),
        (["--best", "b", "--agent", "1"], "--best writes the winner"),
        (["--best", "b", "--best-ever"], "--best writes the winner"),
    ],
)
def test_export_takes_one_folder_and_one_agent(more: list[str], message: str):
    assert message in refused("export", str(run_folder(adapter=True)), *more)
    assert not Path("a").exists()
    assert not Path("b").exists()


def test_rounds_of_an_export_count_from_one():
    run = str(run_folder(adapter=True))
    result = evo("export", run, "out", "--round", "2")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("wrote out: agent 1, member 2; ")
    assert json.loads(Path("out/export.json").read_text())["round"] == 1
    assert "--round" in refused("export", run, "x", "--round", "0")
    assert "finished rounds, 1 to 2, got 3" in refused("export", run, "x", "--round", "3")
    assert "agent 0 after round 1 does not exist" in refused(
        "export", run, "x", "--agent", "0", "--round", "1"
    )


def test_export_to_the_hub_needs_a_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    result = evo("export", str(run_folder(adapter=True)), "out", "--push", "me/sums")
    assert result.exit_code == 2
    assert "in the environment, as HF_TOKEN, got none" in result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sample", "nowhere", "1+1="], "nowhere: no run folder"),
        (["evaluate", "nowhere"], "nowhere: expected a PEFT folder with adapter_config.json"),
    ],
)
def test_nothing_to_try(arguments: list[str], message: str):
    assert message in refused(*arguments)


def test_a_prompt_or_rows():
    result = evo("sample", str(run_folder()), "1+1=", "--row", "2")
    assert result.exit_code == 2
    assert "expected a PROMPT or --row, got both" in result.stderr


def test_overrides_need_a_configuration():
    result = evo("evaluate", str(run_folder()), "--set", "seed=1")
    assert result.exit_code == 2
    assert "--set needs a CONFIG" in result.stderr


# --- replay --------------------------------------------------------------------------------------


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A replay without a model, which fails where a test says."""
    calls = SimpleNamespace(forced=[], allowed=[], error=None)

    def train(
        run: Path,
        *,
        repeats: int | None,
        force: bool,
        allow: Sequence[str],
        observer: Observer,
    ) -> Replay:
        calls.forced.append(force)
        calls.allowed.append(list(allow))
        observer.started(run, 2, 0, None)
        observer.stage(0, "learn", 0, 4)
        if calls.error is not None:
            raise calls.error
        found = shown_replay.replay(made=read_schedule(run), repeats=repeats or 3)
        write_replay(run, found)
        return found

    module = SimpleNamespace(replay=train)
    monkeypatch.setitem(sys.modules, "evo_grpo.analysis.arms", module)
    return calls


def test_replay_shows_the_schedule_the_trainings_and_the_verdict(trainer: SimpleNamespace):
    run = str(run_folder())
    result = evo("replay", run)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "runs/one: the winner is member 2, the best agent of the last round; its schedule over "
        "2 rounds of 4 steps:"
    )
    assert lines[1].split() == [
        *("round", "member", "lr", "beta", "clip", "group", "prompts/step", "tokens")
    ]
    assert lines[2].split() == ["1", "0", "1e-3", "0", "0.2", "8", "2", "1,000"]
    assert lines[3].split() == ["2", "2", "1.2e-3", "0", "0.2", "8", "2", "1,000"]
    assert "runs/one: training with the schedule and with its last values, side by side" in lines
    assert [line.split("  ")[0] for line in lines if " 0.50 ± 0.13" in line] == [
        *("schedule", "last values", "the winner")
    ]
    (verdict,) = [line for line in lines if line.startswith("With the tokens of")]
    assert "the schedule and its last values do not differ significantly" in verdict
    assert "Means of 3 trainings of each kind" in result.stdout
    assert lines[-1] == "replay: runs/one/replay"


def test_a_replay_takes_files_that_changed(trainer: SimpleNamespace):
    assert evo("replay", str(run_folder()), "--allow", "env.train").exit_code == 0
    assert trainer.allowed == [["env.train"]]


def test_a_finished_replay_is_shown_again_unless_forced(trainer: SimpleNamespace):
    run = str(run_folder())
    first = evo("replay", run).stdout.splitlines()
    again = evo("replay", run).stdout.splitlines()
    assert trainer.forced == [False]
    assert [line for line in first if "side by side" not in line] == again
    assert evo("replay", run, "--force").exit_code == 0
    assert trainer.forced == [False, True]
    assert "One training of each kind" in evo("replay", run, "--repeats", "1").stdout
    assert "One training of each kind" in evo("replay", run, "--repeats", "1").stdout
    assert trainer.forced == [False, True, False]
    assert evo("replay", run, "--repeats", "0").exit_code == 2


def test_a_replay_that_is_stopped_says_how_to_start_it_again(trainer: SimpleNamespace):
    trainer.error = KeyboardInterrupt()
    result = evo("replay", str(run_folder()))
    assert result.exit_code == 130
    assert "start it again with: evo-grpo replay runs/one" in result.stderr
    assert "Traceback" not in result.output


def test_what_cannot_be_replayed(trainer: SimpleNamespace):
    assert "no run folder" in refused("replay", "nowhere")
    unfinished = str(run_folder("runs/two", summary=False))
    assert f"finish it with: evo-grpo resume {unfinished}" in refused("replay", unfinished)
    assert trainer.forced == []


def test_a_replay_needs_the_winners_checkpoint():
    result = evo("replay", str(run_folder()))
    assert result.exit_code == 2
    assert "expected the checkpoint of the run's winner, member 2" in result.stderr
    assert "put it back, or repeat the run" in result.stderr


def test_the_resolved_file_of_a_run_is_one_that_check_takes():
    run = run_folder()
    assert yaml.safe_load((run / "population.yaml").read_text())["population"]["size"] == 2
    assert evo("check", str(run / "population.yaml")).exit_code == 0
