"""Agents over one base: what they share, what is theirs alone, and what a copy takes along."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_cohort import (
    PLAIN,
    build_cohort,
    build_model,
    distance,
    fresh,
    make_rows,
    moments,
    same,
    weights,
)

from evo_grpo.errors import ConfigError, PromptTooLongError
from evo_grpo.evolve.explore.mutate import Mutations
from evo_grpo.evolve.protocols import Candidate
from evo_grpo.learn.rows import AgentBatch
from evo_grpo.schema.hparams import MUTABLE
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.types import Member, Mutation, Prompt, Score

PROMPTS = [Prompt(0, "", (3, 4, 5)), Prompt(1, "", (6, 7)), Prompt(2, "", (8, 9, 10, 11))]


def step(cohort, slots, seed=1):
    return cohort.learn(
        [AgentBatch(s, fresh(make_rows(seed + s))) for s in slots], stream=("learn", seed)
    )


def tokens(groups):
    return [[c.token_ids for c in g.completions] for g in groups]


def places(cohort, slot):
    parameters = cohort.slots.parameters(cohort.agents[slot].adapter)
    state = cohort.agents[slot].optimizer.state_dict()["state"]
    tensors = [*parameters, *(v for values in state.values() for v in values.values())]
    # Agents may lie side by side in one storage, but nowhere in the same place.
    return {t.data_ptr() for t in tensors}


def test_new_agents_start_as_the_base_and_all_alike():
    cohort = build_cohort(3, warm=False)
    assert same(weights(cohort, 0), weights(cohort, 1))
    ids = torch.tensor([[3, 4, 5]])
    cohort.slots.activate("actor_1")
    with_adapter = cohort.slots.peft(input_ids=ids).logits
    assert torch.equal(with_adapter, build_model()(input_ids=ids).logits)
    assert [s.member.id for s in cohort.agents.values()] == [0, 1, 2]


def test_making_agents_draws_nothing_from_the_global_generator():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_cohort(2)
    assert torch.equal(torch.rand(3), expected)


def test_copy_is_bit_equal_and_shares_nothing():
    cohort = build_cohort(3)
    for seed in (1, 5):
        step(cohort, [0, 1, 2], seed)
    bystander = weights(cohort, 2), moments(cohort, 2)
    gone = moments(cohort, 1)
    cohort.agents[1].history = [Score(0.5, 0.1, 4)]
    cohort.copy(0, 1)
    assert same(weights(cohort, 0), weights(cohort, 1))
    assert moments(cohort, 0).keys() == moments(cohort, 1).keys()
    for key, value in moments(cohort, 0).items():
        assert torch.equal(value, moments(cohort, 1)[key])
    assert any(not torch.equal(value, gone[key]) for key, value in moments(cohort, 1).items())
    assert not places(cohort, 0) & places(cohort, 1)
    assert same(weights(cohort, 2), bystander[0])
    assert all(torch.equal(v, moments(cohort, 2)[k]) for k, v in bystander[1].items())
    assert cohort.agents[1].history == []
    assert cohort.agents[1].steps == cohort.agents[0].steps == 2


def test_a_copied_agent_goes_on_as_its_parent_would():
    # Same weights, moments and rows: the same step, to the bit, in the slot of another agent.
    cohort, rows = build_cohort(2), make_rows(4)
    step(cohort, [0, 1])
    cohort.copy(0, 1)
    for slot in (0, 1):
        cohort.learn([AgentBatch(slot, fresh(rows))], stream=("again",))
    assert same(weights(cohort, 0), weights(cohort, 1))


def test_a_copy_without_moments_leaves_none_of_the_overwritten_agent():
    cohort = build_cohort(2)
    step(cohort, [0, 1])
    cohort.copy(0, 1, inherit_optimizer=False)
    assert same(weights(cohort, 0), weights(cohort, 1))
    assert moments(cohort, 1) == {}
    owned = [p for g in cohort.agents[1].optimizer.param_groups for p in g["params"]]
    assert all(a is b for a, b in zip(owned, cohort.slots.parameters("actor_1"), strict=True))


@pytest.mark.parametrize("inherit", [True, False])
def test_a_copy_keeps_the_lr_of_its_own_hyperparameters(inherit):
    cohort = build_cohort(2)
    step(cohort, [0])
    cohort.set_hparams(1, PLAIN.replace(lr=3e-3))
    cohort.copy(0, 1, inherit_optimizer=inherit)
    assert [g["lr"] for g in cohort.agents[1].optimizer.param_groups] == [3e-3]
    assert [g["lr"] for g in cohort.agents[0].optimizer.param_groups] == [PLAIN.lr]


def test_a_copy_takes_the_reference_along():
    cohort = build_cohort(2, separate_reference=True)
    cohort.freeze_reference(0)
    cohort.copy(0, 1)
    ours, theirs = (cohort.slots.parameters(f"reference_{s}") for s in (0, 1))
    assert same(list(ours), list(theirs))
    assert not any(p.requires_grad for p in theirs)
    assert all(p.requires_grad for p in cohort.slots.parameters("actor_1"))


SETS = {"attention": ["q_proj", "v_proj"], "mlp": ["up_proj", "down_proj"]}
#: Values from which a mutation moves within a range where it can be felt.
RANGES = {
    "lr": (3e-2, 1e-3, 1e-1),
    "beta": (0.0, 0.0, 5.0),
    "entropy_coef": (0.0, 0.0, 5.0),
    "clip_coef": (0.2, 0.1, 0.4),
    "clip_low": (0.8, 0.3, 0.9),
    "clip_high": (1.2, 1.1, 2.0),
    "group_size": (4, 2, 8),
    "temperature": (1.0, 0.3, 2.0),
    "top_p": (0.7, 0.2, 0.9),
    "top_k": (3, 1, 6),
    "min_p": (0.3, 0.1, 0.8),
    "repetition_penalty": (2.0, 1.0, 4.0),
    "max_grad_norm": (1e-2, 1e-3, 1e-1),
    "weight_decay": (0.5, 0.1, 2.0),
    "update_epochs": (2, 1, 4),
    "batch_size": (5, 2, 9),
    "loss_type": ("grpo", "grpo", "sapo"),
    "importance_sampling_level": ("token", "token", "sequence"),
    "adam_beta1": (0.9, 0.5, 0.95),
    "adam_beta2": (0.99, 0.5, 0.999),
    "max_output_tokens": (5, 2, 5),
    "lora.r": (4, 2, 8),
    "lora.alpha": (8.0, 1.0, 64.0),
    "lora.target_modules": ("attention", "attention", "mlp"),
}


# Prompts and the scale of advantages act before the rows of a step are there.
EARLIER = {"prompt", "adv_norm"}


@pytest.mark.parametrize("name", [name for name in MUTABLE if name not in EARLIER])
def test_whatever_mutates_is_felt_in_the_next_step(name):
    value, low, high = RANGES[name]
    hparams = PLAIN.replace(lr=3e-2, update_epochs=2).with_value(name, value)
    given = {"choices": [low, high]} if isinstance(low, str) else {"min": low, "max": high}
    config = HyperparameterConfig(**{name: RLParameter(**given)})
    mutated = Mutations(step="factors").explore(
        Candidate(hparams), config, np.random.default_rng(1)
    )
    assert mutated.get(name) != value
    seen = []
    for chosen in (hparams, mutated):
        cohort = build_cohort(1, chosen, max_output_tokens=5, target_sets=SETS)
        (groups,) = cohort.generate([0], PROMPTS, stream=("sample", 0))
        for seed in (1, 2):
            step(cohort, [0], seed)
        seen.append((tokens(groups), weights(cohort, 0)))
    (said, stands), (says, stood) = seen
    assert said != says or distance(stands, stood) > 1e-5


def test_weight_decay_is_adamws_decoupled_one():
    after = []
    for decay in (0.0, 0.5):
        cohort = build_cohort(1, PLAIN.replace(lr=1e-2, weight_decay=decay))
        before = [p.detach().clone() for p in cohort.slots.parameters("actor_0")]
        step(cohort, [0])
        after.append([p.detach().clone() for p in cohort.slots.parameters("actor_0")])
    for old, plain, decayed in zip(before, *after, strict=True):
        # Loshchilov and Hutter 2019: the weights shrink by lr * decay, apart from Adam's step.
        torch.testing.assert_close(decayed, plain - 1e-2 * 0.5 * old, atol=1e-7, rtol=0)


class Env:
    tokenizer = "theirs"

    def __init__(self, hint=None):
        self.max_output_tokens = hint
        self.limit = None

    def limit_context(self, max_context_length):
        self.limit = max_context_length


def test_an_environment_fills_in_what_was_left_open():
    cohort, env = build_cohort(1, max_model_len=40), Env(hint=9)
    assert cohort.max_output_tokens == 32
    cohort.adapt_to(env)
    assert cohort.max_output_tokens == 9
    assert cohort.base.tokenizer == "theirs"
    assert env.limit == 40
    told = build_cohort(1, max_output_tokens=5)
    told.base.tokenizer = "own"
    told.adapt_to(env)
    assert told.max_output_tokens == 5
    assert told.base.tokenizer == "own"
    assert env.limit == 64  # the model's own context


def test_a_prompt_that_fills_the_context_is_refused_and_a_completion_ends_at_it():
    cohort = build_cohort(1, max_model_len=6, max_output_tokens=5)
    (groups,) = cohort.generate([0], PROMPTS, stream=("x",))
    longest = max(len(g.prompt.token_ids) + len(c.token_ids) for g in groups for c in g.completions)
    assert longest == 6
    with pytest.raises(PromptTooLongError, match=r"prompt 4 has 6 tokens.*context of 6"):
        cohort.generate([0], [Prompt(4, "x", (3,) * 6)], stream=("x",))


def test_removing_an_agent_leaves_the_others():
    cohort = build_cohort(3, separate_reference=True)
    before = weights(cohort, 0), weights(cohort, 2)
    cohort.remove(1)
    assert sorted(cohort.agents) == [0, 2]
    assert same(weights(cohort, 0), before[0])
    assert same(weights(cohort, 2), before[1])
    assert cohort.add(PLAIN).slot == 3
    step(cohort, [0, 2, 3])
    with pytest.raises(ConfigError, match=r"agent 1: expected one of \[0, 2, 3\]"):
        cohort.check_slot(1)


def test_the_first_agent_can_go_and_the_last_one_stays():
    cohort = build_cohort(2, separate_reference=True)
    cohort.remove(0)
    with pytest.raises(ConfigError, match="agent 1: is the only one; add another"):
        cohort.remove(1)
    assert list(cohort.agents) == [1]
    step(cohort, [1])


def test_a_new_life_has_no_history_and_ids_are_never_reused():
    cohort = build_cohort(2)
    cohort.agents[0].history = [Score(0.5, 0.1, 4)]
    cohort.set_member(0, replace(cohort.agents[0].member, born=1))
    assert len(cohort.agents[0].history) == 1
    cohort.set_member(0, Member(8, 0, parent=0, mutation=Mutation("mutate", {"lr": (1, 2)})))
    assert cohort.agents[0].history == []
    assert cohort.next_member == 9
    cohort.reserve_members(4)
    assert cohort.next_member == 9
    assert cohort.add(PLAIN).member.id == 9


def test_learning_counts_steps_and_keeps_the_last_metrics():
    cohort = build_cohort(2)
    metrics = step(cohort, [1])
    assert cohort.agents[1].steps == 1
    assert cohort.agents[0].steps == 0
    assert cohort.agents[1].last == metrics[0]


def test_every_rank_has_agents_though_shards_are_empty(monkeypatch):
    cohort, moved = build_cohort(3, PLAIN, shards=5), {}
    monkeypatch.setattr(cohort, "move", lambda ranks, weights: moved.update(ranks))
    monkeypatch.setattr(cohort, "team", SimpleNamespace(size=3))
    cohort.place([0, 1, 2])
    assert moved == {0: 0, 1: 1, 2: 2}
