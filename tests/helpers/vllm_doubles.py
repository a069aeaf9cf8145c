"""A double of vLLM in place of the package, in this process or in a child."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

from evo_grpo.settings import AgentSettings

FOLDER = Path(__file__).parent / "vllm_double"


def _forget():
    # The module of the slow model stays, and with it the models that it has loaded.
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        if name != "vllm.slow_model":
            del sys.modules[name]


@contextmanager
def doubled(monkeypatch):
    """Let this Python, and those that it starts, find the double; yields it."""
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    _forget()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setenv("PYTHONPATH", path)
        import vllm

        yield vllm
    _forget()


def settings_of(process="inside", *, engine=None, algorithm=None, **vllm):
    return AgentSettings(
        engine={"rollout": "vllm", "vllm": {"process": process, **vllm}, **(engine or {})},
        algorithm=algorithm or {},
    )
