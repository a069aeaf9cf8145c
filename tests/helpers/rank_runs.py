"""Runs of `evo-grpo` in one process and in several, and what their folders hold."""

import json
import os
import time
from pathlib import Path

from forked import Forked
from ranks import finish, start
from small_run import SETTINGS, outcome

from evo_grpo.record.history import metric_rows

#: Five agents on two shards, three and two, then two and two, then two and one: agents move, a
#: child's parent may live elsewhere, and a step has several micro-batches.
POPULATION = {
    "population": {"size": 5, "rounds": 4, "steps_per_round": 2, "sizes": [5, 4, 3]},
    "engine": {"device": "cpu", "threads": 1, "shards": 2, "max_rows_per_microbatch": 5},
    "algorithm": {**SETTINGS["algorithm"], "separate_reference": True, "beta": 0.02},
}

#: Agents whose groups teach nothing read on, so that ranks have unequal numbers of passes.
DYNAMIC = {**POPULATION["algorithm"], "dynamic_sampling_tokens": 64}


def resampled(folder):
    """Further prompts of each agent in the first step of a run."""
    rows = metric_rows(folder)
    return [row["resampled"] for row in rows if row["round"] == row["step"] == 0]


def written(folder, **changes):
    """Write a run file of JSON, which is YAML, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "population.yaml"
    path.write_text(json.dumps({**SETTINGS, **POPULATION, **changes}))
    return path


def evo(*arguments):
    return ("-m", "evo_grpo", *arguments)


def alone(*arguments, cwd=None):
    """Run the command in one process; it must succeed."""
    process = Forked(evo(*arguments), cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1"})
    ((_, said, code),) = finish([process], seconds=120)
    assert code == 0, said


def together(ranks, *arguments, **given):
    """Run the command in several processes; all must succeed."""
    for out, said, code in finish(start(ranks, *evo(*arguments), **given)):
        assert code == 0, out + said


def equal(first, second):
    """Equal to the bit: records, leaderboard, and every tensor of every checkpoint."""
    one, other = outcome(first), outcome(second)
    assert one == other
    for name in one["files"]:
        if name.endswith(".safetensors"):
            assert (first / name).read_bytes() == (second / name).read_bytes(), name


def sent(folder):
    """Whether some child took weights from an agent of the other shard."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        shard = {
            a["agent"]: n < (len(line["agents"]) + 1) // 2 for n, a in enumerate(line["agents"])
        }
        owner = {a["member"]: a["agent"] for a in line["agents"]}
        for child in line["members"]:
            parent = owner.get(child["parent"])
            if child["id"] not in owner and parent is not None:
                yield shard[parent] != shard[child["agent"]]


def slow_reward(folder, rank_that_fails=None):
    """Write a reward that takes its time, and fails on a rank where one is named."""
    fails = f"if os.environ.get('RANK') == '{rank_that_fails}': raise ValueError('no luck')"
    (folder / "my_reward.py").write_text(
        "import os, time\n\ndef score(completions, answer, **_):\n"
        f"    {fails if rank_that_fails is not None else 'time.sleep(0.15)'}\n"
        "    return [float(str(a) in c) for c, a in zip(completions, answer, strict=True)]\n"
    )
    return {"env": {"kind": "sums", "args": {"high": 20}, "reward": "my_reward:score"}}


def wait_for(file, lines, processes):
    """Wait until a file has so many lines."""
    until = time.monotonic() + 120
    while not (file.is_file() and file.read_text().count("\n") >= lines):
        assert time.monotonic() < until, "the run never came so far"
        assert all(process.poll() is None for process in processes), "the run ended too soon"
        time.sleep(0.02)


def children(process):
    """Return the processes that a process has started, the first rank first."""
    return [
        int(n) for n in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
