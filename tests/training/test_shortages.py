"""A run and Python say which splits have fewer rows than the settings ask for, as check does."""

import io
import json

import pytest
from rich.console import Console
from small_run import small

from evo_grpo import GRPO, run
from evo_grpo.cli.plan.plan import make_plan
from evo_grpo.cli.plan.render import render_plan
from evo_grpo.settings import DoubtfulSetting, from_dict

FEW = {"high": 20, "validation_size": 5, "test_size": 4}


def said(caught):
    return [str(one.message) for one in caught if one.category is DoubtfulSetting]


def test_a_run_warns_as_check_does(tmp_path):
    config = small(env__args=FEW, population__rounds=1, engine__threads=1)
    with pytest.warns(DoubtfulSetting) as caught:
        run(config, out=tmp_path / "run")
    assert said(caught) == list(make_plan(config).warnings)
    few = [text for text in said(caught) if text.startswith("evolve.fitness")]
    assert few == [
        "evolve.fitness.prompts is 6, but validation has 5 rows: only these are used; add rows, or "
        "lower it",
        "evolve.fitness.test_prompts is 6, but test has 4 rows: only these are used; add "
        "rows, or lower it",
    ]


def test_train_warns_of_the_rows_that_it_uses():
    population = GRPO.population(size=2, model="tiny-sums", device="cpu", group_size=2)
    with pytest.warns(DoubtfulSetting) as caught:
        population.train(
            {"kind": "sums", "args": FEW}, rounds=1, steps_per_round=1, fitness={"prompts": 6}
        )
    # The test split is not used without a run folder.
    assert [text.partition(":")[0] for text in said(caught)] == [
        "evolve.fitness.prompts is 6, but validation has 5 rows"
    ]


def text_of(plan):
    console = Console(width=200, file=io.StringIO())
    console.print(render_plan(plan, "rows.yaml"))
    return console.file.getvalue()


DUPLICATES = [{"prompt": f"{number % 3}+1=", "answer": f"{number % 3 + 1}"} for number in range(24)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few_rewards.py").write_text("def right(completion, answer): return 1.0\n")
    return tmp_path


def rows_of(folder, **env):
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in DUPLICATES))
    env = {"kind": "dataset", "train": str(rows), "validation": str(rows), "test": str(rows), **env}
    return from_dict({"model": "tiny-sums", "env": {**env, "reward": "few_rewards:right"}})


def test_check_counts_the_different_prompts_and_says_that_they_are_few(folder):
    plan = make_plan(rows_of(folder))
    assert plan.prompts.different == {"train": 3, "validation": 3, "test": 3}
    assert "24 train, 24 validation, 24 test rows, of 3, 3, 3 different prompts" in text_of(plan)
    (few,) = [text for text in plan.warnings if text.startswith("validation has 3 different prom")]
    assert few.endswith("uncertain with fewer than 8; add rows")


def test_of_several_templates_the_one_with_the_fewest_prompts_counts(folder):
    templates = {"whole": "{prompt}", "short": "{answer}", "again": "{prompt}"}
    plan = make_plan(rows_of(folder, prompts=templates))
    assert plan.prompts.different == {"train": 3, "validation": 3, "test": 3}


def test_a_task_of_one_prompt_has_answers_instead(folder):
    plan = make_plan(rows_of(folder, prompt="name a food:"))
    assert plan.prompts.different == {"train": 1, "validation": 1, "test": 1}
    assert not [text for text in plan.warnings if "different prompt" in text]
