"""wandb, offline, read back from the files that `wandb sync` sends."""

import json

import pytest
from tracker_contract import TrackerContract, need
from tracker_files import read_wandb, runs_of_wandb

need("wandb")
pytestmark = pytest.mark.trackers


class TestWandB(TrackerContract):
    kind = "wandb"
    options = {"project": "sums"}  # noqa: RUF012 -- read alone

    def read(self, folder):
        return read_wandb(folder)

    def test_the_run_has_its_name_project_and_settings(self, made):
        (run,) = runs_of_wandb(made)
        assert (run.project, run.display_name) == ("sums", "run")
        settings = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert settings["model.name"] == "tiny-sums"
        assert settings["population.size"] == 3
