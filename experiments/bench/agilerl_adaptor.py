"""AgileRL's GRPO, a command at a time; runs in its own virtual environment, started by peers.py.

Argument: a JSON job {shape, agents, prompts, group, tokens}. It answers once when the agents stand,
then once for each line it reads:

generate   get_action of every agent: one generate call per prompt
loop       the same through its own training loop's collector: one generate call per completion
learn      one optimizer step of every agent, on the last generation
evolve     tournament selection and mutation of the whole population
save, load a checkpoint of one agent

Every answer holds `seconds`, and `gc_seconds`, the part of it spent in gc.collect(), which it calls
over its own heavy imports: much at a tiny size, little on real models. Behind the clock it is made
sure that the work was done: T tokens of every completion, a finite loss, adapters that moved.

Two of its defaults would give it passes that ours does not make, and are set: old_logprobs_source,
because its own, "rollout", scores every row once more when the sampler is transformers' generate,
and use_separate_reference_adapter, because the base alone is the reference here.
"""

import contextlib
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import agilerl
from common import Collections, tell
from shapes import BETA, COMMON, EMBEDDED, LORA, LR, QUESTIONS, SHAPES

# First workaround: liger-kernel has to be installed, and its Triton kernels, which need a GPU,
# would be patched into the model. Off before the algorithms are imported.
agilerl.HAS_LIGER_KERNEL = False

import torch  # noqa: E402 -- after the switch, as what follows
from agilerl.algorithms import GRPO  # noqa: E402
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter  # noqa: E402
from agilerl.hpo.mutation import Mutations  # noqa: E402
from agilerl.hpo.tournament import TournamentSelection  # noqa: E402
from agilerl.llm_envs import RolloutCollector, RolloutHarness  # noqa: E402
from agilerl.llm_envs.rubrics import reward_fn_to_rubric  # noqa: E402
from agilerl.rollouts.on_policy import collect_rollouts_llm  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)


class Population:
    """Its agents and the commands.

    Args:
        job: See the module docstring.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        """Build the agents as its documentation shows, with what 2.58.0 needs besides."""
        self.job = job
        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
        self.questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(job["prompts"])]
        ids = [tokenizer(q, return_tensors="pt", add_special_tokens=False) for q in self.questions]
        self.prompts = [{"input_ids": each["input_ids"]} for each in ids]
        limits = HyperparameterConfig(
            lr=RLParameter(min=1e-6, max=1e-4), beta=RLParameter(min=1e-3, max=1e-1)
        )
        self.columns = [each["input_ids"].shape[1] + job["tokens"] for each in ids]
        context = 64 + job["tokens"]
        # It takes the first pad that it finds for the end of a completion, and nothing keeps the
        # model from sampling <pad>. <eos> is never sampled: every completion has exactly T tokens.
        self.agents = GRPO.population(
            size=job["agents"], actor_network=build_model(job["shape"]), hp_config=limits,
            pad_token_id=1, pad_token="<eos>", lora_config=LoraConfig(**LORA),
            batch_size=job["prompts"], group_size=job["group"], max_output_tokens=job["tokens"],
            min_output_tokens=job["tokens"], max_model_len=context, device="cpu", lr=LR, beta=BETA,
            gradient_checkpointing=False, use_liger_loss=False, temperature=1.0, top_k=0,
            top_p=1.0, old_logprobs_source="trainer", use_separate_reference_adapter=False,
        )  # fmt: skip
        for agent in self.agents:
            # Second workaround: only the first agent of a population gets an optimizer.
            if agent.optimizer is None:
                agent.wrap_models()
        rows = [{"question": q, "answer": "000"} for q in self.questions] * 8
        self.collector = RolloutCollector(
            lambda: RolloutHarness.from_dataset(
                rows, reward_fn_to_rubric(length_reward), tokenizer, max_model_len=context
            ),
            job["prompts"],
            job["group"],
        )
        self.generated: list[Any] = []
        self.collected: list[Any] = []
        self.learned: list[dict[str, float]] = []
        self.weights = self._adapters()
        self.tournament = TournamentSelection(2, True, job["agents"])
        self.mutations = Mutations(0, 0, 0, 0, 0, 1, rand_seed=0, device="cpu")
        self.folder = tempfile.mkdtemp(prefix="bench-agilerl-")

    def generate(self) -> None:
        """Sample for every agent, one after another."""
        self.generated = [agent.get_action(self.prompts, training=True) for agent in self.agents]

    def loop(self) -> None:
        """Sample through the collector of its training loop."""
        self.collected = [
            collect_rollouts_llm(
                agent=agent, env=self.collector, n_steps=1, batch_size=self.job["prompts"],
                group_seed=0,
            )
            for agent in self.agents
        ]  # fmt: skip

    def learn(self) -> None:
        """Take a step with every agent, one after another."""
        generator = torch.Generator().manual_seed(0)
        self.learned = []
        for agent, out in zip(self.agents, self.generated, strict=True):
            ids = [row[None] for group in out.token_ids for row in group]
            masks = [row[None] for group in out.action_masks for row in group]
            rewards = torch.randn(self.job["prompts"], self.job["group"], generator=generator)
            self.learned.append(agent.learn((ids, masks, rewards.flatten()[:, None])))

    def evolve(self) -> None:
        """Select and mutate."""
        for number, agent in enumerate(self.agents):
            agent.metrics.add_fitness(float(number))
        _, chosen, indices = self.tournament.select(self.agents)
        self.agents = self.mutations.mutation(chosen, indices=indices)

    def check(self, command: str) -> None:
        """Make sure, behind the clock, that a command did its work."""
        job = self.job
        if command == "generate":
            for out in self.generated:
                shapes = [tuple(group.shape) for group in out.token_ids]
                assert shapes == [(job["group"], columns) for columns in self.columns], shapes
                self._check_masks(out.action_masks)
        elif command == "loop":
            for _, masks, *_ in self.collected:
                assert len(masks) == job["prompts"] * job["group"], len(masks)
                self._check_masks(masks)
        elif command == "learn":
            before, self.weights = self.weights, self._adapters()
            for told, old, new in zip(self.learned, before, self.weights, strict=True):
                assert math.isfinite(told["loss"]), told
                assert told["grad_norm_pre"] > 0, told
                assert not torch.equal(old, new), "a step that moved nothing"
        elif command == "evolve":
            assert len(self.agents) == job["agents"], len(self.agents)
            self.weights = self._adapters()

    def _check_masks(self, masks: list[torch.Tensor]) -> None:
        job = self.job
        made = sum(int(mask.sum()) for mask in masks)
        expected = job["prompts"] * job["group"] * job["tokens"]
        assert made == expected, f"{made} tokens, expected {expected}"

    def _adapters(self) -> list[torch.Tensor]:
        """Return a copy of what every agent trains, in one vector each."""
        found = []
        for agent in self.agents:
            trained = [p for p in agent.actor.parameters() if p.requires_grad]
            assert {p.dtype for p in agent.actor.parameters()} == {torch.float32}
            found.append(torch.cat([p.detach().flatten() for p in trained]))
        return found

    def save(self) -> None:
        """Save one agent."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.agents[0].save_checkpoint(self.folder)

    def load(self) -> None:
        """Load one agent."""
        self.agents[0].load_checkpoint(self.folder, load_optimizer=True)


def build_model(shape: str) -> Any:  # noqa: ANN401 -- a transformers model
    """Load the embedded model, or make one with random weights."""
    if shape == "embedded":
        return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**COMMON, **SHAPES[shape])).float().eval()


def length_reward(completion: str, answer: str, question: str) -> float:
    """Return something that differs between completions."""
    del answer, question
    return len(set(completion)) / 32


def main() -> None:
    """Stand the agents up, then do as told."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    collections = Collections()
    population = Population(json.loads(sys.argv[1]))
    packages = ("agilerl", "torch", "transformers", "peft")
    tell({"versions": {name: version(name) for name in packages}})
    # Third workaround: no logger is given to it; the CSV logger fails after the first evaluation.
    for line in sys.stdin:
        command = line.strip()
        collections.seconds = 0.0
        start = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):
            getattr(population, command)()
        seconds, collected = time.perf_counter() - start, collections.seconds
        population.check(command)
        tell({"seconds": seconds, "gc_seconds": collected})


if __name__ == "__main__":
    main()
