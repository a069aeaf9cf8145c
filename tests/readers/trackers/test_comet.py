"""Comet, offline, read back from the archives that `comet upload` sends."""

import json
from zipfile import ZipFile

import pytest
from tracker_contract import TrackerContract, need

need("comet_ml")
pytestmark = pytest.mark.trackers


def messages(folder):
    archives = (folder / "trackers/comet").glob("*.zip")
    for path in sorted(archives, key=lambda path: path.stat().st_mtime):
        with ZipFile(path) as archive, archive.open("messages.json") as lines:
            yield from map(json.loads, lines)


class TestComet(TrackerContract):
    kind = "comet"
    options = {"project": "sums"}  # noqa: RUF012 -- read alone

    def read(self, folder):
        out = {}
        for message in messages(folder):
            if message["type"] != "metric_msg":
                continue
            metric = message["payload"]["metric"]
            name, slash, owner = metric["metricName"].rpartition("/")
            agent = slash and owner.startswith("agent-")
            key = (owner, name) if agent else ("population", metric["metricName"])
            if metric["metricName"] != "process duration":
                out.setdefault(key, []).append((metric["step"], metric["metricValue"]))
        return out

    def test_settings_and_lineage_are_there(self, made):
        found = list(messages(made))
        settings = {
            one["payload"]["param"]["paramName"]: one["payload"]["param"]["paramValue"]
            for one in found
            if one["type"] == "parameter_msg"
        }
        assert settings["model.name"] == "tiny-sums"
        texts = {
            m["payload"]["key"]: m["payload"]["value"] for m in found if m["type"] == "log_other"
        }
        assert texts["lineage/000002/agent-01"] == "member 1"
