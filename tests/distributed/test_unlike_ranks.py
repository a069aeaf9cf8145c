"""Ranks that were given unlike things say so, all of them, before anything trains."""

import json
import os

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
