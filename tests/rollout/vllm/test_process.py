"""vLLM's process: how it is started, ends, and is told of. In it runs a double without torch."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny
from vllm_doubles import REQUEST, build, settings_of

from evo_grpo.errors import ConfigError, EngineUnavailable, RunFailedError
from evo_grpo.rollout.vllm import process as module
from evo_grpo.rollout.vllm.vllm_engine import VLLMEngine


@pytest.fixture
def echo(double_in_child, monkeypatch, tmp_path):
    """Settings of the double; `order` is a file with what it is to do in its next call."""
    monkeypatch.setenv("EVO_GRPO_DOUBLE", "echo")
    monkeypatch.setenv("EVO_GRPO_DOUBLE_LOG", str(tmp_path / "calls"))
    monkeypatch.setenv("EVO_GRPO_DOUBLE_ORDER", str(tmp_path / "order"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def process_of(engine):
    return engine._link._process


def told(folder):
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def wait_until(happened, seconds=60.0):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def logs(folder):
    return sorted(folder.glob("evo-grpo-vllm-*.log"))


def test_ids_go_out_and_tokens_and_logprobs_come_back(pair, echo):
    engine = build(pair)
    (groups,) = engine.rollout([REQUEST])
    assert [len(g.completions) for g in groups] == [2, 2]
    for group in groups:
        for completion in group.completions:
            first, *rest = completion.token_ids
            assert rest == [3 + (first - 3 + i) % 90 for i in (1, 2, 3)]
            assert completion.logprobs == (-1.0,) * 4
    assert len({c.token_ids for g in groups for c in g.completions}) == 4
    assert engine.rollout([REQUEST]) == [groups]
    engine.close()


def test_what_it_is_started_with(pair, echo):
    settings = settings_of(
        engine={"max_decode_rows": 5, "rollout": "vllm"},
        algorithm={"max_model_len": 30},
        dtype="bfloat16",
        quantization="awq",
        kv_cache_dtype="fp8",
        kv_cache_memory_bytes=7_000_000,
        gpu_memory_utilization=0.5,
        max_num_batched_tokens=600,
        enforce_eager=False,
        max_loras=3,
        max_lora_rank=64,
        options={"block_size": 32},
    )
    VLLMEngine(pair, settings).close()
    keywords = told(echo)[0][1]
    assert Path(keywords.pop("model")).name == "base"  # written: a module has no folder
    assert keywords == {
        "block_size": 32,
        "enable_chunked_prefill": False,
        "trust_remote_code": False,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "seed": 0,
        "max_model_len": 30,
        "max_num_seqs": 5,
        "dtype": "bfloat16",
        "enforce_eager": False,
        "gpu_memory_utilization": 0.5,
        "tensor_parallel_size": 1,
        "enable_lora": True,
        "max_loras": 3,
        "max_lora_rank": 64,
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": False,
        "quantization": "awq",
        "kv_cache_dtype": "fp8",
        "kv_cache_memory_bytes": 7_000_000,
        "max_num_batched_tokens": 600,
    }


def test_a_dead_process_is_named_with_its_last_lines_and_its_log(pair, echo):
    engine = build(pair)
    pid = process_of(engine).pid
    (echo / "order").write_text("kill")
    with pytest.raises(RunFailedError) as caught:
        engine.rollout([REQUEST])
    message = str(caught.value)
    assert message.startswith(f"engine.rollout: vLLM's process {pid} (")
    assert "was ended by signal 9 (SIGKILL) while sampling; finished rounds are in" in message
    assert "continue with: evo-grpo resume RUN" in message
    assert caught.value.exit_code == 1
    assert caught.value.__notes__ == ["  the double is about to be killed"]
    (log,) = logs(echo)
    assert str(log) in message
    assert "about to be killed" in log.read_text()
    engine.close()
    assert logs(echo) == [log]


def test_an_error_in_it_is_told_and_its_traceback_is_in_the_log(pair, echo):
    engine = build(pair)
    (echo / "order").write_text("raise")
    with pytest.raises(
        RunFailedError, match=r"raised RuntimeError while sampling: .* told to raise; f"
    ):
        engine.rollout([REQUEST])
    (log,) = logs(echo)
    assert "Traceback (most recent call last)" in log.read_text()
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_a_vllm_that_hangs_is_named_with_the_setting_that_says_how_long(pair, echo, stopped):
    engine = build(pair, timeout=2.5)
    process = process_of(engine)
    if stopped:
        os.kill(process.pid, signal.SIGSTOP)
    else:
        (echo / "order").write_text("hang")
    with pytest.raises(RunFailedError) as caught:
        engine.rollout([REQUEST])
    message = str(caught.value)
    assert "made no progress for 2.5 s while sampling and was ended; if that may take" in message
    assert "raise engine.vllm.timeout; finished rounds are in the run folder; continue" in message
    assert not is_alive(process.pid)
    (log,) = logs(echo)
    assert str(log) in message


@pytest.mark.slow
def test_a_vllm_that_is_slow_and_goes_on_is_waited_for(pair, echo):
    engine = build(pair, timeout=2.5)
    (echo / "order").write_text("crawl 6")
    (groups,) = engine.rollout([REQUEST])
    assert len(groups) == 2
    engine.close()


def test_a_vllm_that_does_not_start_is_bad_input(pair, echo):
    with pytest.raises(EngineUnavailable) as caught:
        build(pair, options={"fail": "no such base"})
    assert "raised ValueError while starting: no such base; fix that (its" in str(caught.value)
    assert caught.value.__notes__[-1] == "  ValueError: no such base"
    assert caught.value.exit_code == 2
    with pytest.raises(EngineUnavailable, match="ended with code 3 while starting") as caught:
        build(pair, options={"exit": 3})
    assert caught.value.__notes__ == ["  the double was told to exit"]


def test_flashinfers_sampler_is_off_where_it_is_missing(pair, echo, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
        build(pair).close()
        assert told(echo)[0][0] == "LLM"
        (echo / "flashinfer.py").write_text("raise ImportError('flashinfer was imported')")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(echo), os.environ["PYTHONPATH"]]))
        with pytest.raises(EngineUnavailable, match="starting: flashinfer was imported"):
            build(pair)


def test_closing_ends_it_and_leaves_nothing(pair, echo):
    engine = build(pair)
    process, folders = process_of(engine), engine._folders
    assert len(logs(echo)) == 1
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in folders)
    engine.close()
    engine.close()
    assert process.returncode == 0
    assert logs(echo) == []
    assert not any(folder.exists() for folder in folders)


def test_a_fork_of_the_trainer_ends_nothing_with_itself(pair, echo):
    engine = build(pair)
    answer = engine.rollout([REQUEST])
    code = os.fork()
    if not code:
        try:
            engine.close()
        finally:
            os._exit(0)
    os.waitpid(code, 0)
    assert all(folder.is_dir() for folder in engine._folders)
    assert engine.rollout([REQUEST]) == answer
    engine.close()


@contextmanager
def trainer(folder):
    """A process with an engine, which calls it once per line that it reads; with vLLM's pid."""
    helpers = str(Path(tiny.__file__).parent)
    with subprocess.Popen(
        [sys.executable, f"{helpers}/vllm_doubles.py"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        pid, *folders = process.stdout.readline().split()
        try:
            yield process, int(pid), list(map(Path, folders))
        finally:
            process.kill()


def call(process):
    process.stdin.write("call\n")
    process.stdin.flush()


def hang(process, folder):
    (folder / "order").write_text("hang")
    call(process)
    wait_until(lambda: (folder / "order").read_text() == "hanging")


@pytest.mark.slow
def test_ctrl_c_is_for_the_trainer_which_ends_it_at_once(echo):
    with trainer(echo) as (process, pid, folders):
        hang(process, echo)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        assert process.wait(60) == 7
        assert process.stdout.read().split() == ["interrupted", "-9"]  # not by waiting for it
        assert not is_alive(pid)
        assert not any(folder.exists() for folder in folders)
        assert logs(echo) == []


@pytest.mark.slow
def test_it_ends_with_a_trainer_that_is_killed_even_in_a_call(echo):
    with trainer(echo) as (process, pid, folders):
        hang(process, echo)
        process.kill()
        wait_until(lambda: not is_alive(pid))
        assert not any(folder.exists() for folder in folders)


# --- the Python it runs in ------------------------------------------------------------------------


def test_the_program_needs_nothing_of_evo_grpo(tmp_path):
    """By a Python without site-packages, from a folder that has no evo_grpo either."""
    script = Path(module.server.__file__)
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(script), "--probe"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == {
        "python": ".".join(map(str, sys.version_info[:3])),
        "vllm": False,
    }
    assert done.stderr == ""


def test_modules_beside_the_program_hide_none_of_vllms(tmp_path):
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "server.py").write_text(Path(module.server.__file__).read_text())
    (folder / "vllm.py").write_text("raise SystemExit('the wrong one')")
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(folder / "server.py"), "--probe"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["vllm"] is False


def test_a_missing_vllm_is_named_with_the_remedies(pair):
    with pytest.raises(EngineUnavailable) as caught:
        build(pair)
    message = str(caught.value)
    assert message.startswith("engine.rollout: vllm needs the package vllm, and this Python (3.")
    assert 'pip install "evo-grpo[vllm]"' in message
    assert "engine.vllm.python" in message


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/no/such/python", "No such file or directory"),
        ("/bin/echo", "Expecting value"),
    ],
)
def test_a_python_that_is_none(pair, python, said):
    with pytest.raises(EngineUnavailable) as caught:
        build(pair, python=python)
    message = str(caught.value)
    assert message.startswith(f"engine.vllm.python: '{python}' cannot be run: ")
    assert said in message
    assert message.endswith("name the Python of an environment in which vLLM is installed")


def test_another_python_is_the_one_that_runs_it(pair, echo):
    other = echo / "python"
    other.write_text(f'#!/bin/sh\nEVO_GRPO_OTHER=yes exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    engine = build(pair, python=str(other))
    variables = Path(f"/proc/{process_of(engine).pid}/environ").read_bytes().split(b"\0")
    assert b"EVO_GRPO_OTHER=yes" in variables
    engine.close()


def test_its_environment_is_the_trainers_but_for_ranks_and_threads(pair, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")
    monkeypatch.setenv("EVO_GRPO_MINE", "kept")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    found = module.environment(pair.base, settings_of())
    assert not found.keys() & {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")
    }
    assert found["EVO_GRPO_MINE"] == "kept"
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["VLLM_HOST_IP"] == "10.0.0.1"
    assert found["VLLM_NO_USAGE_STATS"] == "1"


class OnCuda:
    """A base that says it is on a device."""

    def __init__(self, index):
        self.device = type("Device", (), {"type": "cuda", "index": index})()


@pytest.mark.parametrize(
    ("seen", "index", "settings", "expected"),
    [
        (None, None, {}, "0"),
        (None, 2, {}, "2"),
        ("4,5,6", 1, {}, "5"),
        ("4,5,6", 1, {"tensor_parallel_size": 2}, "5,6"),
        ("GPU-a,GPU-b", 0, {"devices": [1]}, "GPU-b"),
    ],
)
def test_it_gets_the_trainers_device_or_those_that_are_named(
    monkeypatch, seen, index, settings, expected
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    found = module.environment(OnCuda(index), settings_of(**settings))
    assert found["CUDA_VISIBLE_DEVICES"] == expected


def test_a_device_that_is_hidden(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"among the 1 of CUDA_VISIBLE_DEVICES, got \[1\]; add"):
        module.environment(OnCuda(0), settings_of(devices=[1]))


# --- where the base is ----------------------------------------------------------------------------


def folder_of(base, tmp_path, name, **vllm):
    settings = settings_of(**vllm).replace(model=name)
    return module.base_folder(base, settings, tmp_path)


def test_a_base_with_a_folder_is_loaded_from_there(sums_base, tmp_path):
    place = folder_of(sums_base, tmp_path, "tiny-sums")
    assert Path(place).name == "tiny-sums"
    assert (Path(place) / "model.safetensors").is_file()
    assert folder_of(sums_base, tmp_path, "Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert folder_of(sums_base, tmp_path, "tiny-sums", model="/x/awq") == "/x/awq"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", [None, {"name": "tiny-sums", "config": {"num_hidden_layers": 4}}])
def test_any_other_base_is_written(sums_base, tmp_path, model):
    place = folder_of(sums_base, tmp_path, model)
    assert place == str(tmp_path / "base")
    sums_base.check_same(Path(place))
