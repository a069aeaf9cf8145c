"""Observer: a base class of which any part may be overridden."""

import pytest
from random_runs import make_run

import evo_grpo
from evo_grpo.errors import ConfigError
from evo_grpo.record.observer import Observer


def test_any_of_the_methods_may_be_overridden_and_the_others_do_nothing():
    class Printer(Observer):
        def round_done(self, record):
            rounds.append(record)

    rounds, (record,) = [], make_run(rounds=1)
    for observer in (Printer(), Observer()):
        observer.started(None, 2, 0, None)
        observer.stage(0, "learn", 0, 1)
        observer.step_done(0, 0, {0: {"reward": 1.0}})
        observer.round_done(record)
        observer.finished({"rounds": 2})
    assert rounds == [record]
    assert evo_grpo.Observer is Observer


def test_an_object_that_lacks_methods_is_refused_before_the_run(tmp_path):
    class Partial:
        def round_done(self, record):
            raise AssertionError(record)

    missing = "started, stage, step_done, note, finished"
    message = rf"observer: expected an evo_grpo.Observer, got .* without {missing}"
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=message):
        evo_grpo.run({"model": "tiny-sums", "env": "sums"}, out=folder, observer=Partial())
    assert not folder.exists()
    with pytest.raises(ConfigError, match=message):
        evo_grpo.GRPO.population(size=2, model="tiny-sums").train("sums", observer=Partial())
