"""The task sums in AgileRL; runs in AgileRL's own virtual environment, started by agilerl_sums.py.

Argument: a JSON job with the seed, the lr of every agent, its range, and the very prompts of our
runs. After each round it tells seconds so far, tokens so far, and the accuracy of the best agent on
validation, which is its fitness, and on test, which is off the clock and not counted.

What makes AgileRL faster than its own loop would be is done: rollouts go through get_action, one
generate call for the eight completions of a prompt, where the loop's collector makes one for each;
and all prompts of an evaluation, which are equally long, go through one generate call. The three
workarounds of bench/agilerl_adaptor.py are needed here too. Settings that both sides have are ours;
its off-policy masks and its normalisation of the loss, which ours has not, stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import agilerl
from common import tell
from shapes import EMBEDDED, LORA

# Liger's Triton kernels need a GPU. Off before the algorithms are imported.
agilerl.HAS_LIGER_KERNEL = False

import numpy as np  # noqa: E402 -- after the switch, as what follows
import torch  # noqa: E402
from agilerl.algorithms import GRPO  # noqa: E402
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter  # noqa: E402
from agilerl.hpo.mutation import Mutations  # noqa: E402
from agilerl.hpo.tournament import TournamentSelection  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

EOS = 1
"""Its completions end at the first pad, so that the end token has to be the pad."""

Rows = Sequence[Sequence[str]]


class Population:
    """Its agents, its tournament and its mutations.

    Args:
        job: See the module docstring.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        """Build the agents, each with its own lr."""
        self.job = job
        self.tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
        self.agents = [self._agent(index, lr) for index, lr in enumerate(job["lrs"])]
        size = len(self.agents)
        self.tournament = TournamentSelection(2, True, size)
        self.mutations = Mutations(
            0.2, 0, 0, 0, 0, 0.8, mutate_elite=False, rand_seed=job["seed"], device="cpu"
        )
        self.tokens = 0

    def _agent(self, index: int, lr: float) -> Any:  # noqa: ANN401 -- AgileRL is not typed here
        job = self.job
        model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
        limits = HyperparameterConfig(lr=RLParameter(**job["range"]))
        return GRPO(
            index=index, actor_network=model, hp_config=limits, pad_token_id=EOS,
            pad_token="<eos>", lora_config=LoraConfig(**LORA), batch_size=job["prompts"],
            group_size=job["group"], max_output_tokens=job["tokens"], max_model_len=64,
            device="cpu", lr=lr, beta=0.0, clip_coef=0.2, max_grad_norm=1.0, update_epochs=2,
            adv_norm="mean_std", temperature=1.0, top_k=0, top_p=1.0, seed=job["seed"],
            gradient_checkpointing=False, use_liger_loss=False, old_logprobs_source="trainer",
            use_separate_reference_adapter=False,
        )  # fmt: skip

    def ids(self, rows: Rows) -> torch.Tensor:
        """Return the token ids of prompts of one length."""
        texts = [question for question, _ in rows]
        return self.tokenizer(texts, return_tensors="pt", add_special_tokens=False)["input_ids"]

    def rewards(self, completions: torch.Tensor, answers: Sequence[str]) -> torch.Tensor:
        """Return 1 for the very answer, else 0: our reward."""
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        return torch.tensor([float(t == a) for t, a in zip(texts, answers, strict=True)])

    def step(self, rows: Rows) -> None:
        """Sample with every agent and let it learn, one after another."""
        prompts = self.ids(rows)
        length = prompts.shape[1]
        for agent in self.agents:
            out = agent.get_action([{"input_ids": each[None]} for each in prompts], training=True)
            self.tokens += sum(int(mask.sum()) for mask in out.action_masks)
            rewards = [
                self.rewards(group[:, length:], [answer] * len(group))
                for group, (_, answer) in zip(out.token_ids, rows, strict=True)
            ]
            ids = [row[None] for group in out.token_ids for row in group]
            masks = [row[None] for group in out.action_masks for row in group]
            agent.learn((ids, masks, torch.cat(rewards)[:, None]))

    def accuracy(self, agent: Any, rows: Rows, samples: int, *, counted: bool) -> np.ndarray:  # noqa: ANN401 -- AgileRL is not typed here
        """Return the share of right answers to each prompt, sampled in one generate call."""
        prompts = self.ids(rows).repeat_interleave(samples, dim=0)
        with agent.select_adapter("actor"), torch.no_grad():
            agent.actor.eval()
            out = agent.actor.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                generation_config=agent.generation_config,
            )
        completions = out[:, prompts.shape[1] :]
        if counted:
            before_end = (completions == EOS).int().cumsum(dim=1) - (completions == EOS).int()
            self.tokens += int((before_end == 0).sum())
        answers = [answer for _, answer in rows for _ in range(samples)]
        return self.rewards(completions, answers).reshape(-1, samples).mean(dim=1).numpy()

    def evolve(self, fitness: Sequence[float]) -> None:
        """Select and mutate."""
        for agent, value in zip(self.agents, fitness, strict=True):
            agent.metrics.add_fitness(value)
        _, chosen, _ = self.tournament.select(self.agents)
        self.agents = self.mutations.mutation(chosen)
        for agent in self.agents:
            # Only agents whose lr has mutated have an optimizer then.
            if agent.optimizer is None:
                agent.wrap_models()


def play(population: Population, job: dict[str, Any]) -> None:
    """Train, evaluate, select and mutate; tell each round."""
    seconds = 0.0
    rounds = len(job["train"])
    for number, steps in enumerate(job["train"]):
        start = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):
            for rows in steps:
                population.step(rows)
            scores = [
                float(population.accuracy(a, job["validation"], 1, counted=True).mean())
                for a in population.agents
            ]
        seconds += time.perf_counter() - start
        best = population.agents[int(np.argmax(scores))]
        per_prompt = population.accuracy(best, job["test"], job["test_samples"], counted=False)
        tell(
            {
                "round": number,
                "seconds": seconds,
                "tokens": population.tokens,
                "validation": max(scores),
                "test": float(per_prompt.mean()),
                "test_se": float(per_prompt.std(ddof=1) / len(per_prompt) ** 0.5),
                "lrs": [float(agent.lr) for agent in population.agents],
                "fitness": scores,
            }
        )
        if number + 1 < rounds:
            start = time.perf_counter()
            with contextlib.redirect_stdout(sys.stderr):
                population.evolve(scores)
            seconds += time.perf_counter() - start


def main() -> None:
    """Read the job, stand the agents up, and play."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    np.random.seed(job["seed"])  # noqa: NPY002 -- its tournament draws from the global generator
    torch.manual_seed(job["seed"])
    population = Population(job)
    packages = ("agilerl", "torch", "transformers", "peft")
    tell({"versions": {name: version(name) for name in packages}})
    play(population, job)


if __name__ == "__main__":
    main()
