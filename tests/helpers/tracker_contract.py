"""What every kind of tracker does; a test of one says how to read what it wrote."""

import json
import os
import time
import warnings
from importlib.util import find_spec
from typing import ClassVar

import pytest
from small_run import Told, small

from evo_grpo import follow, resume, run
from evo_grpo.analysis.verify import verify
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.history import metric_rows

STEPS = 2
ASKED = "EVO_GRPO_TRACKERS"
"""Set by `make test-trackers`, which installs them all."""


def need(module):
    """Skip the module of tests that calls this where a package is missing."""
    if find_spec(module) is None:
        if os.environ.get(ASKED):
            pytest.fail(f"{module} is missing although {ASKED} is set", pytrace=False)
        pytest.skip(f"{module} is not installed; see make test-trackers", allow_module_level=True)


class TrackerContract:
    """Inherit it, and give `kind`, `options` and `read`."""

    kind: str
    options: ClassVar = {}

    def read(self, folder):
        """Return what was written of a run: {(who, metric): [(step, value), ...]}."""
        raise NotImplementedError

    def state_at(self, folder, rounds, steps):
        """Return what the reader remembers, once it is so far; a package may load for long."""
        file = folder / "readers" / f"{self.kind}.json"
        until = time.monotonic() + 60
        while not (file.is_file() and self.so_far(file, rounds, steps)):
            assert time.monotonic() < until
            time.sleep(0.05)
        return json.loads(file.read_text())

    def so_far(self, file, rounds, steps):
        cursor = json.loads(file.read_text())["cursor"]
        return cursor["rounds"] == rounds and (cursor["steps"] > 0) == steps

    @classmethod
    def config(cls, **changes):
        tracker = {"kind": cls.kind, **cls.options}
        return small(
            population__steps_per_round=STEPS,
            population__rounds=2,
            record__trackers=[tracker],
            **changes,
        )

    def run(self, config, folder, **options):
        """Run, and have the tracker follow it."""
        return run(config, out=folder, **options)

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, tmp_path_factory):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return run(cls.config(), out=tmp_path_factory.mktemp("runs") / "run")

    def test_each_step_of_each_agent_is_there_once(self, made):
        found, rows = self.read(made), metric_rows(made)
        for name in ("reward", "loss", "kl", "lr", "tokens"):
            for agent in range(3):
                expected = [
                    (row["round"] * STEPS + row["step"] + 1, row[name])
                    for row in rows
                    if row["agent"] == agent and name in row
                ]
                assert found.get((f"agent-{agent:02d}", name), []) == [
                    (step, pytest.approx(value, rel=1e-5)) for step, value in expected
                ]

    def test_rounds_are_there_with_fitness_hyperparameters_and_lineage(self, made):
        found = self.read(made)
        for record in read_rounds(made):
            step = (record.round + 1) * STEPS
            for agent in record.agents:
                who = f"agent-{agent.agent:02d}"
                for name, value in (
                    ("fitness", agent.score.mean),
                    ("member", agent.member),
                    ("hyperparameters/lr", agent.hparams.lr),
                ):
                    assert (step, pytest.approx(value, rel=1e-5)) in found[who, name]
            best = max(agent.score.mean for agent in record.agents)
            assert (step, pytest.approx(best, rel=1e-5)) in found["population", "fitness/best"]
            assert (step, record.round + 1) in found["population", "round"]
        assert "test" in {name.partition("/")[0] for _, name in found}

    def test_what_it_writes_lies_in_the_run_folder_and_the_run_is_whole(self, made):
        assert (made / "readers" / f"{self.kind}.json").is_file()
        assert any((made / "trackers" / self.kind).rglob("*"))
        assert verify(made).damage == []

    def test_a_resumed_run_goes_on_in_the_same_tracker_without_a_step_twice(self, made, tmp_path):
        with pytest.raises(KeyboardInterrupt):
            run(self.config(), out=tmp_path / "run", observer=Told(("evaluate", 1)))
        # Some of the round that is played again.
        state = self.state_at(tmp_path / "run", 1, steps=True)
        resume(tmp_path / "run")
        again = json.loads((tmp_path / "run/readers" / f"{self.kind}.json").read_text())
        assert again["id"] == state["id"]
        one, two = self.read(made), self.read(tmp_path / "run")
        timeless = [key for key in one if not key[1].startswith("seconds/")]
        for key in timeless:
            assert one[key] == two.get(key), key

    def test_a_finished_run_is_brought_into_it_afterwards(self, made, tmp_path):
        config = self.config()
        untold = run(config.replace(record={"trackers": []}), out=tmp_path / "run")
        follow(untold, [self.kind])
        one, two = self.read(made), self.read(untold)
        for key in [key for key in one if not key[1].startswith("seconds/")]:
            assert one[key] == two.get(key), key

    def test_a_run_that_replaces_another_begins_anew(self, tmp_path):
        self.run(self.config(), tmp_path / "run")
        first = json.loads((tmp_path / "run/readers" / f"{self.kind}.json").read_text())
        self.run(self.config(seed=4), tmp_path / "run", force=True)
        second = json.loads((tmp_path / "run/readers" / f"{self.kind}.json").read_text())
        assert self.kind in ("tensorboard", "trackio") or first["id"] != second["id"]
        found, rows = self.read(tmp_path / "run"), metric_rows(tmp_path / "run")
        assert [value for _, value in found["agent-00", "tokens"]] == [
            row["tokens"] for row in rows if row["agent"] == 0
        ]
