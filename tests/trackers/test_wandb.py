"""wandb, offline, read back from the files that `wandb sync` sends."""

import json
import struct

import pytest
from tracker_contract import TrackerContract
from tracker_packages import need

need("wandb")
pytestmark = pytest.mark.trackers

BLOCK, HEADER = 32768, 7


def records(path):
    """Yield the records of a .wandb file: a header, then the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


class TestWandB(TrackerContract):
    kind = "wandb"
    options = {"project": "sums"}  # noqa: RUF012 -- read alone

    def runs(self, folder):
        return sorted((folder / "trackers/wandb/wandb").glob("offline-run-*/*.wandb"))

    def read(self, folder):
        out = {}
        for path in self.runs(folder):
            for record in records(path):
                items = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                for name, value in items.items():
                    metric, slash, who = name.rpartition("/")
                    agent = slash and who.startswith("agent-")
                    key = (who, metric) if agent else ("population", name)
                    if isinstance(value, int | float) and not name.startswith("_"):
                        out.setdefault(key, []).append((items["_step"], value))
        return out

    def test_the_run_has_its_name_project_and_settings(self, made):
        (path,) = self.runs(made)
        (run,) = [r.run for r in records(path) if r.HasField("run")]
        assert (run.project, run.display_name) == ("sums", "run")
        settings = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert settings["model.name"] == "tiny-sums"
        assert settings["population.size"] == 3
