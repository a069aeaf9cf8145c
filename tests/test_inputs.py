"""What a run is made of is recorded; a resume refuses what has changed, or records it, by name."""

import json
import re

import pytest
import yaml
from small_run import Told, outcome, small

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.inputs import inputs_of
from evo_grpo.record.files import seal, unseal
from evo_grpo.settings import from_dict
from evo_grpo.training import resume, run

REWARD = "def score(completion, answer):\n    return float(answer in completion)\n"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A run of one's own data and reward, stopped after its first round."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(60))
    )
    (tmp_path / "input_rewards.py").write_text(REWARD)
    config = small(
        env={
            "kind": "dataset",
            "train": "rows.jsonl",
            "prompt": "{question}",
            "reward": "input_rewards:score",
        }
    )
    with pytest.raises(KeyboardInterrupt):
        run(config, out="run", observer=Told(("done", 0)))
    return tmp_path / "run"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.raises(KeyboardInterrupt):
        run(small(), out=folder, observer=Told(("done", 0)))
    return folder


@pytest.fixture
def copied(stopped, tmp_path):
    import shutil

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
        ("algorithm__lr", 0.002, r"algorithm.lr was 0.001 and is 0.002"),
        ("population__steps_per_round", 3, "population.steps_per_round was"),
        (
            "population__rounds",
            9,
            "population.rounds was 3 and is 9; put it back, and give --rounds",
        ),
        ("evolve__selection__size", 3, "evolve.selection.size was 2 and is 3"),
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


def test_all_changes_are_named_at_once(copied):
    rewrite(copied, seed=7, algorithm__lr=0.002)
    with pytest.raises(
        ConfigError, match=r"(?s)begun with something else: 2 problems\n  seed .*\n  algorithm.lr"
    ):
        resume(copied)


def test_no_truncation_of_the_settings_passes(copied, monkeypatch):
    """Every proper prefix of population.yaml is refused, but for one that says the same."""
    file = copied / "population.yaml"
    text = file.read_text()
    whole = yaml.safe_load(text)
    monkeypatch.setattr("evo_grpo.training.prepare", lambda config: pytest.fail("went on"))
    for end in range(0, len(text), 7):
        if yaml_or_none(text[:end]) == whole:
            continue
        file.write_text(text[:end])
        with pytest.raises((ConfigError, CheckpointError)):
            resume(copied)


def yaml_or_none(text):
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
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
    with pytest.raises(ConfigError, match=rf"the file of {name} has changed; .*--allow '{name}'"):
        resume(mine)
    with pytest.raises(ConfigError, match=r"allow: expected names of files .*env.train.*'seed'"):
        resume(mine, allow=["seed"])
    resume(mine, allow=[name])
    (change,) = unseal((mine / "inputs.json").read_bytes())["changes"]
    assert (change["round"], change["name"]) == (1, name)
    resume(mine)  # from then on it is the run's own


@pytest.mark.filterwarnings("ignore:round 1 had nothing to learn from")
def test_before_the_first_round_is_finished_a_file_may_change(mine, monkeypatch):
    config = small(env={"kind": "dataset", "train": "rows.jsonl", "prompt": "{question}",
                        "reward": "input_rewards:score"})  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        run(config, out="early", observer=Told(("learn", 0)))
    path = mine.parent / "input_rewards.py"
    path.write_text(path.read_text() + "\n")
    resume("early")
    (change,) = unseal((mine.parent / "early" / "inputs.json").read_bytes())["changes"]
    assert (change["round"], change["name"]) == (0, "env.reward: input_rewards:score")


def test_a_file_that_is_gone_is_refused(mine):
    (mine.parent / "input_rewards.py").unlink()
    with pytest.raises(ConfigError, match=r"input_rewards:score is not there; put it back"):
        resume(mine)


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


def test_a_run_that_was_never_changed_resumes_to_the_same_result(stopped, copied, tmp_path):
    resume(copied)
    whole = run(small(), out=tmp_path / "whole")
    assert outcome(copied) == outcome(whole)
