"""Runs on a CUDA device, in float32: the same decisions and scores as on the CPU.

Rounding differs between devices, and a token changes only where a draw falls within that rounding
of a boundary: in these runs of a few hundred tokens none does.
"""

import json
import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from subprocess import run as call

import pytest
import tiny
import torch
from engine_contract import prompts_of
from fused_cases import inputs
from small_run import Told, outcome, small, stopped_and_resumed
from steered_runs import OPERATIONS, Steers
from tiny_cohort import PLAIN, build_cohort, build_model, learn, make_rows, weights

from evo_grpo import GRPO, MultiTurnGym, run
from evo_grpo.model.forward.fused import RowLayout, population_forward
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.engine import NativeEngine
from evo_grpo.rollout.native.loop import DecodeLoop
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings

#: EVO_GRPO_TEST_DEVICE=cpu tries the tests themselves on a machine without a GPU.
DEVICE = os.environ.get("EVO_GRPO_TEST_DEVICE", "cuda")
BOTH = ("cpu", DEVICE)
ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(),
        reason="needs a CUDA device, torch finds none",
    ),
]


def alike(first, second, rel=2e-3):
    """Whether two structures are equal, numbers up to rounding; NaN is like NaN."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            alike(first[key], second[key], rel)
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for one, two in zip(first, second, strict=True):
            alike(one, two, rel)
    elif isinstance(first, float):
        same = math.isnan(first) and math.isnan(second)
        assert same or first == pytest.approx(second, rel=rel, abs=2e-5)
    else:
        assert first == second


def placed(device, **changes):
    return small(engine__device=device, engine__dtype="float32", **changes)


def shown(folder):
    """Leaderboard and completions of a run."""
    found = outcome(folder)
    return found["leaderboard"], found["completions"]


def completions(found):
    """The texts of completions, without their log-probs."""
    return {
        file: [json.loads(line).get("completion") for line in text.splitlines()]
        for file, text in found.items()
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm__loss_type": "dapo", "algorithm__adv_norm": "batch_std"},
        {"engine__gradient_checkpointing": True},
        {"engine__max_decode_rows": 8, "engine__max_tokens_per_microbatch": 64},
        {"evolve__archive": True, "evolve__fitness__final_samples": 2},
        {"engine__cuda_graphs": False},
        {"algorithm__update_epochs": 3, "algorithm__kl_shaping": True, "algorithm__beta": 0.05},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_a_run_gives_the_leaderboard_of_the_cpu(changes, tmp_path):
    folders = [
        run(placed(device, **changes), out=tmp_path / f"{i}") for i, device in enumerate(BOTH)
    ]
    (board, texts), (board_there, texts_there) = map(shown, folders)
    assert completions(texts) == completions(texts_there)
    alike(board, board_there)


def test_a_stopped_run_resumed_equals_a_whole_one(tmp_path):
    whole = run(placed(DEVICE), out=tmp_path / "whole")
    parts = stopped_and_resumed(placed(DEVICE), tmp_path / "parts", ("evaluate", 1))
    assert shown(whole) == shown(parts)


def test_a_run_is_steered(tmp_path):
    observer = Steers({("evaluate", 0): list(OPERATIONS.values())})
    folder = run(placed(DEVICE), out=tmp_path / "steered", observer=observer)
    on_cpu = Steers({("evaluate", 0): list(OPERATIONS.values())})
    alike(shown(folder)[0], shown(run(placed("cpu"), out=tmp_path / "c", observer=on_cpu))[0])


def test_the_command_line_runs_evaluates_and_exports(tmp_path):
    def command(*arguments):
        done = call(
            [sys.executable, "-W", "error::UserWarning", "-m", "evo_grpo", *arguments],
            capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    settings = [
        "population.rounds=2", "population.size=3", "population.steps_per_round=2",
        "evolve.fitness.prompts=8", "evolve.fitness.test_prompts=8", f"engine.device={DEVICE}",
    ]  # fmt: skip
    options = [part for value in settings for part in ("--set", value)]
    file = ROOT / "population.yaml"
    command("run", str(file), "--out", "there", *options)
    command("resume", "there")
    command("evaluate", "there", "--prompts", "8")
    command("sample", "there", "12+07=")
    command("export", "there", "winner", "--anyway")
    command("check", str(file), *options)


def test_a_population_in_python_trains_games_of_turns(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from game import MiddleDigit

    boards = []
    for device in BOTH:
        population = GRPO.population(
            size=3, model="tiny-sums", device=device, dtype="float32", group_size=4,
            max_output_tokens=4, hyperparameters={"lr": {"min": 3e-4, "max": 3e-3}}, seed=1,
        )  # fmt: skip
        env = MultiTurnGym(
            MiddleDigit, population.cohort.base.tokenizer, max_turns=2, batch_size=4,
            apply_chat_template=False,
        )  # fmt: skip
        population.train(env, rounds=2, steps_per_round=2, fitness={"prompts": 8})
        boards.append(population.leaderboard().drop(columns="wall_seconds").to_dict("records"))
    alike(*boards)


def test_get_action_and_learn_of_one_agent(tmp_path):
    agent = GRPO(
        model="tiny-sums", device=DEVICE, dtype="float32", group_size=4, max_output_tokens=4
    )
    ids, masks = agent.get_action([{"input_ids": torch.tensor([[3, 4, 5]], device=DEVICE)}])
    rewards = torch.stack([m.float().sum(1) for m in masks])
    metrics = agent.learn((ids, masks, rewards))
    assert metrics["failed"] == 0
    twin = agent.clone()
    assert twin.get_action([{"input_ids": torch.tensor([[3, 4, 5]])}])[0][0].device == ids[0].device
    agent.save_checkpoint(tmp_path / "one")
    GRPO.load(tmp_path / "one", device=DEVICE)


@pytest.mark.parametrize("build", [tiny.llama, tiny.qwen2, tiny.gpt2])
def test_unequal_ranks_share_a_forward(build):
    found = []
    for device in BOTH:
        slots = tiny.population(build().to(device), (4, 2))
        ids, share = (x.to(device) for x in inputs(4))
        with population_forward(slots.layers, RowLayout(("a0", "a1"), (1, 3))):
            hidden = slots.base.hidden(ids)
            logprobs, _ = slots.base.token_logprobs(
                hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten(),
                torch.ones(ids[:, 1:].numel(), device=device),
            )  # fmt: skip
            (logprobs * share.flatten()).sum().backward()
        found.append([p.grad.cpu() for name in ("a0", "a1") for p in slots.parameters(name)])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-3)


SETTINGS = (
    {},
    {"temperature": 0.5, "top_k": 5},
    {"top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.3, "min_output_tokens": 4},
)


def sampled(device, specialized=True, **engine):
    """Completions and their log-probs of agents of unequal ranks, group sizes and settings."""
    slots = tiny.population(tiny.llama().to(device), (4, 2, 8, 1))
    slots.base.specialized = specialized
    asked = [
        RolloutRequest(
            i, name, prompts_of(3, 9, 1, 5, 12), 2 + i % 3,
            Sampling(max_output_tokens=28 + i, **SETTINGS[i]), i,
        )
        for i, name in enumerate(slots.names)
    ]  # fmt: skip
    found = NativeEngine(slots, AgentSettings(engine=engine)).rollout(asked)
    done = [c for mine in found for group in mine for c in group.completions]
    return [c.token_ids for c in done], [list(c.logprobs) for c in done]


@pytest.mark.parametrize(
    "engine",
    [{}, {"max_decode_rows": 24}, {"cuda_graphs": False}, None],
    ids=["graphs", "graphs in pieces", "plain", "modules"],
)
def test_completions_are_those_of_the_cpu(engine):
    expected = sampled("cpu")
    found = sampled(DEVICE, engine is not None, **(engine or {}))
    assert found[0] == expected[0]
    assert len({len(tokens) for tokens in found[0]}) > 5  # rows leave at many steps
    for one, two in zip(found[1], expected[1], strict=True):
        assert one == pytest.approx(two, abs=2e-4)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_learn_call_changes_the_weights_as_on_the_cpu(beta):
    found = []
    for device in BOTH:
        hparams = PLAIN.replace(beta=beta, update_epochs=2)
        cohort = build_cohort(2, hparams, model=build_model().to(device), warm=False)
        slots = list(cohort.agents)
        for slot in slots:
            for index, parameter in enumerate(cohort.slots.parameters(cohort.agents[slot].adapter)):
                parameter.data.add_(0.05 * tiny.noise(parameter.shape, index).to(device))
        learn(cohort, slots, [make_rows(7 + slot) for slot in slots])
        found.append([w.cpu() for slot in slots for w in weights(cohort, slot)])
    # AdamW's first steps have the size of lr whatever the gradient: those near 0 may differ.
    apart = sum(float((one - two).square().sum()) for one, two in zip(*found, strict=True)) ** 0.5
    assert apart < 1e-2 * PLAIN.lr * sum(one.numel() for one in found[0]) ** 0.5


def test_a_step_that_cannot_be_captured_runs_in_plain(monkeypatch):
    step = DecodeLoop._step

    def waits(self):
        step(self)
        self._finished.sum().item()

    expected = sampled("cpu")
    monkeypatch.setattr(DecodeLoop, "_step", waits)
    told = pytest.warns(UserWarning, match=r"engine\.cuda_graphs: .* cannot be captured")
    with nullcontext() if DEVICE == "cpu" else told:
        assert sampled(DEVICE)[0] == expected[0]


def test_bfloat16_trains_and_is_evaluated(tmp_path):
    observer = Told()
    folder = run(
        small(engine__device=DEVICE, engine__dtype="bfloat16"),
        out=tmp_path / "b",
        observer=observer,
    )
    assert all(0 <= row["fitness"] <= 1 for row in shown(folder)[0])
