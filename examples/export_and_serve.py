"""Export the winner of a run, load it with PEFT alone and serve it over HTTP.

    python examples/export_and_serve.py
    curl 'http://127.0.0.1:8123/?prompt=12%2B07%3D'

The server is Python's own, on the loopback of this machine, and only a demonstration. The script
also prints the command with which vLLM serves the same folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs, urlsplit

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import evo_grpo
from evo_grpo.cli.commands import app

# In your code: the hub id or folder that is the model of the run.
BASE = Path(evo_grpo.__file__).parent / "assets" / "tiny-sums"
CONFIG = {
    "model": "tiny-sums",
    "env": "sums",
    "population": {"size": 4, "rounds": 3, "steps_per_round": 6},
    "evolve": {
        "hyperparameters": {"lr": {"min": 1e-4, "max": 1e-2}},
        "fitness": {"prompts": 32, "test_prompts": 32},
    },
}


def trained(out: str, rounds: int) -> Path:
    """Train a population and return its run folder."""
    population = {**cast("dict[str, int]", CONFIG["population"]), "rounds": rounds}
    return evo_grpo.run({**CONFIG, "population": population}, out=out, force=True)


def answerer(adapter: str) -> Callable[[str], str]:
    """Return a function that answers prompts, with transformers and PEFT alone."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), adapter)

    def answer(prompt: str) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return answer


def server(answer: Callable[[str], str], port: int) -> ThreadingHTTPServer:
    """Return a server that answers `/?prompt=...` on the loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            prompt = parse_qs(urlsplit(self.path).query).get("prompt", [""])[0]
            text = answer(prompt).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main(out: str = "runs/serve", rounds: int = 3, port: int = 8123) -> ThreadingHTTPServer:
    """Train, export, and return the server, which is not started yet."""
    run = trained(out, rounds)
    adapter = f"{out}-adapter"
    # The same as `evo-grpo export runs/serve runs/serve-adapter --force`.
    app(["export", str(run), adapter, "--force"], standalone_mode=False)
    answer = answerer(adapter)
    print(f"12+07= {answer('12+07=')}")
    print(f"vllm serve {BASE} --enable-lora --lora-modules winner={adapter}")
    return server(answer, port)


if __name__ == "__main__":
    with main() as ready:
        print(f"http://127.0.0.1:{ready.server_port}/?prompt=12%2B07%3D  (Ctrl-C ends it)")
        try:
            ready.serve_forever()
        except KeyboardInterrupt:
            sys.exit(130)
