"""Anything as a reward, as a completion and as what a game returns: a number, or a named error."""

import decimal
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from fuzzing import fuzz, told_or
from hypothesis import example
from hypothesis import strategies as st
from reward_scores import SET_ASIDE, STOP, score

from evo_grpo.envs.episodes.multi_turn import check_reset, check_step
from evo_grpo.envs.rewards.functions import RewardFunction
from evo_grpo.envs.rewards.scoring import LARGEST, CompletionBatch, score_batch
from evo_grpo.errors import DataError, RewardError

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=6)
ERRORS = (ValueError, TypeError, OverflowError, RecursionError, MemoryError)
ENDS = (SystemExit, GeneratorExit)


class EnvOrWrapper:
    """What to make of which parts: an input that can be shown, whatever its value does."""

    def __init__(self, make: Callable[..., object], *parts: object) -> None:
        self.make, self.parts = make, parts

    def __repr__(self) -> str:
        return f"Made({self.make.__name__}, {', '.join(map(repr, self.parts))})"


def real(value: object) -> object:
    """The value of an input."""
    if isinstance(value, EnvOrWrapper):
        return value.make(*map(real, value.parts))
    if isinstance(value, list | tuple):
        return type(value)(map(real, value))
    return {key: real(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def unkind(method: str, does: object) -> object:
    """An object of a class of its own with one method that raises, or returns anything."""

    def called(self: object, *arguments: object) -> object:
        if isinstance(does, type) and issubclass(does, BaseException):
            raise does(method)
        return does

    return type("Unkind", (), {method: called})()


def guarded(attribute: str, does: object) -> object:
    """An object one of whose attributes raises, or is anything."""
    return type("Guarded", (), {attribute: property(lambda self: unkind("x", does).x())})()


def objects(*items: object) -> np.ndarray:
    """An array of objects, which is no array of numbers."""
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = item
    return array


METHODS = (
    "__float__ __index__ __int__ __str__ __repr__ __len__ __iter__ __bool__ __getitem__ tolist "
    "item __array__ __await__ __eq__ __format__"
)
RESULTS = st.one_of(st.sampled_from([*ERRORS, *ENDS, None, "x", 1, 1.5, 10**400]), ANY_TEXT)
FLOATS = st.lists(st.floats(), max_size=3)
PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.binary(max_size=4)
    | st.complex_numbers() | st.decimals() | st.fractions() | st.dates()
    | st.sampled_from([10**400, -(10**400), 1e15, 1.0000001e15, -1e15, decimal.Decimal("sNaN")])
    | st.sampled_from([pd.NA, pd.NaT, np.nan, ..., NotImplemented, object, int])
)  # fmt: skip
SCALARS = st.one_of(
    PLAIN,
    st.floats(width=16).map(np.float16),
    st.integers(-9, 9).map(np.int8),
    st.booleans().map(np.bool_),
    st.builds(EnvOrWrapper, st.sampled_from([np.array, torch.tensor, pd.Series]), FLOATS),
    st.builds(EnvOrWrapper, st.sampled_from([np.array, torch.tensor]), st.floats()),
    st.builds(EnvOrWrapper, st.just(unkind), st.sampled_from(METHODS.split()), RESULTS),
    st.builds(
        EnvOrWrapper, st.just(guarded), st.sampled_from(["tolist", "ndim", "__class__"]), RESULTS
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(ANY_TEXT, inner, max_size=2)
        | st.lists(inner, max_size=3).map(lambda items: EnvOrWrapper(objects, *items))
        | st.builds(EnvOrWrapper, st.just(iter), st.lists(inner, max_size=3))
    ),
    max_leaves=5,
)  # fmt: skip
COMPLETIONS = st.lists(ANY_TEXT, min_size=1, max_size=3)


def scored(functions: list[Callable[..., Any]], completions: list[str], keep_errors: bool) -> None:
    """Score by both doors, and look at what comes of it."""
    rewards = [RewardFunction("any", function) for function in functions]
    count = len(completions)
    rows, prompts = [{"q": text} for text in completions], completions[::-1]
    batch = CompletionBatch(completions, rows, prompts, [f"row {n}" for n in range(count)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all abstain
        table = told_or(partial(score, rewards, completions, rows, prompts), RewardError)
        kept = told_or(
            partial(score_batch, rewards, batch, SET_ASIDE if keep_errors else STOP), RewardError
        )
    for found in [] if table is None else [table]:
        check_table(found, count, len(functions))
    if kept is not None:
        check_table(kept.rewards, count, len(functions))
        for failure in kept.failures:
            assert set(failure.positions) <= set(range(count))
            assert failure.text.strip()
            failure.text.encode()


def check_table(table: np.ndarray, rows: int, columns: int) -> None:
    assert table.shape == (rows, columns)
    assert table.dtype == np.float64
    known = table[~np.isnan(table)]
    assert (np.abs(known) <= LARGEST).all()


@fuzz(value=VALUES, completions=COMPLETIONS, keep_errors=st.booleans())
@example(value=-(10**400), completions=["\ud800"], keep_errors=False)
@example(value=EnvOrWrapper(guarded, "__class__", ValueError), completions=["a"], keep_errors=True)
@example(value=EnvOrWrapper(guarded, "__class__", None), completions=["a"], keep_errors=False)
def test_any_value_of_a_row_function_is_a_reward_or_named(
    value: object, completions: list[str], keep_errors: bool
):
    scored([lambda completion: real(value)], completions, keep_errors)


@fuzz(
    values=VALUES | st.lists(VALUES, max_size=3), completions=COMPLETIONS, keep_errors=st.booleans()
)
def test_any_value_of_a_batch_function_is_rewards_or_named(
    values: object, completions: list[str], keep_errors: bool
):
    async def later(completions: list[str]) -> object:
        return real(values)

    scored([lambda completions: real(values), later], completions, keep_errors)


@fuzz(
    error=st.sampled_from(ERRORS), text=VALUES, completions=COMPLETIONS, keep_errors=st.booleans()
)
def test_whatever_a_function_raises_is_named(
    error: type[BaseException], text: object, completions: list[str], keep_errors: bool
):
    def raises(completion: str) -> float:
        raise error(real(text))

    async def raises_later(completion: str) -> float:
        raise error(real(text))

    for function in (raises, raises_later):
        scored([function], completions, keep_errors)


@fuzz(value=st.one_of(VALUES, st.tuples(VALUES, VALUES), st.tuples(*[VALUES] * 5)))
@example(value=("a", 1.0, EnvOrWrapper(np.array, [1.0, 2.0]), False, None))
@example(value=("a", EnvOrWrapper(unkind, "__float__", MemoryError), False, False, None))
@example(value=("a", 1.0, False, False, 1.5))
@example(value=EnvOrWrapper(guarded, "__class__", ValueError))
@example(value=(EnvOrWrapper(guarded, "__class__", ValueError), None))
def test_whatever_a_game_returns_is_taken_or_named(value: object):
    with suppress(*ENDS):  # an exit is for the play to name, see episodes.gym
        returned(real(value))


def returned(value: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy's, that NotImplemented is no truth value
        reset = told_or(partial(check_reset, "game", value), DataError)
        step = told_or(partial(check_step, "game", value), (DataError, RewardError))
    assert reset is None or (isinstance(reset[0], str) and isinstance(reset[1], dict))
    if step is not None:
        assert -LARGEST <= step[1] <= LARGEST
        assert isinstance(step[2], bool)
        assert isinstance(step[3], bool)
        assert isinstance(step[4], dict)
