import asyncio
import functools
import inspect
import threading
from pathlib import Path

import numpy as np
import pytest
from reward_scores import score

from evo_grpo.envs.loading import as_rewards
from evo_grpo.envs.rewards.functions import RewardFunction
from evo_grpo.envs.rewards.scoring import reward_of_each
from evo_grpo.errors import ConfigError, RewardError

COMPLETIONS = ["2", "x", "4"]
ROWS = [{"answer": "2", "level": 1}, {"answer": "3", "level": 2}, {"answer": "4", "level": 3}]
PROMPTS = ["1+1=", "1+2=", "1+3="]

FILE = Path(__file__).relative_to(Path.cwd())


def run(*functions, weights=None, **changes):
    given = {"completions": COMPLETIONS, "rows": ROWS, "prompts": PROMPTS, **changes}
    return score(as_rewards(list(functions), weights), **given)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda completion, answer: completion == answer, [1, 0, 1]),
        (lambda completion, level=9: level, [1, 2, 3]),
        (lambda completion, other=9: other, [9, 9, 9]),
    ],
)
def test_a_row_function_gets_the_columns_it_names(function, expected):
    result = run(function)
    assert result.dtype == np.float64
    assert result[:, 0].tolist() == expected


def test_a_row_function_with_kwargs_gets_every_column_and_the_prompt():
    seen = []

    def reward(completion, **columns):
        seen.append((completion, columns))
        return 0

    run(reward)
    assert seen[0] == ("2", {"answer": "2", "level": 1, "prompt": "1+1="})


def test_completion_and_prompt_are_the_librarys_names():
    rows = [{"completion": "gold", "prompt": "raw"}] * 3
    seen = []
    run(lambda completion, prompt: seen.append((completion, prompt)) or 1, rows=rows)
    assert seen[0] == ("2", "1+1=")


def test_a_batch_function_gets_lists():
    def reward(completions, prompts, answer, **others):
        assert others == {"level": [1, 2, 3]}
        assert prompts == PROMPTS
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    assert run(reward).tolist() == [[1], [0], [1]]


def test_a_batch_function_may_return_any_sequence_of_numbers():
    torch = pytest.importorskip("torch")
    for make in (tuple, np.array, lambda values: np.array(values, np.float32), torch.tensor):
        result = run(lambda completions, make=make: make([0.5, 1.0, 0.0]))
        assert result.tolist() == [[0.5], [1.0], [0.0]]
    assert run(lambda completion: torch.tensor(0.5)).tolist() == [[0.5]] * 3
    assert run(lambda completion: 1, completions=[], rows=[], prompts=[]).shape == (0, 1)


def test_none_abstains_and_leaves_the_others():
    def sometimes(completion, level):
        return None if level == 2 else 1.0

    def batch(completions):
        return [None, 0.5, None]

    result = run(sometimes, batch)
    assert np.array_equal(result, [[1, np.nan], [np.nan, 0.5], [1, np.nan]], equal_nan=True)


def test_when_all_abstain_on_everything_somebody_says_so():
    def forgetful(completion):
        completion == "2"  # noqa: B015 -- the return that is missing

    with pytest.warns(
        UserWarning, match="every reward function \\(forgetful\\) abstained on all 3"
    ):
        assert np.isnan(run(forgetful)).all()


def test_columns_keep_the_order_of_the_functions():
    result = run(lambda completion: 1, lambda completions: [2, 2, 2], lambda completion: 3)
    assert result.tolist() == [[1, 2, 3]] * 3


def test_async_functions_all_run_at_the_same_time():
    started = 0
    together = 0

    async def slow(completion):
        nonlocal started, together
        started += 1
        await asyncio.sleep(0)
        together = max(together, started)
        return 1.0

    async def slow_batch(completions):
        nonlocal together
        await asyncio.sleep(0)
        together = max(together, started)
        return [0.0] * len(completions)

    def sync(completion, answer):
        return completion == answer

    result = run(slow, sync, slow_batch)
    assert result.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 0]]
    assert together == 3


def test_async_functions_work_inside_a_running_loop():
    threads = set()

    async def reward(completion):
        threads.add(threading.get_ident())
        await asyncio.sleep(0)
        return 1.0

    async def notebook():
        return run(reward)

    assert asyncio.run(notebook()).tolist() == [[1], [1], [1]]
    assert threads != {threading.get_ident()}


def test_a_callable_object_and_a_partial_are_functions():
    class Judge:
        async def __call__(self, completion, answer):
            return completion == answer

    def near(completion, answer, tolerance):
        return completion.isdigit() and abs(int(completion) - int(answer)) <= tolerance

    rewards = as_rewards([Judge(), functools.partial(near, tolerance=1)])
    assert [reward.name for reward in rewards] == ["Judge", "near"]
    assert score(rewards, COMPLETIONS, ROWS, PROMPTS).tolist() == [[1, 1], [0, 0], [1, 1]]


@pytest.mark.parametrize(
    "function",
    [
        lambda completion, answer, level: f"{answer}{level}",
        lambda completion, **columns: f"{columns['answer']}{columns['level']}",
        lambda completions, answer, level: [f"{answer}{one}" for one in level],
    ],
)
def test_a_value_that_a_partial_binds_is_not_replaced_by_a_column(function):
    def number(**given):
        found = function(**given)
        return [float(one) for one in found] if isinstance(found, list) else float(found)

    number.__signature__ = inspect.signature(function)
    assert run(functools.partial(number, answer=7)).tolist() == [[71], [72], [73]]


def test_a_partial_that_binds_the_completion_is_refused():
    with pytest.raises(ConfigError, match="expected a parameter named completion"):
        as_rewards(functools.partial(lambda completion: 1.0, completion="2"))


def boom(completion, level):
    if level == 2:
        raise KeyError("gold")
    return 1.0


async def async_boom(completion, level):
    await asyncio.sleep(0)
    return boom(completion, level)


def batch_boom(completions):
    raise KeyError("gold")


@pytest.mark.parametrize("function", [boom, async_boom])
def test_a_function_that_raises_is_named_with_row_and_prompt(function):
    with pytest.raises(RewardError) as caught:
        run(function, numbers=[10, 11, 12])
    assert str(caught.value) == (
        f"reward function '{function.__name__}', row 11, prompt '1+2=', completion 'x': "
        f"it raised KeyError: 'gold' in {FILE}, line {boom.__code__.co_firstlineno + 2}, boom"
    )
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.exit_code == 2


def test_a_batch_function_that_raises_is_named_with_its_first_row():
    with pytest.raises(RewardError) as caught:
        run(batch_boom)
    assert str(caught.value) == (
        "reward function 'batch_boom', 3 completions, the first: row 0, prompt '1+1=', "
        f"completion '2': it raised KeyError: 'gold' in {FILE}, "
        f"line {batch_boom.__code__.co_firstlineno + 1}, batch_boom"
    )


def of_messages(completions):
    return [len(completion[0]["content"]) for completion in completions]


def of_ids(completions, **columns):
    return [len(ids) for ids in columns["completion_ids"]]


def with_package(completion):
    return functools.reduce(int.__add__, [completion, inspect.signature(completion)])


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (of_messages, "; completions and prompts are strings here, where TRL has messages"),
        (of_ids, "; TRL passes it, and so does env.reward_style: trl: see docs/from_trl.md"),
        (with_package, ""),  # the innermost call is that of an installed module
    ],
)
def test_an_exception_is_told_with_the_line_of_the_users_code_and_what_to_change(function, hint):
    with pytest.raises(RewardError) as caught:
        run(function)
    line = function.__code__.co_firstlineno + 1
    place = f" in {FILE}, line {line}, {function.__name__}{hint}"
    assert place in str(caught.value)
    assert hint or str(caught.value).endswith(place)


@pytest.mark.parametrize("name", ["completion_ids", "trainer_state", "log_metric"])
def test_a_parameter_of_another_trainer_is_explained(name):
    reward = RewardFunction("mine", eval(f"lambda completions, {name}: 1"))
    assert "TRL passes" in reward.required_columns()[name]
    with pytest.raises(ConfigError, match=r"solution_str.*verl passes the completion so"):
        RewardFunction("mine", lambda data_source, solution_str: 1.0)


def test_an_error_leaves_no_coroutine_waiting():
    # A coroutine that nobody awaits warns when it is collected, and warnings are errors here.
    with pytest.raises(RewardError, match="'boom'"):
        run(async_boom, boom)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("1.0", "str '1.0'"),
        (float("nan"), "nan"),
        (-float("inf"), "-inf"),
        (np.float32("nan"), "float32 'nan'"),
        ({"reward": 1}, "dict \"{'reward': 1}\""),
        (np.array([1.0]), "ndarray '\\[1.\\]'"),
        (1j, "complex '1j'"),
        (10**400, "int '1000"),
    ],
)
def test_what_is_no_finite_number_is_named_with_function_row_and_prompt(value, what):
    def per_row(completion, level):
        return value if level == 2 else 1.0

    def per_batch(completions):
        return [1.0, value, 1.0]

    for function in (per_row, per_batch):
        with pytest.raises(
            RewardError,
            match=f"reward function '{function.__name__}', row 1, prompt '1\\+2=', completion 'x': "
            f"expected a finite number, or None to abstain, got {what}",
        ):
            run(function)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 0.0], "expected a list of 3 rewards, one per .*, got 2 for 3 completions"),
        (np.zeros(4), "expected a list of 3 rewards, one per .*, got 4"),
        (0.5, "expected a list of 3 rewards, .*, got 0.5"),
        ("abc", "expected a list of 3 rewards, .*, got str 'abc'"),
        (None, "expected a list of 3 rewards, .*, got None .* does it return its list?"),
        ({}, "expected a list of 3 rewards, .*, got dict"),
    ],
)
def test_a_batch_function_with_a_wrong_count_is_named(value, message):
    def reward(completions):
        return value

    with pytest.raises(RewardError, match=message) as caught:
        run(reward)
    assert str(caught.value).startswith("reward function 'reward': ")
    assert "row 0, prompt '1+1='" in str(caught.value)


@pytest.mark.parametrize("reward", [lambda completion, anser: 1, lambda completions, anser: 1])
def test_a_missing_column_is_named(reward):
    with pytest.raises(RewardError, match=r"row 0, .*: it raised TypeError: .*argument: 'anser'"):
        run(reward)


def test_weights_belong_to_functions():
    rewards = as_rewards([boom, RewardFunction("other", batch_boom, 0.5)])
    assert [(reward.name, reward.weight) for reward in rewards] == [("boom", 1.0), ("other", 0.5)]
    assert [reward.weight for reward in as_rewards([boom, boom], [2, 0.25])] == [2, 0.25]
    second = as_rewards([boom, boom])[1]
    assert [reward.weight for reward in as_rewards([second, boom], np.array([1, 3]))] == [1, 3]
    assert as_rewards(boom)[0].fn is boom


def test_functions_of_one_name_are_told_apart():
    names = [reward.name for reward in as_rewards([boom, boom, batch_boom, boom])]
    assert names == ["boom", "boom#2", "batch_boom", "boom#3"]


@pytest.mark.parametrize(
    ("reward_fn", "weights", "message"),
    [
        ([], None, "at least one, got \\[\\]"),
        (None, None, "got None"),
        ("no_rewards:reward", None, "no module 'no_rewards'"),
        ([boom, "my_rewards.reward"], None, 'expected "module:function"'),
        (boom, [1, 2], "reward_weights: expected one per reward function, that is 1, got 2"),
        (boom, [float("nan")], "reward function 'boom': expected a finite weight, got nan"),
        (
            boom,
            [1e300],
            "expected a finite weight, got 1e\\+300; give one from -1e\\+15",
        ),
        (boom, ["1"], "expected a finite weight, got '1'"),
        (dict, None, "expected a function, got <class 'dict'>; make an instance of it"),
        (lambda answer: 1, None, "expected a parameter named completion .* got \\(answer\\)"),
        (len, None, "passed by name, and obj can only be passed by position"),
        (max, None, "its parameters have no names"),
    ],
)
def test_what_cannot_score_is_refused_when_it_is_given(reward_fn, weights, message):
    with pytest.raises(ConfigError, match=message):
        as_rewards(reward_fn, weights)


def test_means_leave_out_what_abstained():
    rewards = np.array([[1.0, 5.0, np.nan], [0.0, np.nan, np.nan], [1.0, 1.0, np.nan]])
    assert reward_of_each(["a", "b", "c"], rewards) == {
        "reward/a": pytest.approx(2 / 3),
        "reward/b": 3.0,
    }
    assert reward_of_each(["a"], np.ones((2, 1))) == {}  # one function is the reward itself
