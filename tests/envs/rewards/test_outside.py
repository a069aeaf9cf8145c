"""Reward functions that hang, raise what nobody expects, or leave things changed."""

import asyncio
import contextlib
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
from reward_scores import SET_ASIDE, score

from evo_grpo.envs.loading import as_rewards
from evo_grpo.envs.rewards.scoring import LATEST_GROUPS, CompletionBatch, SetAside, score_batch
from evo_grpo.envs.rewards.watch import current_modes
from evo_grpo.errors import RewardAbortError, RewardError

COMPLETIONS = ["2", "x", "4"]
ROWS = [{"level": 1}, {"level": 2}, {"level": 3}]
PROMPTS = ["1+1=", "1+2=", "1+3="]
PLACES = [f"row {n}" for n in range(3)]
LIMIT = 0.3


def run(*functions, timeout=LIMIT):
    return score(as_rewards(list(functions)), COMPLETIONS, ROWS, PROMPTS, timeout=timeout)


def sleeps(completion, level):
    if level == 2:
        time.sleep(1000)  # longer than a test may take
    return 1.0


def spins(completion, level):
    while level == 2:
        pass
    return 1.0


def swallows(completion, level):
    try:
        return sleeps(completion, level)
    except BaseException:
        return 0.0


async def waits(completion, level):
    await asyncio.sleep(1000 if level == 2 else 0)
    return 1.0


async def blocks(completion, level):
    await asyncio.sleep(0)
    return sleeps(completion, level)


@pytest.mark.parametrize("function", [sleeps, spins, swallows, waits, blocks])
def test_a_call_that_takes_too_long_is_named_with_row_and_prompt(function, monkeypatch):
    monkeypatch.setattr("evo_grpo.envs.rewards.watch.ASYNC_ALLOWANCE", 0.2)
    with pytest.raises(RewardAbortError) as caught:
        run(function)
    text = str(caught.value)
    assert text.startswith(
        f"reward function '{function.__name__}', row 1, prompt '1+2=', completion 'x': "
    )
    assert "within 0.3 s" in text
    assert "env.reward_timeout" in text
    assert "env.isolate" in text


@pytest.mark.parametrize("function", [sleeps, waits])
def test_the_limit_holds_outside_of_the_main_thread_too(function):
    caught = []

    def elsewhere():
        try:
            run(function)
        except RewardAbortError as error:
            caught.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(20)
    assert "row 1, prompt '1+2='" in caught[0]


def test_many_short_calls_may_take_longer_than_the_limit_together():
    assert run(lambda completion: time.sleep(0.12) or 1.0).tolist() == [[1.0]] * 3


def test_a_function_may_set_an_alarm_and_use_objects_of_its_own_thread():
    connection = sqlite3.connect(":memory:")  # refuses other threads

    def reward(completion):
        before = signal.signal(signal.SIGALRM, signal.SIG_IGN)  # raises in other threads
        signal.alarm(100)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        return connection.execute("select 1").fetchone()[0]

    assert run(reward).tolist() == [[1.0]] * 3
    connection.close()


def test_a_call_that_cannot_be_interrupted_ends_the_process_with_its_name():
    code = """
        import ctypes
        from evo_grpo.envs.rewards import watch
        from evo_grpo.envs.loading import as_rewards
        from evo_grpo.envs.rewards.scoring import CompletionBatch
        from evo_grpo.envs.rewards.scoring import score_batch
        from evo_grpo.settings.env import RewardCalls
        watch.GRACE_SECONDS = 0.3
        def deaf(completion):
            mutex = ctypes.create_string_buffer(256)
            for _ in range(2):  # waits for itself, in C, where no signal reaches Python
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
        batch = CompletionBatch(["a"], [{}], ["p"], ["row 0"])
        score_batch(as_rewards(deaf), batch, RewardCalls(reward_timeout=0.3))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "error: reward function 'deaf', row 0, prompt 'p', completion 'a'" in done.stderr
    assert "Traceback" not in done.stderr


class Own(BaseException):
    pass


class Dumb(Exception):
    def __str__(self):
        raise Own


def own(completion):
    raise Own("mine")


def cancelled(completion):
    raise asyncio.CancelledError


async def async_cancelled(completion):
    await asyncio.sleep(0)
    raise asyncio.CancelledError


async def async_own(completion):
    raise Own("mine")


def dumb(completion):
    raise Dumb


def leaves(completion):
    sys.exit(3)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (own, "it raised Own: mine"),
        (async_own, "it raised Own: mine"),
        (cancelled, "it raised CancelledError"),
        (async_cancelled, "it raised CancelledError"),
        (dumb, "it raised Dumb, whose __str__ raised Own"),
        (leaves, "it raised SystemExit: 3"),
    ],
)
def test_whatever_a_function_raises_is_a_reward_error(function, what):
    with pytest.raises(RewardError) as caught:
        run(function)
    assert str(caught.value).startswith(f"reward function '{function.__name__}', row 0")
    assert what in str(caught.value)


def stopped(completion):
    raise KeyboardInterrupt


async def async_stopped(completion):
    raise KeyboardInterrupt


@pytest.mark.parametrize("function", [stopped, async_stopped])
@pytest.mark.parametrize("limit", [None, 5.0])
def test_ctrl_c_stays_ctrl_c_and_is_said_once(function, limit, caplog):
    with pytest.raises(KeyboardInterrupt):
        run(function, timeout=limit)
    gc.collect()
    assert caplog.records == []  # asyncio logs the traceback of a task that nobody asked


#: Code that changes a mode, and what the error says of it.
CHANGES = [
    ("os.chdir(place)", "working folder at {place} instead of"),
    ("torch.set_autocast_enabled('cpu', True)", "autocast on the CPU at True instead of False; "),
    ("torch.set_grad_enabled(False)", "torch's gradients at False instead of True"),
    ("torch.set_default_device('meta')", "default device at meta instead of cpu"),
    ("torch.set_default_dtype(torch.float64)", "dtype at torch.float64 instead of torch.float32"),
    ("torch.set_float32_matmul_precision('medium')", "precision at medium instead of highest"),
    (
        "setattr(torch.backends.mkldnn.matmul, 'fp32_precision', 'bf16')",
        "float32 matmul precision at a value that cannot be read (RuntimeError) instead of",
    ),
    ("torch.set_num_threads(torch.get_num_threads() + 1)", "number of threads at"),
]


@pytest.mark.parametrize(
    ("change", "said", "elsewhere"),
    [*((*one, False) for one in CHANGES), (*CHANGES[0], True), (*CHANGES[4], True)],
)
def test_a_mode_left_changed_is_named_and_put_back(change, said, elsewhere, tmp_path):
    torch = pytest.importorskip("torch")
    before = current_modes()
    caught = []

    def forgets(completion, level):
        if level == 2:
            eval(change, {"torch": torch, "os": os, "place": tmp_path})
        return 1.0

    def work():
        with pytest.raises(RewardAbortError) as error:
            run(forgets, timeout=30)  # torch imports much where it is set
        caught.append(str(error.value))
        assert current_modes() == before
        assert run(lambda completion: 1.0).tolist() == [[1.0]] * 3

    if elsewhere:  # where no signal reaches the calls, they are made by a thread of their own
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
    else:
        work()
    assert caught[0].startswith("reward function 'forgets', row 1, prompt '1+2=', completion 'x': ")
    assert said.format(place=tmp_path) in caught[0]
    assert current_modes() == before


def test_a_mode_changed_for_a_while_is_the_functions_own_affair(tmp_path):
    torch = pytest.importorskip("torch")

    def careful(completion):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        with contextlib.chdir(tmp_path), torch.autocast("cpu"), torch.device("meta"):
            assert torch.empty(1).device.type == "meta"
        torch.set_float32_matmul_precision(before)
        return 1.0

    assert run(careful).tolist() == [[1.0]] * 3


@pytest.mark.parametrize("value", [1e308, -1e308, 1.1e15, 10**400])
def test_a_reward_too_large_to_learn_from_is_named_and_the_largest_is_taken(value):
    with pytest.raises(RewardError, match=r"reward function '<lambda>', row 0, .* got "):
        run(lambda completion: value)
    assert run(lambda completion: -1e15).tolist() == [[-1e15]] * 3


def batch_of(count=3):
    return CompletionBatch(COMPLETIONS[:count], ROWS[:count], PROMPTS[:count], PLACES[:count])


@pytest.mark.parametrize("function", [own, async_own, lambda completion: "1"])
def test_errors_are_failures_where_that_is_asked_for(function):
    rewards = as_rewards([function, lambda completion: 1.0])
    scored = score_batch(rewards, batch_of(), SET_ASIDE)
    assert [list(failure.positions) for failure in scored.failures] == [[0], [1], [2]]
    assert scored.rewards[:, 1].tolist() == [1.0] * 3


def test_a_wrong_count_always_stops():
    with pytest.raises(RewardError, match="expected a list of 3 rewards"):
        score_batch(as_rewards(lambda completions: [1.0]), batch_of(), SET_ASIDE)


def test_one_group_of_many_may_be_set_aside_and_too_many_end_the_run():
    aside = SetAside(0.1)
    with pytest.warns(UserWarning, match="why; its group is set aside"):
        aside.record([True, False, False], "why")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        for _ in range(9):
            aside.record([True, False, False], "why")
    with pytest.raises(
        RewardError, match=r"why \(of 11 such groups\); .* now 0.1 of the latest 100"
    ):
        aside.record([True], "why")


def test_groups_that_were_set_aside_are_forgotten():
    aside = SetAside(0.1)
    with pytest.warns(UserWarning, match="set aside"):
        aside.record([True], "why")
    for _ in range(30):
        aside.record([True, *[False] * 19], "why")


@pytest.mark.parametrize("share", [0, 1])
def test_a_share_of_0_ends_at_the_first_and_one_of_1_when_all_are_set_aside(share):
    aside = SetAside(share)
    if share:
        with pytest.warns(UserWarning, match="set aside"):
            aside.record([True] * (LATEST_GROUPS - 1), "why")
    with pytest.raises(RewardError, match="why"):
        aside.record([True], "why")
