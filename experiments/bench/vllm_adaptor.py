"""vLLM's offline engine, one batch at a time; runs in its own virtual environment.

Argument: a JSON job {model, adapters, ids, lengths, rows, dtype, eager}: a folder with the base,
one folder per adapter, the prompt, the tokens of each row, by adapter, how many rows at once, the
dtype, and whether to leave out graphs. It answers once when the engine stands, then once for each
line `generate` it reads: all rows in one call, one LoRARequest per row, in `seconds`.
"""

import importlib.metadata
import json
import os
import sys
import time
from importlib.metadata import version

# In this process, on the threads it was given, with a cache that is large enough.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from common import tell
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest


def main() -> None:
    """Build the engine, then generate whenever asked."""
    job = json.loads(sys.argv[1])
    lengths = job["lengths"]
    each = len(lengths) // len(job["adapters"])
    engine = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        enforce_eager=job["eager"],
        # On a GPU the other side keeps its share.
        gpu_memory_utilization=0.4,
        enable_lora=True,
        max_loras=len(job["adapters"]),
        max_lora_rank=8,
        max_num_seqs=job["rows"],
        max_model_len=len(job["ids"]) + max(lengths) + 8,
        seed=0,
    )
    sampling = [
        SamplingParams(
            temperature=1.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False
        )
        for n in lengths
    ]
    requests = [
        LoRARequest(f"a{i}", i + 1, folder)
        for i, folder in enumerate(job["adapters"])
        for _ in range(each)
    ]
    prompts = [TokensPrompt(prompt_token_ids=job["ids"])] * len(lengths)
    # The build for a CPU is a package of another name.
    own = next(iter(importlib.metadata.packages_distributions()["vllm"]))
    packages = {"vllm": own, "torch": "torch", "transformers": "transformers"}
    tell({"versions": {name: version(package) for name, package in packages.items()}})
    for _ in sys.stdin:
        start = time.perf_counter()
        done = engine.generate(
            prompts, sampling_params=sampling, lora_request=requests, use_tqdm=False
        )
        seconds = time.perf_counter() - start
        found = [len(output.outputs[0].token_ids) for output in done]
        assert found == lengths, f"{found} tokens, expected {lengths}"
        tell({"seconds": seconds})


if __name__ == "__main__":
    main()
