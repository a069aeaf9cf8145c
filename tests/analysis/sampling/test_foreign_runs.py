"""A run folder from somebody else: its code is not imported, and its task is the one it had."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from forked import Forked
from small_run import edited, small

import evo_grpo
from evo_grpo import replay, resume, run
from evo_grpo.analysis.sampling.answers import sample
from evo_grpo.analysis.sampling.evaluation import evaluate_adapter
from evo_grpo.errors import ConfigError, EvoGrpoError

REWARD = """
from pathlib import Path

Path({ran!r}).write_text("imported")

def reward(completion, **row):
    Path({ran!r}).write_text("called")
    return sum(map(ord, completion)) % 7 / 7
"""
CALLS = {
    "sample --row": lambda run, **allow: sample(run, rows=0, n=1, base=False, **allow),
    "evaluate": lambda run, **allow: evaluate_adapter(run, prompts=2, base=False, **allow),
    "resume": lambda run, **allow: resume(run, rounds=4, **allow),
    "replay": lambda run, **allow: replay(run, repeats=1, **allow),
}
"""Every command that calls the task of a run."""


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    return run(small(population__rounds=2), out=tmp_path_factory.mktemp("runs") / "plain")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder in which modules are found, and are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("planted", "sent", "flash_"))]:
        del sys.modules[name]


def sent(place, name="planted", **changes):
    """A finished run as it arrives, with the module of its reward beside its records."""
    (place / f"{name}.py").write_text(REWARD.format(ran=str(place / "ran")))
    settings = {
        "population__rounds": 2,
        "evolve__fitness": {"prompts": 2, "test_prompts": 2, "test_samples": 1},
    }
    config = small(env={"kind": "sums", "reward": f"{name}:reward"}, **{**settings, **changes})
    folder = run(config, out=place / "sent")
    shutil.move(place / f"{name}.py", folder / f"{name}.py")
    (place / "ran").unlink()
    sys.modules.pop(name)
    return Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_code_in_the_run_folder_is_not_imported_where_it_is_the_working_folder(
    place, monkeypatch, call
):
    folder = sent(place)
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"planted\.py: expected .* outside of any run folder"):
        CALLS[call](Path("."))
    assert not (place / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("plant", ["a link", "a path of packages", "a package"])
@pytest.mark.parametrize("call", ["sample --row", "evaluate"])
def test_nor_by_a_link_or_as_a_package_where_a_folder_above_is(place, call, plant):
    folder = sent(place)
    name = "planted"
    if plant == "a link":
        (place / "planted.py").symlink_to(folder / "planted.py")
    else:
        name = "sent.planted"
        text = (folder / "population.yaml").read_text().replace("planted:reward", f"{name}:reward")
        (folder / "population.yaml").write_text(text)
        vouch(folder)
    if plant == "a package":
        (folder / "__init__.py").write_text(f"open({str(place / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match="outside of any run folder"):
        CALLS[call](folder)
    assert not (place / "ran").exists()


def vouch(folder):
    """Write inputs.json anew, as a sender can who has edited population.yaml."""
    (folder / "inputs.json").unlink()
    from dataclasses import asdict

    from evo_grpo.record.files import seal
    from evo_grpo.record.folder import read_config
    from evo_grpo.training.recorded_inputs import inputs_of

    (folder / "inputs.json").write_text(seal(asdict(inputs_of(read_config(folder)))))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sample . --row 0", "evaluate .", "resume . --rounds 3"])
def test_the_command_refuses_it_in_a_process_of_its_own(place, command):
    folder = sent(place)
    environment = {**os.environ, "COLUMNS": "1000"}
    process = Forked(("-m", "evo_grpo", *command.split()), cwd=folder, env=environment)
    _, said = process.communicate(120)
    assert process.returncode == 2, said
    assert "planted.py: expected the module 'planted' outside of any run folder" in said
    assert "Traceback" not in said
    assert not (place / "ran").exists()


@pytest.mark.parametrize("places", ["", ":"])
def test_a_file_named_like_a_package_is_not_imported_from_the_current_folder(
    plain_run, tmp_path, places
):
    folder = shutil.copytree(plain_run, tmp_path / "sent")
    (folder / "yaml.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    package = Path(evo_grpo.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "evo_grpo", "leaderboard", "."],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{places}{package}"},
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_folder_with_the_code_of_a_run_is_no_place_to_record_it(place):
    (place / "planted_own.py").write_text("def reward(completion):\n    return 0.0\n")
    config = small(env={"kind": "sums", "reward": "planted_own:reward"})
    with pytest.raises(ConfigError, match=r"--out \.: expected a folder without code .*--out"):
        run(config, out=".", force=True)
    assert [path.name for path in place.iterdir()] == ["planted_own.py"]


def test_what_another_package_would_import_is_not_either(place, monkeypatch):
    """transformers and others try whether an optional package is there."""
    folder = sent(place)
    (folder / "flash_none.py").write_text(f"open({str(place / 'ran')!r}, 'w')")
    monkeypatch.chdir(folder)
    with pytest.raises(EvoGrpoError):
        sample(Path("."), rows=0)
    with pytest.raises(ImportError, match="outside of any run folder"):
        __import__("flash_none")
    assert not (place / "ran").exists()


@pytest.mark.parametrize("call", CALLS)
def test_a_task_that_was_edited_is_refused_by_name(plain_run, place, call):
    folder = shutil.copytree(plain_run, place / "one")
    edited(folder, env__args__high=90)
    with pytest.raises(ConfigError, match=r"env\.args\.high was 20 and is 90"):
        CALLS[call](folder)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_reward_that_has_changed_is_refused_by_name_and_allowed_by_it(place, call):
    folder = sent(place)
    module = place / "planted.py"
    module.write_text((folder / "planted.py").read_text() + "\n# another\n")
    with pytest.raises(
        ConfigError, match=r"the file of env\.reward: planted:reward has changed"
    ) as e:
        CALLS[call](folder)
    assert "--allow 'env.reward: planted:reward'" in str(e.value)
    assert not (place / "ran").exists()
    CALLS[call](folder, allow=["env.reward: planted:reward"])
    assert (place / "ran").read_text() == "called"


def test_a_prompt_calls_no_reward(place):
    folder = sent(place)
    shutil.copy(folder / "planted.py", place)
    assert sample(folder, "12+07=", n=1, base=False)[0].texts
    assert not (place / "ran").exists()


def test_programs_and_models_with_code_in_a_run_folder_are_refused(plain_run, place, monkeypatch):
    folder = shutil.copytree(plain_run, place / "one")
    text = (folder / "population.yaml").read_text()
    (folder / "python").write_text("#!/bin/sh\ntouch ran")
    monkeypatch.chdir(folder)
    for changes in (
        {"engine__rollout": "vllm", "engine__vllm": {"python": "./python"}},
        {"model__name": "./checkpoints", "model__trust_remote_code": True},
    ):
        (folder / "population.yaml").write_text(text)
        edited(folder, **changes)
        for call in (lambda: sample(folder, "1+1="), lambda: evaluate_adapter(folder)):
            with pytest.raises(ConfigError, match="expected code outside of any run folder, got"):
                call()


def test_an_installed_package_is_left_alone(place):
    """An environment may lie beside the files of a run, which was put there with --force."""
    (place / "population.yaml").write_text("")
    (place / "rounds.jsonl").write_text("")
    from evo_grpo.envs import loading as run_code

    run_code.refuse_code_of_a_run("yaml", yaml.__file__)
    with pytest.raises(ImportError):
        run_code.refuse_code_of_a_run("own", place / "own.py")
