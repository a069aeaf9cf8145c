"""The code for vLLM on a model card runs as printed, where vLLM is installed."""

import os
import subprocess

import pytest
from small_run import small

from evo_grpo import run
from evo_grpo.analysis.export.export import export

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(small(population__rounds=1), out=tmp_path_factory.mktemp("runs") / "sums-1")


@pytest.mark.parametrize("merge", [False, True])
def test_the_code_for_vllm_runs_as_printed(python, finished, tmp_path, merge):
    out = export(finished, tmp_path / "out", merge=merge)
    code = (out / "README.md").read_text().split("```python\n")[2].split("```")[0]
    (tmp_path / "card.py").write_text('import sys; sys.modules["evo_grpo"] = None\n' + code)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    # Of this machine, not of the export: how much memory vLLM takes on a CPU, and which device.
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run(
        [python, str(tmp_path / "card.py")],
        cwd=out,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Some of vLLM's log is on standard output too.
    answers = [line for line in done.stdout.splitlines() if line.isdigit()]
    assert len(answers) == 1, done.stdout
    assert len(answers[0]) <= 4
