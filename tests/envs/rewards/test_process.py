"""Reward functions in a process of their own: it hangs, exits, crashes and forks without harm."""

import os

import numpy as np
import pytest

from evo_grpo.envs.loading import as_rewards, load_function
from evo_grpo.envs.rewards.process import RewardProcess
from evo_grpo.envs.rewards.scoring import CompletionBatch, score_batch
from evo_grpo.errors import ConfigError, RewardAbortError, RewardError
from evo_grpo.settings.env import RewardCalls

MODULE = """
import asyncio, ctypes, os, sys, threading, time

def exact(completion, answer):
    return float(completion == answer)

def half(completions, level):
    return [value / 2 if value != 2 else float("nan") for value in level]

async def later(completion):
    await asyncio.sleep(0.01)
    return 1.0

def pid(completion):
    return os.getpid()

def leaves(completion, level):
    if level == 2:
        os._exit(0)
    return 1.0

def crashes(completion, level):
    if level == 2:
        os.abort()
    return 1.0

def exits(completion):
    sys.exit(3)

def raises(completion):
    raise ValueError("m" * 1_000_000)

def forks(completion):
    os.fork()
    return 1.0

def sleeps(completion, level):
    time.sleep(1000 if level == 2 else 0)
    return 1.0

def deaf(completion, level):
    if level == 2:
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock: no thread runs, no signal
    return 1.0
"""
BATCH = CompletionBatch(
    ["2", "x", "4"],
    [{"answer": "2", "level": 1}, {"answer": "3", "level": 2}, {"answer": "4", "level": 3}],
    ["1+1=", "1+2=", "1+3="],
    ["row 10", "row 11", "row 12"],
)


@pytest.fixture
def process(write_module):
    made = []

    def make(*names, **settings):
        write_module("outside_rewards", MODULE)
        rewards = as_rewards([load_function(f"outside_rewards:{name}") for name in names])
        made.append(RewardProcess(rewards, RewardCalls(**settings)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_rewards_are_those_of_this_process(process):
    isolated = process("exact", "half", "later")
    scored = isolated.score(BATCH)
    here = score_batch(isolated._rewards, BATCH, RewardCalls())
    assert np.array_equal(scored.rewards, here.rewards, equal_nan=True)
    assert [(list(f.positions), f.text) for f in scored.failures] == [
        (list(f.positions), f.text) for f in here.failures
    ]


def test_one_process_serves_all_batches(process):
    isolated = process("pid")
    first, second = isolated.score(BATCH), isolated.score(BATCH)
    assert first.rewards[0, 0] == second.rewards[2, 0] != os.getpid()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("leaves", "ended its process with code 0"),
        ("crashes", "ended its process by signal 6"),
    ],
)
def test_an_exit_is_named(process, name, how):
    isolated = process(name)
    with pytest.raises(RewardAbortError) as caught:
        isolated.score(BATCH)
    assert str(caught.value).startswith(
        f"reward function '{name}', row 11, prompt '1+2=', completion 'x': it {how}"
    )


@pytest.mark.parametrize("name", ["sleeps", "deaf"])
def test_a_call_that_hangs_is_stopped(process, name, monkeypatch):
    monkeypatch.setattr("evo_grpo.envs.rewards.process.GRACE_SECONDS", 0.5)
    isolated = process(name, reward_timeout=0.3)
    with pytest.raises(RewardAbortError, match=f"'{name}', row 11, .*within 0.3 s"):
        isolated.score(BATCH)
    easy = CompletionBatch(["2"], [{"level": 1}], ["1+1="], ["row 0"])
    assert isolated.score(easy).rewards.tolist() == [[1.0]]  # the next batch has a process
    isolated.close()
    assert isolated.close() == 0  # nothing runs any more


@pytest.mark.slow
def test_errors_come_as_they_are_here(process):
    with pytest.raises(RewardError, match=r"'exits', row 10, .* it raised SystemExit: 3"):
        process("exits").score(BATCH)
    with pytest.raises(RewardError, match="1,000,012 characters") as caught:
        process("raises").score(BATCH)
    assert len(str(caught.value)) < 500
    failures = process("raises", reward_errors="set_aside").score(BATCH).failures
    assert [list(failure.positions) for failure in failures] == [[0], [1], [2]]


def test_a_fork_does_no_harm(process):
    isolated = process("forks")
    for _ in range(2):
        assert isolated.score(BATCH).rewards.tolist() == [[1.0]] * 3


def test_functions_that_cannot_be_imported_are_refused():
    with pytest.raises(
        ConfigError, match=r"'<lambda>': env.isolate: process needs a function that"
    ):
        RewardProcess(as_rewards(lambda completion: 1.0), RewardCalls(isolate="process"))
