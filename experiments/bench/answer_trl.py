"""The task of answer.py in TRL; runs in TRL's own virtual environment, started by answer.py.

Argument: a JSON job with the seed, learning rates, and the very prompts of our runs. It answers
once before its first step, then once for each line that it reads: a GRPOTrainer trains as many
steps as a round has, and the accuracy of its policy on validation is told. When a trainer has had
all rounds, the next one begins, with the next learning rate, in the same process.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from answer_side import Questions, wait
from common import elapsed, tell
from datasets import Dataset
from peft import LoraConfig
from shapes import LORA
from transformers import TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer


class Rounds(TrainerCallback):
    """Calls a function after as many optimizer steps as a round has.

    Args:
        steps: Of a round.
        report: The function, which gets the number of the round in this training.
    """

    def __init__(self, steps: int, report: Callable[[int], None]) -> None:
        """Nothing is trained yet."""
        self.steps, self.report = steps, report

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401 -- TRL is not typed here
        """Count."""
        del args, control, kwargs
        if state.global_step % self.steps == 0:
            self.report(state.global_step // self.steps - 1)


def trainer_of(questions: Questions, job: dict[str, Any], lr: float, first: int) -> GRPOTrainer:
    """Return a trainer that begins with the prompts of a round, with a policy that is the base.

    Args:
        questions: The prompts and rewards.
        job: See the module docstring.
        lr: Learning rate.
        first: The round.
    """
    steps = job["train"][first * job["steps"] :]
    rows = [{"prompt": text, "answer": answer} for step in steps for text, answer in step]
    # Two optimizer steps on each generation, as update_epochs = 2 makes of one minibatch.
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="answer-trl-"), use_cpu=True, bf16=False,
        per_device_train_batch_size=job["prompts"] * job["group"], num_generations=job["group"],
        max_completion_length=job["tokens"], temperature=1.0, top_p=1.0, top_k=0, beta=0.0,
        epsilon=0.2, num_iterations=job["epochs"], learning_rate=lr, loss_type="grpo",
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, shuffle_dataset=False,
        gradient_checkpointing=False, max_steps=job["epochs"] * len(steps), save_strategy="no",
        report_to=[], logging_strategy="no", disable_tqdm=True, seed=job["seed"],
    )  # fmt: skip
    return GRPOTrainer(
        questions.load(), questions.score, args=settings, train_dataset=Dataset.from_list(rows),
        processing_class=questions.tokenizer, peft_config=LoraConfig(**LORA),
    )  # fmt: skip


def one_after_another(questions: Questions, job: dict[str, Any]) -> None:
    """Train with one learning rate after another; tell each score."""
    for lr in job["lrs"]:
        trainer = trainer_of(questions, job, lr, 0)

        def report(number: int, trainer: GRPOTrainer = trainer, lr: float = lr) -> None:
            best = questions.accuracy(trainer.model, job["validation"])
            tell({**elapsed(job["started"]), "best": best, "lr": lr, "round": number})
            wait()

        trainer.add_callback(Rounds(job["epochs"] * job["steps"], report))
        trainer.train()


def main() -> None:
    """Read the job, and train."""
    job = json.loads(sys.argv[1])
    imported = elapsed(job["started"])
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(job["seed"])
    questions = Questions(job)
    packages = ("trl", "torch", "transformers", "peft")
    tell(
        {
            "imported": imported,
            "standing": elapsed(job["started"]),
            "versions": {name: version(name) for name in packages},
        }
    )
    wait()
    one_after_another(questions, job)


if __name__ == "__main__":
    main()
