"""Ranks that were given unlike things say so, all of them, before anything trains."""

import json
import os
import shutil

import pytest
from rank_runs import POPULATION, evo, written
from ranks import finish, start
from small_run import SETTINGS

pytestmark = pytest.mark.distributed

REWARD = (
    "def score(completions, answer, **_):\n"
    "    return [float(str(a) in c) for c, a in zip(completions, answer, strict=True)]\n"
)
ROWS = "".join(
    json.dumps({"question": f"{a}+{b}=", "answer": a + b}) + "\n"
    for a in range(5)
    for b in range(5)
)
DATA = {
    "env": {
        "kind": "dataset",
        "train": "train.jsonl",
        "prompt": "{question}",
        "reward": "my_reward:score",
    }
}
SECONDS = 150


@pytest.fixture
def places(tmp_path):
    """Folders as on two machines without a common disk, in which all is the same."""
    found = [tmp_path / "here", tmp_path / "there"]
    for place in found:
        written(place, **DATA)
        (place / "my_reward.py").write_text(REWARD)
        (place / "train.jsonl").write_text(ROWS)
    return found


def refused(places, *command, says):
    """Run a command in both places; each rank has to say it, end with 2 and begin nothing."""
    env = {"PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
    for out, said, code in finish(start(2, *evo(*command), places=places, env=env), SECONDS):
        text = " ".join(said.split())
        assert code == 2, out + said
        assert says in text, said
        assert "Traceback" not in said
    return text


def run(places, says):
    text = refused(places, "run", "population.yaml", "--out", "run", says=says)
    assert not any((place / "run").exists() for place in places)
    return text


SETTINGS_OF_ONE = {
    "lr": ({"algorithm": {**POPULATION["algorithm"], "lr": 0.01}}, "algorithm.lr 0.01 where rank 0 "
           "has 0.001"),
    "size": ({"population": {**POPULATION["population"], "size": 6, "sizes": [6, 4, 3]}},
             "population.size 6 where rank 0 has 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS_OF_ONE)
def test_another_setting_is_named_by_every_rank(places, name):
    changes, says = SETTINGS_OF_ONE[name]
    written(places[1], **DATA, **changes)
    run(places, f"rank 1 has {says}")


def test_other_data_and_another_reward_are_named_by_every_rank(places):
    (places[1] / "my_reward.py").write_text(REWARD + "# another\n")
    text = run(places, "rank 1 has the file of env.reward: my_reward:score '")
    assert "env.train" not in text
    (places[1] / "train.jsonl").write_text(ROWS + ROWS)
    text = run(places, "rank 1 has the file of env.train '")
    assert "env.reward" in text
    (places[1] / "train.jsonl").unlink()
    run(places, "rank 1 has the file of env.train 'missing' where rank 0 has '")


def test_another_base_is_named_by_every_rank(places):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from evo_grpo.sources import resolve

    source = resolve("tiny-sums").path
    model, tokenizer = (kind.from_pretrained(source) for kind in
                        (AutoModelForCausalLM, AutoTokenizer))  # fmt: skip
    given = {**DATA, "model": {**SETTINGS["model"], "name": "./base"}}
    for place in places:
        model.save_pretrained(place / "base")
        tokenizer.save_pretrained(place / "base")
        written(place, **given)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    model.save_pretrained(places[1] / "base")
    run(places, "'./base' with another weights on rank 1 than on rank 0")


def test_a_command_and_a_number_of_rounds_of_its_own_are_named(places):
    env = {"PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
    first = start(1, *evo("run", "population.yaml", "--out", "run"), places=places[:1], env=env)
    assert finish(first)[0][2] == 0
    asked = [evo("resume", "run", "--rounds", rounds) for rounds in (5, 6)]
    apart = [evo("resume", "run"), evo("run", "population.yaml", "--out", "other")]
    for commands, says in (
        (asked, "rank 1 has rounds 6 where rank 0 has 5"),
        (apart, "rank 1 has the call 'run' where rank 0 has 'resume'"),
    ):
        processes = start(2, "-c", _one_of(commands), places=places, env=env)
        for out, said, code in finish(processes, SECONDS):
            assert code == 2, out + said
            assert says in " ".join(said.split())


def test_a_resume_with_other_data_is_refused_and_leaves_the_folder_as_it_was(places):
    env = {"PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
    first = start(1, *evo("run", "population.yaml", "--out", "run"), places=places[:1], env=env)
    assert finish(first)[0][2] == 0
    kept = (places[0] / "run" / "population.yaml").read_bytes()
    (places[1] / "train.jsonl").write_text(ROWS + ROWS)
    says = "rank 1 has the file of env.train '"
    refused(places, "resume", "run", "--rounds", 5, says=says)
    assert (places[0] / "run" / "population.yaml").read_bytes() == kept
    assert (places[0] / "run" / "summary.json").is_file()


def _one_of(commands):
    """Return a program that runs the command of its rank."""
    lists = [[str(part) for part in command[2:]] for command in commands]
    return (
        "import os, runpy, sys\n"
        f"sys.argv = ['evo-grpo', *{lists!r}[int(os.environ['RANK'])]]\n"
        "runpy.run_module('evo_grpo', run_name='__main__')\n"
    )


def test_a_rank_that_cannot_read_its_settings_tells_the_others_at_once(places):
    (places[1] / "population.yaml").write_text("populaton: {size: 5}\n")
    processes = start(2, *evo("run", "population.yaml", "--out", "run"), places=places)
    (_, first, one), (_, second, two) = finish(processes, SECONDS)
    assert (one, two) == (1, 2)
    assert "rank 1 of 2 failed" in first
    assert "populaton" in first
    assert "populaton" in second


def test_python_compares_too(places):
    written(places[1], **DATA, seed=4)
    program = "import evo_grpo; evo_grpo.run('population.yaml', out='run', progress=True)"
    env = {"PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
    for out, said, code in finish(start(2, "-c", program, places=places, env=env), SECONDS):
        assert code == 1, out + said
        assert "ConfigError: ranks: expected the same run" in said
        assert "rank 1 has seed 4 where rank 0 has 3" in said


def test_paths_of_data_may_differ_where_what_they_hold_is_the_same(places):
    shutil.move(places[1] / "train.jsonl", places[1] / "other.jsonl")
    env = {**DATA["env"], "train": "other.jsonl"}
    small = {"population": {**POPULATION["population"], "rounds": 1}}
    written(places[0], **DATA, **small)
    written(places[1], env=env, **small)
    shared = {"PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
    command = evo("run", "population.yaml", "--out", "run")
    for out, said, code in finish(start(2, *command, places=places, env=shared)):
        assert code == 0, out + said
