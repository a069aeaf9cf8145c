"""A base that is divided among processes gives what a whole one gives, and ends as one does."""

import os
import re
import signal
from pathlib import Path

import pytest
from rank_runs import (
    DYNAMIC,
    POPULATION,
    alone,
    equal,
    evo,
    resampled,
    slow_reward,
    together,
    wait_for,
    written,
)
from ranks import finish, start
from safetensors.torch import load_file
from small_run import SETTINGS

pytestmark = pytest.mark.distributed

SHARDED = {**POPULATION["engine"], "base": "sharded"}
TWO_ROUNDS = {**POPULATION["population"], "rounds": 2}
#: With all that one rank does alone at the end, and agents that move.
EVERYTHING = {
    "evolve": {
        **SETTINGS["evolve"],
        "archive": True,
        "dead_steps": 4,
        "significance": 0.4,
        "fitness": {**SETTINGS["evolve"]["fitness"], "final_samples": 1, "racing": 1.0},
    }
}


def test_ranks_with_unequal_work_compute_what_a_whole_base_does():
    script = Path(__file__).parents[1] / "helpers" / "sharded_passes.py"
    for out, said, code in finish(start(2, script), seconds=150):
        assert code == 0, out + said
        shares = dict(re.findall(r"^(.+): ([\d.]+)$", out, re.MULTILINE))
        assert len(shares) == 6
        # Half of the layers; a tiny model has much in its embedding, which stays whole.
        assert all(0.5 < float(share) < 0.6 for share in shares.values()), shares


def test_a_run_over_a_divided_base_is_the_run_over_a_whole_one(tmp_path):
    file = written(tmp_path, engine=SHARDED, algorithm=DYNAMIC, **EVERYTHING)
    alone("run", file, "--out", tmp_path / "one")
    together(2, "run", file, "--out", tmp_path / "two")
    equal(tmp_path / "one", tmp_path / "two")
    assert len(set(resampled(tmp_path / "one"))) > 1


def test_a_run_over_a_divided_base_is_nearly_that_over_replicas(tmp_path):
    # The layers of the Llama family have a way of their own over a whole base: AdamW turns a
    # gradient of 1e-8, which rounding moves, into a step of lr.
    given = {"algorithm": {**POPULATION["algorithm"], "lr": 1e-4}}
    given["evolve"] = {**SETTINGS["evolve"], "hyperparameters": {}}
    for base in ("replicated", "sharded"):
        engine = {**SHARDED, "base": base}
        file = written(tmp_path / base, engine=engine, population=TWO_ROUNDS, **given)
        together(2, "run", file, "--out", tmp_path / f"run-{base}")
    first, second = tmp_path / "run-replicated", tmp_path / "run-sharded"
    names = sorted(p.relative_to(first) for p in first.rglob("adapter_model.safetensors"))
    assert len(names) == 2 * (5 + 4)  # actor and reference
    for name in names:
        one, other = load_file(first / name), load_file(second / name)
        assert max(float((one[key] - other[key]).abs().max()) for key in one) <= 1e-6, name


def test_a_killed_rank_ends_all_and_one_process_goes_on_to_the_same_end(tmp_path):
    file = written(tmp_path, engine=SHARDED, **slow_reward(tmp_path))
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    processes = start(2, *evo("run", file, "--out", tmp_path / "run"), env=env)
    wait_for(tmp_path / "run" / "rounds.jsonl", 1, processes)
    processes[1].send_signal(signal.SIGKILL)
    (_, said, code), (_, _, ended) = finish(processes, seconds=60)
    assert (code, ended) == (1, -signal.SIGKILL)
    assert "rank 1 of 2 has ended" in said
    assert f"evo-grpo resume {tmp_path / 'run'}" in said
    assert "Traceback" not in said
    done = finish(start(1, *evo("resume", tmp_path / "run"), env=env))[0]
    assert done[2] == 0, done[1]
    together(2, "run", file, "--out", tmp_path / "whole", env=env)
    equal(tmp_path / "whole", tmp_path / "run")


def test_an_error_in_the_middle_of_a_pass_ends_all_ranks(tmp_path):
    reward = slow_reward(tmp_path)
    (tmp_path / "my_reward.py").write_text(
        (tmp_path / "my_reward.py").read_text() + "\n"
        "from transformers.models.llama.modeling_llama import LlamaMLP\n\n"
        "forward = LlamaMLP.forward\n\n"
        # Not before the run has begun: until then no rank waits for another in a pass.
        "def breaks(self, x):\n"
        f"    begun = os.path.exists({str(tmp_path / 'run' / 'checkpoints')!r})\n"
        "    if os.environ['RANK'] == '1' and begun:\n"
        "        raise MemoryError('no room in the middle')\n"
        "    return forward(self, x)\n\n"
        "LlamaMLP.forward = breaks\n"
    )
    file = written(tmp_path, engine=SHARDED, **reward)
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    first, second = finish(start(2, *evo("run", file, "--out", tmp_path / "run"), env=env), 60)
    assert (first[2], second[2]) == (1, 1)
    assert "no room in the middle" in second[1]
    assert "rank 1 of 2 has ended" in first[1]
    assert "Traceback" not in first[1]
