"""Loads of several threads: one at a time, and beside nothing that computes."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from evo_grpo.envs.rewards.watch import current_modes
from evo_grpo.model.alone import excluding_loads, loading
from evo_grpo.model.base import SharedBase


def test_threads_load_one_at_a_time_and_leave_nothing_changed():
    with ThreadPoolExecutor(4) as threads:
        dtypes = ["float32", "bfloat16"] * 3
        bases = list(threads.map(lambda d: SharedBase.load("tiny-sums", dtype=d), dtypes))
    assert [str(base.model.dtype) for base in bases] == [f"torch.{one}" for one in dtypes]
    SharedBase.load("tiny-sums")  # what threads leave behind would break every later load


def test_what_computes_sees_no_dtype_of_a_load():
    over, seen = threading.Event(), set()

    def compute():
        while not over.is_set():
            with excluding_loads():
                seen.add(torch.zeros(1).dtype)
            seen.add(current_modes()[5])

    thread = threading.Thread(target=compute)
    thread.start()
    for _ in range(10):
        SharedBase.load("tiny-sums", dtype="bfloat16")
    over.set()
    thread.join()
    assert seen == {torch.float32}


def test_a_load_within_a_computation_or_a_load_of_its_thread_waits_for_nobody():
    order = []

    def load():
        with loading():
            order.append("other load")

    with excluding_loads(), loading(), loading(), excluding_loads():
        other = threading.Thread(target=load)
        other.start()
        time.sleep(0.05)
        order.append("own load")
    other.join()
    assert order == ["own load", "other load"]


def test_several_threads_compute_at_once_and_a_load_gets_its_turn():
    meet, loaded, over = threading.Barrier(3), threading.Event(), threading.Event()

    def compute():
        with excluding_loads():
            meet.wait(5)
        while not over.is_set():
            with excluding_loads():
                time.sleep(0.01)

    def load():
        meet.wait(5)
        with loading():
            loaded.set()

    threads = [threading.Thread(target=one) for one in (compute, compute, load)]
    for thread in threads:
        thread.start()
    came = loaded.wait(5)
    over.set()
    for thread in threads:
        thread.join(5)
    assert came
