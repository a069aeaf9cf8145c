"""The task sums in AgileRL; runs in AgileRL's own virtual environment, started by answer.py.

Argument: a JSON job with the seed, the lr of every agent, its range, and the very prompts of our
runs. It answers once when the agents stand, then once for each line that it reads: it plays a round
and tells seconds so far, and the accuracy of the best agent on validation, which is its fitness.

What makes AgileRL faster than its own loop would be is done: rollouts go through get_action, one
generate call for the eight completions of a prompt, where the loop's collector makes one for each;
and all prompts of an evaluation, which are equally long, go through one generate call. The three
workarounds of agilerl_adaptor.py are needed here too. Settings that both sides have are ours; its
off-policy masks and its normalisation of the loss, which ours has not, stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import agilerl
from common import Collections, elapsed, tell
from shapes import LORA

# Liger's Triton kernels need a GPU. Off before the algorithms are imported.
agilerl.HAS_LIGER_KERNEL = False

import numpy as np  # noqa: E402 -- after the switch, as what follows
import torch  # noqa: E402
from agilerl.algorithms import GRPO  # noqa: E402
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter  # noqa: E402
from agilerl.hpo.mutation import Mutations  # noqa: E402
from agilerl.hpo.tournament import TournamentSelection  # noqa: E402
from answer_side import Questions, Rows, wait  # noqa: E402
from peft import LoraConfig  # noqa: E402

EOS = 1
"""Its completions end at the first pad, so that the end token has to be the pad."""


class Population:
    """Its agents, its tournament and its mutations.

    Args:
        job: See the module docstring.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        """Build the agents, each with its own lr."""
        self.job = job
        self.questions = Questions(job, pad=EOS)
        self.agents = [self._agent(index, lr) for index, lr in enumerate(job["lrs"])]
        self.tournament = TournamentSelection(2, True, len(self.agents))
        self.mutations = Mutations(
            0.2, 0, 0, 0, 0, 0.8, mutate_elite=False, rand_seed=job["seed"], device="cpu"
        )

    def _agent(self, index: int, lr: float) -> Any:  # noqa: ANN401 -- AgileRL is not typed here
        job = self.job
        limits = HyperparameterConfig(lr=RLParameter(**job["range"]))
        return GRPO(
            index=index, actor_network=self.questions.load(), hp_config=limits, pad_token_id=EOS,
            pad_token="<eos>", lora_config=LoraConfig(**LORA), batch_size=job["prompts"],
            group_size=job["group"], max_output_tokens=job["tokens"], max_model_len=64,
            device="cpu", lr=lr, beta=0.0, clip_coef=0.2, max_grad_norm=1.0, update_epochs=2,
            adv_norm="mean_std", temperature=1.0, top_k=0, top_p=1.0, seed=job["seed"],
            gradient_checkpointing=False, use_liger_loss=False, old_logprobs_source="trainer",
            use_separate_reference_adapter=False,
        )  # fmt: skip

    def step(self, rows: Rows) -> None:
        """Sample with every agent and let it learn, one after another."""
        prompts, _ = self.questions.ids(rows)
        length = prompts.shape[1]
        for agent in self.agents:
            out = agent.get_action([{"input_ids": each[None]} for each in prompts], training=True)
            rewards = [
                self.questions.rewards(group[:, length:], [answer] * len(group))
                for group, (_, answer) in zip(out.token_ids, rows, strict=True)
            ]
            ids = [row[None] for group in out.token_ids for row in group]
            masks = [row[None] for group in out.action_masks for row in group]
            agent.learn((ids, masks, torch.cat(rewards)[:, None]))

    def scores(self) -> list[float]:
        """Return the accuracy of every agent on validation."""
        found: list[float] = []
        for agent in self.agents:
            with agent.select_adapter("actor"):
                found.append(self.questions.accuracy(agent.actor, self.job["validation"]))
        return found

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


def main() -> None:
    """Read the job, stand the agents up, and play: train, evaluate, select and mutate."""
    job = json.loads(sys.argv[1])
    imported = elapsed(job["started"])
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    np.random.seed(job["seed"])  # noqa: NPY002 -- its tournament draws from the global generator
    torch.manual_seed(job["seed"])
    collections = Collections()
    population = Population(job)
    packages = ("agilerl", "torch", "transformers", "peft")
    tell(
        {
            "imported": imported,
            "standing": elapsed(job["started"]),
            "versions": {name: version(name) for name in packages},
        }
    )
    steps, scores = job["steps"], list[float]()
    for start in range(0, len(job["train"]), steps):
        wait()
        with contextlib.redirect_stdout(sys.stderr):
            if scores:
                population.evolve(scores)
            for rows in job["train"][start : start + steps]:
                population.step(rows)
            scores = population.scores()
        tell(
            {
                **elapsed(job["started"]),
                "best": max(scores),
                "gc_seconds": collections.seconds,
                "lrs": [float(agent.lr) for agent in population.agents],
            }
        )


if __name__ == "__main__":
    main()
