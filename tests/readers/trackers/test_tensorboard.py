"""TensorBoard, read back by TensorBoard itself."""

import pytest
from tracker_contract import TrackerContract
from tracker_files import accumulated, read_tensorboard
from tracker_packages import need

need("tensorboard")


class TestTensorBoard(TrackerContract):
    kind = "tensorboard"

    def read(self, folder):
        return read_tensorboard(folder)

    def test_agents_are_runs_so_that_a_chart_compares_them(self, made):
        runs = {path.name for path in (made / "trackers" / self.kind).iterdir()}
        assert runs == {"agent-00", "agent-01", "agent-02", "population"}

    def test_settings_and_lineage_are_texts(self, made):
        folder = made / "trackers" / self.kind
        (settings,) = accumulated(folder / "population").Tensors("settings")
        assert "| model.name | tiny-sums |" in settings.tensor_proto.string_val[0].decode()
        lives = accumulated(folder / "agent-01").Tensors("lineage")
        assert lives[0].tensor_proto.string_val[0].decode().startswith("member 1")

    @pytest.mark.slow
    def test_a_folder_of_its_own_has_a_folder_per_run(self, tmp_path):
        from evo_grpo import run

        config = self.config()
        trackers = [{"kind": "tensorboard", "folder": str(tmp_path / "boards")}]
        config = config.replace(record=config.record.replace(trackers=trackers))
        run(config, out=tmp_path / "first")
        assert (tmp_path / "boards/first/agent-00").is_dir()
        assert not (tmp_path / "first/trackers/tensorboard").exists()
