"""`record.trackers` as settings: shorthands, and what is refused."""

import pytest
from small_run import small

from evo_grpo.errors import ConfigError
from evo_grpo.settings import RecordConfig
from evo_grpo.settings.trackers import TrackerConfig


@pytest.mark.parametrize(
    ("trackers", "said"),
    [
        (["wandb", "wandb"], r"trackers\[1\].kind: expected each kind once"),
        ([{"kind": "tensorboard", "online": True}], "online: tensorboard takes folder alone"),
        (
            [{"kind": "mlflow", "server": "http://me:secret@host"}],
            "server: expected a URL without user and password",
        ),
        (3, "trackers: expected a list, got 3"),
    ],
)
def test_settings_that_cannot_be_are_refused(trackers, said):
    with pytest.raises(ConfigError, match=said) as error:
        small(record__trackers=trackers)
    assert "secret" not in str(error.value)


def test_a_tracker_may_be_given_by_its_kind_alone():
    assert RecordConfig(trackers="wandb").trackers == [TrackerConfig(kind="wandb")]
    assert RecordConfig(trackers=None).trackers == []
