"""trackio, read back from its SQLite file."""

import json
import sqlite3
from contextlib import closing

import pytest
from tracker_contract import TrackerContract, need

need("trackio")
pytestmark = pytest.mark.trackers


class TestTrackio(TrackerContract):
    kind = "trackio"

    def read(self, folder):
        out = {}
        with closing(sqlite3.connect(folder / "trackers/trackio/evo-grpo.db")) as database:
            rows = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
            (runs,) = database.execute("SELECT count(DISTINCT run_name) FROM metrics").fetchone()
        assert runs == 1
        for step, metrics in rows:
            for name, value in json.loads(metrics).items():
                metric, slash, who = name.rpartition("/")
                agent = slash and who.startswith("agent-")
                key = (who, metric) if agent else ("population", name)
                if isinstance(value, int | float):
                    out.setdefault(key, []).append((step, value))
        return out

    def test_lives_are_told(self, made):
        with closing(sqlite3.connect(made / "trackers/trackio/evo-grpo.db")) as database:
            rows = [json.loads(m) for (m,) in database.execute("SELECT metrics FROM metrics")]
        lives = [row["lineage/agent-01"] for row in rows if "lineage/agent-01" in row]
        assert lives[0] == "member 1"
