import json
import sys

import pytest

from evo_grpo.envs.registry import build_task, kinds
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.settings import EnvConfig

REWARDS = """
def exact(completion, answer):
    return completion == answer

def short(completions):
    return [-len(c) for c in completions]

def needs_gold(completion, gold):
    return completion == gold
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "task_rewards", raising=False)
    (tmp_path / "task_rewards.py").write_text(REWARDS)
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(50)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, rows[:3])))
    return tmp_path


def dataset(**changes):
    given = {"kind": "dataset", "train": "train.jsonl", "reward": "task_rewards:exact"}
    return EnvConfig(**{**given, **changes})


def questions(task):
    return {split: {row["question"] for row in rows} for split, rows in task.splits.items()}


def test_the_kinds_are_named():
    assert kinds() == [
        "sums",
        "foods",
        "dataset",
        "reasoning_gym:<name>",
        "gem:<name>",
        "textarena:<name>",
        "verifiers:<name>",
        "trl:<name>",
        "python:<name>",
    ]


@pytest.mark.parametrize(
    ("kind", "nearest"),
    [("sum", 'mean "sums"'), ("sums:x", ""), ("reasoning_gym", "reasoning_gym:<name>"), ("x:", "")],
)
def test_an_unknown_kind_is_named_with_the_nearest(kind, nearest):
    with pytest.raises(
        ConfigError, match=f'env.kind: no task "{kind}".*{nearest}.*Expected one of'
    ):
        build_task(EnvConfig(kind=kind), 0)


# --- sums and foods ------------------------------------------------------------------------------


def test_sums_holds_every_pair_once_and_no_pair_twice():
    task = build_task(EnvConfig(kind="sums"), 3)
    sizes = {split: len(rows) for split, rows in task.splits.items()}
    assert sizes == {"train": 9000, "validation": 500, "test": 500}
    everything = [row["question"] for rows in task.splits.values() for row in rows]
    assert len(set(everything)) == 10_000
    assert task.max_output_tokens == 4


def test_sums_asks_and_answers_with_fixed_width():
    task = build_task(EnvConfig(kind="sums", args={"low": 7, "high": 12}), 0)
    rows = {row["question"]: row["answer"] for split in task.splits.values() for row in split}
    assert rows["12+07="] == "019"
    assert all(int(q[:2]) + int(q[3:5]) == int(a) and len(a) == 3 for q, a in rows.items())
    (exact,) = task.rewards
    assert [exact.fn(completion=c, answer="019") for c in ("019", "19", "0190", " 019")] == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]


def test_sums_is_divided_by_the_seed():
    env = EnvConfig(kind="sums", args={"high": 9, "test_size": 20})
    assert questions(build_task(env, 1)) == questions(build_task(env, 1))
    assert questions(build_task(env, 1))["test"] != questions(build_task(env, 2))["test"]
    assert len(questions(build_task(env, 1))["test"]) == 20


def test_foods_repeats_one_prompt():
    task = build_task(EnvConfig(kind="foods"), 0)
    assert {split: len(rows) for split, rows in task.splits.items()} == {
        "train": 64,
        "validation": 64,
        "test": 256,
    }
    assert task.prompt.format(**task.splits["train"][0]) == "ravin likes "
    (reward,) = task.rewards
    assert [reward.fn(completion=c, food="pizza") for c in ("pizza", "tacos")] == [1.0, 0.0]
    assert task.max_output_tokens == 16


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        (
            "sums",
            {"lwo": 1},
            'env.args.lwo: no such argument of "sums". Did you mean "low"\\? It has',
        ),
        ("sums", {"low": "1"}, "env.args.low: expected an integer, got '1'"),
        ("sums", {"low": True}, "env.args.low: expected an integer, got True"),
        ("sums", {"low": 9, "high": 3}, "expected 0 <= low <= high <= 99.*low 9, high 3"),
        ("sums", {"high": 100}, "high 100"),
        ("sums", {"high": 0}, "make 1 pairs"),
        ("sums", {"train_size": 9500, "test_size": 600}, "make 10000 pairs.*train 9500.*test 600"),
        ("sums", {"validation_size": 0}, "at least one for each split.*validation 0"),
        ("foods", {"food": 3}, "env.args.food: expected a string, got 3"),
        ("foods", {"food": " "}, "expected a name and a food"),
        ("foods", {"test_size": 0}, "env.args.test_size: expected an integer from 1 to 1,000,000"),
        ("foods", {"train_size": 10**19}, "from 1 to 1,000,000, got 10,000,000,000,000,000,000"),
    ],
)
def test_a_wrong_argument_is_named(kind, args, message):
    with pytest.raises(ConfigError, match=message):
        build_task(EnvConfig(kind=kind, args=args), 0)


def test_a_mapping_weighs_the_functions_of_a_built_in_task():
    task = build_task(EnvConfig(kind="sums", reward_weights={"exact": 0.5}), seed=0)
    assert [(r.name, r.weight) for r in task.rewards] == [("exact", 0.5)]
    with pytest.raises(ConfigError, match=r"got 'exakt'\. Did you mean"):
        build_task(EnvConfig(kind="sums", reward_weights={"exakt": 0.5}), seed=0)


def test_a_built_in_task_takes_another_prompt_and_another_reward(folder):
    env = EnvConfig(
        kind="sums",
        prompt="{a} plus {b}:",
        reward=["task_rewards:exact", "task_rewards:short"],
        reward_weights=[1.0, 0.1],
    )
    task = build_task(env, 0)
    assert task.prompt == "{a} plus {b}:"
    assert [(r.name, r.weight) for r in task.rewards] == [("exact", 1.0), ("short", 0.1)]
    chat = build_task(
        EnvConfig(kind="sums", conversation=[{"role": "user", "content": "{question}"}]), 0
    )
    assert chat.prompt is None
    assert chat.conversation == ({"role": "user", "content": "{question}"},)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt": "{qestion}"}, DataError, 'sums, .*no column "qestion".*mean "question"'),
        (
            {"reward": "task_rewards:needs_gold"},
            DataError,
            'no column "gold", which the reward fun',
        ),
        (
            {"reward_weights": [1.0]},
            ConfigError,
            "env.reward_weights: expected env.reward beside it",
        ),
        (
            {"reward": "task_rewards:exact", "reward_weights": [1.0, 2.0]},
            ConfigError,
            "expected one per reward function, that is 1, got 2",
        ),
        ({"max_turns": 3}, ConfigError, 'env.max_turns: "sums" asks one question, .*got 3'),
    ],
)
def test_what_does_not_fit_a_built_in_task_is_named(folder, changes, error, message):
    with pytest.raises(error, match=message):
        build_task(EnvConfig(kind="sums", **changes), 0)


# --- dataset -------------------------------------------------------------------------------------


def test_a_dataset_without_splits_holds_a_tenth_out_for_each(folder):
    task = build_task(dataset(), 5)
    parts = questions(task)
    assert {split: len(part) for split, part in parts.items()} == {
        "train": 40,
        "validation": 5,
        "test": 5,
    }
    assert len(set.union(*parts.values())) == 50
    assert questions(build_task(dataset(), 5)) == parts
    assert questions(build_task(dataset(), 6)) != parts


def test_a_dataset_with_splits_keeps_them(folder):
    task = build_task(dataset(validation="few.jsonl", test="few.jsonl"), 0)
    assert [len(task.splits[split]) for split in ("train", "validation", "test")] == [50, 3, 3]
    task = build_task(dataset(test="few.jsonl"), 0)
    assert [len(task.splits[split]) for split in ("train", "validation", "test")] == [45, 5, 3]


def test_a_dataset_without_a_template_asks_its_question(folder):
    assert build_task(dataset(), 0).conversation == ({"role": "user", "content": "{question}"},)
    (folder / "train.jsonl").write_text(
        "\n".join(json.dumps({"prompt": str(n), "question": "?", "answer": "1"}) for n in range(20))
    )
    assert build_task(dataset(), 0).conversation == ({"role": "user", "content": "{prompt}"},)
    assert build_task(dataset(prompt="{question}{prompt}"), 0).prompt == "{question}{prompt}"


def test_the_same_prompt_is_never_in_two_splits(folder):
    rows = [{"question": f"{n % 20}+1=", "answer": str(n)} for n in range(100)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = build_task(dataset(), 0)
    parts = questions(task)
    assert sum(len(part) for part in parts.values()) == 20
    assert sum(len(rows) for rows in task.splits.values()) == 100


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"train": "trian.jsonl"}, DataError, "train: no file 'trian.jsonl'"),
        ({"prompt": "{qestion}"}, DataError, r'train \(train.jsonl\), line 1: no column "qestion"'),
        (
            {"reward": "task_rewards:needs_gold"},
            DataError,
            "no column \"gold\", which the reward function 'needs_gold' needs",
        ),
        ({"reward": "task_rewards:exakt"}, ConfigError, 'Did you mean "exact"'),
        (
            {"train": "few.jsonl"},
            DataError,
            "3 different prompts are too few to hold out validation",
        ),
        ({"args": {"x": 1}}, ConfigError, 'env.args: kind "dataset" takes none, got x'),
    ],
)
def test_what_is_wrong_with_a_dataset_is_named(folder, changes, error, message):
    with pytest.raises(error, match=message) as caught:
        build_task(dataset(**changes), 0)
    assert caught.value.exit_code == 2


def test_a_dataset_with_nothing_to_ask_is_named(folder):
    (folder / "train.jsonl").write_text('{"text": "a", "answer": "b"}')
    with pytest.raises(
        DataError, match=r'no column "prompt", "question" or "messages".*env.prompt.*text, answer'
    ):
        build_task(dataset(), 0)


# What config refuses already is refused here too: a task can be built without a population.yaml.
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": None}, 'env.reward: kind "dataset" needs a reward function'),
        ({"train": None}, "env.train: expected a dataset to learn from"),
        (
            {"prompt": "{question}", "conversation": [{"role": "user", "content": "x"}]},
            "expected prompt .* or conversation .* got both",
        ),
        (
            {"kind": "sums"},
            'env.train: "sums" brings its own rows; those of files belong to kind "dataset"',
        ),
    ],
)
def test_settings_that_contradict_each_other_are_named(folder, changes, message):
    given = {
        "kind": "dataset",
        "args": {},
        "train": "train.jsonl",
        "validation": None,
        "test": None,
        "prompt": None,
        "conversation": None,
        "reward": "task_rewards:exact",
        "reward_weights": None,
    }
    env = EnvConfig.model_construct(**{**given, **changes})
    with pytest.raises((ConfigError, DataError), match=message):
        build_task(env, 0)
