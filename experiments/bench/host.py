"""What the host does between the launches of a round, on a CPU, at shapes that are run on GPUs.

    OMP_NUM_THREADS=1 python experiments/bench/host.py [--shapes 0.5B 3B] [--tokenizer NAME]

Rounds of eight agents, as `evo-grpo run` plays them, with a run folder. The base has the shape's
sizes and weights of zeros; what a device computes is left out: the decode loop draws random tokens,
forward passes give zeros, and gradients are not computed. All else is done: prompts, packing,
texts, rewards, metrics, copies of agents, digests, files. Seconds of the device are subtracted, and
those of the writer, whose thread works beside the next round, stand apart. Copies from a device and
launches are not part of it: tests/device/counts.json counts them.
"""

import json
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from common import Report, parser, quiet

THREADS = quiet()

import torch  # noqa: E402 -- after the threads are fixed, as what follows
from shapes import COMMON, EMBEDDED, LARGE  # noqa: E402
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from evo_grpo import settings as configuration  # noqa: E402
from evo_grpo.learn.learner import Learner  # noqa: E402
from evo_grpo.learn.updates import OwnOptimizers  # noqa: E402
from evo_grpo.model.base import SharedBase  # noqa: E402
from evo_grpo.population.round import next_slots, play_round  # noqa: E402
from evo_grpo.record.observer import Observer  # noqa: E402
from evo_grpo.record.run_dir import RunDir  # noqa: E402
from evo_grpo.rollout.native.engine import NativeEngine  # noqa: E402
from evo_grpo.rollout.native.loop import DecodeLoop  # noqa: E402
from evo_grpo.training.assemble import prepare  # noqa: E402
from evo_grpo.training.writer import FolderWriter  # noqa: E402

#: Functions whose seconds are told, with what the table calls them; those of the writer's thread.
PARTS = (
    ("evo_grpo.envs.dataset.DatasetEnvironment.judge", "rewards"),
    ("evo_grpo.rollout.native.engine.NativeEngine._groups", "completions, as texts"),
    ("evo_grpo.rollout.native.engine.NativeEngine._pad", "prompts, padded"),
    ("evo_grpo.learn.learner.pack", "micro-batches"),
    ("evo_grpo.learn.learner.collate", "tensors of micro-batches"),
    ("evo_grpo.population.steps.rows_from_trajectories", "rows to learn from"),
    ("evo_grpo.population.steps.report_steps", "metrics of steps"),
    ("evo_grpo.population.round.save", "checkpoints: copies"),
    ("evo_grpo.population.round.plan_and_record", "plan and record"),
    ("evo_grpo.population.round.carry_out", "copies of agents"),
)
WRITER = "evo_grpo.training.writer.FolderWriter._write_round"
DEVICE = "device"
