"""Rewards in TRL's style against TRL itself: its own functions, and its trainer's call of them."""

import importlib.util
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.types import Completion, CompletionGroup

if importlib.util.find_spec("trl") is None:
    if os.environ.get("EVO_GRPO_OUTSIDE"):
        raise ImportError("expected trl, which make test-outside installs")
    pytest.skip("trl is not installed here: make test-outside", allow_module_level=True)

ROWS = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(12)]
TEXTS = ("<think>\nadd\n</think>\n3", "3", "<think>a</think>" * 2)


def own(prompts, completions, completion_ids, answer, log_metric=None, **kwargs):
    """A reward of a person, which reads all that TRL passes."""
    log_metric("mean", len(completions))
    return [
        len(p) + len(ids) + float(c[0]["content"].endswith(a))
        for p, c, ids, a in zip(prompts, completions, completion_ids, answer, strict=True)
    ]


def test_numbers_are_those_of_trls_own_trainer(chat_tokenizer, monkeypatch):
    from trl.rewards import get_soft_overlong_punishment, think_format_reward
    from trl.trainer import grpo_trainer

    functions = [think_format_reward, get_soft_overlong_punishment(6, 4), own]
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "{question}"}]
    env = ReasoningGym(ROWS[:8], ROWS[8:], chat_tokenizer, functions, chat, reward_style="trl")
    groups = [
        CompletionGroup(
            0,
            prompt,
            tuple(Completion((7,) * (2 * n + 1), text, None, True) for n, text in enumerate(TEXTS)),
        )
        for prompt in env.batch(0, 2)
    ]
    monkeypatch.setattr(grpo_trainer, "profiling_context", lambda *_: nullcontext())
    monkeypatch.setattr(grpo_trainer, "gather", lambda values: values)
    names = ["think_format_reward", "soft_overlong_punishment_reward", "own"]
    logged = []
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        reward_funcs=functions,
        reward_processing_classes=[None] * 3,
        reward_func_names=names,
        state=None,
        environments=None,
        _log_completion_extra=None,
        _log_metric=lambda name, value: logged.append((name, value)),
    )
    flat = [(group.prompt, one) for group in groups for one in group.completions]
    messages = [
        [chat[0], {"role": "user", "content": prompt.columns["question"]}] for prompt, _ in flat
    ]
    theirs = grpo_trainer.GRPOTrainer._calculate_rewards.__wrapped__(  # without its profiler
        trainer,
        [
            {**prompt.columns, "prompt": one}
            for (prompt, _), one in zip(flat, messages, strict=True)
        ],
        messages,
        [[{"role": "assistant", "content": one.text}] for _, one in flat],
        [list(one.token_ids) for _, one in flat],
    )
    assert env.score(groups).tolist() == theirs.tolist()
    assert env.judge(groups).logged == dict(logged)
    assert env.reward_names == tuple(names)
