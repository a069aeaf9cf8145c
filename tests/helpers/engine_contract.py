"""What every rollout engine promises. A new engine supplies `engine` and inherits the tests.

class TestMyEngine(RolloutContract):
    @pytest.fixture
    def make(self):
        return MyEngine  # called with the slots: an `EngineFactory`, its settings left out
"""

import math
from dataclasses import replace

import pytest
import tiny
import torch

from evo_grpo.errors import PromptTooLongError, ShapeError
from evo_grpo.model.forward.fused import RowLayout, population_forward
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.types import Prompt

# `slots`, the population every engine samples from, stands in conftest.py.


def prompts(base, *texts, start=0):
    return [
        Prompt(start + i, text, tuple(base.tokenizer(text).input_ids))
        for i, text in enumerate(texts)
    ]


def prompts_of(*lengths):
    """Prompts of drawn tokens, for the models of `tiny`, which have no words."""
    return [
        Prompt(i, f"prompt {i}", tuple(tiny.ids(1, n, seed=3 + i)[0].tolist()))
        for i, n in enumerate(lengths)
    ]


def logits_of(slots, adapter, token_ids):
    """Logits (T, V) of one sequence through one adapter: one row, no cache, no padding."""
    input_ids = torch.tensor([token_ids], device=slots.base.device)
    with torch.no_grad(), population_forward(slots.layers, RowLayout((adapter,), (1,))):
        return slots.base.logits(slots.base.hidden(input_ids))[0]


def logprobs_of(slots, request, prompt, completion):
    """What the loss will compute for the sampled tokens."""
    sequence = prompt.token_ids + completion.token_ids
    logits = logits_of(slots, request.adapter, sequence)
    table = torch.log_softmax(logits / (request.sampling.temperature or 1.0), dim=-1)
    start = len(prompt.token_ids) - 1
    return [table[start + i, token].item() for i, token in enumerate(completion.token_ids)]


def greedy_by_transformers(slots, adapter, prompt, tokens=8, **given):
    """What `generate` gives for one prompt alone."""
    slots.activate(adapter)
    ids = torch.tensor([prompt.token_ids])
    whole = slots.base.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=tokens,
        pad_token_id=0,
        **given,
    )
    return tuple(whole[0, ids.shape[1] :].tolist())


def ids_of(groups):
    return [[c.token_ids for c in group.completions] for group in groups]


class RolloutContract:
    #: Largest gap between an engine's own log-probs and those of the training forward, in nats.
    LOGPROB_GAP = 2e-4
    #: Whether draws are keyed by the request, so that other agents and the batch cannot move them.
    KEYED = True
    #: Whether log-probs are recorded where filters or penalties act; else they are None.
    TELLS_BEHIND_FILTERS = True
    TEXTS = ("12+07=", "3+4=", "10+22=", "5+5=")

    @pytest.fixture
    def make(self):
        raise AssertionError("a subclass supplies what makes its engine from slots")

    def own_slots(self):
        """Two agents that a test may change, and stir as it needs."""
        return tiny.population(tiny.llama(), (4, 4))

    @pytest.fixture
    def engine(self, make, slots):
        """An engine over `slots`."""
        engine = make(slots)
        yield engine
        engine.close()

    def request_for(self, slots, index=0, **changes):
        settings = {
            "agent": index,
            "adapter": f"a{index}",
            "samples": 3,
            "sampling": Sampling(max_output_tokens=6),
            "seed": 100 + index,
        } | changes
        if "prompts" not in settings:
            settings["prompts"] = prompts(slots.base, *self.TEXTS)
        return RolloutRequest(**settings)

    def test_one_group_per_prompt_in_order(self, engine, slots):
        requests = [
            self.request_for(slots, 2, samples=1),
            self.request_for(slots, 0, prompts=prompts(slots.base, "1+1=", start=7), samples=5),
            self.request_for(slots, 1, prompts=[]),
        ]
        out = engine.rollout(requests)
        assert [len(groups) for groups in out] == [4, 1, 0]
        for request, groups in zip(requests, out, strict=True):
            assert [g.prompt for g in groups] == list(request.prompts)
            assert all(g.agent == request.agent for g in groups)
            assert all(len(g.completions) == request.samples for g in groups)

    def test_nothing_to_do(self, engine, slots):
        assert engine.rollout([]) == []
        assert engine.rollout([self.request_for(slots, prompts=[])]) == [[]]

    def test_completions_are_well_formed(self, engine, slots):
        requests = [
            self.request_for(slots, i, sampling=Sampling(max_output_tokens=m), samples=8)
            for i, m in enumerate((1, 4, 9))
        ]
        end = set(slots.base.eos_ids)
        lengths = set()
        for request, groups in zip(requests, engine.rollout(requests), strict=True):
            limit = request.sampling.max_output_tokens
            for completion in (c for group in groups for c in group.completions):
                ids = completion.token_ids
                lengths.add(len(ids))
                assert 1 <= len(ids) <= limit
                assert all(0 <= i < slots.base.vocabulary for i in ids)
                assert completion.ended == (ids[-1] in end)
                assert not end & set(ids[:-1])
                assert completion.ended or len(ids) == limit
                text = slots.base.tokenizer.decode(ids, skip_special_tokens=True)
                assert completion.text == text
                assert len(completion.logprobs) == len(ids)
                assert all(math.isfinite(v) and v <= 1e-6 for v in completion.logprobs)
        assert len(lengths) > 3

    @pytest.mark.parametrize("temperature", [0.6, 1.5])
    def test_logprobs_are_those_of_the_training_forward(self, engine, slots, temperature):
        sampling = Sampling(temperature=temperature, max_output_tokens=5)
        for completion, expected in self.sampled_and_expected(engine, slots, sampling):
            assert completion.logprobs == pytest.approx(expected, abs=self.LOGPROB_GAP)

    @pytest.mark.parametrize(
        "shaped",
        [
            {"top_k": 30},
            {"top_p": 0.9},
            {"min_p": 0.05},
            {"repetition_penalty": 1.3},
            {"min_output_tokens": 4},
            {"temperature": 0.6, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "min_output_tokens": 2},
        ],
        ids=lambda shaped: "+".join(shaped),
    )
    def test_logprobs_behind_filters_are_the_policys_or_none(self, engine, slots, shaped):
        """Filters and penalties are not part of the policy."""
        sampling = Sampling(**{"max_output_tokens": 5} | shaped)
        if self.TELLS_BEHIND_FILTERS:
            for completion, expected in self.sampled_and_expected(engine, slots, sampling):
                assert completion.logprobs == pytest.approx(expected, abs=self.LOGPROB_GAP)
        else:
            groups = engine.rollout([self.request_for(slots, sampling=sampling)])[0]
            assert [c.logprobs for group in groups for c in group.completions] == [None] * 12

    def sampled_and_expected(self, engine, slots, sampling):
        """Completions of three agents and the base, with the log-probs that the loss computes."""
        settings = {"sampling": sampling, "samples": 1}
        requests = [self.request_for(slots, i, **settings) for i in range(3)]
        requests.append(self.request_for(slots, 3, adapter=None, **settings))
        for request, groups in zip(requests, engine.rollout(requests), strict=True):
            for group in groups:
                for completion in group.completions:
                    yield completion, logprobs_of(slots, request, group.prompt, completion)

    def test_the_likeliest_token_of_every_step(self, engine, slots):
        requests = [
            self.request_for(slots, i, sampling=Sampling(max_output_tokens=5, **greedy), samples=2)
            for i, greedy in (
                *((0, {"top_k": 1}), (1, {"temperature": 1e-4}), (2, {"top_p": 1e-6})),
                *((0, {"temperature": 0.0}), (1, {"temperature": 0.0, "top_p": 0.5})),
            )
        ]
        for request, groups in zip(requests, engine.rollout(requests), strict=True):
            for group in groups:
                sequence, greedy = list(group.prompt.token_ids), []
                while len(greedy) < 5 and (not greedy or greedy[-1] not in slots.base.eos_ids):
                    greedy.append(int(logits_of(slots, request.adapter, sequence)[-1].argmax()))
                    sequence.append(greedy[-1])
                assert [list(c.token_ids) for c in group.completions] == [greedy, greedy]

    def test_the_same_request_gives_the_same_samples(self, engine, slots):
        requests = [self.request_for(slots, i) for i in range(3)]
        assert engine.rollout(requests) == engine.rollout(requests)

    def test_another_seed_gives_other_samples(self, engine, slots):
        request = self.request_for(slots, samples=6, sampling=Sampling(temperature=1.5))
        other = self.request_for(slots, samples=6, sampling=Sampling(temperature=1.5), seed=5)
        assert ids_of(engine.rollout([request])[0]) != ids_of(engine.rollout([other])[0])

    def test_prompts_and_completions_draw_apart(self, engine, slots):
        same = prompts(slots.base, "3+4=", "3+4=")
        sampling = Sampling(temperature=2.0, max_output_tokens=6, min_output_tokens=6)
        request = self.request_for(slots, prompts=same, samples=6, sampling=sampling)
        one, two = ids_of(engine.rollout([request])[0])
        assert len(set(one) | set(two)) == 12

    def test_an_agents_samples_do_not_depend_on_the_others(self, engine, slots):
        if not self.KEYED:
            pytest.skip("this engine draws in the order of its batch")
        mine = self.request_for(slots, 1)
        alone = ids_of(engine.rollout([mine])[0])
        others = [
            self.request_for(slots, 0, samples=5),
            self.request_for(slots, 2, prompts=prompts(slots.base, "20+30=")),
            self.request_for(slots, 3, adapter=None, sampling=Sampling(top_p=0.5)),
        ]
        assert ids_of(engine.rollout([mine, *others])[0]) == alone
        assert ids_of(engine.rollout([*others, mine])[-1]) == alone

    def test_min_output_tokens(self, engine, slots):
        sampling = Sampling(max_output_tokens=6, min_output_tokens=4)
        free = engine.rollout([self.request_for(slots, samples=8)])[0]
        held = engine.rollout([self.request_for(slots, samples=8, sampling=sampling)])[0]
        assert min(len(c.token_ids) for g in free for c in g.completions) < 4
        assert min(len(c.token_ids) for g in held for c in g.completions) >= 4

    def test_a_prompt_without_tokens(self, engine, slots):
        with pytest.raises(ShapeError, match=r"prompt 0 \(''\) has no tokens; expected at least o"):
            engine.rollout([self.request_for(slots, prompts=[Prompt(0, "", ())])])

    def test_a_prompt_that_leaves_no_room(self, engine, slots):
        long = Prompt(3, "1" * 512, tuple([10] * 512))
        with pytest.raises(PromptTooLongError, match=r"prompt 3 has 512 tokens.*context of 512"):
            engine.rollout([self.request_for(slots, prompts=[long])])

    @pytest.mark.parametrize(
        "change", [{"samples": 0}, {"sampling": Sampling(max_output_tokens=0)}]
    )
    def test_nothing_asked_for(self, engine, slots, change):
        with pytest.raises(ShapeError, match=r"samples and max_output_tokens must be >= 1, got "):
            engine.rollout([self.request_for(slots, **change)])

    def test_says_whether_its_logprobs_are_exact(self, engine):
        """An engine that needs a wider gap than rounding cannot call its numbers exact."""
        assert engine.exact in (True, False)
        assert self.LOGPROB_GAP <= 2e-4 or not engine.exact

    def test_a_change_acts_on_its_adapter_alone(self, make):
        slots = self.own_slots()
        engine = make(slots)
        asked = prompts_of(3, 5, 7)
        requests = [
            self.request_for(slots, i, prompts=asked, sampling=Sampling(top_k=1)) for i in (0, 1)
        ]
        before = engine.rollout(requests)
        slots.copy("a0", "a1")
        after = engine.rollout(requests)
        assert ids_of(after[0]) == ids_of(before[0])
        assert ids_of(after[1]) == ids_of(after[0]) != ids_of(before[1])
        engine.close()

    def test_an_adapter_of_an_old_name_is_another_one(self, make):
        slots = self.own_slots()
        engine = make(slots)
        request = self.request_for(
            slots, 1, prompts=prompts_of(3, 5, 7), sampling=Sampling(top_k=1)
        )
        stirred = engine.rollout([request])[0]
        slots.remove("a1")
        slots.add("a1")
        fresh = engine.rollout([request])[0]
        (base,) = engine.rollout([replace(request, adapter=None)])
        assert ids_of(fresh) == ids_of(base) != ids_of(stirred)
        engine.close()

    def test_samples_are_the_same_after_sleep(self, engine, slots):
        requests = [self.request_for(slots, i) for i in range(3)]
        engine.wake()
        before = engine.rollout(requests)
        engine.sleep()
        engine.sleep()
        engine.wake()
        assert engine.rollout(requests) == before

    def test_closing_twice(self, make, slots):
        engine = make(slots)
        engine.close()
        engine.close()

    def test_moves_neither_generator_nor_gradients(self, engine, slots, generator_state):
        engine.rollout([self.request_for(slots, i) for i in range(3)])
        for name in slots.names:
            assert all(p.requires_grad and p.grad is None for p in slots.parameters(name))
        assert not any("forward" in vars(layer) for layer in slots.layers.values())
