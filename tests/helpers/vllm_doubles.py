"""A double of vLLM in place of the package, in this process or in the child of an engine.

As a program, it calls an engine for every line that it reads.
"""

import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import tiny
from engine_contract import prompts_of

from evo_grpo.errors import RunFailedError
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.rollout.vllm.server import Session
from evo_grpo.rollout.vllm.vllm_engine import VLLMEngine
from evo_grpo.settings import AgentSettings

FOLDER = Path(__file__).parent / "vllm_double"
REQUEST = RolloutRequest(0, "a0", prompts_of(3, 5), 2, Sampling(max_output_tokens=4), 7)


def _forget():
    # The module of the slow model stays, and with it the models that it has loaded.
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        if name != "vllm.slow_model":
            del sys.modules[name]


class InProcess:
    """What an engine has in place of its child: the program's session, in this process."""

    def __init__(self):
        self._session = Session()

    def ask(self, operation, values):
        try:
            return self._session.answer({**values, "operation": operation})
        except Exception as error:
            raise RunFailedError(f"raised {type(error).__name__}: {error}") from error

    def close(self):
        self._session = None


@contextmanager
def doubled(monkeypatch, *, child=False):
    """Let this Python, and those that it starts, find the double; yields it.

    Without `child`, engines have it in this process, where a test can look into it.
    """
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    _forget()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setenv("PYTHONPATH", path)
        if not child:
            patch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")  # as the program does
            patch.setattr(VLLMEngine, "_opened", lambda engine: InProcess())
        import vllm

        yield vllm
    _forget()


def settings_of(*, engine=None, algorithm=None, **vllm):
    return AgentSettings(
        engine={"rollout": "vllm", "vllm": vllm, **(engine or {})}, algorithm=algorithm or {}
    )


def build(slots, **options):
    return VLLMEngine(slots, settings_of(**options))


def main():
    # Whoever starts tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = build(tiny.population(tiny.llama()))
    print(engine._link.pid, *engine._folders, flush=True)
    for _ in sys.stdin:
        try:
            engine.rollout([REQUEST])
        except KeyboardInterrupt:
            print("interrupted", engine._link._process.poll(), flush=True)
            sys.exit(7)
        print("done", flush=True)


if __name__ == "__main__":
    main()
