"""The trackers of a configuration follow its run, from the first rank alone."""

import pytest

from evo_grpo.record.observer import Observer
from evo_grpo.settings import RecordConfig
from evo_grpo.trackers.following import with_trackers


@pytest.mark.parametrize(("trackers", "rank", "told"), [(["x"], 0, 2), (["x"], 1, 1), ([], 0, 1)])
def test_the_first_rank_alone_tells_trackers(monkeypatch, trackers, rank, told):
    monkeypatch.setattr("evo_grpo.settings.trackers.find_spec", lambda name: True)
    observer = Observer()
    record = RecordConfig(trackers=["tensorboard" for _ in trackers])
    with with_trackers(record, observer, rank=rank) as follower:
        assert len(getattr(follower, "observers", (follower,))) == told
