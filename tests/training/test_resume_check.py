"""What a run is made of is recorded; a resume refuses what has changed, or records it, by name."""

import json
import re
import shutil
import sys
from contextlib import contextmanager, nullcontext

import pytest
import yaml
from small_run import Told, small

from evo_grpo import leaderboard, resume, run
from evo_grpo.analysis.arms import compare, replay
from evo_grpo.errors import CheckpointError, ConfigError, RunDirError
from evo_grpo.record.files import seal, unseal
from evo_grpo.record.folder import read_config
from evo_grpo.settings import from_dict, load, to_yaml
from evo_grpo.training.recorded_inputs import inputs_of
from evo_grpo.training.resume_check import check_inputs

REWARD = "def score(completion, answer):\n    return float(answer in completion)\n"

MINE = {
    "kind": "dataset",
    "train": "rows.jsonl",
    "prompt": "{question}",
    "reward": "input_rewards:score",
}


@contextmanager
def working_in(folder):
    """Work in a folder with data and a reward of one's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, "input_rewards", raising=False)
        yield


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with a run of one's own data and reward, stopped after its first round."""
    folder = tmp_path_factory.mktemp("begun")
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(60)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "input_rewards.py").write_text(REWARD)
    with working_in(folder), pytest.raises(KeyboardInterrupt):
        run(small(env=MINE), out="run", observer=Told(("done", 0)))
    return folder


@pytest.fixture
def mine(begun, tmp_path):
    """The run in a copy of that folder."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    with working_in(tmp_path):
        yield tmp_path / "run"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.raises(KeyboardInterrupt):
        run(small(), out=folder, observer=Told(("done", 0)))
    return folder


@pytest.fixture
def copied(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


def rewrite(folder, **changes):
    """Change settings of population.yaml by dotted paths."""
    file = folder / "population.yaml"
    data = yaml.safe_load(file.read_text())
    for path, value in changes.items():
        *groups, name = path.split("__")
        place = data
        for group in groups:
            place = place[group]
        place[name] = value
    file.write_text(yaml.safe_dump(data))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seed", 7, "seed was 3 and is 7; put it back in population.yaml, or start another run"),
        ("algorithm__max_grad_norm", 0.5, r"algorithm.max_grad_norm was 1.0 and is 0.5"),
        (
            "population__rounds",
            9,
            "population.rounds was 3 and is 9; put it back, and give --rounds",
        ),
        ("evolve__selection__size", 3, "evolve.selection.size was 4 and is 3"),
        ("population__decisions", [1, 3], r"population.decisions was \[1, 2, 3\] and is \[1, 3\]"),
        ("evolve__hyperparameters", {}, "evolve.hyperparameters"),
    ],
)
def test_a_changed_setting_is_refused_by_name(copied, path, value, message):
    rewrite(copied, **{path: value})
    before = {p: p.read_bytes() for p in copied.rglob("*") if p.is_file() and p.name != ".lock"}
    with pytest.raises(ConfigError, match=message):
        resume(copied)
    after = {p: p.read_bytes() for p in copied.rglob("*") if p.is_file() and p.name != ".lock"}
    assert after == before


@pytest.mark.slow
def test_no_truncation_of_the_settings_passes(copied, monkeypatch):
    """A proper prefix of population.yaml is refused, but for one that says the same."""
    file = copied / "population.yaml"
    text = file.read_text()
    whole = settings_or_none(text)
    assert whole is not None
    monkeypatch.setattr("evo_grpo.training.run.prepare", lambda *given: pytest.fail("went on"))
    # The end of a line, where a prefix is YAML, and places within lines.
    lines = {at for at, letter in enumerate(text) if letter == "\n"}
    for end in sorted(lines | set(range(0, len(text), 41))):
        if settings_or_none(text[:end]) == whole:
            continue
        file.write_text(text[:end])
        with pytest.raises((ConfigError, CheckpointError)):
            resume(copied)


def settings_or_none(text):
    try:
        return from_dict(yaml.safe_load(text))
    except (yaml.YAMLError, ConfigError):
        return None


def test_what_changes_nothing_that_was_played_is_honoured_and_recorded(copied, stopped):
    rewrite(copied, record__completions=0, record__optuna=False, env__reward_timeout=None)
    resume(copied)
    changes = unseal((copied / "inputs.json").read_bytes())["changes"]
    assert {(c["round"], c["name"], c["to"]) for c in changes} == {
        (1, "record.completions", 0),
        (1, "record.optuna", False),
        (1, "env.reward_timeout", None),
    }
    assert (copied / "completions" / "round-0000.jsonl").read_text()
    assert (copied / "completions" / "round-0002.jsonl").read_text() == ""


@pytest.mark.parametrize("name", ["processor", "torch", "threads"])
def test_another_machine_is_announced_as_inexact_and_recorded(copied, name):
    file = copied / "inputs.json"
    data = unseal(file.read_bytes())
    now = data["software"][name]
    data["software"][name] = "another"
    file.write_text(seal(data))
    message = rf"{name} was 'another' and is '{re.escape(now)}': .* may differ in rounding"
    with pytest.warns(UserWarning, match=message):
        resume(copied)
    (change,) = unseal(file.read_bytes())["changes"]
    assert (change["name"], change["from"], change["to"]) == (name, "another", now)


def test_the_users_files_are_recorded(mine):
    files = unseal((mine / "inputs.json").read_bytes())["files"]
    assert set(files) == {"env.train", "env.reward: input_rewards:score"}
    assert all(len(digest) == 64 for digest in files.values())


@pytest.mark.parametrize(
    ("file", "name"),
    [("rows.jsonl", "env.train"), ("input_rewards.py", "env.reward: input_rewards:score")],
)
def test_a_changed_file_is_refused_or_allowed_by_name(mine, file, name):
    path = mine.parent / file
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ConfigError, match=rf"the file of {name} has changed .*--allow '{name}'"):
        resume(mine)
    with pytest.raises(ConfigError, match=r"allow: expected names of files .*env.train.*'seed'"):
        resume(mine, allow=["seed"])
    resume(mine, allow=[name])
    (change,) = unseal((mine / "inputs.json").read_bytes())["changes"]
    assert (change["round"], change["name"]) == (1, name)
    resume(mine)  # from then on it is the run's own


@pytest.mark.filterwarnings("ignore:round 1 had nothing to learn from")
def test_before_the_first_round_is_finished_a_file_may_change(mine, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        run(small(env=MINE), out="early", observer=Told(("learn", 0)))
    path = mine.parent / "input_rewards.py"
    path.write_text(path.read_text() + "\n")
    resume("early")
    (change,) = unseal((mine.parent / "early" / "inputs.json").read_bytes())["changes"]
    assert (change["round"], change["name"]) == (0, "env.reward: input_rewards:score")


def test_a_file_that_is_gone_is_refused(mine):
    (mine.parent / "input_rewards.py").unlink()
    with pytest.raises(ConfigError, match=r"score is not there \(.* begun with .*\); put it back"):
        resume(mine)


def test_every_changed_file_is_in_the_command_that_goes_on(mine):
    for name in ("rows.jsonl", "input_rewards.py"):
        (mine.parent / name).write_text((mine.parent / name).read_text() + "\n")
    reward = "env.reward: input_rewards:score"
    with pytest.raises(
        ConfigError, match=f"(?s)2 problems.*--allow '{reward}' --allow 'env.train'"
    ):
        resume(mine)
    with pytest.raises(ConfigError, match=f"--allow '{reward}' --allow 'env.train'"):
        resume(mine, allow=[reward])
    check_inputs(mine, load(mine / "population.yaml"), command="", allow=[reward, "env.train"])


def test_the_file_that_defines_a_reward_is_among_the_files(mine, monkeypatch):
    package = mine.parent / "input_package"
    package.mkdir()
    (package / "__init__.py").write_text("from .scores import score as exact\n")
    (package / "scores.py").write_text(REWARD)
    config = small(env={**MINE, "reward": "input_package:exact"})
    with pytest.raises(KeyboardInterrupt):
        run(config, out="packaged", observer=Told(("done", 0)))
    (package / "scores.py").write_text(REWARD.replace("answer in", "answer not in"))
    name = "env.reward: input_package:exact (input_package.scores)"
    with pytest.raises(ConfigError, match=re.escape(f"the file of {name} has changed")):
        resume("packaged")
    folder, config = mine.parent / "packaged", load("packaged/population.yaml")
    check_inputs(folder, config, command="", allow=[name])
    (package / "scores.py").unlink()
    with pytest.raises(ConfigError, match=re.escape(f"the file of {name} is not there")):
        resume("packaged")
    # What is read only since a file on the way has changed goes with that file.
    (package / "__init__.py").write_text(REWARD.replace("score", "exact"))
    check_inputs(folder, config, command="", allow=["env.reward: input_package:exact"])
    (package / "other.py").write_text(REWARD)
    (package / "__init__.py").write_text("from .other import score as exact\n")
    check_inputs(folder, config, command="", allow=["env.reward: input_package:exact"])


def test_a_data_set_may_lie_elsewhere_if_it_is_the_same(mine, tmp_path):
    (mine.parent / "elsewhere").mkdir()
    moved = mine.parent / "elsewhere" / "rows.jsonl"
    (mine.parent / "rows.jsonl").rename(moved)
    with pytest.raises(
        ConfigError,
        match=r"the file of env.train is not there .*; put it back",
    ):
        resume(mine)
    rewrite(mine, env__train=str(moved))
    text = moved.read_text()
    moved.write_text(text + "\n")
    with pytest.raises(ConfigError, match=r"something else: the file of env.train has changed"):
        resume(mine)
    moved.write_text(text)
    shutil.copyfile(moved, moved.with_suffix(".json"))
    rewrite(mine, env__train=str(moved.with_suffix(".json")))
    with pytest.raises(ConfigError, match=r"env.train was 'rows.jsonl' and is"):
        resume(mine)
    rewrite(mine, env__train=str(moved), env__test=str(moved))
    with pytest.raises(ConfigError, match=r"env.test was None and is"):
        resume(mine)
    rewrite(mine, env__test=None)
    resume(mine)
    data = unseal((mine / "inputs.json").read_bytes())
    assert data["changes"] == [
        {"round": 1, "name": "env.train", "from": "rows.jsonl", "to": str(moved)}
    ]
    assert data["settings"]["env.train"] == str(moved)


@pytest.mark.parametrize(
    ("before", "after"), [(1, True), (0, False), (1, 1.0), ([1], [True]), (1, None)]
)
def test_free_arguments_are_compared_with_their_types(copied, before, after):
    def config(value):
        return small(env={"kind": "sums", "args": {"high": 20, "free": value}}).settled(8)

    record(copied, **{"env.args.free": before})
    (copied / "population.yaml").write_text(to_yaml(config(before)))
    check_inputs(copied, config(before), command="")
    with pytest.raises(ConfigError, match=rf"env.args.free was {re.escape(str(before))} and is"):
        check_inputs(copied, config(after), command="")
    record(copied, drop=["env.args.free"])
    with pytest.raises(ConfigError, match=r"env.args.free was None and is"):
        check_inputs(copied, config(None), command="")


def test_a_whole_number_is_no_change_of_a_setting_that_is_none(copied):
    record(copied, **{"algorithm.max_grad_norm": 1})
    rewrite(copied, algorithm__max_grad_norm=1)
    check_inputs(copied, load(copied / "population.yaml"), command="")


def record(folder, drop=(), **changes):
    """Change the settings that inputs.json records."""
    file = folder / "inputs.json"
    data = unseal(file.read_bytes())
    data["settings"] |= changes
    for name in drop:
        del data["settings"][name]
    file.write_text(seal(data))


NEWER = ("engine.kernels", "record.optuna", "evolve.fitness.racing", "evolve.selection.elitism")


def test_a_setting_that_the_record_does_not_have_is_unchanged_at_its_default(copied):
    """As if an evo-grpo had begun the run that did not know them."""
    data = yaml.safe_load((copied / "population.yaml").read_text())
    for name in NEWER:
        *groups, last = name.split(".")
        place = data
        for group in groups:
            place = place[group]
        del place[last]
    (copied / "population.yaml").write_text(yaml.safe_dump(data))
    record(copied, drop=NEWER)
    with pytest.raises(KeyboardInterrupt):
        resume(copied, observer=Told(("done", 1)))
    recorded = unseal((copied / "inputs.json").read_bytes())
    assert {one["name"] for one in recorded["changes"]} == set(NEWER)
    assert all(one["round"] == 1 and one["from"] is None for one in recorded["changes"])
    assert recorded["settings"]["evolve.fitness.racing"] == 0.0
    resume(copied)  # now it is recorded, and population.yaml still has none of them
    assert unseal((copied / "inputs.json").read_bytes()) == recorded


def test_a_setting_that_the_record_does_not_have_is_refused_at_another_value(copied):
    record(copied, drop=["evolve.fitness.racing"])
    rewrite(copied, evolve__fitness__racing=0.5)
    with pytest.raises(ConfigError, match=r"evolve.fitness.racing was 0.0 and is 0.5"):
        resume(copied)


def test_a_run_of_an_earlier_version_is_read_and_not_gone_on_with(copied):
    """As an evo-grpo wrote it that had settings which were removed since."""
    file = copied / "population.yaml"
    text = file.read_text().replace("\nevolve:\n", "\nevolve:\n  recombine: none\n")
    file.write_text(text.replace("\n  vllm:\n", "\n  vllm:\n    process: child\n"))
    record(copied, **{"evolve.recombine": "none", "engine.vllm.process": "child"})
    message = r"an earlier version, with evolve.recombine, engine.vllm.process; finish it with evo-"
    with pytest.raises(RunDirError, match=message):
        resume(copied)
    check_inputs(copied, read_config(copied), command="")
    assert len(leaderboard(copied)) > 1


@pytest.mark.parametrize("mode", [None, "default"])
def test_a_run_that_could_compile_is_gone_on_with(copied, mode):
    """As an evo-grpo wrote it that had `engine.compile`, which rounded, and changed no rule."""
    record(copied, **{"engine.compile": mode})
    rewrite(copied, engine__compile=mode)
    if mode is not None:
        with pytest.raises(ConfigError, match=r"engine.compile: expected null, got .*default"):
            resume(copied)
        rewrite(copied, engine__compile=None)
    check_inputs(copied, read_config(copied), command="")
    with nullcontext() if mode is None else pytest.warns(UserWarning, match=r"engine.compile was"):
        resume(copied)
    assert (copied / "summary.json").exists()
    assert "engine.compile" not in unseal((copied / "inputs.json").read_bytes())["settings"]
    assert len(leaderboard(copied)) > 1


@pytest.mark.slow
def test_what_is_trained_beside_a_run_is_made_of_the_same(mine):
    resume(mine)
    reward, name = mine.parent / "input_rewards.py", "env.reward: input_rewards:score"
    reward.write_text(REWARD + "\n")
    (mine.parent / "rows.jsonl").write_text((mine.parent / "rows.jsonl").read_text() + "\n")
    before = (mine / "inputs.json").read_bytes()
    for train, command in ((replay, f"replay {mine}"), (compare, f"resume {mine} --compare")):
        allowed = f"evo-grpo {command} --allow '{name}' --allow 'env.train'"
        with pytest.raises(ConfigError, match=re.escape(allowed)):
            train(mine)
        with pytest.raises(ConfigError, match=r"allow: expected names of files .*got 'seed'"):
            train(mine, allow=["seed"])
        rewrite(mine, seed=4)
        with pytest.raises(ConfigError, match=r"seed was 3 and is 4; put it back"):
            train(mine, allow=[name, "env.train"])
        rewrite(mine, seed=3)
    replay(mine, repeats=1, allow=[name, "env.train"])
    assert (mine / "inputs.json").read_bytes() == before


@pytest.mark.slow
def test_a_population_beside_a_run_is_trained_anew_with_other_files(mine):
    resume(mine)
    with pytest.raises(KeyboardInterrupt):
        compare(mine, observer=Told(("test", 0)))
    told = Told()
    (mine.parent / "input_rewards.py").write_text(REWARD + "\n")
    compare(mine, allow=["env.reward: input_rewards:score"], observer=told)
    assert ("learn", 0) in told.calls[: told.calls.index(("test", 0))]
    assert [a["name"] for a in json.loads((mine / "compare" / "compare.json").read_text())["arms"]]


def test_strategies_and_environments_of_ones_own_are_among_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_strategies.py").write_text("")
    config = from_dict(
        {
            "model": "tiny-sums",
            "env": {"kind": "python:my_strategies:make"},
            "evolve": {"selection": "my_strategies:Mine"},
        }
    )
    files = inputs_of(config).files
    assert set(files) == {
        "env.kind: my_strategies:make",
        "evolve.selection: my_strategies:Mine",
    }
    assert len(set(files.values())) == 1
    named = from_dict({"model": "tiny-sums", "env": "reasoning_gym:chain_sum"})
    assert inputs_of(named).files == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "got no file; put it back"),
        ("", "it is not JSON"),
        (seal({}), "format: expected 1, got None"),
        (seal({"format": 1, "settings": []}), "settings: input should be an object"),
        ("{}", "it has no sha256"),
    ],
)
def test_a_damaged_record_is_named(copied, text, message):
    file = copied / "inputs.json"
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(CheckpointError, match=rf"inputs.json: .*{message}"):
        resume(copied)
