"""A double of vLLM: as much of its interface as evo-grpo uses, slow, obvious, and with its traps.

It is found by a Python that has the folder above on its path. `EVO_GRPO_DOUBLE=echo` answers with
tokens that no model has chosen, and loads no torch; else the model of the folder answers, row by
row, without a cache. What is done to it stands in `LLM.calls`, and in the file that
`EVO_GRPO_DOUBLE_LOG` names, one line of JSON each.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from vllm.v1.worker import lora_model_runner_mixin

__version__ = "0.0.double"

made = []


@dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    max_tokens: int = 16
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: list = field(default_factory=list)
    stop: list = field(default_factory=list)
    detokenize: bool = True

    def __post_init__(self):
        if not self.min_tokens <= self.max_tokens:
            raise ValueError("min_tokens must be less than or equal to max_tokens")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize")
        if 0 < self.temperature < 0.01:
            self.temperature = 0.01


class LLM:
    """One engine. Keywords are kept, and those of a mistake refused."""

    def __init__(self, **keywords):
        if os.environ.get("VLLM_USE_FLASHINFER_SAMPLER") != "0":
            import flashinfer  # noqa: F401 -- as on CUDA, where it is the default
        self.calls = []
        self.keywords = keywords
        self._tell("LLM", **keywords)
        made.append(self)
        if "fail" in keywords:
            print("the double was told to fail", file=sys.stderr)
            raise ValueError(keywords["fail"])
        if "exit" in keywords:
            print("the double was told to exit", file=sys.stderr, flush=True)
            os._exit(keywords["exit"])
        if "hang" in keywords:
            time.sleep(60)
        self.llm_engine = SimpleNamespace(remove_lora=self._remove_lora, step=lambda: None)
        self._state = "awake"
        if os.environ.get("EVO_GRPO_DOUBLE") == "echo":
            self._sampler = Echo()
        else:
            from vllm.slow_model import SlowModel

            self._sampler = SlowModel(keywords)

    def generate(self, prompts, sampling_params, *, lora_request, use_tqdm):
        assert not use_tqdm
        assert self._state == "awake", f"generate while {self._state}"
        assert len(prompts) == len(sampling_params) == len(lora_request)
        names = [None if one is None else one.lora_name for one in lora_request]
        self._tell("generate", rows=len(prompts), adapters=sorted({n for n in names if n}),
                   bare=names.count(None))  # fmt: skip
        self._act()
        if None in names and any(names):
            # The trap: without an adapter, a row in such a batch gets the last one's.
            last = [one for one in lora_request if one is not None][-1]
            lora_request = [one or last for one in lora_request]
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        assert all(len(i) < self.keywords["max_model_len"] for i in ids)
        assert all(
            len(i) + s.max_tokens <= self.keywords["max_model_len"]
            for i, s in zip(ids, sampling_params, strict=True)
        )
        done = self._sampler.sample(list(zip(ids, sampling_params, lora_request, strict=True)))
        return [SimpleNamespace(outputs=[one]) for one in done]

    def sleep(self, level):
        assert self.keywords["enable_sleep_mode"], "not made for it"
        self._tell("sleep", level=level)
        self._state = f"asleep {level}"
        self._sampler.lose(level)

    def wake_up(self, tags=None):
        self._tell("wake_up", tags=tags)
        self._act("asleep ")
        if tags is None or "kv_cache" in tags:
            self._state = "awake"

    def collective_rpc(self, method):
        self._tell("collective_rpc", method=method if isinstance(method, str) else method.__name__)
        if method == "reload_weights":
            # The trap of a vLLM without the fix.
            if not hasattr(lora_model_runner_mixin.LoRAModelRunnerMixin, "reset_lora_state"):
                raise KeyError("layers.0.mlp.gate_up_proj.weight")
            self._sampler.reload()
        else:
            method(SimpleNamespace(model_runner=SimpleNamespace(kv_caches=self._sampler.caches)))

    def reset_prefix_cache(self):
        self._tell("reset_prefix_cache")

    def _remove_lora(self, number):
        self._tell("remove_lora", id=number)
        self._sampler.remove(number)

    def _act(self, when=""):
        """Do what a test has asked for by a file, whose name is in the environment.

        An order that begins with "asleep " is for the next call that wakes.
        """
        order = Path(os.environ.get("EVO_GRPO_DOUBLE_ORDER", "/nowhere"))
        if not order.is_file():
            return
        text = order.read_text()
        match text.removeprefix(when).split() if text.startswith(when) else []:
            case ["kill"]:
                print("the double is about to be killed", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case ["raise"]:
                raise RuntimeError("the double was told to raise")
            case ["hang"]:
                order.write_text("hanging")
                time.sleep(60)
            case ["crawl", seconds]:
                until = time.monotonic() + float(seconds)
                while time.monotonic() < until:
                    time.sleep(0.1)
                    self.llm_engine.step()

    def _tell(self, name, **what):
        self.calls.append((name, what))
        if (log := os.environ.get("EVO_GRPO_DOUBLE_LOG")) is not None:
            with Path(log).open("a") as file:
                file.write(json.dumps([name, what]) + "\n")


class Echo:
    """Tokens that follow from the seed, or else from the prompt; none ends a completion."""

    def __init__(self):
        self.caches = []

    def sample(self, rows):
        done = []
        for ids, sampling, _ in rows:
            first = (sum(ids) if sampling.seed is None else sampling.seed) % 90
            tokens = [3 + (first + step) % 90 for step in range(sampling.max_tokens)]
            table = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
            done.append(SimpleNamespace(token_ids=tokens, logprobs=table, stop_reason=None))
        return done

    def lose(self, level):
        pass

    def reload(self):
        pass

    def remove(self, number):
        pass
