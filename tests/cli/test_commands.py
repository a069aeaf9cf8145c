import csv
import io
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import shown_replay
from commands import evo, refused
from shown_run import run_folder, small_config

from evo_grpo.errors import RewardError, RunDirError, RunFailedError
from evo_grpo.record.observer import Observer
from evo_grpo.record.replay import Replay, read_schedule, write_replay
from evo_grpo.settings import load, to_yaml

MINIMAL = "model: tiny-sums\nenv: sums\n"
PLANNED = """
    model: tiny-sums
    env: sums
    population: {size: 8, rounds: 6, steps_per_round: 8}
    evolve: {hyperparameters: {lr: {min: 1e-4, max: 3e-3}, group_size: {min: 4, max: 16}}}
"""


def written(text: str = MINIMAL, name: str = "population.yaml") -> str:
    Path(name).write_text(textwrap.dedent(text), encoding="utf-8")
    return name


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


RUN = "runs/one"
ROWS = '\'env={kind: dataset, train: %s, prompt: "%s", reward: "rewards:%s"}\''
REFUSED = [
    ("trian", "No such command 'trian'"),
    ("check --sett a=1", "No such option: --sett"),
    ("init --template game", "--template: expected one of sums, foods, dataset, "),
    ("init questions.csv --template dataset", "another name; the template 'dataset' writes it too"),
    ("check none.yaml", "write one with: evo-grpo init none.yaml"),
    ("check --set evolve.selection.sise=3", "did you mean 'size'?"),
    ("check --set env=sumz", 'env.kind: no task "sumz". Did you mean "sums"?'),
    ("check --set env.args.lowest=3", "env.args.lowest: unknown key; did you mean 'low'?"),
    ("check --set model=./here", "model: './here' is neither an embedded model"),
    ("check --set model.lora.target_modules=[qproj]", "['qproj'] matches no layer of tiny-sums"),
    (f"check --set {ROWS % ('no.csv', 'q', 'exact')}", "train: no file 'no.csv'"),
    (f"check --set {ROWS % ('none.csv', 'q', 'exact')}", "(none.csv): expected at least one row"),
    (
        f"check --set {ROWS % ('rows.csv', '{qestion}', 'exact')}",
        'train (rows.csv), line 2: no column "qestion", which the prompt template needs',
    ),
    (f"check --set {ROWS % ('rows.csv', 'q', 'exakt')}", "has no 'exakt'. Did you mean \"exact\"?"),
    ("run --set algorithm.lr", "--set algorithm.lr: expected a.b.c=value"),
    ("run a b", "unexpected extra argument"),
    ("run --quiet --json", "expected one of --quiet and --json, got both"),
    (
        f"run {RUN}",
        f"got a folder; name the file in it, or continue a run with: evo-grpo resume {RUN}",
    ),
    ("run --compare --set population.size=1 --set evolve.selection=none", "at least 2 agents to"),
    ("resume", "Missing argument 'RUN'"),
    ("resume nowhere", "rounds.jsonl and population.yaml"),
    ("resume population.yaml", "configuration with: evo-grpo run population.yaml"),
    (f"resume {RUN} --rounds 0", "--rounds"),
    ("leaderboard nowhere", "no run folder"),
    ("lineage empty", "rounds.jsonl and population.yaml"),
    (f"leaderboard {RUN} --json --csv", "expected one of --json, --csv and --markdown"),
    (f"export {RUN}", "expected one output folder"),
    (f"export {RUN} a --best b", "expected one output folder"),
    (f"export {RUN} --best b --best-ever", "--best writes the winner"),
    ("replay nowhere", "no run folder"),
    ("sample nowhere 1+1=", "nowhere: no run folder"),
    (f"sample {RUN} 1+1= --row 2", "expected a PROMPT or --row, got both"),
    ("evaluate nowhere", "nowhere: expected a PEFT folder with adapter_config.json"),
    (f"evaluate {RUN} --set seed=1", "--set needs a CONFIG"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_bad_input_is_one_message_and_nothing_is_trained_or_written(line, message, loop):
    run_folder(RUN)
    Path("empty").mkdir()
    written()
    rows = "".join(f"{n}+1=,{n + 1}\n" for n in range(40))
    Path("rows.csv").write_text(f"question,answer\n{rows}")
    Path("none.csv").write_text("question,answer\n")
    Path("rewards.py").write_text("def exact(completion, answer):\n    return 1.0\n")
    before = sorted(os.listdir())
    assert message in refused(*shlex.split(line))
    assert loop.seen == []
    assert sorted(os.listdir()) == before


def test_debug_adds_the_traceback_and_keeps_the_code():
    for arguments in (["check", "none.yaml", "--debug"], ["--debug", "check", "none.yaml"]):
        result = evo(*arguments)
        assert result.exit_code == 2
        assert "Traceback" in result.stderr
        assert "error: none.yaml: no such file" in result.stderr


# --- check ---------------------------------------------------------------------------------------


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


# --- schema --------------------------------------------------------------------------------------


def test_the_schema_in_a_file():
    assert "yaml-language-server: $schema=out.json" in evo("schema", "-o", "out.json").stdout
    assert json.loads(Path("out.json").read_text()) == json.loads(evo("schema").stdout)
    nowhere = evo("schema", "--out", "none/a.json")
    assert (nowhere.exit_code, nowhere.stderr) == (
        1,
        "error: none/a.json: No such file or directory\n",
    )


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


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (1, "stopped after round 1; continue with: evo-grpo resume here\n"),
        (0, "stopped before the first round was finished; continue with: evo-grpo resume here\n"),
        (-1, "stopped before the run began\n"),
    ],
)
def test_ctrl_c_says_how_to_go_on(loop: SimpleNamespace, done: int, message: str):
    loop.error, loop.after = KeyboardInterrupt(), done
    name = written(to_yaml(small_config()))
    result = evo("run", name, "--out", "here")
    assert result.exit_code == 130
    assert result.stderr == message


def test_resume_takes_more_rounds_and_files_that_changed(loop):
    run_folder()
    given = ("--rounds", "9", "--allow", "env.train", "--allow", "env.reward: a:b")
    assert evo("resume", "runs/one", *given).exit_code == 0
    assert loop.seen == [(Path("runs/one"), 9, ["env.train", "env.reward: a:b"])]


def test_resume_goes_on_and_prints_the_result(loop: SimpleNamespace):
    run_folder("runs/one", rounds=1, summary=False)
    result = evo("resume", "runs/one")
    assert result.exit_code == 0, result.output
    assert loop.seen == [Path("runs/one")]
    assert ", going on after round 1" in result.stdout
    assert "round 2/2" in result.stdout
    assert "round 1/2" not in result.stdout
    loop.error = KeyboardInterrupt()
    stopped = evo("resume", "runs/one")
    assert stopped.exit_code == 130
    assert "continue with: evo-grpo resume runs/one" in stopped.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunFailedError("no agent is left"), 1),
        (RunDirError("here: is in use by process 3"), 2),
        (RewardError("reward function 'r', row 3: it raised"), 2),
        (OSError(28, "No space left"), 1),
    ],
)
def test_errors_of_a_run_keep_their_codes_and_say_how_to_go_on(loop, error: Exception, code: int):
    loop.error = error
    result = evo("run", written(to_yaml(small_config())), "--out", "here")
    text = f"error: {getattr(error, 'strerror', None) or error}\n"
    assert (result.exit_code, result.stderr) == (code, text)
    loop.after = 0
    result = evo("run", "population.yaml", "--out", "here")
    more = "fix the cause, then continue with: evo-grpo resume here\n"
    assert (result.exit_code, result.stderr) == (code, text + more)


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


# --- compare -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments", [["run", "population.yaml", "--out", "one"], ["resume", "one"]]
)
def test_a_comparison_follows_the_run_where_it_is_asked_for(
    arguments: list[str], loop: SimpleNamespace
):
    written(to_yaml(small_config()))
    if arguments[0] == "resume":
        run_folder("one")
    plain = evo(*arguments)
    assert plain.exit_code == 0, plain.output
    assert loop.compared == []
    assert "your guess" not in plain.stdout
    shutil.rmtree("one")
    if arguments[0] == "resume":
        run_folder("one")
    lines = evo(*arguments, "--compare").stdout.splitlines()
    assert loop.compared == [(Path("one"), [])]
    assert any(" of at most 4 steps" in line for line in lines)
    (guess,) = [line for line in lines if line.startswith("two agents at your guess")]
    assert guess.endswith("0.35 ± 0.01  1,000 tokens")
    assert "comparison: one/compare/compare.json" in lines
    assert lines[-1].startswith("Next: evo-grpo report one")
    guess = (
        "your first guess alone reached 0.35 ± 0.01 and the best of 2 random guesses 0.80 ± 0.01"
    )
    assert any(f"without evolution {guess}; this run reached 0.90" in line for line in lines)


def test_a_comparison_that_stops_says_how_to_go_on(loop: SimpleNamespace):
    name = written(to_yaml(small_config()))
    loop.compare_error = KeyboardInterrupt()
    result = evo("run", name, "--out", "here", "--compare")
    assert result.exit_code == 130
    assert result.stderr == (
        "stopped in the comparison; continue with: evo-grpo resume here --compare\n"
    )
    loop.compare_error = RunFailedError("no agent is left")
    shutil.rmtree("here")
    result = evo("run", name, "--out", "here", "--compare")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: no agent is left\nfix the cause, then continue with: "
        "evo-grpo resume here --compare\n"
    )
    loop.error, loop.after = KeyboardInterrupt(), 1
    result = evo("run", name, "--out", "there", "--compare")
    assert result.stderr.endswith("continue with: evo-grpo resume there --compare\n")


# --- leaderboard, lineage, export ----------------------------------------------------------------


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


def test_leaderboard_before_the_first_round():
    run = str(run_folder(rounds=0, summary=False))
    assert "no round is finished yet" in evo("leaderboard", run).stdout
    assert json.loads(evo("leaderboard", run, "--json").stdout) == []
    assert "no round is finished yet" in evo("lineage", run).stdout


def test_lineage_is_a_tree():
    lines = evo("lineage", str(run_folder())).stdout.splitlines()
    assert lines == [
        "runs/one: 3 members in 2 rounds",
        "├── member 0  agent 0, rounds 1-2  0.500 -> 0.625  lr 1e-3",
        "│   └── member 2  agent 1, round 2  0.750  lr 1e-3 -> 1.2e-3  winner, test 0.807",
        "└── member 1  agent 1, round 1  0.250  lr 1e-3",
    ]


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
