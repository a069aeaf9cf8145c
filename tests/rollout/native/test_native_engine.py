import math
from dataclasses import replace
from functools import partial

import architectures
import pytest
import tiny
import torch
from engine_contract import RolloutContract, greedy_by_transformers, ids_of, logprobs_of

from evo_grpo.errors import ModelError
from evo_grpo.model.forward.fused import RowLayout, population_forward
from evo_grpo.model.llama import decode
from evo_grpo.model.llama.cache import FixedCache
from evo_grpo.model.llama.departures import departures_of
from evo_grpo.model.llama.weights import is_llama_family
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native import loop
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings
from evo_grpo.types import Prompt

LENGTHS = (3, 9, 1, 6)
RANKS = (4, 2, 8, 4, 4, 4, 1, 4)


def requests_for(slots, *, samples=3, seed=0, lengths=LENGTHS, **sampling):
    """One request per slot, prompts of different lengths."""
    token_ids = tiny.ids(len(lengths), max(lengths), seed=3)
    asked = [
        Prompt(i, f"prompt {i}", tuple(row[:n].tolist()))
        for i, (row, n) in enumerate(zip(token_ids, lengths, strict=True))
    ]
    settings = Sampling(**{"max_output_tokens": 8} | sampling)
    return [
        RolloutRequest(i, name, asked, samples, settings, seed + i)
        for i, name in enumerate(slots.names)
    ]


def engine_of(slots, *, specialized=True, **engine):
    """An engine with settings of the group `engine`, by joined layers or the model's modules."""
    slots.base.specialized = specialized
    try:
        return NativeEngine(slots, AgentSettings(engine=engine))
    finally:
        slots.base.specialized = True


def assert_logprobs(slots, requests, out, atol=2e-4, known=None):
    """Compare with one row alone; `known` keeps its values for calls over the same weights."""
    known = {} if known is None else known
    for request, groups in zip(requests, out, strict=True):
        for group in groups:
            for completion in group.completions:
                sequence = group.prompt.token_ids, completion.token_ids
                key = (request.adapter, request.sampling.temperature, *sequence)
                if key not in known:
                    known[key] = logprobs_of(slots, request, group.prompt, completion)
                assert completion.logprobs == pytest.approx(known[key], abs=atol)


class TestLeanContract(RolloutContract):
    @pytest.fixture
    def make(self):
        return NativeEngine

    def test_runs_on_the_llama_kernels(self, slots):
        assert is_llama_family(slots.base)


class TestTrunkContract(RolloutContract):
    @pytest.fixture
    def make(self):
        return partial(engine_of, specialized=False)


class TestPiecesContract(RolloutContract):
    """A request that is split: at most three rows, so every prompt is a piece of its own."""

    @pytest.fixture
    def make(self):
        return partial(engine_of, max_decode_rows=3)


MODELS = {
    "llama": (tiny.llama, {}),
    "llama-bias": (tiny.llama, {"attention_bias": True, "mlp_bias": True}),
    "llama-no-groups": (tiny.llama, {"num_key_value_heads": 4}),
    "llama-head-dim": (tiny.llama, {"head_dim": 12}),
    "llama3-rope": (
        tiny.llama,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama-eager": (tiny.llama, {"attn_implementation": "eager"}),
    "qwen2": (tiny.qwen2, {}),
    "mistral": (tiny.mistral, {"sliding_window": None}),
    **{name: (build, {}) for name, build in architectures.FAMILIES.items()},
    "gpt2": (tiny.gpt2, {}),
    "gpt2-eager": (tiny.gpt2, {"attn_implementation": "eager"}),
}
#: By their own modules: what is fast for one member of the Llama family is so for all.
GREEDY = {
    **{name: MODELS[name] for name in ("llama", "llama-bias", "llama3-rope", "qwen2")},
    **{name: MODELS[name] for name in ("gpt2", "gpt2-eager")},
    "qwen3": (architectures.qwen3, {}),
    "gpt-neox": (architectures.gpt_neox, {}),
    "gemma": (architectures.gemma, {}),
}


class TestAgainstTransformers:
    @pytest.mark.filterwarnings("ignore:.*generation flags are not valid.*:UserWarning")
    @pytest.mark.parametrize(
        ("model", "specialized"),
        [*((one, False) for one in GREEDY), *((one, True) for one in MODELS if "gpt2" not in one)],
    )
    def test_greedy_equals_generate(self, model, specialized):
        build, changes = (MODELS if specialized else GREEDY)[model]
        slots = tiny.population(build(**changes), (4, 2))
        if specialized:
            assert not departures_of(slots.base, slots.layers)
        requests = requests_for(slots, samples=2, temperature=0.0)
        out = engine_of(slots, specialized=specialized).rollout(requests)
        for request, groups in zip(requests, out, strict=True):
            for group in groups:
                expected = greedy_by_transformers(slots, request.adapter, group.prompt)
                assert {completion.token_ids for completion in group.completions} == {expected}
        assert_logprobs(slots, requests, out)

    @pytest.mark.parametrize(
        ("model", "specialized"),
        [
            *((one, True) for one in ("llama", "llama-bias", "qwen2", *architectures.FAMILIES)),
            ("llama-bias", False),
        ],
    )
    def test_samples_score_alike(self, model, specialized):
        build, changes = MODELS[model]
        slots = tiny.population(build(**changes), (4, 2, 8))
        requests = requests_for(slots, temperature=0.9)
        assert_logprobs(
            slots, requests, engine_of(slots, specialized=specialized).rollout(requests)
        )

    @pytest.mark.parametrize("fixed", [False, True], ids=["cpu", "gpu"])
    @pytest.mark.parametrize("name", architectures.FAMILIES)
    def test_families_draw_what_their_modules_draw(self, name, fixed, monkeypatch):
        """Many windows long, in the cache of a CPU and that of a GPU, while rows leave."""
        slots = tiny.population(architectures.FAMILIES[name](), (4, 2))
        settings = {"temperature": 0.9, "max_output_tokens": 24}
        requests = requests_for(slots, samples=1, lengths=(3, 30, 12, 22), **settings)
        expected = engine_of(slots, specialized=False).rollout(requests)
        if fixed:
            monkeypatch.setattr(decode, "cache_for", lambda device, *layers: FixedCache(*layers))
        monkeypatch.setattr(loop, "_LEAVE_SHARE", 0.1)
        out = engine_of(slots).rollout(requests)
        assert not departures_of(slots.base, slots.layers)
        assert [ids_of(groups) for groups in out] == [ids_of(groups) for groups in expected]
        assert_logprobs(slots, requests, out, atol=1e-5)

    def test_samples_of_wide_adapters_score_alike(self, monkeypatch):
        """Each B of joined layers apart, as a CPU has it where there are many rows."""
        monkeypatch.setattr("evo_grpo.model.llama.adapter_views._START", 0)
        slots = tiny.population(tiny.llama(), (4, 18))
        requests = requests_for(slots, temperature=0.9)
        assert_logprobs(slots, requests, engine_of(slots, specialized=True).rollout(requests))

    def test_frequencies_are_the_models_probabilities(self):
        """5,000 first tokens of two agents, within five standard errors of softmax."""
        slots = tiny.population(tiny.llama(), (4, 4))
        count = 5000
        requests = requests_for(slots, samples=count, lengths=(4,), max_output_tokens=1)
        out = engine_of(slots, max_decode_rows=100_000).rollout(requests)
        for request, groups in zip(requests, out, strict=True):
            first = torch.tensor([c.token_ids[0] for c in groups[0].completions])
            shares = torch.bincount(first, minlength=tiny.VOCABULARY).double() / count
            ids = torch.tensor([groups[0].prompt.token_ids])
            slots.activate(request.adapter)
            with torch.no_grad():
                p = torch.softmax(slots.base.model(input_ids=ids).logits[0, -1].double(), dim=-1)
            assert ((shares - p).abs() <= 5 * (p * (1 - p) / count).sqrt()).all()

    def test_repetition_penalty_and_minimum_equal_generate(self):
        """transformers' own processors, over prompt and completion, with a greedy choice."""
        slots = tiny.population(tiny.llama(), (4,))
        settings = {"repetition_penalty": 1.8, "min_output_tokens": 5, "max_output_tokens": 12}
        requests = requests_for(slots, samples=1, temperature=0.0, **settings)
        given = {"min_new_tokens": 5, "repetition_penalty": 1.8}
        for group in NativeEngine(slots).rollout(requests)[0]:
            expected = greedy_by_transformers(slots, "a0", group.prompt, 12, **given)
            assert group.completions[0].token_ids == expected


SETTINGS = (
    {},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"min_output_tokens": 4},
    {"temperature": 1.4, "top_p": 0.95, "top_k": 30},
)


@pytest.fixture(scope="module")
def eight():
    return tiny.population(tiny.llama(), RANKS)


@pytest.fixture(scope="module")
def requests(eight):
    """Ragged: every agent has a group size and settings of its own."""
    return [
        replace(
            request,
            samples=2 + i % 3,
            sampling=Sampling(max_output_tokens=4 + i, **SETTINGS[i]),
        )
        for i, request in enumerate(requests_for(eight))
    ]


@pytest.fixture(scope="module")
def expected(eight, requests):
    """Each agent alone, one prompt at a time: nothing is padded, and one prompt's rows alone."""
    engine = engine_of(eight, max_decode_prompts=1, specialized=False)
    return [ids_of(engine.rollout([request])[0]) for request in requests]


@pytest.fixture(scope="module")
def scored():
    """Log-probs of `expected`, filled by the first test that compares them."""
    return {}


class TestCompany:
    """An agent's samples are its own, whoever else is in the batch and however it is cut."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"max_decode_rows": 1},
            {"max_decode_rows": 60},
            {"max_decode_prompts": 3},
            {"max_decode_rows": 40, "max_decode_prompts": 3, "specialized": False},
        ],
        ids=str,
    )
    def test_all_together(self, eight, requests, expected, scored, options):
        out = engine_of(eight, **options).rollout(requests)
        assert [ids_of(groups) for groups in out] == expected
        assert_logprobs(eight, requests, out, known=scored)

    @pytest.mark.parametrize(
        ("share", "specialized"), [(0.0, True), (0.5, True), (2.0, True), (0.5, False)]
    )
    def test_whenever_finished_rows_leave(
        self, eight, requests, expected, share, specialized, monkeypatch
    ):
        """At once, late, and never."""
        monkeypatch.setattr(loop, "_LEAVE_SHARE", share)
        out = engine_of(eight, specialized=specialized).rollout(requests)
        assert [ids_of(groups) for groups in out] == expected

    @pytest.mark.parametrize("share", [0.2, 2.0])
    def test_the_memory_and_blocks_of_a_gpu(
        self, eight, requests, expected, scored, share, monkeypatch
    ):
        """Steps over a fixed width, of which some are past the end of every row."""
        monkeypatch.setattr(decode, "cache_for", lambda device, *layers: FixedCache(*layers))
        monkeypatch.setattr(loop, "block_of", lambda device: 3)
        monkeypatch.setattr(loop, "_LEAVE_SHARE", share)
        out = engine_of(eight).rollout(requests)
        # A cache that is wrong differs from the modules, which would then take its place.
        assert not departures_of(eight.base, eight.layers)
        assert [ids_of(groups) for groups in out] == expected
        assert_logprobs(eight, requests, out, known=scored)

    def test_agents_without_prompts(self, eight, requests, expected):
        some = [
            replace(request, prompts=request.prompts[: i % 4]) for i, request in enumerate(requests)
        ]
        out = engine_of(eight, max_decode_prompts=2).rollout(some)
        assert [ids_of(g) for g in out] == [e[: i % 4] for i, e in enumerate(expected)]

    def test_keys_stand_for_positions(self, eight, requests, expected):
        """A prompt that moved within its request keeps its draws when its key says so."""
        request = requests[0]
        moved = replace(request, prompts=request.prompts[2:], keys=[2, 3])
        for engine in (NativeEngine(eight), engine_of(eight, max_decode_prompts=1)):
            assert ids_of(engine.rollout([moved])[0]) == expected[0][2:]

    def test_one_agents_nan_leaves_the_others_alone(self, requests, expected):
        slots = tiny.population(tiny.llama(), RANKS)
        with torch.no_grad():
            for parameter in slots.parameters("a2"):
                parameter.fill_(math.nan)
        out = engine_of(slots).rollout(requests)
        for index, groups in enumerate(out):
            if index != 2:
                assert ids_of(groups) == expected[index]
        assert all(math.isnan(v) for g in out[2] for c in g.completions for v in c.logprobs)

    def test_slots_come_go_and_change_their_modules(self):
        slots = tiny.population(tiny.llama(), (4,), target_modules=["q_proj", "down_proj"])
        engine = NativeEngine(slots)
        engine.rollout(requests_for(slots))
        slots.add("a1", tiny.lora(3, target_modules=["v_proj", "gate_proj", "down_proj"]))
        tiny.stir(slots, "a1", 5)
        for change in (lambda: None, lambda: slots.rebuild("a0", tiny.lora(2))):
            change()
            tiny.stir(slots, "a0", 6)
            asked = requests_for(slots)
            assert_logprobs(slots, asked, engine.rollout(asked))
        slots.remove("a1")
        asked = requests_for(slots)
        assert_logprobs(slots, asked, engine.rollout(asked))


class TestEndTokens:
    @pytest.mark.parametrize("specialized", [True, False])
    @pytest.mark.parametrize("pad", [0, tiny.EOS, None], ids=["apart", "pad-is-eos", "no-pad"])
    def test_padding_changes_nothing(self, pad, specialized):
        """Masks come from lengths, so prompts may hold the padding id, and padding may be eos."""
        samples = []
        for padding in (pad, 5):
            tokenizer = tiny.FakeTokenizer(eos_token_id=tiny.EOS, pad_token_id=padding)
            slots = tiny.population(tiny.llama(), (4, 4), tokenizer)
            asked = requests_for(slots, max_output_tokens=12)
            held = Prompt(4, "all special", (0, tiny.EOS, 5, tiny.EOS))
            asked = [replace(r, prompts=[*r.prompts, held]) for r in asked]
            out = engine_of(slots, specialized=specialized).rollout(asked)
            assert_logprobs(slots, asked, out)
            samples.append([ids_of(groups) for groups in out])
        assert samples[0] == samples[1]
        flat = [ids for groups in samples[0] for group in groups for ids in group]
        assert any(ids[-1] == tiny.EOS for ids in flat)
        assert all(tiny.EOS not in ids[:-1] for ids in flat)

    def test_the_end_token_is_sampled_scored_and_not_shown(self):
        tokenizer = tiny.FakeTokenizer(eos_token_id=tiny.EOS, pad_token_id=tiny.EOS)
        slots = tiny.population(tiny.llama(), (4,), tokenizer)
        asked = requests_for(slots, samples=40, max_output_tokens=20)
        completions = [c for g in NativeEngine(slots).rollout(asked)[0] for c in g.completions]
        ended = [c for c in completions if c.ended]
        assert ended
        assert len(ended) < len(completions)
        for completion in ended:
            assert completion.token_ids[-1] == tiny.EOS
            assert completion.text == " ".join(map(str, completion.token_ids[:-1]))
            assert len(completion.logprobs) == len(completion.token_ids)
        assert any(len(c.token_ids) == 1 and c.text == "" for c in ended)

    def test_each_of_several_end_tokens_ends(self):
        model = tiny.llama()
        model.generation_config.eos_token_id = [tiny.EOS, 6, 7, 8, 9, 10]
        slots = tiny.population(model, (4,))
        asked = requests_for(slots, samples=40, max_output_tokens=20)
        out = NativeEngine(slots).rollout(asked)
        last = {c.token_ids[-1] for g in out[0] for c in g.completions if c.ended}
        assert {6, 7, 8} <= last <= {tiny.EOS, 6, 7, 8, 9, 10}
        held = requests_for(slots, samples=40, max_output_tokens=9, min_output_tokens=9)
        for group in NativeEngine(slots).rollout(held)[0]:
            for completion in group.completions:
                assert not {tiny.EOS, 6, 7, 8, 9, 10} & set(completion.token_ids[:8])


class TestContext:
    def test_a_token_without_an_embedding_is_refused(self):
        slots = tiny.population(tiny.llama(), (4,))
        (request,) = requests_for(slots, lengths=(3,))
        beyond = slots.base.vocabulary
        prompt = replace(request.prompts[0], token_ids=(1, beyond))
        with pytest.raises(ModelError, match=rf"prompt 0 has the token {beyond}, and the model"):
            engine_of(slots).rollout([replace(request, prompts=[prompt])])

    @pytest.mark.parametrize("build", [tiny.mistral, tiny.qwen2])
    def test_completions_go_on_behind_a_sliding_window(self, build):
        changes = {"sliding_window": 16}
        if build is tiny.qwen2:
            changes |= {"use_sliding_window": True, "max_window_layers": 0}
        model = build(**changes)
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        slots = tiny.population(model, (4,))
        asked = requests_for(slots, samples=1, lengths=(3, 40), max_output_tokens=40)
        out = NativeEngine(slots).rollout(asked)
        assert [len(g.completions[0].token_ids) for g in out[0]] == [40, 24]
        assert_logprobs(slots, asked, out)


class TestRefusedModels:
    def test_an_attention_that_takes_no_mask_per_row(self):
        slots = tiny.population(tiny.llama(), (4,))
        slots.base.model.config._attn_implementation_internal = "flash_attention_2"
        with pytest.raises(
            ModelError, match=r"attention 'flash_attention_2'; expected sdpa or eage"
        ):
            engine_of(slots, specialized=False)


@pytest.mark.parametrize("specialized", [True, False])
def test_bfloat16(specialized):
    slots = tiny.population(tiny.llama().to(torch.bfloat16), (4, 2))
    asked = requests_for(slots)
    assert_logprobs(
        slots, asked, engine_of(slots, specialized=specialized).rollout(asked), atol=0.3
    )


def test_training_goes_on_after_a_rollout_joined_the_weights():
    """The specialized decoder turns the base's weights into views: gradients must not notice."""
    gradients = []
    for rollout in (False, True):
        slots = tiny.population(tiny.llama(), (4, 4))
        if rollout:
            NativeEngine(slots).rollout(requests_for(slots))
        with population_forward(slots.layers, RowLayout(("a0", "a1"), (1, 2))):
            slots.base.hidden(tiny.ids(3, 6)).square().sum().backward()
        gradients.append([p.grad for n in slots.names for p in slots.parameters(n)])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
