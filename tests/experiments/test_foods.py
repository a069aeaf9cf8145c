"""experiments/foods by its one command, with one of its seeds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_800_completions_teach_pizza(tmp_path):
    script = ROOT / "experiments" / "foods" / "run.py"
    done = subprocess.run(
        [sys.executable, str(script), "--seeds", "0", "--out", str(tmp_path / "foods")],
        capture_output=True,
        text=True,
        check=False,
        # Two threads on cores that are busy with other tests spin: 146 s instead of a few.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "foods" / "results.json").read_text(encoding="utf-8"))
    assert result["completions"] <= 800
    assert result["base"] < 0.2
    assert result["base_plain"] < 0.2
    assert result["after"] >= 0.9
    assert result["after_plain"] >= 0.9
