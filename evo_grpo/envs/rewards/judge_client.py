"""Requests to an OpenAI-compatible API: several at a time, with time-outs, retries and back-off."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

from evo_grpo.envs.rewards.watch import check_not_stopped, in_a_thread
from evo_grpo.errors import ConfigError, RewardError
from evo_grpo.printable import printable, redacted, shorten
from evo_grpo.settings.rewards import JudgeReward

if TYPE_CHECKING:
    import httpx2

MOST_BYTES = 1 << 22
"""Largest reply: 4 MiB."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before the first retry, which double with each further one, and most of them."""
PLACE_SECONDS = 0.2
"""Seconds after which a thread that waits for a place looks whether it is still needed."""
LONGEST_WAIT = 300.0
"""Most seconds that a server may ask to wait in Retry-After."""
_AGAIN = frozenset({408, 409, 425, 429})
_REFUSED = {401: "refused the key", 403: "refused access"}
NOT_ASKED = "it was not asked"
Body = Mapping[str, Any]
Keep = Callable[[str, Mapping[str, Any]], None]


class _Trouble(Exception):
    """A request that failed: why, whether another attempt may help, seconds that it has to wait."""

    def __init__(self, why: str, *, again: bool = True, wait: float = 0.0) -> None:
        super().__init__(why)
        self.why = why
        self.again = again
        self.wait = wait


@dataclass
class _Batch:
    """The requests of one call of `Client.ask`, which its threads share."""

    pending: deque[tuple[str, Body]]
    keep: Keep
    failed: dict[str, str] = field(default_factory=dict[str, str])
    replies: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)


@final
class Client:
    """Asks the API of a judge; see `JudgeReward` for the settings."""

    def __init__(self, settings: JudgeReward) -> None:
        self.settings = settings
        self._url = settings.url.rstrip("/") + "/chat/completions"
        self._places = threading.Semaphore(settings.concurrency)

    def check_key(self) -> None:
        """Check that the environment has a key that can be sent, if the settings name one.

        Raises:
            ConfigError: It has none, or one with characters that no key has; or a proxy or
                certificates that cannot be used.
        """
        self.key()
        # Imported here: only a judge needs it, and it takes a tenth of a second.
        import httpx2

        try:
            httpx2.Client()
        # Its errors are those of URLs, of files, of ssl, and of a package for SOCKS.
        except (ValueError, OSError, ImportError, httpx2.InvalidURL) as error:
            # A proxy may hold a password, so its address is not shown.
            raise ConfigError(
                f"env.reward: kind judge: no connection to {self.settings.url} can be set up "
                f"({type(error).__name__}); correct or unset the proxy in HTTP_PROXY, HTTPS_PROXY "
                "or ALL_PROXY, and the certificates in SSL_CERT_FILE or SSL_CERT_DIR"
            ) from None

    def key(self) -> str | None:
        """Return the key, None where the settings name none; see `check_key`."""
        name = self.settings.key_variable
        if name is None:
            return None
        key = os.environ.get(name, "").strip()
        if not key:
            raise ConfigError(
                f"env.reward: kind judge: expected the key of {self.settings.url} in the "
                f"environment variable {name}, got none; set it: export {name}=..."
            )
        if not key.isascii() or not key.isprintable():
            raise ConfigError(
                f"env.reward: kind judge: expected a key of printable ASCII characters in the "
                f"environment variable {name}, got others; set it again"
            )
        return key

    def ask(self, bodies: Mapping[str, Body], keep: Keep) -> dict[str, str]:
        """Send requests, `concurrency` at a time, together with those of other threads.

        Args:
            bodies: Request -> JSON body.
            keep: Called in a thread with a request and the JSON of its reply as soon as it comes.

        Returns:
            Why requests got no reply after all retries. If one stays without a reply and no
            other got one in the meantime, the rest is not sent.

        Raises:
            RewardError: The API refuses the key, or does not know the URL or the model.
        """
        # Imported here: only a judge needs it, and it takes a tenth of a second.
        import httpx2

        batch, key = _Batch(deque(bodies.items()), keep), self.key()
        count, timeout = min(self.settings.concurrency, len(bodies)), self.settings.timeout
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        limits = httpx2.Limits(max_connections=count, max_keepalive_connections=count)
        # Redirects are not followed: they could lead the key to another host.
        with httpx2.Client(headers=headers, limits=limits, timeout=timeout) as client:
            work = partial(self._work, client, batch)
            workers = [in_a_thread("judge", work) for _ in range(count)]
            try:
                wait(workers)
            finally:
                batch.stopped.set()  # after Ctrl-C, the threads send no more
        for worker in workers:
            worker.result()
        why = next(iter(batch.failed.values()), NOT_ASKED)
        return batch.failed | {name: why for name, _ in batch.pending}

    def _work(self, client: httpx2.Client, batch: _Batch) -> None:
        """Send requests of a batch until it has none left or is stopped."""
        try:
            while batch.pending and not batch.stopped.is_set():
                check_not_stopped()
                if self._places.acquire(timeout=PLACE_SECONDS):
                    try:
                        self._send_next(client, batch)
                    finally:
                        self._places.release()
        except BaseException:
            # No request begins any more, and those under way end: they may be paid for.
            batch.stopped.set()
            raise

    def _send_next(self, client: httpx2.Client, batch: _Batch) -> None:
        try:
            key, body = batch.pending.popleft()
        except IndexError:  # another thread took the last one
            return
        before = batch.replies
        try:
            reply = self._reply(client, batch, key, body)
        except _Trouble as trouble:
            batch.failed[key] = trouble.why
            if trouble.again and batch.replies == before:
                batch.stopped.set()  # not this request alone: the API is down
        else:
            batch.replies += 1
            batch.keep(key, reply)

    def _reply(
        self, client: httpx2.Client, batch: _Batch, key: str, body: Body
    ) -> Mapping[str, Any]:
        """Send a request until there is a reply, with pauses in between."""
        # Other requests wait for other times, and the same ones when the run is repeated.
        spread = 0.75 + int(key[:8], 16) / 2**33
        attempt = 0
        while True:
            try:
                return self._attempt(client, body)
            except _Trouble as trouble:
                if not trouble.again or attempt == self.settings.retries or batch.stopped.is_set():
                    tried = f" in {attempt + 1} attempts" if attempt else ""
                    raise _Trouble(f"{trouble.why}{tried}", again=trouble.again) from None
                pause = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE) * spread
                batch.stopped.wait(max(pause, trouble.wait))
            attempt += 1

    def _attempt(self, client: httpx2.Client, body: Body) -> Mapping[str, Any]:
        import httpx2

        limit, data = self.settings.timeout, bytearray()
        end = time.monotonic() + limit
        late = _Trouble(f"the API gave no answer within {limit:g} s")
        try:
            with client.stream("POST", self._url, content=json.dumps(body)) as response:
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) > MOST_BYTES:
                        raise _Trouble(f"the API sent more than {MOST_BYTES:,} bytes", again=False)
                    if time.monotonic() > end:
                        raise late
        except httpx2.TimeoutException:
            raise late from None
        except httpx2.HTTPError as error:
            said = shorten(redacted(f"{type(error).__name__}: {error}", self.key()))
            raise _Trouble(f"the API cannot be reached ({printable(said)})") from None
        if response.status_code != 200:
            raise self._refusal(response.status_code, bytes(data), response.headers)
        try:
            reply = json.loads(data)
        except (ValueError, RecursionError):
            reply = None
        found = cast("Mapping[str, Any]", reply) if isinstance(reply, Mapping) else {}
        if not isinstance(found.get("choices"), list):
            raise _Trouble(f"expected choices from the API, got {self._excerpt(bytes(data))}")
        return found

    def _refusal(self, status: int, data: bytes, headers: Mapping[str, str]) -> _Trouble:
        """Return the trouble of a status; raise for one that every request would get."""
        url, name = self.settings.url, self.settings.key_variable
        if status in _REFUSED:
            # What the server says may hold the key.
            has = "env.reward sends none: name it in key_variable"
            if name is not None:
                has = f"see that the environment variable {name} has the right one"
            raise RewardError(
                f"env.reward: kind judge: {url} {_REFUSED[status]} (status {status}); {has}, then "
                "go on with: evo-grpo resume RUN"
            )
        said = self._excerpt(data)
        if status == 404 or 300 <= status < 400:
            raise RewardError(
                f"env.reward: kind judge: expected {self._url} to have a model "
                f"{self.settings.model!r}, got status {status}: {said}; correct url or model"
            )
        again = status in _AGAIN or status >= 500
        pause = _seconds(headers.get("retry-after", "")) if again else 0.0
        return _Trouble(f"the API answered with status {status}: {said}", again=again, wait=pause)

    def _excerpt(self, data: bytes) -> str:
        return repr(shorten(redacted(data.decode("utf-8", errors="replace"), self.key()), 200))


def _seconds(text: str) -> float:
    """Return the seconds of a header Retry-After, 0 for a date or anything else."""
    try:
        found = float(text)
    except ValueError:
        return 0.0
    return min(found, LONGEST_WAIT) if found > 0 else 0.0
