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

GAME = """
class Echo:
    def reset(self, *, seed=None):
        return "say a", {}

    def step(self, action):
        return "say a", float(action == "a"), False, False, {}
"""


def rendered(settings: dict, overrides: list[str], width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(render_plan(make_plan(from_dict(settings, overrides)), "echo.yaml"))
    return console.file.getvalue()


def test_episodes_have_turns_and_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rendered_game.py").write_text(GAME)
    monkeypatch.chdir(tmp_path)
    env = {"kind": "python:rendered_game:Echo", "max_turns": 3}
    text = rendered({"model": "tiny-sums", "env": env}, ["algorithm.max_output_tokens=5"])
    assert "python:rendered_game:Echo: episodes of at most 3 turns" in text
    assert "of at most 5 tokens in each of 3 turns" in text


def test_evaluations_name_the_prompts_that_there_are():
    text = rendered({"model": "tiny-sums", "env": "sums"}, ["env.args={validation_size: 10}"])
    assert "10 prompts x 1 for every agent" in text
    assert "up to 2 finalists on 10 validation prompts x 2" in text


def test_the_first_prompt_and_the_calls_of_rewards_are_shown(tmp_path, monkeypatch):
    (tmp_path / "called.py").write_text(
        "def one(completion, answer):\n    ...\n\ndef all(completions, **kwargs):\n    ...\n"
    )
    rows = "".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    env = {
        "kind": "dataset",
        "train": "rows.jsonl",
        "prompt": "{question}\n=",
        "reward": ["called:one", "called:all"],
    }
    lines = rendered({"model": "tiny-foods", "env": env}, []).splitlines()
    (asked,) = (n for n, line in enumerate(lines) if line.startswith("the first prompt as the mod"))
    number = lines[asked + 1].strip("> ?")
    assert lines[asked].endswith(f"it, {len(number) + 3} tokens:")  # one a character
    assert lines[asked + 1 : asked + 3] == [f"> {number}?", "> ="]
    text = "\n".join(lines)
    assert f"rewards     one(answer='{number}', completion='...')" in text
    assert f"all(question=['{number}?'], answer=['{number}'], completions=['...']" in text


@pytest.mark.parametrize(
    ("selection", "text"),
    [
        ("none", "selection none"),
        ("tournament", "selection tournament (size 4, elitism true)"),
        ("truncation", "selection truncation (share 0.25)"),
    ],
)
def test_every_selection_is_shown_with_its_settings(selection: str, text: str):
    evolve = {"selection": {"kind": selection}}
    assert text in rendered({"model": "tiny-sums", "env": "sums", "evolve": evolve}, [])


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "8 agents in rounds 1-2, 4 in round 3, 2 in rounds 4-6"),
        (["population.rounds=20"], "8 agents in rounds 1-5, 4 in rounds 6-10, 2 in rounds 11-20"),
        (
            ["population.sizes=[8, 4, 1]", "evolve.archive=true"],
            "8 agents in round 1, 4 in round 2, 1 in rounds 3-6",
        ),
        (["population.sizes=constant"], "8 agents in every round"),
    ],
)
def test_places_are_shown_round_by_round(overrides: list[str], text: str):
    lines = rendered({"model": "tiny-sums", "env": "sums"}, overrides).splitlines()
    (places,) = [line for line in lines if line.startswith("places ")]
    assert places.split(maxsplit=1)[1].strip() == text


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "after rounds 2 (8 agents), 3 (4), 4 (2) and 6 (2)"),
        (["population.decisions=every"], "after each round"),
        (["population.rounds=3"], "after each round"),
        (["population.decisions=[6]"], "after round 6 (8 agents)"),
        # The end of a run is evaluated, whether or not it is a decision.
        (["population.decisions=[4]"], "after rounds 4 (8 agents) and 6 (8)"),
        (
            ["population.rounds=40", "population.decisions=[2, 4]"],
            "after rounds 2 (8 agents), 4 (4), 6 (4), 8 (4), 10 (4), 12 (4), 14 (4), 12 more and "
            "40 (4)",
        ),
        (
            [
                "population.rounds=40",
                "evolve.exploration={kind: schedule, rounds: [{round: 9, lr: 1.0e-3}]}",
            ],
            "after each round",
        ),
    ],
)
def test_the_rounds_after_which_a_run_decides_are_shown(overrides: list[str], text: str):
    lines = rendered({"model": "tiny-sums", "env": "sums"}, overrides).splitlines()
    (decides,) = [line for line in lines if line.startswith("decides ")]
    assert decides.split(maxsplit=1)[1].strip() == text


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "for every agent at a decision; none in other rounds"),
        (
            ["evolve.archive=true"],
            "for every agent at a decision, and for the archive and the best agent, to compare",
        ),
        ([], "; none in other rounds, whose fitness is the mean reward of training"),
        (["evolve.fitness.between=5"], "; 5 prompts x 1 in other rounds"),
        (["evolve.fitness.between=1"], "; 1 prompt x 1 in other rounds"),
        (["population.decisions=every"], "64 prompts x 1 for every agent that played"),
    ],
)
def test_what_is_evaluated_is_shown(overrides: list[str], text: str):
    lines = rendered({"model": "tiny-sums", "env": "sums"}, overrides, 300).splitlines()
    (evaluation,) = [line for line in lines if line.startswith("evaluation ")]
    assert text in evaluation
    plan = make_plan(from_dict({"model": "tiny-sums", "env": "sums"}, overrides))
    tokens = sum(plan.evaluation_tokens)
    share = f"{tokens / plan.total_tokens:.0%}"
    assert f"at most {tokens:,} tokens, {share} of the run: " in evaluation


def test_rows_are_those_of_all_agents_and_their_share():
    text = rendered({"model": "tiny-sums", "env": "sums"}, [])
    assert "256 rows in all" in text
    assert "32 per agent, 4 prompts x 8 completions; 128 per agent once 2 agents are left" in text
    text = rendered(
        {"model": "tiny-sums", "env": "sums"},
        [
            "population.sizes=[8, 5, 3]",
            "evolve.hyperparameters={group_size: {min: 4, max: 16}}",
            "evolve.fitness.racing=0.5",
        ],
    )
    assert "about 85 per agent once 3 agents are left" in text
    assert "groups have 4 to 16" in text
    assert "by racing up to 50% more" in text


def test_a_warm_up_is_said_to_be_drawn_at_the_start_alone():
    ranges = "evolve.hyperparameters.lr_schedule.warmup_proportion={min: 0.01, max: 0.2}"
    text = rendered(
        {"model": "tiny-sums", "env": "sums", "algorithm": {"lr_schedule": {"steps": 8}}}, [ranges]
    )
    assert "lr_schedule.warmup_proportion in [0.01, 0.2] at the start alone" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_folds_the_text_and_keeps_the_titles(width: int):
    lines = rendered({"model": "tiny-sums", "env": "sums"}, [], width).splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    titles = {line[:10].strip() for line in lines}
    assert {"population", "places", "mutates", "task", "a step", "a round", "memory"} <= titles


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1_000, "1.0 kB"),
        (933_888, "934 kB"),
        (1_812_864, "1.8 MB"),
        (538_060_032, "538 MB"),
        (3_200_000_000_000, "3.2 TB"),
    ],
)
def test_sizes_are_short(count: int, text: str):
    assert format_bytes(count) == text


def test_metrics_and_readers_are_named(monkeypatch: pytest.MonkeyPatch):
    settings = {"model": "tiny-sums", "env": "sums"}
    text = rendered(settings, [])
    assert "metrics/" in text
    assert "readers" not in text
    assert "metrics/" not in rendered(settings, ["record.metrics=false"])
    monkeypatch.setattr("evo_grpo.settings.trackers.find_spec", lambda name: name)
    text = rendered(settings, ["record.trackers=[wandb, mlflow]"])
    assert " ".join(text.split()).count("readers wandb, mlflow") == 1
    monkeypatch.setattr("evo_grpo.settings.trackers.find_spec", lambda name: None)
    with pytest.raises(EngineUnavailable, match=r'pip install "evo-grpo\[wandb\]"'):
        rendered(settings, ["record.trackers=[wandb, mlflow]"])


def test_a_schedule_is_shown_entry_by_entry():
    entries = "[{round: 2, lr: 2.0e-3}, {round: 4, lr: 5.0e-4}]"
    given = ["evolve.selection=none", f"evolve.exploration={{kind: schedule, rounds: {entries}}}"]
    text = rendered({"model": "tiny-sums", "env": "sums"}, given)
    assert "from round 2 on lr 2e-3; from round 4 on lr 5e-4" in text
