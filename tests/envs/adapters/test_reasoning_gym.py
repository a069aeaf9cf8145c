import random

import numpy as np
import pytest
from reward_scores import score

from evo_grpo.envs.registry import build_task
from evo_grpo.errors import ConfigError
from evo_grpo.settings import EnvConfig

pytest.importorskip("reasoning_gym")

SIZES = {"train_size": 30, "validation_size": 10, "test_size": 20}
# Two terms of one digit: about two hundred different questions.
EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def build(name="chain_sum", seed=0, **args):
    return build_task(EnvConfig(kind=f"reasoning_gym:{name}", args={**SIZES, **args}), seed)


def test_rows_are_those_of_the_package_and_the_answer_scores_one():
    task = build(min_terms=3, max_terms=4)
    assert task.name == "reasoning_gym:chain_sum"
    assert {split: len(rows) for split, rows in task.splits.items()} == {
        "train": 30,
        "validation": 10,
        "test": 20,
    }
    rows = task.splits["test"]
    assert set(rows[0]) == {"question", "answer", "metadata"}
    answers = [row["answer"] for row in rows]
    prompts = [row["question"] for row in rows]
    right = score(task.rewards, answers, rows, prompts)
    assert right.tolist() == [[1.0]] * len(rows)
    wrong = score(task.rewards, ["no idea"] * len(rows), rows, prompts)
    assert wrong.tolist() == [[0.0]] * len(rows)


def test_spaces_and_answer_tags_are_taken_off():
    task = build()
    row = task.splits["train"][0]
    reward = task.rewards[0].fn
    for text in (f" {row['answer']}\n", f"Think. <answer> {row['answer']} </answer> Done."):
        assert reward(completion=text, **row) == 1.0
    assert 0 < reward(completion=f"The answer is {row['answer']}", **row) < 1


def test_splits_follow_from_the_seed_and_share_no_question():
    parts = [{row["question"] for row in rows} for rows in build(seed=1).splits.values()]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 60
    assert build(seed=1).splits == build(seed=1).splits
    assert build(seed=1).splits != build(seed=2).splits


def test_a_task_with_few_questions_still_shares_none():
    task = build(train_size=1000, validation_size=128, test_size=256, **EASY)
    parts = {split: {row["question"] for row in rows} for split, rows in task.splits.items()}
    assert len(set.union(*parts.values())) == sum(map(len, parts.values()))
    assert all(len(rows) == len(parts[split]) for split, rows in task.splits.items())
    assert len(parts["train"]) > len(parts["test"]) > len(parts["validation"]) > 5


def test_global_generators_stay_as_they_were():
    # pool_matrix seeds numpy's global generator for every question.
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    build("pool_matrix", train_size=2, validation_size=1, test_size=1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


def test_an_answer_that_the_package_cannot_parse_scores_zero():
    task = build("prime_factorization")
    assert task.rewards[0].fn(completion="two times three", **task.splits["train"][0]) == 0.0


def test_a_mixture_is_a_list_of_mappings():
    mixed = [
        {"name": "chain_sum", "weight": 1, "config": {}},
        {"name": "leg_counting", "weight": 1, "config": {}},
    ]
    task = build("composite", datasets=mixed)
    sources = {row["metadata"]["source_dataset"] for row in task.splits["train"]}
    assert sources == {"chain_sum", "leg_counting"}
    row = task.splits["train"][0]
    assert task.rewards[0].fn(completion=row["answer"], **row) == 1.0


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("chain_sums", {}, 'no environment "chain_sums" .* Did you mean "chain_sum"'),
        ("chain_sum", {"min_term": 2}, 'env.args.min_term: no such argument.*mean "min_terms"'),
        ("chain_sum", {"size": 3}, "env.args.size: is not set here; use train_size"),
        ("chain_sum", {"seed": 3}, "env.args.seed: is not set here"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, '"chain_sum" refuses these settings: '),
        ("chain_sum", {"min_terms": "a"}, '"chain_sum" refuses these settings'),
        ("chain_sum", {"train_size": 0}, "env.args.train_size: expected an integer >= 1, got 0"),
        (
            "chain_sum",
            {"train_size": "9"},
            "env.args.train_size: expected an integer >= 1, got .*9",
        ),
        ("composite", {}, '"composite" refuses these settings: Must specify at least one dataset'),
        ("composite", {"datasets": [{"nam": "x"}]}, '"composite" refuses these settings'),
    ],
)
def test_what_the_package_does_not_know_is_named(name, args, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_task(EnvConfig(kind=f"reasoning_gym:{name}", args={**SIZES, **args}), 0)
    assert caught.value.exit_code == 2
