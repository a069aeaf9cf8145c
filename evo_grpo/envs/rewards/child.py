"""What runs in the process of the reward functions; see `process`."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import threading
import time
from typing import Any

from evo_grpo.envs.rewards.process import NUMBER, receive, send
from evo_grpo.envs.rewards.reward_values import CompletionBatch
from evo_grpo.envs.rewards.scoring import score_batch
from evo_grpo.errors import EvoGrpoError


def serve(descriptors: tuple[int, int, int], parent: int) -> None:
    """Score batches until the pipe is closed.

    Args:
        descriptors: The pipe to read from, the pipe to write to, and the file of the shared number.
        parent: The process that asks; when it ends, this one does.
    """
    requests, replies, number = descriptors
    own = os.getpid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    memory = mmap.mmap(number, NUMBER.size)

    def mark(call: int) -> None:
        NUMBER.pack_into(memory, 0, call)

    try:
        rewards, errors = pickle.loads(receive(requests))  # from the parent's own pipe alone
        limit = pickle.loads(receive(requests))  # the same
        while True:
            # From the parent's own pipe, which nobody else can write to: no file's data, no hub's.
            batch = CompletionBatch(*pickle.loads(receive(requests)))  # the same
            reply = _reply(rewards, batch, limit, errors == "set_aside", mark)
            if os.getpid() != own:
                os._exit(0)  # a copy that a reward function forked off
            send(replies, json.dumps(reply).encode())
    except EOFError:
        os._exit(0)  # threads that a reward function left must not hold up the end


def _reply(
    rewards: Any,  # noqa: ANN401 -- as it was sent
    batch: CompletionBatch,
    limit: float | None,
    keep_errors: bool,
    mark: Any,  # noqa: ANN401 -- a function of one number
) -> dict[str, Any]:
    try:
        scored = score_batch(rewards, batch, timeout=limit, keep_errors=keep_errors, mark=mark)
    except EvoGrpoError as error:
        return {"error": [type(error).__name__, str(error)]}
    failures = [[list(failure.positions), failure.text] for failure in scored.failures]
    return {"rewards": scored.rewards.tolist(), "failures": failures}


def _end_with(parent: int) -> None:
    """End this process, even in the middle of a call, when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)
