"""A plan as text."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from evo_grpo.cli.plan.plan import make_plan
from evo_grpo.cli.plan.render import render_plan
from evo_grpo.errors import EngineUnavailable
from evo_grpo.settings import from_dict
from evo_grpo.training.sizing.machine import format_bytes

SUMS = {"model": "tiny-sums", "env": "sums"}
GAME = """
class Echo:
    def reset(self, *, seed=None):
        return "say a", {}

    def step(self, action):
        return "say a", float(action == "a"), False, False, {}
"""


def rendered(*overrides: str, settings: dict = SUMS, width: int = 300) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(render_plan(make_plan(from_dict(settings, overrides)), "echo.yaml"))
    return console.file.getvalue()


def test_episodes_have_turns_and_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rendered_game.py").write_text(GAME)
    monkeypatch.chdir(tmp_path)
    env = {"kind": "python:rendered_game:Echo", "max_turns": 3}
    text = rendered("algorithm.max_output_tokens=5", settings={"model": "tiny-sums", "env": env})
    assert "python:rendered_game:Echo: episodes of at most 3 turns" in text
    assert "of at most 5 tokens in each of 3 turns" in text


def test_the_first_prompt_and_the_calls_of_rewards_are_shown(tmp_path, monkeypatch):
    (tmp_path / "called.py").write_text(
        "def one(completion, answer):\n    ...\n\ndef all(completions, **kwargs):\n    ...\n"
    )
    rows = "".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    reward = ["called:one", "called:all"]
    env = {"kind": "dataset", "train": "rows.jsonl", "prompt": "{question}\n=", "reward": reward}
    lines = rendered(settings={"model": "tiny-foods", "env": env}).splitlines()
    (asked,) = (n for n, line in enumerate(lines) if line.startswith("the first prompt as the mod"))
    number = lines[asked + 1].strip("> ?")
    assert lines[asked].endswith(f"it, {len(number) + 3} tokens:")  # one a character
    assert lines[asked + 1 : asked + 3] == [f"> {number}?", "> ="]
    text = "\n".join(lines)
    assert f"rewards     one(answer='{number}', completion='...')" in text
    assert f"all(question=['{number}?'], answer=['{number}'], completions=['...']" in text


# Overrides, and a part of the text for them.
SHOWN = """
evolve.selection=none
    selection none
evolve.selection=tournament
    selection tournament (size 4, elitism true)
evolve.selection=truncation
    selection truncation (share 0.25)
seed=0
    places      8 agents in rounds 1-2, 4 in round 3, 2 in rounds 4-6
population.rounds=20
    places      8 agents in rounds 1-5, 4 in rounds 6-10, 2 in rounds 11-20
population.sizes=[8, 4, 1] && evolve.archive=true
    places      8 agents in round 1, 4 in round 2, 1 in rounds 3-6
population.sizes=constant
    places      8 agents in every round
seed=0
    decides     after rounds 2 (8 agents), 3 (4), 4 (2) and 6 (2)
population.decisions=every
    decides     after each round
population.rounds=3
    decides     after each round
population.decisions=[6]
    decides     after round 6 (8 agents)
population.decisions=[4]
    decides     after rounds 4 (8 agents) and 6 (8)
population.rounds=40 && population.decisions=[2, 4]
    (8 agents), 4 (4), 6 (4), 8 (4), 10 (4), 12 (4), 14 (4), 12 more and 40 (4)
population.rounds=40 && evolve.exploration={kind: schedule, rounds: [{round: 9, lr: 1.0e-3}]}
    decides     after each round
evolve.selection=none && evolve.exploration={kind: schedule, rounds: [{round: 2, lr: 2.0e-3}]}
    from round 2 on lr 2e-3
evolve.archive=true
    for every agent at a decision, and for the archive and the best agent, to compare
seed=0
    ; none in other rounds, whose fitness is the mean reward of training
evolve.fitness.between=5
    ; 5 prompts x 1 in other rounds
evolve.fitness.between=1
    ; 1 prompt x 1 in other rounds
population.decisions=every
    64 prompts x 1 for every agent that played
env.args={validation_size: 10}
    up to 2 finalists on 10 validation prompts x 2
seed=0
    32 per agent, 4 prompts x 8 completions; 128 per agent once 2 agents are left
population.sizes=[8, 5, 3]
    about 85 per agent once 3 agents are left
evolve.hyperparameters={group_size: {min: 4, max: 16}}
    groups have 4 to 16
evolve.fitness.racing=0.5
    by racing up to 50% more
"""
LINES = SHOWN.strip().split("\n")


@pytest.mark.parametrize(
    ("overrides", "text"), [*zip(LINES[::2], map(str.strip, LINES[1::2]), strict=True)]
)
def test_what_a_setting_changes_in_the_plan_is_shown(overrides: str, text: str):
    assert text in rendered(*overrides.split(" && "))


def test_a_warm_up_is_said_to_be_drawn_at_the_start_alone():
    ranges = "evolve.hyperparameters={lr_schedule.warmup_proportion: {min: 0.01, max: 0.2}}"
    text = rendered("algorithm.lr_schedule.steps=8", ranges)
    assert "lr_schedule.warmup_proportion in [0.01, 0.2] at the start alone" in text


def test_sizes_are_short():
    sizes = [0, 999, 1_000, 933_888, 1_812_864, 3_200_000_000_000]
    shown = ["0 bytes", "999 bytes", "1.0 kB", "934 kB", "1.8 MB", "3.2 TB"]
    assert [*map(format_bytes, sizes)] == shown


def test_evaluations_have_their_share_of_the_run():
    plan = make_plan(from_dict(SUMS))
    tokens = sum(plan.evaluation_tokens)
    share = f"{tokens / plan.total_tokens:.0%}"
    assert f"at most {tokens:,} tokens, {share} of the run: " in rendered()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_folds_the_text_and_keeps_the_titles(width: int):
    lines = rendered(width=width).splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    titles = {line[:10].strip() for line in lines}
    assert {"population", "places", "mutates", "task", "a step", "a round", "memory"} <= titles


def test_metrics_and_readers_are_named(monkeypatch: pytest.MonkeyPatch):
    text = rendered()
    assert "metrics/" in text
    assert "readers" not in text
    assert "metrics/" not in rendered("record.metrics=false")
    monkeypatch.setattr("evo_grpo.settings.trackers.find_spec", lambda name: name)
    text = rendered("record.trackers=[wandb, mlflow]")
    assert " ".join(text.split()).count("readers wandb, mlflow") == 1
    monkeypatch.setattr("evo_grpo.settings.trackers.find_spec", lambda name: None)
    with pytest.raises(EngineUnavailable, match=r'pip install "evo-grpo\[wandb\]"'):
        rendered("record.trackers=[wandb, mlflow]")
