"""A language model of a few thousand weights, agents over it, and rows to learn from."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from evo_grpo.envs.single_turn import SingleTurnPlay
from evo_grpo.learn.rows import AgentBatch, AgentTraining, Row, rows_from_trajectories
from evo_grpo.model.base import SharedBase
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.schema.hparams import Hparams
from evo_grpo.settings.keywords import agent_settings
from evo_grpo.types import Completion, CompletionGroup, Prompt

VOCABULARY = 19

#: Plain settings: one epoch over all rows at once, no KL term, no filters.
PLAIN = Hparams(
    lr=1e-2,
    beta=0.0,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    max_grad_norm=1.0,
    batch_size=None,
    group_size=4,
    update_epochs=1,
)


def build_model(seed=0, **changes):
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                **{
                    "vocab_size": VOCABULARY,
                    "hidden_size": 16,
                    "intermediate_size": 24,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "max_position_embeddings": 64,
                    "initializer_range": 0.5,
                    "pad_token_id": 0,
                    "eos_token_id": 1,
                    "bos_token_id": 2,
                }
                | changes
            )
        )
    return model


def build_cohort(
    size=1,
    hparams=PLAIN,
    *,
    kind="grpo",
    lora=None,
    dropout=0.0,
    seed=7,
    warm=True,
    engine=None,
    model=None,
    target_sets=None,
    **settings,
):
    """Agents over a model of their own; `warm` gives each other weights than the base's.

    Settings are given by the names of the constructors' keywords; nothing mutates unless told.
    """
    lora = lora or LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    given = {"seed": seed, "hyperparameters": {}, **settings}
    agents = agent_settings(given, kind=kind).replace(target_sets=target_sets or {})
    cohort = Cohort(SharedBase(model or build_model()), lora, agents, engine=engine)
    for index in range(size):
        given = hparams[index] if isinstance(hparams, list) else hparams
        slot = cohort.add(given).slot
        if warm:
            perturb(cohort, slot)
    return cohort


@torch.no_grad()
def perturb(cohort, slot, scale=0.05):
    generator = torch.Generator().manual_seed(100 + slot)
    for parameter in cohort.slots.parameters(cohort.agents[slot].adapter):
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def group(prompt, *completions):
    """Completions of one prompt, all of them ended, by their token ids."""
    return CompletionGroup(
        0,
        Prompt(0, "", prompt),
        tuple(Completion(ids, "", (-0.5,) * len(ids), True) for ids in completions),
    )


def make_rows(seed, groups=2, group_size=4, prompt=(3, 6), answer=(1, 5)):
    """Rows of unlike lengths with advantages that sum to about 0 in a group."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(groups):
        ids = rng.integers(2, VOCABULARY, rng.integers(*prompt))
        advantages = rng.normal(size=group_size)
        advantages -= advantages.mean()
        for advantage in advantages:
            tail = rng.integers(1, VOCABULARY, rng.integers(*answer))
            mask = np.r_[np.zeros(len(ids), bool), np.ones(len(tail), bool)]
            rows.append(Row(np.r_[ids, tail].astype(np.int64), mask, float(advantage)))
    return rows


def rows_of(groups, advantages):
    """Rows of one agent's groups, by way of an environment of one turn."""
    play = SingleTurnPlay(UNREWARDED, [[g.prompt for g in groups]], [0])
    play.tell([groups])
    (experience,) = play.experiences()
    return rows_from_trajectories(experience.trajectories, advantages)


def no_rewards(groups):
    return np.zeros((sum(len(g.completions) for g in groups), 1)), [False] * len(groups), {}


#: In place of an environment of one turn.
UNREWARDED = SimpleNamespace(judge=no_rewards, reward_names=(), of_trl=False)


def fresh(rows, **changes):
    """Copies that a learn call may write to."""
    return [replace(row, old=None, ref=None, **changes) for row in rows]


def learn(cohort, slots, rows, seed=3, **options):
    """One learn call for some agents with these rows each."""
    agents = [
        AgentTraining(
            cohort.agents[s].adapter,
            cohort.references.of(cohort.agents[s]),
            cohort.agents[s].hparams,
            cohort.agents[s].optimizer,
        )
        for s in slots
    ]
    batches = [AgentBatch(s, fresh(r)) for s, r in zip(slots, rows, strict=True)]
    return cohort.learner.learn(agents, batches, seed=seed, **options)


def weights(cohort, slot):
    return [p.detach().clone() for p in cohort.slots.parameters(cohort.agents[slot].adapter)]


def moments(cohort, slot):
    state = cohort.agents[slot].optimizer.state_dict()["state"]
    return {(i, name): v.clone() for i, values in state.items() for name, v in values.items()}


def image(cohort, slot):
    """All that belongs to an agent, copied; `assert_same_image` compares two of them."""
    state = cohort.agents[slot]
    optimizer = state.optimizer.state_dict()
    reference = cohort.slots.state(state.reference) if state.has_reference else {}
    return {
        "actor": cohort.slots.state(state.adapter),
        "reference": reference,
        "moments": moments(cohort, slot),
        "trains": [p.requires_grad for p in cohort.slots.parameters(state.adapter)],
        "groups": [
            {k: v for k, v in g.items() if k != "params"} for g in optimizer["param_groups"]
        ],
        # An optimizer over other tensors than the slot's would train nothing.
        "owned": [id(p) for g in state.optimizer.param_groups for p in g["params"]]
        == [id(p) for p in cohort.slots.parameters(state.adapter)],
        "rank": cohort.slots.lora_config(state.adapter).r,
        "state": (state.hparams, state.member, state.steps, list(state.history)),
        "more": (list(state.hooks), dict(state.last)),
    }


def assert_same_image(first, second):
    assert first.keys() == second.keys()
    for name in first:
        one, two = first[name], second[name]
        if name in ("actor", "reference", "moments"):
            assert one.keys() == two.keys(), name
            # The bits: NaN equals itself, and 0.0 is not -0.0.
            same = {
                k: torch.equal(v.view(torch.int32), two[k].view(torch.int32))
                for k, v in one.items()
            }
            assert all(same.values()), (name, same)
        else:
            assert one == two, name
    assert first["owned"]


def assert_same_agents(first, second):
    """Two populations have the same weights, moments, hyperparameters, steps and scores."""
    assert first.slots == second.slots
    for one, other in zip(first, second, strict=True):
        assert same(weights(first.cohort, one.slot), weights(second.cohort, other.slot))
        kept, found = moments(first.cohort, one.slot), moments(second.cohort, other.slot)
        assert kept.keys() == found.keys()
        assert all(torch.equal(value, found[key]) for key, value in kept.items())
        assert (one.hparams, one.steps) == (other.hparams, other.steps)
        assert one.fitness == other.fitness


def distance(first, second):
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def same(first, second):
    return len(first) == len(second) and all(
        torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )
