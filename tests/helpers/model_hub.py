"""A hub of models on the loopback address, which stops by itself, as `huggingface_hub` asks one."""

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40
#: The config.json of Qwen3-4B, without what decides no size.
QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}  # fmt: skip
GATED = "gated"
#: A repository that never answers.
HANGS = "hangs"


@contextmanager
def hub_in_use(models, cache, monkeypatch):
    """Make `huggingface_hub` ask a loopback hub, with an empty cache; yields what was asked for."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with loopback_hub(models) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield asked


@contextmanager
def loopback_hub(models: Mapping[str, Mapping[str, bytes] | str]) -> Iterator[tuple[str, list]]:
    """Serve models: id -> file name -> content, or `GATED` or `HANGS`.

    Yields the address and the list of requested paths.
    """
    asked: list[str] = []
    over = threading.Event()

    class Handler(_Handler):
        """The models, and what was asked for."""

    Handler.models, Handler.asked, Handler.over = models, asked, over
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    models: Mapping
    asked: list
    over: threading.Event

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        self.asked.append(self.path)
        repository, _, file = self.path.strip("/").partition("/resolve/main/")
        files = self.models.get(repository)
        if files == HANGS:
            self.over.wait(30)
        elif files is None:
            self.reply(401, {"X-Error-Code": "RepoNotFound"})
        elif files == GATED:
            self.reply(403, {"X-Error-Code": "GatedRepo"})
        elif file not in files:
            self.reply(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            content = files[file]
            tag = hashlib.sha256(content).hexdigest()
            self.reply(200, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, content, body=body)

    def reply(self, code, headers, content=b"", *, body=False):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_given):
        pass
