"""Agents over the embedded tiny-sums, small and quick, and games that they can play."""

from peft import LoraConfig
from tiny_cohort import perturb

from evo_grpo import agilerl
from evo_grpo.api.agent import GRPO
from evo_grpo.envs.episodes.gym import MultiTurnGym

#: One epoch over all rows at once, nothing mutates and all agents begin with the same values.
PLAIN = {
    "model": "tiny-sums",
    "lr": 3e-3,
    "group_size": 4,
    "update_epochs": 1,
    "max_output_tokens": 4,
    "hyperparameters": {},
    "device": "cpu",
    "seed": 7,
}

#: The same as AgileRL spells it.
AGILERL = {
    "model_name": "tiny-sums",
    "lr": 3e-3,
    "beta": 0.0,
    "group_size": 4,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "max_grad_norm": 1.0,
    "batch_size": None,
    "update_epochs": 1,
    "max_output_tokens": 4,
    "max_model_len": None,
    "gradient_checkpointing": False,
    "use_separate_reference_adapter": False,
    "seed": 7,
}


def lora(rank=2):
    return LoraConfig(
        r=rank, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )


def agents(size=2, *, warm=True, **changes):
    """A population; `warm` gives each agent other weights than the base's."""
    made = GRPO.population(size=size, init="same", **{**PLAIN, "lora": lora(), **changes})
    return stirred(made) if warm else made


def agilerl_agents(size=2, **changes):
    """The same population, made as AgileRL spells it."""
    given = {**AGILERL, "lora_config": lora(), **changes}
    return stirred(agilerl.GRPO.population(size, **given))


def stirred(population):
    for slot in population.slots:
        perturb(population.cohort, slot)
    return population


class Count:
    """Asks the policy to add one, `turns` times, from where the seed says; a wrong answer ends it.

    The reward of each turn is 1 for the right answer.
    """

    def __init__(self, turns=3, strict=True):
        self.turns, self.strict = turns, strict

    def reset(self, seed=None):
        self.number, self.asked = 10 + (seed or 0) % 80, 1
        return f"{self.number:02d}+01=", {}

    def step(self, action):
        self.number += 1
        right = action == f"{self.number:03d}"
        over = self.asked >= self.turns or (self.strict and not right)
        self.asked += 1
        return f"{self.number:02d}+01=", float(right), over, False, {}


class Flaky(Count):
    """Raises in the second turn of episodes that began at an even number."""

    def step(self, action):
        if self.asked == 2 and (self.number - self.asked + 1) % 2 == 0:
            raise ConnectionError("gone")
        return super().step(action)


def gym(population, factory=Count, **settings):
    settings = {"max_turns": 8, "batch_size": 3, "seed": 1, "max_output_tokens": 4, **settings}
    made = MultiTurnGym(factory, population.cohort.base.tokenizer, **settings)
    population.cohort.adapt_to(made)
    return made
