"""A judge on the loopback: an OpenAI-compatible API that fails, waits or talks nonsense if told."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JudgeServer(ThreadingHTTPServer):
    """Answers requests by `answer(body, number) -> (status, data)`.

    `number` counts requests from 1. `data` is JSON, or bytes that are sent as they are; None sends
    nothing until the server stops. `paid` has the messages of each answer with the status 200.
    """

    daemon_threads = True

    def __init__(self, answer, port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer, self.lock, self.over = answer, threading.Lock(), threading.Event()
        self.requests, self.paid, self.keys, self.headers, self.busy, self.most = (
            0,
            [],
            [],
            {},
            0,
            0,
        )

    def handle_error(self, request, client_address):
        """Say nothing of a client that was killed or has given up."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests += 1
            server.busy += 1
            server.most = max(server.most, server.busy)
            server.keys.append(self.headers.get("Authorization"))
            number = server.requests
        status, data = server.answer(body, number)
        with server.lock:
            server.busy -= 1
            if status == 200:
                server.paid.append(json.dumps(body["messages"]))
        if data is None:
            server.over.wait(60)
            return
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@contextmanager
def judging(answer, **options):
    with JudgeServer(answer, **options) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()


def says(text, usage=(100, 10)):
    """A reply with a text, and the tokens read and written."""
    return {
        "choices": [{"message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]},
    }


def score_of(text):
    """A score from 0 to 10 that depends on the text alone."""
    return sum(int(one) for one in text if one.isdigit()) % 11


def by_digits(body, number=0):
    return 200, says(f"Well. <score>{score_of(body['messages'][-1]['content'])}</score>")
