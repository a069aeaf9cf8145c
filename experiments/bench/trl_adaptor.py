"""TRL's GRPOTrainer, a step at a time; runs in its own virtual environment, started by peers.py.

Argument: a JSON job {shape, prompts, group, tokens, prompt_tokens, device}, the last two of which
may be left out; on CUDA the base is in bf16, else in fp32. It answers once before its first step,
then once for each line `step` it reads: one generation, one scoring, one optimizer step, in
`seconds`.
A population of N is N of these one after another, each with a process or at least a model of its
own: N times the seconds, the models' loading not counted. Behind the clock it is made sure that the
step was one: T tokens of every completion, a finite KL, an adapter that moved.
"""

import json
import math
import os
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch
from common import tell
from datasets import Dataset
from peft import LoraConfig
from shapes import BETA, COMMON, EMBEDDED, LORA, LR, QWEN2, SHAPES, question
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer


class OnDemand(TrainerCallback):
    """Holds the training loop until a step is asked for, and times it.

    Args:
        tokens: Tokens that every completion has to have.
    """

    def __init__(self, tokens: int) -> None:
        """Nothing is running yet."""
        self.tokens = tokens
        self.trainer: GRPOTrainer | None = None
        self.adapter = torch.empty(0)
        self.start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Wait for a line; the end of the input ends the process, in the middle of the loop."""
        self.adapter = adapter_of(self.trainer)
        if not sys.stdin.readline():
            os._exit(0)
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Answer."""
        seconds = time.perf_counter() - self.start
        told = self.trainer._metrics["train"]  # what it would log, had it a logger
        shortest = told["completions/min_length"][-1]
        assert shortest == self.tokens, f"{shortest} tokens, expected {self.tokens}"
        assert math.isfinite(told["kl"][-1]), told["kl"][-1]
        now = adapter_of(self.trainer)
        assert bool(now.isfinite().all()), "an adapter that is not finite"
        assert not torch.equal(now, self.adapter), "a step that moved nothing"
        tell({"seconds": seconds})


def adapter_of(trainer: GRPOTrainer) -> torch.Tensor:
    """Return a copy of what is trained, in one vector."""
    if trainer.model.device.type == "cpu":
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([p.detach().flatten() for p in trained])


def build_model(shape: str, device: str) -> Any:  # noqa: ANN401 -- a transformers model
    """Load the embedded model, or make one with random weights."""
    if shape == "embedded":
        return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    torch.manual_seed(0)
    if shape in QWEN2:
        torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
        try:
            with torch.device(device):
                return Qwen2ForCausalLM(Qwen2Config(**COMMON, **QWEN2[shape]))
        finally:
            torch.set_default_dtype(torch.float32)
    return LlamaForCausalLM(LlamaConfig(**COMMON, **SHAPES[shape])).float()


def random_reward(completions: list[str], **columns: Any) -> list[float]:
    """Return rewards that differ, so that no group is dead."""
    del columns
    return torch.randn(len(completions)).tolist()


def main() -> None:
    """Make a trainer and let it train as long as steps are asked for."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    device = job.get("device", "cpu")
    rows = [{"prompt": question(i, job.get("prompt_tokens", 6))} for i in range(64)]
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="bench-trl-"), use_cpu=device == "cpu",
        bf16=device != "cpu",
        per_device_train_batch_size=job["prompts"] * job["group"], num_generations=job["group"],
        max_completion_length=job["tokens"], generation_kwargs={"min_new_tokens": job["tokens"]},
        temperature=1.0, top_p=1.0, top_k=0, beta=BETA, learning_rate=LR, loss_type="grpo",
        gradient_checkpointing=False, max_steps=10**6, save_strategy="no", report_to=[],
        logging_strategy="no", disable_tqdm=True, seed=0,
    )  # fmt: skip
    on_demand = OnDemand(job["tokens"])
    trainer = GRPOTrainer(
        build_model(job["shape"], device), random_reward, args=settings,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        peft_config=LoraConfig(**LORA), callbacks=[on_demand],
    )  # fmt: skip
    on_demand.trainer = trainer
    packages = ("trl", "torch", "transformers", "peft")
    tell({"versions": {name: version(name) for name in packages}})
    trainer.train()


if __name__ == "__main__":
    main()
