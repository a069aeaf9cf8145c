import json
import sys
from pathlib import Path

import pytest

from evo_grpo.envs import registry
from evo_grpo.envs.prompts import Template
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


def test_the_kinds_are_the_modules_of_families():
    assert {"sums", "dataset", "reasoning_gym:<name>", "gem:<name>"} < set(kinds())
    folders = [Path(registry.__file__).parent / name for name in ("builtin", "adapters")]
    files = {file.stem for folder in folders for file in folder.glob("[!_]*.py")}
    assert {kind.partition(":")[0] for kind in kinds()} == files


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


def test_sums_holds_every_pair_once_and_asks_and_answers_with_fixed_width():
    task = build_task(EnvConfig(kind="sums"), 3)
    sizes = {split: len(rows) for split, rows in task.splits.items()}
    assert sizes == {"train": 9000, "validation": 500, "test": 500}
    everything = [row["question"] for rows in task.splits.values() for row in rows]
    assert len(set(everything)) == 10_000
    assert task.max_output_tokens == 4
    task = build_task(EnvConfig(kind="sums", args={"low": 7, "high": 12}), 0)
    rows = {row["question"]: row["answer"] for split in task.splits.values() for row in split}
    assert rows["12+07="] == "019"
    assert all(int(q[:2]) + int(q[3:5]) == int(a) and len(a) == 3 for q, a in rows.items())
    (exact,) = task.rewards
    scores = [exact.fn(completion=text, answer="019") for text in ("019", "19", "0190", " 019")]
    assert scores == [1.0, 0.0, 0.0, 0.0]


def test_sums_is_divided_by_the_seed():
    env = EnvConfig(kind="sums", args={"high": 9, "test_size": 20})
    assert questions(build_task(env, 1)) == questions(build_task(env, 1))
    assert questions(build_task(env, 1))["test"] != questions(build_task(env, 2))["test"]
    assert len(questions(build_task(env, 1))["test"]) == 20


def test_foods_repeats_one_prompt():
    task = build_task(EnvConfig(kind="foods"), 0)
    sizes = {split: len(rows) for split, rows in task.splits.items()}
    assert sizes == {"train": 64, "validation": 64, "test": 256}
    assert task.template.text.format(**task.splits["train"][0]) == "ravin likes "
    (reward,) = task.rewards
    assert [reward.fn(completion=c, food="pizza") for c in ("pizza", "tacos")] == [1.0, 0.0]


def test_a_built_in_task_takes_another_prompt_other_rewards_and_weights(folder):
    rewards = ["task_rewards:exact", "task_rewards:short"]
    env = EnvConfig(kind="sums", prompt="{a}+{b}:", reward=rewards, reward_weights=[1.0, 0.1])
    task = build_task(env, 0)
    assert task.template.text == "{a}+{b}:"
    assert [(r.name, r.weight) for r in task.rewards] == [("exact", 1.0), ("short", 0.1)]
    messages = [{"role": "user", "content": "{question}"}]
    chat = build_task(EnvConfig(kind="sums", conversation=messages), 0)
    assert (chat.template.text, chat.template.conversation) == (None, tuple(messages))
    task = build_task(EnvConfig(kind="sums", reward_weights={"exact": 0.5}), seed=0)
    assert [(r.name, r.weight) for r in task.rewards] == [("exact", 0.5)]


# --- dataset -------------------------------------------------------------------------------------


def test_a_dataset_without_splits_holds_a_tenth_out_for_each_and_keeps_its_own(folder):
    def sizes(**changes):
        splits = build_task(dataset(**changes), 0).splits
        return [len(splits[split]) for split in ("train", "validation", "test")]

    parts = questions(build_task(dataset(), 5))
    assert sizes() == [40, 5, 5]
    assert len(set.union(*parts.values())) == 50
    assert questions(build_task(dataset(), 5)) == parts
    assert questions(build_task(dataset(), 6)) != parts
    assert sizes(validation="few.jsonl", test="few.jsonl") == [50, 3, 3]
    assert sizes(test="few.jsonl") == [45, 5, 3]


def test_a_dataset_without_a_template_asks_its_question(folder):
    asked = Template.of([{"role": "user", "content": "{question}"}])
    assert build_task(dataset(), 0).template == asked
    rows = [{"prompt": str(n), "question": "?", "answer": "1"} for n in range(20)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = Template.of([{"role": "user", "content": "{prompt}"}])
    assert build_task(dataset(), 0).template == asked
    assert build_task(dataset(prompt="{question}{prompt}"), 0).template.text == "{question}{prompt}"


def test_the_same_prompt_is_never_in_two_splits(folder):
    rows = [{"question": f"{n % 20}+1=", "answer": str(n)} for n in range(100)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = build_task(dataset(), 0)
    assert sum(len(part) for part in questions(task).values()) == 20
    assert sum(len(rows) for rows in task.splits.values()) == 100


# --- what does not fit ---------------------------------------------------------------------------

BOTH = {"prompt": "{question}", "conversation": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        *(
            ("sums", {"args": args}, message)
            for args, message in (
                ({"lwo": 1}, "env.args.lwo: unknown key; did you mean 'low'\\? Expected one of"),
                ({"self": 1}, "env.args.self: unknown key"),
                ({"low": "1"}, r"env.args.low: expected an integer in \[0, 99\], got .*'1'"),
                ({"low": True}, r"env.args.low: expected an integer in \[0, 99\], got true"),
                ({"low": 9, "high": 3}, "env.args: expected low <= high, got low 9, high 3"),
                ({"high": 100}, r"env.args.high: expected an integer in \[0, 99\], got 100"),
                ({"high": 0}, "make 1 pairs"),
                ({"train_size": 9500, "test_size": 600}, "make 10000 pairs.*train 9500.*test 600"),
                ({"validation_size": 0}, "at least one for each split.*validation 0"),
            )
        ),
        ("foods", {"args": {"food": 3}}, "env.args.food: expected a string that is .*, got 3"),
        ("foods", {"args": {"food": " "}}, "env.args.food: .* that is not blank, got .*' '"),
        ("foods", {"args": {"test_size": 0}}, r"env.args.test_size: .* \[1, 1e\+06\], got 0"),
        ("foods", {"args": {"train_size": 10**19}}, r"env.args.train_size: .* 1e\+06\], got 10"),
        ("sums", {"prompt": "{qestion}"}, 'sums, .*no column "qestion".*mean "question"'),
        ("sums", {"reward": "task_rewards:needs_gold"}, 'no column "gold", which the reward fun'),
        ("sums", {"reward_weights": {"exakt": 0.5}}, r"got 'exakt'\. Did you mean"),
        ("sums", {"reward_weights": [1.0]}, "env.reward_weights: expected env.reward beside it"),
        (
            "sums",
            {"reward": "task_rewards:exact", "reward_weights": [1.0, 2.0]},
            "expected one per reward function, that is 1, got 2",
        ),
        ("sums", {"max_turns": 3}, 'env.max_turns: "sums" asks one question, .*got 3'),
        ("sums", {"train": "few.jsonl"}, 'env.train: "sums" brings its own rows; those of files'),
        ("dataset", {"train": "trian.jsonl"}, "train: no file 'trian.jsonl'"),
        ("dataset", {"train": None}, "env.train: expected a dataset to learn from"),
        ("dataset", {"train": "few.jsonl"}, "3 different prompts are too few to hold out valid"),
        ("dataset", {"train": "odd.jsonl"}, 'no column "prompt", "question" or .*env.prompt.*text'),
        ("dataset", {"prompt": "{qestion}"}, r'train \(train.jsonl\), line 1: no column "qestion"'),
        ("dataset", {"reward": "task_rewards:needs_gold"}, "the reward function 'needs_gold' need"),
        ("dataset", {"reward": "task_rewards:exakt"}, 'Did you mean "exact"'),
        ("dataset", {"reward": None}, 'env.reward: kind "dataset" needs a reward function'),
        ("dataset", {"args": {"x": 1}}, 'env.args: kind "dataset" takes none, got x'),
        ("dataset", BOTH, "expected prompt .* or conversation .* got both"),
    ],
)
def test_what_does_not_fit_a_task_is_named(folder, kind, changes, message):
    (folder / "odd.jsonl").write_text('{"text": "a", "answer": "b"}')
    env = dataset(**changes) if kind == "dataset" else EnvConfig(kind=kind, **changes)
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        build_task(env, 0)
    assert caught.value.exit_code == 2
