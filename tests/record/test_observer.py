"""Observer: a base class of which any part may be overridden."""

import inspect

import pytest

import evo_grpo
from evo_grpo.record.observer import Observer

METHODS = ("started", "stage", "round_done", "finished")


def call_all(observer, record):
    observer.started(None, 2, 0, None)
    observer.stage(0, "learn", 0, 1)
    observer.round_done(record)
    observer.finished({"rounds": 2})


@pytest.mark.parametrize("overridden", METHODS)
def test_one_method_is_enough(make_run, overridden):
    calls = []
    method = {overridden: lambda self, *arguments: calls.append(arguments)}
    (record,) = make_run(rounds=1)
    call_all(type("Partial", (Observer,), method)(), record)
    (arguments,) = calls
    assert len(arguments) == len(inspect.signature(getattr(Observer, overridden)).parameters) - 1


def test_the_base_class_does_nothing_and_is_public(make_run):
    (record,) = make_run(rounds=1)
    call_all(Observer(), record)
    assert evo_grpo.Observer is Observer
    assert {"Observer", "history"} <= set(evo_grpo.__all__)
