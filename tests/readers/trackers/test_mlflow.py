"""MLflow, read back by its client from its SQLite file."""

import warnings

import pytest
from tracker_contract import TrackerContract, need

need("mlflow")
pytestmark = [
    pytest.mark.trackers,
    # MLflow's own tables, which are set up by whichever test comes first
    pytest.mark.filterwarnings("ignore:The ..noload.. loader strategy is deprecated"),
]


def client(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow's own imports
        from mlflow.tracking import MlflowClient

        return MlflowClient(f"sqlite:///{folder / 'trackers/mlflow/mlflow.db'}")


class TestMLflow(TrackerContract):
    kind = "mlflow"

    def run_of(self, folder):
        found = client(folder)
        (experiment,) = [e for e in found.search_experiments() if e.name == "evo-grpo"]
        (run,) = found.search_runs([experiment.experiment_id])
        return found, run

    def read(self, folder):
        found, run = self.run_of(folder)
        out = {}
        for name in run.data.metrics:
            metric, slash, who = name.rpartition("/")
            agent = slash and who.startswith("agent-")
            key = (who, metric) if agent else ("population", name)
            history = found.get_metric_history(run.info.run_id, name)
            out[key] = [(one.step, one.value) for one in history]
        return out

    def test_the_run_is_over_and_has_its_settings_and_lives(self, made):
        _, run = self.run_of(made)
        assert run.info.status == "FINISHED"
        assert run.info.run_name == "run"
        assert run.data.params["model.name"] == "tiny-sums"
        assert run.data.tags["lineage.000002.agent-01"] == "member 1"
