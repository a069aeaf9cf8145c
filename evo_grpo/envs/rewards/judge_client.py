"""Asks a judge, a language model behind an API, over HTTP, and keeps its answers."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

from evo_grpo.envs.rewards.watch import check_not_stopped, in_a_thread
from evo_grpo.errors import ConfigError, RewardError
from evo_grpo.escaping import printable, redacted, shorten
from evo_grpo.record.files import append, reading, seal, sync, unseal, writing
from evo_grpo.record.plain import MAX_LOG_BYTES, read_plain
from evo_grpo.settings.rewards import JudgeReward

if TYPE_CHECKING:
    import httpx2

MOST_BYTES = 1 << 22
"""Largest reply: 4 MiB."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before the first retry, doubled before each further one, and their maximum."""
PLACE_SECONDS = 0.01
"""Seconds between two attempts to acquire `Client.places`."""
LONGEST_WAIT = 300.0
"""Upper limit, in seconds, of the wait that a server asks for in Retry-After."""
_AGAIN = frozenset({408, 409, 425, 429})
_REFUSED = {401: "refused the key", 403: "refused access"}
Body = Mapping[str, Any]
Keep = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Unanswered:
    """A question that got no answer, and why."""

    why: str


class _RequestFailure(Exception):
    """A failed request: the reason, whether a retry may help, and the seconds to wait before it."""

    def __init__(self, why: str, *, again: bool = True, wait: float = 0.0) -> None:
        super().__init__(why)
        self.why = why
        self.again = again
        self.wait = wait


@final
class Client:
    """Asks the API of a judge; see `JudgeReward` for the settings."""

    def __init__(self, settings: JudgeReward) -> None:
        self.settings = settings
        self.url = settings.url.rstrip("/") + "/chat/completions"
        #: Requests that may be under way, of all threads together.
        self.places = threading.Semaphore(settings.concurrency)

    def check_key(self) -> None:
        """Check the API key, if the settings name one, and the proxy and certificate settings."""
        self.key()
        # Imported here: only a judge needs it, and it takes a tenth of a second.
        import httpx2

        try:
            httpx2.AsyncClient()
        # A URL, a file or ssl may be wrong, or the package for SOCKS missing.
        except (ValueError, OSError, ImportError, httpx2.InvalidURL) as error:
            # A proxy may hold a password, so its address is not shown.
            raise ConfigError(
                f"env.reward: kind judge: no connection to {self.settings.url} can be set up "
                f"({type(error).__name__}); correct or unset the proxy in HTTP_PROXY, HTTPS_PROXY "
                "or ALL_PROXY, and the certificates in SSL_CERT_FILE or SSL_CERT_DIR"
            ) from None

    def key(self) -> str | None:
        """Return the API key from its environment variable; None if the settings name none."""
        name = self.settings.key_variable
        if name is None:
            return None
        key = os.environ.get(name, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise ConfigError(
                f"env.reward: kind judge: expected the key of {self.settings.url} in the "
                f"environment variable {name}, of printable ASCII characters, got "
                f"{'others' if key else 'none'}; set it: export {name}=..."
            )
        return key

    def ask(self, bodies: Mapping[str, Body], keep: Keep) -> dict[str, Unanswered]:
        """Send requests, at most `concurrency` at a time in all threads together.

        Inside a running event loop, as in a notebook, another thread sends them. `bodies` has the
        JSON body of each request, by the question's key; `keep` is called with the key and the JSON
        of each reply when it arrives.

        Returns the questions that have no reply after all retries. If a request fails and no other
        got a reply in the meantime, the remaining requests are not sent. Raises RewardError if the
        API refuses the key, or does not know the URL or the model.
        """
        asking = _Asking(self, keep)
        work = asking.all(bodies)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(work)
        try:
            return in_a_thread("judge", lambda: asyncio.run(work)).result()
        finally:
            asking.stopped.set()  # after Ctrl-C, the thread sends no more


class _Asking:
    """Sends the requests of one call of `Client.ask`, several at a time."""

    def __init__(self, client: Client, keep: Keep) -> None:
        self.url, self.settings, self._places = client.url, client.settings, client.places
        self.keep = keep
        self.stopped = threading.Event()
        self._key = client.key()
        self._replies = 0

    async def all(self, bodies: Mapping[str, Body]) -> dict[str, Unanswered]:
        # Imported here: only a judge needs it, and it takes a tenth of a second.
        import httpx2

        pending = iter(bodies.items())
        failed: dict[str, Unanswered] = {}
        workers = min(self.settings.concurrency, len(bodies))
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        limits = httpx2.Limits(max_connections=workers, max_keepalive_connections=workers)
        # `_attempt` has one time-out for a whole request. Redirects are not followed: they could
        # lead the key to another host.
        async with httpx2.AsyncClient(headers=headers, limits=limits, timeout=None) as client:
            tasks = [
                asyncio.ensure_future(self._work(client, pending, failed)) for _ in range(workers)
            ]
            done, unfinished = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            # After an error, no request begins, and those under way end: they may be paid for.
            self.stopped.set()
            ended = await asyncio.gather(*done, *unfinished, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error
        why = next(iter(failed.values()), Unanswered("it was not asked"))
        failed |= {key: why for key, _ in pending}
        return failed

    async def _work(
        self,
        client: httpx2.AsyncClient,
        pending: Iterator[tuple[str, Body]],
        failed: dict[str, Unanswered],
    ) -> None:
        while not self.stopped.is_set():
            check_not_stopped()
            request = next(pending, None)
            if request is None:
                return
            key, body = request
            before = self._replies
            try:
                async with self._place():
                    reply = await self._reply(client, key, body)
            except _RequestFailure as trouble:
                failed[key] = Unanswered(trouble.why)
                if trouble.again and self._replies == before:
                    self.stopped.set()  # not this request alone: the API is down
                continue
            self._replies += 1
            self.keep(key, reply)

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None]:
        """Hold one of the `Client.places` in a `with` block, without blocking the event loop."""
        while not self._places.acquire(blocking=False):
            if self.stopped.is_set():
                raise _RequestFailure("it was not asked")
            check_not_stopped()
            await asyncio.sleep(PLACE_SECONDS)
        try:
            yield
        finally:
            self._places.release()

    async def _reply(self, client: httpx2.AsyncClient, key: str, body: Body) -> Mapping[str, Any]:
        """Send a request, with pauses between attempts, until there is a reply or no retry left."""
        # Requests wait for different times, which are the same when the run is repeated.
        spread = 0.75 + int(key[:8], 16) / 2**33
        attempt = 0
        while True:
            try:
                return await self._attempt(client, body)
            except _RequestFailure as trouble:
                if not trouble.again or attempt == self.settings.retries or self.stopped.is_set():
                    tried = f" in {attempt + 1} attempts" if attempt else ""
                    raise _RequestFailure(f"{trouble.why}{tried}", again=trouble.again) from None
                pause = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE) * spread
                await self._pause(max(pause, trouble.wait))
            attempt += 1

    async def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.stopped.is_set() and (remaining := end - time.monotonic()) > 0:
            await asyncio.sleep(min(remaining, 0.2))

    async def _attempt(self, client: httpx2.AsyncClient, body: Body) -> Mapping[str, Any]:
        import httpx2

        limit = self.settings.timeout
        try:
            async with (
                asyncio.timeout(limit),
                client.stream("POST", self.url, content=json.dumps(body)) as response,
            ):
                data = bytearray()
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > MOST_BYTES:
                        raise _RequestFailure(
                            f"the API sent more than {MOST_BYTES:,} bytes", again=False
                        )
        except TimeoutError:
            raise _RequestFailure(f"the API gave no answer within {limit:g} s") from None
        except httpx2.HTTPError as error:
            why = printable(shorten(redacted(f"{type(error).__name__}: {error}", self._key)))
            raise _RequestFailure(f"the API cannot be reached ({why})") from None
        if response.status_code != 200:
            raise self._refusal(response.status_code, bytes(data), response.headers)
        reply: object = None
        with suppress(ValueError, RecursionError):
            reply = json.loads(data)
        fields = cast("Mapping[str, Any]", reply) if isinstance(reply, Mapping) else {}
        if not isinstance(fields.get("choices"), list):
            raise _RequestFailure(
                f"expected choices from the API, got {self._excerpt(bytes(data))}"
            )
        return fields

    def _refusal(self, status: int, data: bytes, headers: Mapping[str, str]) -> _RequestFailure:
        """Return the failure for a status; raise RewardError if every request would get it."""
        url, name = self.settings.url, self.settings.key_variable
        text = self._excerpt(data)
        why = ""
        if status in _REFUSED:  # what the server says may hold the key
            remedy = "env.reward sends none: name it in key_variable"
            if name is not None:
                remedy = f"see that the environment variable {name} has the right one"
            why = (
                f"{url} {_REFUSED[status]} (status {status}); {remedy}, then go on with: evo-grpo "
                "resume RUN"
            )
        elif status == 404 or 300 <= status < 400:
            why = (
                f"expected {self.url} to have a model {self.settings.model!r}, got status "
                f"{status}: {text}; correct url or model"
            )
        if why:
            raise RewardError(f"env.reward: kind judge: {why}")
        again = status in _AGAIN or status >= 500
        wait = _seconds(headers.get("retry-after", "")) if again else 0.0
        return _RequestFailure(
            f"the API answered with status {status}: {text}", again=again, wait=wait
        )

    def _excerpt(self, data: bytes) -> str:
        return repr(shorten(redacted(data.decode("utf-8", errors="replace"), self._key), 200))


def _seconds(text: str) -> float:
    """Return the seconds of a header Retry-After, 0 for a date or anything else."""
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return min(seconds, LONGEST_WAIT) if seconds > 0 else 0.0


TEXT_CHARACTERS = 500
"""Characters of an answer's text that are kept, for people to read."""
_SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Answer:
    """A judge's answer to one question.

    Attributes:
        score: From 0 to 1; None if the answer has no score that can be used.
        text: The end of the answer's text.
        input: Tokens that the judge read.
        output: Tokens that the judge wrote.
    """

    score: float | None
    text: str
    input: int = 0
    output: int = 0


@final
class Answers:
    """The answers of a judge, by the digest of the question.

    Each answer is appended to the file at once, in one write, so that a killed process loses none.

    Attributes:
        known: The answers by question.
        unrecorded: Answers that are in no file, because this process has no folder.
        count: Number of answers to this process, plus those in the files if `record_in` counts
            them.
        input: Tokens that the judge read for the counted answers.
        output: Tokens that the judge wrote in the counted answers.
    """

    def __init__(self) -> None:
        self.count = self.input = self.output = 0
        self.known: dict[str, Answer] = {}
        self.unrecorded: dict[str, Answer] = {}
        self._path: Path | None = None

    def record_in(self, folder: Path, name: str, *, counts: bool = True) -> None:
        """Read the answers in all files of a folder; append new ones to `<name>.jsonl` there.

        The folder and the file are created with the first new answer, which also removes a line
        that a kill cut off. A damaged line causes a warning; its question is asked again. With
        `counts`, `count`, `input` and `output` include the answers of this judge in all the files.
        """
        judge = name.rpartition("rank-")[0]
        # The cost of an earlier run is recorded in its folder, or in the files below.
        self.count = self.input = self.output = 0
        damaged = 0
        with reading(folder):
            for file in answer_files(folder):
                recorded = read_answers(file)
                damaged += recorded.damaged
                for key, answer in recorded.answers:
                    self.keep(key, answer, counts=counts and file.name.startswith(judge))
        if damaged:
            warnings.warn(
                f"{folder}: {damaged} answers of the judge are damaged, and are asked again if "
                "they are needed",
                stacklevel=2,
            )
        self._path = folder / (name + _SUFFIX)

    def add(self, key: str, answer: Answer) -> Answer:
        """Keep an answer with its text cut, write it to the file, and return the cut answer."""
        answer = Answer(answer.score, answer.text[-TEXT_CHARACTERS:], answer.input, answer.output)
        self.keep(key, answer, counts=True)
        self.write({key: answer})
        return answer

    def write(self, answers: Mapping[str, Answer]) -> None:
        """Append answers to the file or raise RunFailedError; without one, add to `unrecorded`."""
        if self._path is None:
            self.unrecorded |= answers
            return
        lines = "".join(_line(key, answer) for key, answer in answers.items())
        append(self._path, lines, durable=False)

    def sync(self) -> None:
        """Wait until the answers are on disk."""
        if self._path is not None and self._path.exists():
            with writing(self._path):
                sync(self._path)
                sync(self._path.parent)

    def keep(self, key: str, answer: Answer, *, counts: bool) -> None:
        """Keep an answer in memory; with `counts`, add it to `count`, `input` and `output`."""
        if counts:
            self.count += 1
            self.input += answer.input
            self.output += answer.output
        self.known[key] = answer


def _line(key: str, answer: Answer) -> str:
    tokens = {"input_tokens": answer.input, "output_tokens": answer.output}
    return seal({"question": key, "score": answer.score, **tokens, "text": answer.text})


class ReadAnswers(NamedTuple):
    """The content of a file: its answers, and the numbers of damaged lines and of cut-off bytes."""

    answers: list[tuple[str, Answer]]
    damaged: int
    cut_off: int


def answer_files(folder: Path) -> list[Path]:
    """Return the files of answers in a folder, or [] if the folder is missing."""
    return sorted(folder.glob(f"*{_SUFFIX}"))


def read_answers(file: Path) -> ReadAnswers:
    """Read the undamaged lines of a file of answers."""
    *lines, cut_off = read_plain(file, MAX_LOG_BYTES).split(b"\n")
    answers = [answer for line in lines if (answer := _answer(line)) is not None]
    return ReadAnswers(answers, len(lines) - len(answers), len(cut_off))


def _answer(line: bytes) -> tuple[str, Answer] | None:
    try:
        data = unseal(line)
        key, text = _typed(data, "question", str), _typed(data, "text", str)
        tokens = [_typed(data, name, int) for name in ("input_tokens", "output_tokens")]
        score = data.get("score")
        if score is not None and not (isinstance(score, int | float) and 0 <= score <= 1):
            raise ValueError("score")
    except ValueError:
        return None
    return key, Answer(None if score is None else float(score), text, *tokens)


def _typed(data: dict[str, Any], name: str, kind: type) -> Any:  # noqa: ANN401 -- of that type
    value = data.get(name)
    if type(value) is not kind:
        raise ValueError(name)
    return value
