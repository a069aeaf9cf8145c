"""experiments/architectures: a sample of the sweep, and the page of what the whole one found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments" / "architectures"
REFUSED = {"bert", "openai-gpt"}


def rows_of(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def sweep(*arguments):
    return subprocess.run(
        [sys.executable, str(FOLDER / "sweep.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_of_each_kind_is_exact_or_refused(tmp_path):
    out = tmp_path / "results.jsonl"
    done = sweep("--sample", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {row["model_type"]: row["verdict"] for row in rows_of(out)}
    assert {name for name, verdict in verdicts.items() if verdict == "refused"} == REFUSED
    assert {verdict for name, verdict in verdicts.items() if name not in REFUSED} == {"exact"}
    # A second call has nothing left to do.
    again = sweep("--sample", "--out", out)
    assert again.stdout.count("\n") == 1


def test_no_architecture_is_wrong_or_late():
    rows = rows_of(FOLDER / "results.jsonl")
    assert {row["verdict"] for row in rows} <= {"exact", "refused", "cannot build"}
    assert all(row["sentence"] for row in rows if row["verdict"] != "exact")
    assert all(max(row["errors"].values()) <= 1e-5 for row in rows if row["verdict"] == "exact")


def test_the_page_has_the_results():
    sys.path.insert(0, str(FOLDER))
    try:
        from page import page
    finally:
        sys.path.remove(str(FOLDER))
    written = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    rows = rows_of(FOLDER / "results.jsonl")
    if {row["transformers"] for row in rows} != {transformers.__version__}:
        pytest.skip(f"the sweep is not of transformers {transformers.__version__}")
    assert page(rows, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)) == written
