"""A Falcon that slopes its attention by the columns of its mask (alibi), in place of positions."""

import pytest
import tiny
import torch
from engine_contract import logprobs_of, prompts_of
from transformers import FalconConfig

from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native.ability import Ability
from evo_grpo.rollout.native.engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling

LENGTHS = (3, 9, 1, 6)
OUTPUT = 8


@pytest.fixture(scope="module", params=[True, False], ids=["one-key-head", "all-key-heads"])
def slots(request):
    config = FalconConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=tiny.HIDDEN, num_hidden_layers=2,
        num_attention_heads=4, alibi=True, new_decoder_architecture=False,
        multi_query=request.param, parallel_attn=request.param, bos_token_id=2, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    return tiny.population(tiny.of(config), (4, 2))


def asked_of(slots, samples, **sampling):
    settings = Sampling(max_output_tokens=OUTPUT, **sampling)
    return [
        RolloutRequest(i, name, prompts_of(*LENGTHS), samples, settings, 7 + i)
        for i, name in enumerate(slots.names)
    ]


def pairs(requests, out):
    for request, groups in zip(requests, out, strict=True):
        for group in groups:
            for completion in group.completions:
                yield request, group.prompt, completion


def test_it_is_decoded_one_length_of_prompts_at_a_time(slots):
    requests = asked_of(slots, 2, temperature=0.9)
    engine = NativeEngine(slots)
    assert engine.ability is Ability.EQUAL_LENGTHS
    for request, prompt, done in pairs(requests, engine.rollout(requests)):
        expected = logprobs_of(slots, request, prompt, done)
        assert done.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*generation flags are not valid.*:UserWarning")
def test_greedy_equals_generate(slots):
    requests = asked_of(slots, 1, top_k=1)
    for request, prompt, done in pairs(requests, NativeEngine(slots).rollout(requests)):
        slots.activate(request.adapter)
        ids = torch.tensor([prompt.token_ids])
        expected = slots.base.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=OUTPUT,
            pad_token_id=0,
        )[0, ids.shape[1] :]
        assert list(done.token_ids) == expected.tolist()
