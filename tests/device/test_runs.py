"""Runs on another device, in float32: the same decisions and scores as on the CPU.

Rounding differs between devices, and a token changes only where a draw falls within that rounding
of a boundary: in these runs of a few hundred tokens none does.
"""

import json
import math
import sys
from pathlib import Path
from subprocess import run as call

import pytest
import rehearsal
import tiny
import torch
from architectures import FAMILIES
from engine_contract import prompts_of
from small_run import Told, outcome, small, stopped_and_resumed
from tiny_cohort import PLAIN, build_cohort, build_model, learn, make_rows, weights
from typer.testing import CliRunner

from evo_grpo import GRPO, MultiTurnGym, run
from evo_grpo.cli.commands import app
from evo_grpo.model.forward.choice import differs
from evo_grpo.model.llama.departures import can_join_layers
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.loop import DecodeLoop
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.device


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
        {"engine__overlap": True, "population__steps_per_round": 2},
        pytest.param({"engine__cuda_graphs": False}, marks=pytest.mark.cuda),
        {"algorithm__update_epochs": 3, "algorithm__kl_shaping": True, "algorithm__beta": 0.05},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_a_run_gives_the_leaderboard_of_the_cpu(changes, device, tmp_path):
    folders = [
        run(placed(where, **changes), out=tmp_path / f"{i}")
        for i, where in enumerate(("cpu", device))
    ]
    (board, texts), (board_there, texts_there) = map(shown, folders)
    assert completions(texts) == completions(texts_there)
    alike(board, board_there)


def test_a_stopped_run_resumed_equals_a_whole_one(device, tmp_path):
    whole = run(placed(device), out=tmp_path / "whole")
    parts = stopped_and_resumed(placed(device), tmp_path / "parts", ("evaluate", 1))
    assert shown(whole) == shown(parts)


def test_the_command_line_runs_evaluates_and_exports(device, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        if device == rehearsal.NAME:  # which is known to this process alone
            done = CliRunner().invoke(app, list(arguments))
            assert done.exit_code == 0, done.output
            return
        done = call(
            [sys.executable, "-W", "error::UserWarning", "-m", "evo_grpo", *arguments],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    settings = [
        "population.rounds=2", "population.size=3", "population.steps_per_round=2",
        "evolve.fitness.prompts=8", "evolve.fitness.test_prompts=8", f"engine.device={device}",
    ]  # fmt: skip
    options = [part for value in settings for part in ("--set", value)]
    file = ROOT / "population.yaml"
    command("run", str(file), "--out", "there", *options)
    command("resume", "there")
    command("evaluate", "there", "--prompts", "8")
    command("sample", "there", "12+07=")
    command("export", "there", "winner", "--anyway")
    command("check", str(file), *options)


def test_a_population_in_python_trains_games_of_turns(device, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from game import MiddleDigit

    boards = []
    for where in ("cpu", device):
        population = GRPO.population(
            size=3, model="tiny-sums", device=where, dtype="float32", group_size=4,
            max_output_tokens=4, hyperparameters={"lr": {"min": 3e-4, "max": 3e-3}}, seed=1,
        )  # fmt: skip
        env = MultiTurnGym(
            MiddleDigit, population.cohort.base.tokenizer, max_turns=2, batch_size=4,
            apply_chat_template=False,
        )  # fmt: skip
        population.train(env, rounds=2, steps_per_round=2, fitness={"prompts": 8})
        boards.append(population.leaderboard().drop(columns="wall_seconds").to_dict("records"))
    alike(*boards)


def test_get_action_and_learn_of_one_agent(device, tmp_path):
    agent = GRPO(
        model="tiny-sums", device=device, dtype="float32", group_size=4, max_output_tokens=4
    )
    ids, masks = agent.get_action([{"input_ids": torch.tensor([[3, 4, 5]], device=device)}])
    rewards = torch.stack([m.float().sum(1) for m in masks])
    metrics = agent.learn((ids, masks, rewards))
    assert metrics["failed"] == 0
    twin = agent.clone()
    assert twin.get_action([{"input_ids": torch.tensor([[3, 4, 5]])}])[0][0].device == ids[0].device
    agent.save_checkpoint(tmp_path / "one")
    GRPO.load(tmp_path / "one", device=device)


SETTINGS = (
    {},
    {"temperature": 0.5, "top_k": 5},
    {"top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.3, "min_output_tokens": 4},
)


def sampled(device, specialized=True, build=tiny.llama, **engine):
    """Completions and their log-probs of agents of unequal ranks, group sizes and settings."""
    slots = tiny.population(build().to(device), (4, 2, 8, 1))
    slots.base.specialized = specialized
    asked = [
        RolloutRequest(
            i, name, prompts_of(3, 9, 1, 5, 12), 2 + i % 3,
            Sampling(max_output_tokens=28 + i, **SETTINGS[i]), i,
        )
        for i, name in enumerate(slots.names)
    ]  # fmt: skip
    native = NativeEngine(slots, AgentSettings(engine=engine))
    assert native._specialized is specialized
    found = native.rollout(asked)
    done = [c for mine in found for group in mine for c in group.completions]
    return [c.token_ids for c in done], [list(c.logprobs) for c in done]


@pytest.mark.parametrize(
    ("build", "engine"),
    [
        (tiny.llama, {}),
        (tiny.llama, {"max_decode_rows": 24}),
        pytest.param(tiny.llama, {"cuda_graphs": False}, marks=pytest.mark.cuda),
        (tiny.llama, None),
        *((build, {}) for build in FAMILIES.values()),
    ],
    ids=["default", "pieces", "plain", "modules", *FAMILIES],
)
def test_completions_are_those_of_the_cpu(build, engine, device):
    expected = sampled("cpu", build=build)
    found = sampled(device, engine is not None, build, **(engine or {}))
    assert found[0] == expected[0]
    assert len({len(tokens) for tokens in found[0]}) > 1  # rows leave at many steps
    for one, two in zip(found[1], expected[1], strict=True):
        assert one == pytest.approx(two, abs=2e-4)


@pytest.mark.parametrize(
    "build",
    [build_model, tiny.gpt2, *FAMILIES.values()],
    ids=["joined layers", "modules", *FAMILIES],
)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_learn_call_changes_the_weights_as_on_the_cpu(beta, build, device):
    found = []
    for where in ("cpu", device):
        hparams = PLAIN.replace(beta=beta, update_epochs=2)
        cohort = build_cohort(2, hparams, model=build().to(where), warm=False)
        assert can_join_layers(cohort.base, cohort.slots.layers) is (build is not tiny.gpt2)
        slots = list(cohort.agents)
        for slot in slots:
            for index, parameter in enumerate(cohort.slots.parameters(cohort.agents[slot].adapter)):
                parameter.data.add_(0.05 * tiny.noise(parameter.shape, index).to(where))
        cohort.freeze_reference(slots[0])  # a reference adapter beside the base itself
        learn(cohort, slots, [make_rows(7 + slot) for slot in slots])
        found.append([w.cpu() for slot in slots for w in weights(cohort, slot)])
    # AdamW's first steps have the size of lr whatever the gradient: those near 0 may differ.
    apart = sum(float((one - two).square().sum()) for one, two in zip(*found, strict=True)) ** 0.5
    assert apart < 1e-2 * PLAIN.lr * sum(one.numel() for one in found[0]) ** 0.5


@pytest.mark.cuda
def test_a_step_that_cannot_be_captured_runs_in_plain(device, monkeypatch):
    step = DecodeLoop._step

    def waits(self):
        step(self)
        self.batch.finished.sum().item()

    expected = sampled("cpu")
    monkeypatch.setattr(DecodeLoop, "_step", waits)
    with pytest.warns(UserWarning, match=r"engine\.cuda_graphs: .* cannot be captured"):
        found = sampled(device)
    assert found[0] == expected[0]


def test_bfloat16_trains_and_is_evaluated(device, tmp_path):
    observer = Told()
    folder = run(
        small(engine__device=device, engine__dtype="bfloat16"),
        out=tmp_path / "b",
        observer=observer,
    )
    assert all(0 <= row["fitness"] <= 1 for row in shown(folder)[0])


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [(14, 2, 64), (16, 2, 128), (4, 1, 256)])
def test_learning_by_kernels_of_the_card_agrees_with_torch(device, heads):
    names = "num_attention_heads", "num_key_value_heads", "head_dim"
    sizes = dict(zip(names, heads, strict=True), max_position_embeddings=256)
    slots = tiny.population(tiny.llama(**sizes).to(device, torch.bfloat16), (4, 17))
    assert differs(slots, slots.names) is None
