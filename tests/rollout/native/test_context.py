"""Completions end where a model has no more positions, by whatever name its config has that."""

import architectures
import pytest
import tiny
from engine_contract import logprobs_of, prompts_of

from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native import loop
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling


@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize("build", [architectures.mpt, architectures.gpt_neo, tiny.llama])
def test_a_completion_ends_at_the_last_position(build, block, monkeypatch):
    """Also where steps come in blocks, as on a GPU: no step may have a position beyond."""
    monkeypatch.setattr(loop, "block_of", lambda device: block)
    slots = tiny.population(build(), (4, 2))
    asked = Sampling(max_output_tokens=2 * tiny.CONTEXT, min_output_tokens=2 * tiny.CONTEXT)
    requests = [RolloutRequest(0, slots.names[0], prompts_of(5, 40), 1, asked, 7)]
    (groups,) = NativeEngine(slots).rollout(requests)
    for group in groups:
        (done,) = group.completions
        assert len(group.prompt.token_ids) + len(done.token_ids) == tiny.CONTEXT
        expected = logprobs_of(slots, requests[0], group.prompt, done)
        assert done.logprobs == pytest.approx(expected, abs=1e-4)
