"""metrics/: what each step measured, written with its round and read back."""

import json
import math
import shutil

import numpy as np
import pytest
from small_run import Told, small

from evo_grpo import resume, run
from evo_grpo.after.verify import verify
from evo_grpo.errors import CheckpointError, RunNotFoundError
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.history import metric_rows, read_metrics
from evo_grpo.record.observer import Observer
from evo_grpo.record.run_dir import RunDir

TOLD = {
    *("reward", "loss", "clip_fraction", "clip_low", "clip_high", "zero_variance"),
    *("entropy", "completion_length", "ended", "sampler_gap", "grad_norm", "ratio_max"),
    *("lr", "tokens", "completions", "rows", "updates"),
}


class Steps(Observer):
    """Keeps what it hears of steps."""

    def __init__(self):
        self.heard = []

    def step_done(self, round, step, metrics):
        self.heard += [{"round": round, "step": step, "agent": a, **m} for a, m in metrics.items()]


def config(**changes):
    return small(
        population__steps_per_round=2,
        population__rounds=2,
        algorithm__lr_schedule={"steps": 4, "warmup_proportion": 0.5},
        **changes,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    observer = Steps()
    return run(config(), out=tmp_path_factory.mktemp("runs") / "run", observer=observer), observer


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "run")
    return tmp_path / "run"


def test_a_row_for_each_step_and_agent(folder):
    rows = metric_rows(folder)
    assert [(row["round"], row["step"], row["agent"]) for row in rows] == [
        (round, step, agent) for round in range(2) for step in range(2) for agent in range(3)
    ]
    assert all(set(row) >= TOLD for row in rows)


def test_the_means_of_a_round_are_those_of_its_steps(folder):
    frame = read_metrics(folder)
    for record in read_rounds(folder):
        for agent in record.agents:
            steps = frame[(frame["round"] == record.round) & (frame["agent"] == agent.agent)]
            assert steps["reward"].tolist() == list(agent.step_rewards)
            assert steps["tokens"].sum() == agent.tokens
            # Without a beta no KL is computed, and none is recorded.
            assert ("kl" in agent.metrics) == (agent.hparams.beta > 0) == (steps["kl"].count() == 2)
            assert steps["kl"].mean() == pytest.approx(
                agent.metrics.get("kl", math.nan), nan_ok=True
            )
            assert steps["ratio_max"].max() == agent.metrics["ratio_max"]
            assert steps["rows"].sum() == agent.metrics["rows"]
            assert not {"lr", "tokens", "completions"} & set(agent.metrics)
            # Half of the four steps warm up, then a cosine of two steps.
            factors = [[0.5, 1.0], [1.0, 0.5]][record.round]
            assert steps["lr"].tolist() == pytest.approx([agent.hparams.lr * f for f in factors])


def test_an_observer_hears_of_each_step_what_is_recorded(made):
    folder, observer = made
    assert [json.loads(json.dumps(row)) for row in observer.heard] == metric_rows(folder)


def test_the_file_is_one_of_its_round_and_a_change_of_it_is_found(folder):
    name = "metrics/round-0001.jsonl"
    assert name in read_rounds(folder)[1].files
    assert verify(folder).damage == []
    (folder / name).write_text((folder / name).read_text().replace('"step": 1', '"step": 0'))
    (text,) = verify(folder).damage
    assert name in text
    (folder / name).unlink()
    (text,) = verify(folder).damage
    assert f"{name}: is missing" in text


@pytest.mark.slow
def test_a_run_stopped_in_a_round_goes_on_to_the_same_files(folder, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(config(), out=tmp_path / "stopped", observer=Told(("evaluate", 1)))
    half = tmp_path / "stopped/metrics/round-0001.jsonl"
    assert len(half.read_bytes().splitlines()) == 6, "both steps of three agents"
    with RunDir.open(tmp_path / "stopped") as opened:
        opened.amend_round(opened.rounds()[-1])  # a line of rounds.jsonl that is no round
    assert {row["round"] for row in metric_rows(tmp_path / "stopped")} == {0}
    half.write_text(half.read_text() * 2 + "half a li")
    resume(tmp_path / "stopped")
    for name in ("round-0000.jsonl", "round-0001.jsonl"):
        written = (tmp_path / "stopped/metrics" / name).read_bytes()
        assert written == (folder / "metrics" / name).read_bytes()
    assert verify(tmp_path / "stopped").damage == []


def test_without_metrics_a_run_records_all_else(folder, tmp_path):
    without = run(config(record__metrics=False), out=tmp_path / "without")
    assert not (without / "metrics").exists()
    assert not any(name.startswith("metrics") for r in read_rounds(without) for name in r.files)
    assert read_metrics(without).empty
    assert list(read_metrics(without)) == ["round", "step", "agent"]
    for one, other in zip(read_rounds(without), read_rounds(folder), strict=True):
        assert [a.metrics for a in one.agents] == [a.metrics for a in other.agents]
        assert [a.adapter_sha256 for a in one.agents] == [a.adapter_sha256 for a in other.agents]
    assert verify(without).damage == []


def test_each_of_several_reward_functions_has_a_mean(tmp_path, monkeypatch):
    (tmp_path / "scores.py").write_text(
        "def length(completion):\n"
        "    return float(len(completion))\n"
        "def sometimes(completion, answer):\n"
        "    return 1.0 if completion.startswith('1') else None\n"
    )
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(60))
    )
    monkeypatch.syspath_prepend(tmp_path)
    env = {
        "kind": "dataset",
        "train": str(tmp_path / "rows.jsonl"),
        "prompt": "{question}",
        "reward": ["scores:length", "scores:sometimes"],
        "reward_weights": [0.25, 1.0],
    }
    folder = run(config(env=env, algorithm__max_output_tokens=6), out=tmp_path / "run")
    frame = read_metrics(folder)
    assert {"reward/length", "reward/sometimes"} <= set(frame)
    assert frame["reward/length"].between(0, 6).all()
    assert set(frame["reward/sometimes"].dropna()) <= {1.0}
    for record in read_rounds(folder):
        for agent in record.agents:
            steps = frame[(frame["round"] == record.round) & (frame["agent"] == agent.agent)]
            mean = agent.metrics["reward/length"]
            assert mean == pytest.approx(steps["reward/length"].mean())


def test_damaged_lines_are_named_with_their_file(folder):
    path = folder / "metrics/round-0000.jsonl"
    lines = path.read_text().splitlines()
    for damage in (
        "{",
        "[]",
        '{"round": 0, "step": 0}',
        lines[1].replace('"agent": 1', '"agent": "x"'),
    ):
        path.write_text("\n".join([lines[0], damage, *lines[2:]]))
        with pytest.raises(
            CheckpointError, match=r"round-0000\.jsonl, line 2: expected the metrics"
        ):
            metric_rows(folder)


def test_numbers_that_are_not_finite_are_null_and_read_as_nan(folder):
    path = folder / "metrics/round-0000.jsonl"
    rows = [{"round": 0, "step": 0, "agent": 0, "kl": None, "loss": 1}]
    path.write_text(json.dumps(rows[0]) + "\n")
    frame = read_metrics(folder)
    assert math.isnan(frame["kl"][0])
    assert frame["loss"][0] == 1.0
    assert frame.dtypes["agent"] == "Int64"
    assert frame.dtypes["kl"] == np.float64


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunNotFoundError):
        read_metrics(tmp_path)
