"""A Hub on the loopback: what `datasets` and transformers ask, for repositories in memory."""

import hashlib
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMITS = ("a" * 40, "b" * 40)
"""The commits of every repository: the older one, and that of the branch main."""
#: The config.json of Qwen3-4B, without what decides no size.
QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """Serves `server.repositories`, name -> commit -> file -> bytes; "gated" and "slow" by name."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(head=True)

    def do_GET(self):
        self.answer()

    def do_POST(self):
        size = int(self.headers.get("Content-Length", 0))
        self.answer(body=json.loads(self.rfile.read(size) or b"{}"))

    def answer(self, *, head=False, body=None):
        self.server.asked.append(self.path)
        parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
        api = parts[0] == "api"
        # api/datasets/owner/name, datasets/owner/name, or, for a model, owner/name.
        parts = parts[2:] if api else parts[1:] if parts[0] == "datasets" else parts
        name, rest = "/".join(parts[:2]), parts[2:]
        if "slow" in name:
            return time.sleep(self.server.patience)
        if name not in self.server.repositories:
            return self.refuse(401, "RepoNotFound")
        if "gated" in name:
            return self.refuse(403, "GatedRepo")
        commits = self.server.repositories[name]
        revision = rest[1] if len(rest) > 1 else "main"
        commit = {"main": COMMITS[-1], "refs/heads/main": COMMITS[-1]}.get(revision, revision)
        if commit not in commits:
            return self.refuse(404, "RevisionNotFound")
        files = commits[commit]
        if not api:
            file = "/".join(rest[2:])
            if file not in files:
                return self.refuse(404, "EntryNotFound")
            return self.send(files[file], head, {"X-Repo-Commit": commit}, "text/plain")
        if rest and rest[0] == "tree":
            return self.send_json([self.entry(file, data) for file, data in files.items()], head)
        if rest and rest[0] == "paths-info":
            wanted = body.get("paths", [])
            return self.send_json([self.entry(f, files[f]) for f in wanted if f in files], head)
        info = {"id": name, "sha": commit, "private": False, "gated": False, "downloads": 0}
        info |= {"likes": 0, "tags": [], "siblings": [{"rfilename": file} for file in files]}
        return self.send_json(info, head)

    @staticmethod
    def entry(file, data):
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": file, "size": len(data), "oid": oid}

    def send_json(self, value, head):
        self.send(json.dumps(value).encode(), head, {}, "application/json")

    def send(self, data, head, headers, kind):
        self.send_response(200)
        etag = hashlib.sha1(data).hexdigest()
        for key, value in {**headers, "Content-Type": kind, "ETag": f'"{etag}"'}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not head:
            self.wfile.write(data)

    def refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def loopback_hub(repositories, patience=30.0):
    """Serve repositories until the context ends; yields the server and its URL.

    A repository with "slow" in its name is answered after `patience` seconds, with nothing.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.repositories, server.patience, server.asked = repositories, patience, []
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def hub_in_use(models, cache, monkeypatch):
    """Make `huggingface_hub` ask a loopback Hub for models, id -> file -> bytes; yields requests.

    The cache is empty at first.
    """
    with loopback_hub({name: {COMMITS[-1]: files} for name, files in models.items()}) as (hub, url):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield hub.asked
