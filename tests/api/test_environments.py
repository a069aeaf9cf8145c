"""Environments that agents are given: objects of several classes, and names."""

import numpy as np
import pytest
from text_agents import Count, agents, agilerl_agents
from tiny_cohort import build_model

from evo_grpo import GRPO, MultiTurnGym, TokenObservationWrapper
from evo_grpo.errors import ConfigError
from evo_grpo.training.assemble import environment_for


@pytest.mark.slow
def test_an_agent_is_tested_in_whatever_plays():
    agent = agents(1)[0]
    tokenizer = agent.cohort.base.tokenizer
    wrapper = TokenObservationWrapper(Count(), tokenizer, 3, max_output_tokens=4)
    for env in (Count(), wrapper, MultiTurnGym(Count, tokenizer, max_turns=3), "sums"):
        rewards = agent.test(env)
        assert np.isfinite(rewards).all()
        assert agent.fitness[-1] == pytest.approx(rewards.mean())


def test_a_bare_environment_has_the_turns_of_a_configuration():
    population = agents(1)
    world = environment_for(population.cohort, Count(turns=99, strict=False))
    assert world.max_turns == 16
    assert world.max_output_tokens == 4


def test_what_cannot_be_played_is_named():
    agent = agents(1)[0]
    for env in (5, object(), None):
        with pytest.raises(ConfigError, match="env: expected a DatasetEnv, a ReasoningGym, a"):
            agent.test(env)
    with pytest.raises(ConfigError, match='no task "sum"'):
        agent.test("sum")
    with pytest.raises(ConfigError, match="loop: expected an integer"):
        agent.test("sums", 0)
    mute = GRPO(model=build_model())
    with pytest.raises(ConfigError, match="env: Count needs the model's tokenizer"):
        mute.test(Count())


@pytest.mark.parametrize("moved", [False, True], ids=["as-it-is", "to-device"])
def test_turns_by_hand_end_with_any_end_token_of_the_model(moved):
    """As many tokens as the engine sampled, be they closed by its tokenizer's end token or not."""
    agent = agilerl_agents(1)[0]
    base = agent.cohort.base
    others = [i for i in range(base.vocabulary) if i != base.tokenizer.eos_token_id][::2]
    base.model.generation_config.eos_token_id = others
    closed = set()
    for seed in range(4):
        wrapper = TokenObservationWrapper(Count(turns=99, strict=False), base.tokenizer, 4)
        observation, _ = wrapper.reset(seed=seed)
        for _ in range(3):
            if moved:
                (observation,) = agent.to_device(observation)
            (ids,), (mask,) = agent.get_action(observation)
            row = int(mask.sum(1).argmin())  # the shortest of its group: padded where others go on
            sampled = ids[row, 1:][mask[row]].tolist()
            before, length = sum(wrapper.mask), len(wrapper.token_ids)
            observation, *_ = wrapper.step(ids[row])
            assert sum(wrapper.mask) - before == len(sampled)
            assert wrapper.token_ids[length : length + len(sampled)] == sampled
            assert wrapper.ended == (sampled[-1] in base.eos_ids)
            closed |= {sampled[-1]} & set(others)
    assert closed
