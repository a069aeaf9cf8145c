"""Starts the process that runs vLLM, and exchanges messages with it."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BufferedRWPair
from pathlib import Path
from typing import Any, NoReturn, final

import torch

from evo_grpo.errors import ConfigError, EngineUnavailable, ModelError, RunFailedError
from evo_grpo.escaping import printable, shorten
from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.rollout.vllm import server
from evo_grpo.settings import AgentSettings, VLLMSettings
from evo_grpo.sources import resolve

_log = logging.getLogger(__name__)

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as its largest LoRA rank."""
CPU_CACHE_BYTES = 1 << 30
_PROBE_SECONDS = 60

_QUIET = {
    # Send no usage statistics, and listen on the loopback address only.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    # Run vLLM's engine in its own process rather than in a further one.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # On a CPU: use OMP_NUM_THREADS threads instead of binding one to each core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_OF_RANKS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK")
"""A launcher's variables for the ranks of a run, which vLLM would take for its own."""

LAST_LINES = 8
"""Number of log lines that an error shows."""
_LOG_BYTES = 1 << 14
_DOING = {
    "start": "starting",
    "generate": "sampling",
    "sleep": "going to sleep",
    "wake": "waking",
}
_SECONDS_TO_END = 5.0


def find_vllm(settings: VLLMSettings) -> str:
    """Return the Python that runs vLLM; check that vLLM is installed there, without loading it."""
    configured = settings.python
    python = sys.executable if configured is None else str(Path(configured).expanduser())
    try:
        completed = subprocess.run(
            [python, server.__file__, "--probe"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
        versions = json.loads(completed.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        reason = getattr(error, "stderr", None) or getattr(error, "strerror", None) or error
        raise EngineUnavailable(
            f"engine.vllm.python: {python!r} cannot be run: {shorten(str(reason).strip())}; name "
            "the Python of an environment in which vLLM is installed"
        ) from error
    if not versions["vllm"]:
        whose = "this Python" if configured is None else repr(python)
        raise EngineUnavailable(
            f"engine.rollout: vllm needs the package vllm, and {whose} ({versions['python']}) has "
            'none; install it there: pip install "evo-grpo[vllm]"; or name the Python of an '
            "environment that has it in engine.vllm.python (evo-grpo need not be installed there); "
            "or leave engine.rollout out"
        )
    return python


def environment(base: SharedBase, settings: AgentSettings) -> dict[str, str]:
    """Return the environment variables of vLLM's process, made from those of this process."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith(("LOCAL_", "TORCHELASTIC_"))
    }
    variables = {**_QUIET, **variables, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    devices = settings.engine.vllm.devices
    if base.device.type == "cuda":
        index = base.device.index or 0
        numbers = devices or range(index, index + settings.engine.vllm.tensor_parallel_size)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [name for name in (visible or "").split(",") if name]
        if visible is not None and max(numbers) >= len(names):
            raise ConfigError(
                f"engine.vllm: expected devices among the {len(names)} of CUDA_VISIBLE_DEVICES, "
                f"got {list(numbers)}; add devices to it, or name others in engine.vllm.devices"
            )
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(
            str(number) if visible is None else names[number] for number in numbers
        )
    return variables


def base_folder(base: SharedBase, settings: AgentSettings, scratch: Path) -> str:
    """Return the folder or hub id from which vLLM loads the base.

    The base is written to `scratch` if it was given as a module, or comes from a GGUF file, or was
    loaded with `model.config`.
    """
    model = settings.model
    if settings.engine.vllm.model is not None:
        return str(Path(settings.engine.vllm.model).expanduser())
    if model is not None and not model.config:
        source = resolve(model.name)
        if source.gguf_file is None:
            return source.path
    folder = scratch / "base"
    if not folder.exists():
        base.save(folder)
    return str(folder)


def tokenizer_folder(base: SharedBase, scratch: Path) -> str:
    """Write the trainer's tokenizer to `scratch`, for stop strings; return the folder."""
    assert base.tokenizer is not None, "Ends refuses strings without a tokenizer"
    folder = scratch / "tokenizer"
    base.tokenizer.save_pretrained(str(folder))
    return str(folder)


def rank_of(slots: AdapterSlots, name: str) -> int:
    """Return the largest LoRA rank of an adapter's layers."""
    shapes = slots.shapes(name).items()
    return max(shape[0] for key, shape in shapes if key.endswith(".lora_A.weight"))


def largest_rank(slots: AdapterSlots, settings: AgentSettings) -> int:
    """Return the largest LoRA rank for which vLLM has to reserve memory."""
    trained = (rank_of(slots, name) for name in slots.names if slots.is_trainable(name))
    # Otherwise vLLM would be restarted for each larger rank that a mutation brings.
    space = settings.search_space()
    needed = max([*trained, int(space["lora.r"].max) if "lora.r" in space.names() else 1])
    vllm = settings.engine.vllm
    if vllm.max_lora_rank is not None:
        if vllm.max_lora_rank < needed:
            raise ConfigError(
                f"engine.vllm.max_lora_rank: expected at least {needed}, the rank of an adapter, "
                f"got {vllm.max_lora_rank}; raise it, or leave it out"
            )
        return vllm.max_lora_rank
    for rank in RANKS:
        if rank >= needed:
            return rank
    raise ModelError(
        f"model.lora: vLLM takes ranks up to {RANKS[-1]}, got {needed}; lower it, or generate with "
        "engine.rollout: native"
    )


def llm_keywords(
    slots: AdapterSlots, settings: AgentSettings, *, folder: str, context: int, rank: int
) -> dict[str, Any]:
    """Return the keywords of `vllm.LLM`.

    `folder` is the folder or hub id of the base; `context` bounds prompt plus completion, and
    `rank` the LoRA rank.
    """
    base, engine, vllm = slots.base, settings.engine, settings.engine.vllm
    on_cpu = base.device.type == "cpu"
    agents = sum(slots.is_trainable(name) for name in slots.names)
    cache = vllm.kv_cache_memory_bytes
    if cache is None and on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        cache = CPU_CACHE_BYTES
    # Where vLLM splits a prompt, it rewinds the row's generator, which fails on a CPU.
    chunking: dict[str, Any] = {"enable_chunked_prefill": False} if on_cpu else {}
    keywords: dict[str, Any] = {
        **chunking,
        **vllm.options,
        "model": folder,
        "trust_remote_code": settings.model is not None and settings.model.trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "seed": 0,
        "max_model_len": context,
        "max_num_seqs": engine.decode_rows,
        "dtype": str(base.dtype).removeprefix("torch.") if vllm.dtype == "auto" else vllm.dtype,
        "enforce_eager": on_cpu if vllm.enforce_eager is None else vllm.enforce_eager,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "enable_lora": True,
        "max_loras": vllm.max_loras or max(1, agents),
        "max_lora_rank": rank,
        # log_softmax(logits / temperature), without filters or penalties.
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": vllm.sleep_level > 0 and can_sleep(base),
        "quantization": vllm.quantization,
        "kv_cache_dtype": vllm.kv_cache_dtype,
        "kv_cache_memory_bytes": cache,
        "max_num_batched_tokens": vllm.max_num_batched_tokens,
    }
    return {name: value for name, value in keywords.items() if value is not None}


def can_sleep(base: SharedBase) -> bool:
    """Return whether vLLM can free memory on the base's device."""
    return base.device.type == "cuda"


@final
class Child:
    """Runs vLLM in a child process, and exchanges messages with it.

    The child has its own session, so Ctrl-C reaches only this process, which then ends the child.
    The child's output goes to a temporary log file, which is kept after a failure. `python` runs
    vLLM in `environment`. If this process is killed, the child removes `folders`. After `timeout`
    seconds without progress, vLLM counts as hung; None waits forever.
    """

    def __init__(
        self,
        python: str,
        environment: Mapping[str, str],
        folders: Sequence[Path] = (),
        timeout: float | None = None,
    ) -> None:
        self._python = python
        self._timeout = timeout
        self._folders = [str(folder) for folder in folders]
        handle, name = tempfile.mkstemp(prefix="evo-grpo-vllm-", suffix=".log")
        self.log = Path(name)
        ours, theirs = socket.socketpair()
        ours.settimeout(timeout)  # for a process that is stopped and sends nothing
        self._link = ours.makefile("rwb")
        ours.close()  # takes effect when the file is closed
        try:
            self._process = subprocess.Popen(
                [python, server.__file__, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            self._link.close()
            self.log.unlink()
            raise EngineUnavailable(
                f"engine.vllm.python: {python!r} cannot be run: {error.strerror}; name the Python "
                "of an environment in which vLLM is installed"
            ) from error
        finally:
            theirs.close()
            os.close(handle)
        # Also ends the child at the exit of the interpreter, or when the engine is collected.
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, self._link, self.log)
        _log.info("vLLM starts as process %d; its log is %s", self.pid, self.log)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def ask(self, operation: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Request an operation of `server.Session`, and wait for its answer."""
        try:
            server.send(self._link, {**values, "operation": operation, "folders": self._folders})
            answer = self._answer()
        except TimeoutError:
            _kill(self._process)
            self._failed(
                operation,
                f"made no progress for {self._timeout:g} s while {_DOING[operation]} and was "
                "ended; if that may take longer, raise engine.vllm.timeout",
            )
        except (EOFError, OSError):
            self._ended(operation)
        except BaseException:  # Ctrl-C too: the child would answer a request that is abandoned
            _kill(self._process)
            self.close()
            raise
        if "error" in answer:
            kind, text = answer["error"]
            text = text.strip().rstrip(".")
            self._failed(operation, f"raised {kind} while {_DOING[operation]}: {text}")
        return answer

    def close(self) -> None:
        """End the process. Closing twice is allowed."""
        self._end()

    def _answer(self) -> Mapping[str, Any]:
        """Wait for the answer as long as vLLM makes progress."""
        progress, since = None, time.monotonic()
        while True:
            message = server.receive(self._link)
            if "progress" not in message:
                return message
            if message["progress"] != progress:
                progress, since = message["progress"], time.monotonic()
            elif self._timeout is not None and time.monotonic() - since >= self._timeout:
                raise TimeoutError

    def _ended(self, operation: str) -> NoReturn:
        try:
            code = self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._failed(operation, "closed its socket")
        how = f"ended with code {code}" if code >= 0 else f"was ended by {_signal(-code)}"
        self._failed(operation, f"{how} while {_DOING[operation]}")

    def _failed(self, operation: str, what: str) -> NoReturn:
        """End the process and raise an error, with the last lines of the log as notes.

        If `start` failed, the error is EngineUnavailable, because no round has been trained; else
        it is RunFailedError.
        """
        lines = last_lines(self.log)
        # Keep the log, which the error names.
        self._end.detach()
        _end(os.getpid(), self._process, self._link, None)
        text = printable(shorten(f"vLLM's process {self.pid} ({self._python}) {what}", 1000))
        kind, remedy = RunFailedError, "finished rounds are in the run folder; continue with: "
        remedy += "evo-grpo resume RUN"
        if operation == "start":
            kind, remedy = EngineUnavailable, "fix that (its settings are engine.vllm), or leave "
            remedy += "engine.rollout out to generate with the built-in engine"
        log = f"the last lines of its log {self.log} follow"
        error = kind(f"engine.rollout: {text}; {remedy}; {log}")
        for line in lines:
            error.add_note(f"  {line}")
        raise error


def _signal(number: int) -> str:
    with suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log, each shortened to fit an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [printable(shorten(line)) for line in text.splitlines() if line.strip()][-LAST_LINES:]


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(
    owner: int, process: subprocess.Popen[bytes], link: BufferedRWPair, log: Path | None
) -> None:
    """End a process and its children: close its socket, then kill them."""
    with suppress(OSError):  # a request that it did not read
        link.close()
    if os.getpid() != owner:  # a fork of the process that started it, and that alone ends it
        return
    with suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)
    _kill(process)
    process.wait()
    if log is not None:
        log.unlink(missing_ok=True)
