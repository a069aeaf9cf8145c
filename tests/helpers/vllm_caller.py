"""An engine over vLLM in a child; as a program, one that calls it for every line that it reads."""

import signal
import sys

import tiny
from engine_contract import prompts_of
from vllm_doubles import settings_of

from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.rollout.vllm.engine import VLLMEngine

REQUEST = RolloutRequest(0, "a0", prompts_of(3, 5), 2, Sampling(max_output_tokens=4), 7)


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
