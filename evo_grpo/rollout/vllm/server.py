"""The program that runs vLLM, and its messages.

The trainer starts this file by its path, with a Python in which evo-grpo need not be installed. So
it imports only the standard library until it loads vLLM, and never evo-grpo. The process ends when
the process that started it ends.

    python server.py --probe          prints the versions as JSON
    python server.py SOCKET PARENT    serves the descriptor SOCKET until process PARENT ends
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedRWPair
from typing import Any, NamedTuple

SECONDS_BETWEEN_SIGNS = 1.0
"""Seconds between the progress messages of a process at work."""
PROBE_PROMPT = 64
"""Most tokens of the prompt that is sampled before sleeping and after waking."""
PROBE_TOKENS = 4
"""Tokens sampled for the probe's prompt."""
PROBE_GAP = 0.1
"""Largest change of a log-prob between sleeping and waking that is no error, in nats."""


def send(link: BufferedRWPair, message: Mapping[str, Any]) -> None:
    """Write a message: a line of JSON; arrays are base64 of the machine's byte layout."""
    link.write(json.dumps(message, default=_packed).encode() + b"\n")
    link.flush()


def receive(link: BufferedRWPair) -> dict[str, Any]:
    """Read a message; raise EOFError if the other end is closed."""
    line = link.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the other end of the socket is closed")
    return json.loads(line, object_hook=_unpacked)


def _packed(values: array[Any]) -> dict[str, str]:
    return {"array": values.typecode, "bytes": base64.b64encode(values).decode()}


def _unpacked(values: dict[str, Any]) -> Any:  # noqa: ANN401 -- an array, or what JSON holds
    if values.keys() != {"array", "bytes"}:
        return values
    kind: Any = values["array"]
    return array(kind, base64.b64decode(values["bytes"]))  # pyright: ignore[reportDeprecated] -- not "u"


class Row(NamedTuple):
    """One completion to sample.

    `adapter` is (name, id, path) for vLLM, or None for the base; `prompt` has token ids; `sampling`
    has keyword arguments of `vllm.SamplingParams`.
    """

    adapter: tuple[str, int, str] | None
    prompt: list[int]
    sampling: dict[str, Any]


def rows_of(message: Mapping[str, Any]) -> list[Row]:
    """Return the completions that a message requests, ordered by request, prompt, completion.

    The message has `requests`, each with `adapter`, `sampling`, `prompts` (P) and `samples` (G).
    Its arrays have the token `ids` of all prompts one after another, a length (`lengths`) and a
    maximum length of completions (`limits`) per prompt, and a seed (`seeds`) per completion.
    """
    ids, lengths = message["ids"], message["lengths"]
    limits, seeds = message["limits"], iter(message["seeds"])
    rows: list[Row] = []
    start = number = 0
    for request in message["requests"]:
        adapter = None if request["adapter"] is None else tuple(request["adapter"])
        for _ in range(request["prompts"]):
            prompt = list(ids[start : start + lengths[number]])
            limit = limits[number]
            start, number = start + lengths[number], number + 1
            for _ in range(request["samples"]):
                keywords = {**request["sampling"], "max_tokens": limit, "seed": next(seeds)}
                # vLLM refuses a minimum above the maximum.
                keywords["min_tokens"] = min(keywords.get("min_tokens", 0), limit)
                rows.append(Row(adapter, prompt, keywords))
    return rows


class Session:
    """Runs an operation for each message: `start`, `generate`, `sleep` or `wake`."""

    def __init__(self) -> None:
        self._vllm: Any = None
        self._llm: Any = None
        #: Adapters that vLLM may have loaded, by id.
        self._held: dict[int, tuple[str, int, str]] = {}
        self._level = 0
        #: The probe's prompt, and the tokens and log-probs sampled for it before sleeping.
        self._prompt: list[int] = []
        self._before: list[tuple[list[int], list[float]]] = []
        self._steps = 0

    def progress(self) -> int:
        """Return a number that grows: vLLM's steps, or the size of its log while vLLM loads."""
        return self._steps if self._llm is not None else os.fstat(1).st_size

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Run the operation that a message names, and return its answer."""
        return getattr(self, message["operation"])(message)

    def start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Load vLLM and the base, and sample once.

        In the message, `llm` has the keywords of `vllm.LLM`, and `level` is the sleep level; all
        else is for `generate`.
        """
        self._vllm = importlib.import_module("vllm")
        if message["level"] == 2 and not reloads_with_adapters():
            raise ValueError(
                "engine.vllm.sleep_level: expected 0 or 1 with vLLM "
                f"{self._vllm.__version__}, which cannot load a base with adapters again, got 2; "
                "set it to 1, or install vLLM 0.32 or newer"
            )
        self._llm = self._vllm.LLM(**message["llm"])
        self._count_steps(self._llm.llm_engine)
        return self.generate(message)

    def generate(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sample completions; first drop the adapters whose ids are in `remove`.

        Returns arrays: the concatenated `tokens` and `logprobs` of the completions, their
        `lengths`, and `stopped`, 1 where a string of `stop` ended a completion.
        """
        for number in message["remove"]:
            self._remove(number)
        rows = rows_of(message)
        self._prompt = rows[0].prompt[:PROBE_PROMPT] if rows else self._prompt
        tokens, logprobs = array("i"), array("f")
        lengths, stopped = array("i"), array("b")
        for output in self._isolated(rows):
            tokens.extend(output.token_ids)
            logprobs.extend(_logprobs(output))
            lengths.append(len(output.token_ids))
            stopped.append(isinstance(output.stop_reason, str))
        return {"tokens": tokens, "logprobs": logprobs, "lengths": lengths, "stopped": stopped}

    def sleep(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Free memory as `level` says; see `vllm.LLM.sleep`."""
        self._before = self._probe()
        self._level = int(message["level"])
        self._llm.reset_prefix_cache()
        self._llm.sleep(level=self._level)
        return {}

    def wake(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Restore the memory, load every adapter again, and compare probes before and after."""
        del message
        if self._level == 2:
            self._llm.wake_up(tags=["weights"])
            self._llm.collective_rpc("reload_weights")
            self._llm.wake_up(tags=["kv_cache"])
        else:
            self._llm.wake_up()
        # Their memory on the device may hold other data now.
        held = dict(self._held)
        for number in held:
            self._remove(number)
        self._held = held
        after = self._probe()
        names = ["the base", *(name for name, _, _ in held.values())]
        for name, probe_before, probe_after in zip(names, self._before, after, strict=True):
            gap = probe_gap(probe_before, probe_after)
            if not gap <= PROBE_GAP:
                raise RuntimeError(
                    f"{name} samples differently after sleeping than before: log-probs differ by "
                    f"{gap:.3g} nats; set engine.vllm.sleep_level to "
                    f"{1 if self._level == 2 else 0}"
                )
        return {}

    def _count_steps(self, engine: Any) -> None:  # noqa: ANN401 -- vLLM's own
        step = engine.step

        def counted() -> Any:  # noqa: ANN401 -- vLLM's own
            result = step()
            self._steps += 1
            return result

        engine.step = counted

    def _isolated(self, rows: list[Row]) -> list[Any]:
        """Sample a completion of every row; NaN of one agent does not affect other agents.

        An agent whose activations overflow leaves NaN in the cache of keys and values. A later row
        that reuses this memory multiplies it by 0, which is NaN again. Rows with NaN are therefore
        sampled again, adapter by adapter, on a cleared cache.
        """
        outputs = self._sampled(rows)
        broken = [i for i, output in enumerate(outputs) if not _is_finite(output)]
        for adapter in dict.fromkeys(rows[i].adapter for i in broken):
            indices = [i for i in broken if rows[i].adapter == adapter]
            self._wipe()
            for i, output in zip(indices, self._sampled([rows[i] for i in indices]), strict=True):
                outputs[i] = output
        if broken:
            self._wipe()
        return outputs

    def _wipe(self) -> None:
        self._llm.reset_prefix_cache()
        self._llm.collective_rpc(wipe_cache)

    def _sampled(self, rows: list[Row]) -> list[Any]:
        """Sample a completion of every row, in one call for rows with adapters and one for others.

        In one call for both, vLLM on a CPU applies another row's adapter to rows without one.
        """
        outputs: list[Any] = [None] * len(rows)
        for with_adapter in (True, False):
            part = [i for i, row in enumerate(rows) if (row.adapter is not None) is with_adapter]
            if not part:
                continue
            results = self._llm.generate(
                [{"prompt_token_ids": rows[i].prompt} for i in part],
                sampling_params=[self._vllm.SamplingParams(**rows[i].sampling) for i in part],
                lora_request=[self._request(rows[i].adapter) for i in part],
                use_tqdm=False,
            )
            for i, result in zip(part, results, strict=True):
                outputs[i] = result.outputs[0]
        return outputs

    def _request(self, adapter: tuple[str, int, str] | None) -> Any:  # noqa: ANN401 -- vLLM's own
        if adapter is None:
            return None
        self._held[adapter[1]] = adapter
        return importlib.import_module("vllm.lora.request").LoRARequest(*adapter)

    def _remove(self, number: int) -> None:
        self._held.pop(number, None)
        self._llm.llm_engine.remove_lora(number)

    def _probe(self) -> list[tuple[list[int], list[float]]]:
        """Sample a few tokens greedily with the base and every adapter, in that order."""
        sampling = {
            "temperature": 0.0,
            "max_tokens": PROBE_TOKENS,
            "logprobs": 0,
            "detokenize": False,
        }
        adapters = [None, *self._held.values()]
        rows = [Row(adapter, self._prompt, sampling) for adapter in adapters]
        outputs = self._isolated(rows) if self._prompt else []
        return [(list(output.token_ids), _logprobs(output)) for output in outputs]


def probe_gap(one: tuple[list[int], list[float]], other: tuple[list[int], list[float]]) -> float:
    """Return the largest log-prob difference of two probes, in nats; NaN if only `other` has NaN.

    The comparison ends at the first tokens that differ, because rounding decides between equal
    probabilities. It also ends at a NaN of `one`, the probe before sleeping.
    """
    largest = 0.0
    for token, other_token, value, other_value in zip(
        one[0], other[0], one[1], other[1], strict=False
    ):
        if math.isnan(value):
            break
        gap = abs(value - other_value)
        if math.isnan(gap):
            return gap
        largest = max(largest, gap)
        if token != other_token:
            break
    return largest


def reloads_with_adapters() -> bool:
    """Return whether vLLM has the fix without which `reload_weights` raises KeyError with LoRA."""
    try:
        module = importlib.import_module("vllm.v1.worker.lora_model_runner_mixin")
    except ImportError:  # a later vLLM may have moved it
        return True
    return hasattr(module.LoRAModelRunnerMixin, "reset_lora_state")


def wipe_cache(worker: Any) -> None:  # noqa: ANN401 -- vLLM's own
    """Set the keys and values of a vLLM worker to zero."""
    waiting = [*worker.model_runner.kv_caches]
    while waiting:
        cache = waiting.pop()
        if isinstance(cache, list | tuple):
            waiting += cache
        else:
            cache.zero_()


def _is_finite(output: Any) -> bool:  # noqa: ANN401 -- vLLM's own
    return not any(math.isnan(value) for value in _logprobs(output))


def _logprobs(output: Any) -> list[float]:  # noqa: ANN401 -- vLLM's own
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return [float(table[token].logprob) for token, table in pairs]


def probe() -> dict[str, Any]:
    """Return the version of this Python, and whether it finds vLLM; do not load vLLM."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, "vllm": importlib.util.find_spec("vllm") is not None}


def serve(link: BufferedRWPair, folders: list[str]) -> None:
    """Answer requests until the other end is closed; an error is sent as the answer.

    Each message replaces the contents of `folders`, the folders to remove at the end.
    """
    session = Session()
    while True:
        try:
            message = receive(link)
        except (EOFError, OSError):
            break
        folders[:] = message["folders"]
        try:
            with _progress(link, session):
                answer = session.answer(message)
        except Exception as error:  # any error of vLLM is sent, and printed to the log
            traceback.print_exc()
            answer = {"error": [type(error).__name__, str(error)]}
        try:
            send(link, answer)
        except OSError:
            break


@contextmanager
def _progress(link: BufferedRWPair, session: Session) -> Generator[None]:
    """Send progress messages until the block ends."""
    over = threading.Event()

    def report() -> None:
        with suppress(OSError):  # the trainer has closed the socket
            while not over.wait(SECONDS_BETWEEN_SIGNS):
                send(link, {"progress": session.progress()})

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # no progress message may interrupt the answer


def _remove(folders: list[str]) -> None:
    """Remove the folders that a killed trainer has left."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _end_with(parent: int, folders: list[str]) -> None:
    """End this process and its children when the process that started it has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    # The main thread notices the closed socket, unless it is busy with vLLM.
    time.sleep(2)
    _remove(folders)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run as a program; see the top of the file."""
    # Python puts the folder of this file first on the path; vLLM must not import its modules.
    this_folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != this_folder]
    if sys.argv[1:] == ["--probe"]:
        print(json.dumps(probe()))
        return
    if importlib.util.find_spec("flashinfer") is None:
        # vLLM imports its sampler on CUDA unless told otherwise, and fails where it is missing.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles it and closes the socket
    descriptor, parent = map(int, sys.argv[1:])
    folders: list[str] = []
    threading.Thread(target=_end_with, args=(parent, folders), daemon=True).start()
    link = socket.socket(fileno=descriptor)
    link.set_inheritable(False)
    serve(link.makefile("rwb"), folders)
    _remove(folders)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads and processes that vLLM left running must not delay the exit


if __name__ == "__main__":
    main()
