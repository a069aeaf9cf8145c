import numpy as np
import pytest

from evo_grpo.envs.registry import build_task
from evo_grpo.envs.single_turn import ReasoningGym, right_answer
from evo_grpo.envs.task import Task
from evo_grpo.errors import ConfigError, DataError, PromptTooLongError, RewardError
from evo_grpo.settings import EnvConfig
from evo_grpo.types import Completion, CompletionGroup


def exact(completion, answer):
    return completion == answer


def brief(completions):
    return [-len(completion) for completion in completions]


@pytest.fixture
def make(rows, tokenizer):
    def make_env(**changes):
        given = {
            "train_dataset": rows[:30],
            "test_dataset": rows[30:],
            "tokenizer": tokenizer,
            "reward_fn": exact,
            "conversation_template": "{question}",
        }
        return ReasoningGym(**{**given, **changes})

    return make_env


def answered(prompt, *texts, agent=0):
    completions = tuple(Completion((1,), text, (0.0,), True) for text in texts)
    return CompletionGroup(agent, prompt, completions)


def test_a_prompt_carries_text_ids_columns_and_its_row(make, rows, tokenizer):
    prompt = make(validation_dataset=rows).prompts("validation", 1)[0]
    assert prompt.columns == rows[prompt.index]
    assert prompt.text == rows[prompt.index]["question"]
    assert prompt.token_ids == tuple(tokenizer(prompt.text)["input_ids"])


def test_a_step_is_a_function_of_seed_and_step(make):
    env, again, other = make(seed=1), make(seed=1), make(seed=2)
    steps = [env.batch(step) for step in range(5)]
    assert [again.batch(step) for step in reversed(range(5))] == steps[::-1]
    assert [other.batch(step) for step in range(5)] != steps


def test_an_epoch_holds_every_row_once_and_the_next_has_another_order(make, rows):
    env = make(validation_dataset=rows[:3], batch_size=7)
    indices = [prompt.index for step in range(9) for prompt in env.batch(step)]
    epochs = [indices[:30], indices[30:60]]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    few = make(train_dataset=rows[:3], validation_dataset=rows).batch(0, 7)  # more than there are
    assert sorted(one.index for one in few[:3]) == sorted(one.index for one in few[3:6])


def test_a_subset_is_fixed_and_begins_the_larger_ones(make):
    env = make()
    assert env.prompts("test", 4) == env.prompts("test", 4) == make().prompts("test", 9)[:4]
    assert [p.index for p in env.prompts("test", 10)] != list(range(10))
    assert len(env.prompts("test", 1000)) == len(env.prompts("test")) == 10
    assert make(seed=3).prompts("test", 4) != env.prompts("test", 4)


def test_prompts_too_few_to_hold_any_out_are_those_of_selection_too(make, rows):
    env = make(train_dataset=rows[:2])
    assert {p.text for p in env.prompts("validation")} == {row["question"] for row in rows[:2]}


def test_validation_is_held_out_of_train(make, rows):
    env = make()
    parts = {s: {p.text for p in env.prompts(s)} for s in ("train", "validation", "test")}
    assert {split: len(part) for split, part in parts.items()} == {
        "train": 27,
        "validation": 3,
        "test": 10,
    }
    assert parts["train"] | parts["validation"] == {row["question"] for row in rows[:30]}


def test_rewards_come_in_the_order_of_groups_and_completions(make, rows):
    env = make(reward_fn=[exact, brief], reward_weights=[1.0, 0.5])
    first, second = env.prompts("test", 2)
    right = second.columns["answer"]
    groups = [answered(first, "abc", ""), answered(second, right, "x", "yz", agent=1)]
    assert env.score(groups).tolist() == [
        [0, -3],
        [0, 0],
        [1, -len(right)],
        [0, -1],
        [0, -2],
    ]
    assert env.weights.tolist() == [1.0, 0.5]
    assert [reward.name for reward in env.task.rewards] == ["exact", "brief"]
    assert env.score([]).shape == (0, 2)


def test_agents_ask_once_each_for_its_own_prompts_and_group(make):
    env = make()
    first, second = env.prompts("test", 2)
    play = env.begin([[first, second], [first]], [2, 3])
    ask = play.ask()
    assert (ask.prompts, ask.samples, ask.turn, ask.keys) == (
        [[first, second], [first]],
        [2, 3],
        None,
        None,
    )
    right = first.columns["answer"]
    play.tell(
        [
            [answered(first, right, "x"), answered(second, "x", "y")],
            [answered(first, "a", right, "b", agent=1)],
        ]
    )
    assert play.ask() is None
    one, other = play.experiences()
    assert one.rewards.tolist() == [[1.0], [0.0], [0.0], [0.0]]
    assert other.rewards.tolist() == [[0.0], [1.0], [0.0]]
    assert [t.text for t in other.trajectories] == ["a", right, "b"]
    # Sample completions are recorded with it.
    assert {t.answer for t in other.trajectories} == {right}
    assert (one.completions, other.tokens) == (4, 3)


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ({"question": "q", "solution": 7}, "7"),
        ({"answer": "a", "label": "b"}, "a"),
        ({"question": "q", "answer": ["no", "text"]}, ""),
        ({"question": "q"}, ""),
    ],
)
def test_the_right_answer_is_the_column_that_is_called_so(columns, answer):
    assert right_answer(columns) == answer


@pytest.mark.parametrize("kind", ["sums", "foods"])
def test_a_built_in_task_becomes_an_environment(kind, tokenizer):
    task = build_task(EnvConfig(kind=kind), 0)
    env = ReasoningGym.from_task(task, tokenizer, batch_size=4, seed=9)
    assert env.name == kind
    assert env.max_output_tokens == task.max_output_tokens
    assert len(env.batch(0)) == 4
    assert len(env.prompts("validation", 64)) == 64
    assert env.score([answered(env.batch(0)[0], "x")]).tolist() == [[0.0]]
    assert [len(env.prompts(split)) for split in task.splits] == [
        len(rows) for rows in task.splits.values()
    ]


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_prompt_longer_than_the_context_is_named(make, rows, split):
    long = [{"question": "1" * 20, "answer": "1", "level": 0}]
    given = {"train_dataset": rows[:5], "validation_dataset": rows[:5], "test_dataset": rows[:5]}
    given[f"{split}_dataset"] = rows[:2] + long
    with pytest.raises(PromptTooLongError) as caught:
        make(**given, max_context_length=20)
    assert str(caught.value).startswith(
        f"{split}, row 2: expected a prompt of at most 19 tokens, so that one more fits the "
        "context of 20, got 20: '1111"
    )
    assert caught.value.exit_code == 2
    env = make(**given)
    env.limit_context(21)
    with pytest.raises(PromptTooLongError, match=f"{split}, row 2"):
        env.limit_context(20)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"test_dataset": [{"question": "x"}]}, DataError, 'test, row 0: no column "answer"'),
        ({"train_dataset": []}, DataError, "train: expected at least one row"),
        ({"test_dataset": []}, DataError, "test: expected at least one row"),
        ({"validation_dataset": []}, DataError, "validation: expected at least one row"),
        ({"test_dataset": None}, ConfigError, "test_dataset: expected rows"),
        ({"train_dataset": None}, DataError, "expected a dataset to learn from"),
        ({"batch_size": 0}, ConfigError, "batch_size: expected >= 1 prompt per step, got 0"),
        ({"max_context_length": 1}, ConfigError, "max_context_length: expected >= 2"),
    ],
)
def test_what_the_constructor_cannot_use_is_named(make, changes, error, message):
    with pytest.raises(error, match=message) as caught:
        make(**changes)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda env: env.batch(-1), "step >= 0"),
        (lambda env: env.batch(0, 0), "size >= 1, got step 0, size 0"),
        (lambda env: env.prompts("valid"), "expected a split of .*, got 'valid' and None"),
        (lambda env: env.prompts("test", 0), "size >= 1 or None, got 'test' and 0"),
    ],
)
def test_a_wrong_request_is_named(make, call, message):
    with pytest.raises(ConfigError, match=message):
        call(make())


def test_a_task_without_rows_is_named(rows):
    sums = build_task(EnvConfig(kind="sums"), 0)
    with pytest.raises(ConfigError, match=r"task 'mine': .*got none for test"):
        Task("mine", {"train": rows, "validation": rows}, sums.rewards, sums.templates)


def test_prompts_are_the_same_rendered_together_and_one_by_one(make, rows):
    together, alone = make(), make()
    together.limit_context(1000)
    assert together.prompts("train") == alone.prompts("train")
    assert together.batch(3, 5) == alone.batch(3, 5)
    assert together.max_context_length == 1000
    assert alone.max_context_length is None


def test_a_prompt_that_cannot_be_rendered_is_named_among_many(make, rows):
    rows = [*rows[:7], {**rows[7], "question": ""}]
    env = make(train_dataset=rows, conversation_template="{question}")
    for render in (lambda: env.limit_context(1000), lambda: env.prompts("train")):
        with pytest.raises(DataError, match=r"^train, row 7: the prompt '' has no token"):
            render()


def nan_once(prompts_with_nan):
    def reward(completion, question):
        spoilt = completion == "a" and question in prompts_with_nan
        return float("nan") if spoilt else float(len(completion))

    return reward


def test_a_group_with_a_nan_is_set_aside_counted_and_the_others_go_on(make, rows):
    env = make(reward_fn=nan_once({rows[0]["question"]}), validation_dataset=rows)
    prompts = {prompt.index: prompt for prompt in env.prompts("validation")}
    play = env.begin([[prompts[0], prompts[1]], [prompts[1]]], [2, 2])
    play.tell(
        [
            [answered(prompts[0], "a", "bc"), answered(prompts[1], "a", "bc")],
            [answered(prompts[1], "abc", "", agent=1)],
        ]
    )
    with pytest.warns(UserWarning, match="row 0, .* got nan; its group is set aside"):
        first, second = play.experiences()
    assert np.isnan(first.rewards[:2]).all()
    assert first.rewards[2:].tolist() == [[1.0], [2.0]]
    assert second.rewards.tolist() == [[3.0], [0.0]]
    assert [e.metrics["set_aside"] for e in (first, second)] == [1.0, 0.0]


def test_the_first_nan_ends_a_run_that_allows_none(make, rows):
    env = make(reward_fn=nan_once({row["question"] for row in rows}), reward_failures=0.0)
    prompt = env.batch(0, 1)[0]
    play = env.begin([[prompt]], [2])
    play.tell([[answered(prompt, "a", "b")]])
    with pytest.raises(RewardError, match=r"got nan; mend the .*env.reward_failures, now 0"):
        play.experiences()
