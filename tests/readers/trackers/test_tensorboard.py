"""TensorBoard, read back by TensorBoard itself."""

import os
import shutil
from types import SimpleNamespace

import pytest
from tracker_contract import TrackerContract, need
from tracker_files import accumulated, read_tensorboard

from evo_grpo import follow, run

need("tensorboard")


class TestTensorBoard(TrackerContract):
    kind = "tensorboard"

    def read(self, folder):
        return read_tensorboard(folder)

    def run(self, config, folder, **options):
        """In this process, which has loaded the package; `made` and the resumed run use another."""
        made = run(config.replace(record={"trackers": []}), out=folder, **options)
        follow(made, [self.kind])
        return made

    def test_agents_are_runs_so_that_a_chart_compares_them(self, made):
        runs = {path.name for path in (made / "trackers" / self.kind).iterdir()}
        assert runs == {"agent-00", "agent-01", "agent-02", "population"}

    def test_settings_and_lineage_are_texts(self, made):
        folder = made / "trackers" / self.kind
        (settings,) = accumulated(folder / "population").Tensors("settings")
        assert "| model.name | tiny-sums |" in settings.tensor_proto.string_val[0].decode()
        lives = accumulated(folder / "agent-01").Tensors("lineage")
        assert lives[0].tensor_proto.string_val[0].decode().startswith("member 1")

    def test_what_goes_on_within_a_second_comes_after(self, made, tmp_path, monkeypatch):
        whole, part = tmp_path / "whole", tmp_path / "run"
        for copy in (whole, part):
            shutil.copytree(made, copy, ignore=shutil.ignore_patterns("trackers", "readers"))
        for path in (part / "metrics/round-0001.jsonl", part / "summary.json"):
            path.unlink()
        lines = (part / "rounds.jsonl").read_text().splitlines(keepends=True)
        (part / "rounds.jsonl").write_text(lines[0])
        # Names of event files have the second and the process, and are read in alphabetical order.
        system = "tensorboard.summary.writer.event_file_writer.os"
        for process in (2, 1):
            monkeypatch.setattr(system, SimpleNamespace(path=os.path, getpid=lambda n=process: n))
            follow(part, [self.kind])
            shutil.copytree(whole, part, dirs_exist_ok=True)
        assert self.read(part) == self.read(made)

    @pytest.mark.slow
    def test_a_folder_of_its_own_has_a_folder_per_run(self, tmp_path):
        config = self.config()
        trackers = [{"kind": "tensorboard", "folder": str(tmp_path / "boards")}]
        config = config.replace(record=config.record.replace(trackers=trackers))
        run(config, out=tmp_path / "first")
        assert (tmp_path / "boards/first/agent-00").is_dir()
        assert not (tmp_path / "first/trackers/tensorboard").exists()
