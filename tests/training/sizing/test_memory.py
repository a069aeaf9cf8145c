"""The memory plan: exact where it can be, and each setting lowers what the plan says it lowers."""

from dataclasses import replace

import kernel_reference
import numpy as np
import pytest
import tiny
import torch
from architectures import FAMILIES
from small_run import small
from transformers import LlamaConfig

from evo_grpo.model.base import SharedBase
from evo_grpo.model.forward.prefix import find_shared_prefixes
from evo_grpo.model.forward.stacks import RowLayout
from evo_grpo.model.llama.cuda.learn import KernelForward
from evo_grpo.settings import EngineConfig
from evo_grpo.training.sizing.machine import Setup
from evo_grpo.training.sizing.memory import (
    LearnBatch,
    Work,
    base_bytes,
    learn_batch,
    micro_batch_tokens,
    predict,
    saved_bytes,
    total,
)
from evo_grpo.training.sizing.model_size import from_config, read_model_size

SHAPE = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
    "tie_word_embeddings": True,
}  # fmt: skip
SIZE = from_config("135M", {"model_type": "llama", **SHAPE})
WORK = Work(
    agents=8, archive=True, references=False, start=False, parameters=1000, rank=8, rows=512,
    evaluation_rows=64, prompt_tokens=10, output_tokens=22,
)  # fmt: skip


def plan(work=WORK, dtype="float32", device="cpu", **engine):
    found = predict(SIZE, work, EngineConfig(**engine), dtype=dtype, device=device)
    assert found is not None
    return found


def part(found, name):
    (one,) = [p for p in (*found.held, *found.sampling, *found.learning) if p.name == name]
    return one.bytes


def test_what_agents_own_is_exact():
    assert part(plan(), "agents") == 8 * 1000 * 16 + 1000 * 12
    assert part(plan(replace(WORK, archive=False)), "agents") == 8 * 1000 * 16
    assert part(plan(replace(WORK, start=True)), "agents") == 8 * 1000 * 16 + 1000 * 12 + 1000 * 4
    own = replace(WORK, references=True)
    assert part(plan(own), "agents") == 8 * 1000 * 20 + 1000 * 16
    assert part(plan(own), "checkpoints being written") == 8 * 1000 * 16


def test_keys_and_values_are_those_of_the_rows_decoded_at_once():
    each = 32 * 2 * 3 * 64 * 4  # columns, keys and values, heads, size, bytes
    assert part(plan(), "keys and values") == 31 * 512 * each
    assert part(plan(max_decode_rows=100), "keys and values") == 31 * 100 * each
    evaluated = replace(WORK, evaluation_rows=700)
    assert part(plan(evaluated), "keys and values") == 31 * 700 * each
    # On a GPU, rows that wait join at later columns.
    each += 16 * 2 * 3 * 64 * 4
    assert part(plan(max_decode_rows=100, device="cuda"), "keys and values") == 31 * 100 * each


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("activations of a micro-batch", {"max_tokens_per_microbatch": 512}),
        ("activations of a micro-batch", {"max_rows_per_microbatch": 16}),
        ("activations of a micro-batch", {"gradient_checkpointing": True}),
        ("logits of a token", {"max_decode_rows": 64}),
        ("base", {"quantization": "int8"}),
        ("base", {"quantization": "nf4"}),
    ],
)
def test_a_setting_lowers_its_part(name, engine):
    assert part(plan(**engine), name) < 0.6 * part(plan(), name)


def test_shards_divide_the_linear_layers_and_no_more():
    whole, half = (part(plan(replace(WORK, shards=n)), "base") for n in (1, 2))
    linears = sum(i * o for i, o in SIZE.linears.values()) * 4
    largest = max(i * o for i, o in SIZE.linears.values()) * 4
    assert half == whole - linears // 2 + largest


def test_sampling_and_learning_take_turns():
    found = plan()
    assert found.peak == total(found.held) + max(total(found.sampling), total(found.learning))
    assert found.largest.bytes == max(p.bytes for p in found.parts if p.settings)


def test_an_unknown_architecture_has_no_plan():
    size = from_config("mamba", {"model_type": "mamba"})
    assert predict(size, WORK, EngineConfig(), dtype="float32", device="cpu") is None
    assert base_bytes(size, "float32") is None


def test_a_micro_batch_is_that_of_the_base(sums_base):
    shape = read_model_size("tiny-sums").shape
    assert shape is not None
    assert micro_batch_tokens(shape, 4, "cpu") == sums_base.micro_batch_tokens
    changes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    base = SharedBase(tiny.llama(**changes))
    shape = from_config("wide", base.model.config.to_dict()).shape
    assert shape is not None
    tokens = base.micro_batch_tokens
    assert 2048 < tokens < 8192
    assert micro_batch_tokens(shape, 4, "cpu") == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantised_base_has_the_bytes_that_are_loaded(tmp_path, kind):
    model = tiny.llama(hidden_size=128, intermediate_size=192)
    model.save_pretrained(tmp_path)
    base = SharedBase.load(str(tmp_path), device="cpu", tokenizer=object(), quantization=kind)
    weights = base.model.state_dict()
    # NF4 keeps a table of sixteen values and its sizes with each layer; no plan counts them.
    loaded = sum(
        v.numel() * v.element_size()
        for k, v in weights.items()
        if not k.endswith(("quant_map", "bitsandbytes__nf4", "weight_format"))
    )
    config = LlamaConfig.from_pretrained(tmp_path).to_dict()
    assert base_bytes(from_config("wide", config), "float32", kind) == loaded


def test_vllm_holds_the_base_once_more_and_the_trainer_samples_nothing():
    found = plan(rollout="vllm", vllm={"kv_cache_memory_bytes": 7 << 20})
    assert found.sampling == ()
    process, adapters, logits = 1700 << 20, 8 * 1000 * 4, 2 * 4 * 512 * 49152
    assert part(found, "vLLM") == process + (7 << 20) + part(found, "base") + adapters + logits
    quantised = plan(rollout="vllm", quantization="int8", vllm={"kv_cache_memory_bytes": 7 << 20})
    assert part(quantised, "vLLM") == part(found, "vLLM")  # the trainer's base alone is quantised


def test_a_prompt_is_computed_once_for_its_completions_but_not_by_modules():
    work = replace(WORK, prompt_tokens=96, output_tokens=33, rows=64, group=8)
    shared = learn_batch(work, 1 << 20, None)
    assert (shared.rows, shared.prefixes, shared.tokens) == (64, 8, 8 * 96 + 64 * 32)
    whole = learn_batch(replace(work, specialised=False), 1 << 20, None)
    assert (whole.prefixes, whole.tokens) == (0, 64 * 129)
    # The budget counts a shared prompt once, for modules too.
    half = learn_batch(replace(work, specialised=False), 8 * 96 // 2 + 64 * 33 // 2, None)
    assert half.rows == 32
    assert learn_batch(work, 1 << 20, 5).rows == 5
    assert learn_batch(work, 1, None).rows == 1


def test_agents_are_dealt_to_processes():
    config = small(population__size=8, algorithm__prompts_per_step=64)
    size = read_model_size("tiny-sums")
    whole, half = (Setup(size, 32, "float32", "cpu", processes=n).plan(config) for n in (1, 2))
    assert whole is not None
    assert half is not None

    def held(plan):
        return {p.name: p.bytes for p in plan.held}

    assert held(half)["agents"] * 2 == held(whole)["agents"]
    assert half.peak < whole.peak


@pytest.mark.parametrize("engine", [{"base": "sharded"}, {"zero": 3}])
def test_a_divided_base_is_a_part_in_each_process(engine):
    size = read_model_size("tiny-sums")
    plans = [
        Setup(size, 32, "float32", "cpu", processes=4).plan(
            small(**{f"engine__{name}": value for name, value in given.items()})
        )
        for given in ({}, engine)
    ]
    whole, part = ({p.name: p.bytes for p in plan.held}["base"] for plan in plans if plan)
    assert part < whole / 2


def test_the_agents_of_a_shard_are_in_one_batch_and_a_sharded_base_has_as_many_parts():
    size = read_model_size("tiny-sums")

    def plan(processes=1, **engine):
        config = small(population__size=8, algorithm__prompts_per_step=64, engine=engine)
        found = Setup(size, 32, "float32", "cpu", processes=processes).plan(config)
        assert found is not None
        return found

    together, apart = plan(device="cpu"), plan(device="cpu", shards=4)
    assert {p.name: p.bytes for p in apart.held} == {p.name: p.bytes for p in together.held}
    assert apart.decode_rows * 4 == together.decode_rows * 2  # 2,048 rows are above the limit
    assert sum(p.bytes for p in apart.sampling) < sum(p.bytes for p in together.sampling)


def test_agents_in_host_memory_are_not_on_the_device():
    size = read_model_size("tiny-sums")

    def agents(device, on=True, **changes):
        config = small(population__size=8, engine={"shards": 4, "offload_adapters": on}, **changes)
        found = Setup(size, 32, "float32", device).plan(config)
        assert found is not None
        (part,) = (part for part in found.held if part.name == "agents")
        return part

    on, off = agents("cuda"), agents("cuda", on=False)
    assert on.bytes * 2 == off.bytes  # two parts of two agents each, of eight
    assert "engine.offload_adapters" in off.settings
    assert "engine.offload_adapters" not in on.settings
    assert agents("cpu").bytes == off.bytes
    # The archive is in host memory too.
    assert agents("cuda", evolve__archive=True).bytes == on.bytes
    assert agents("cuda", on=False, evolve__archive=True).bytes > off.bytes


@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "v_proj"]])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("build", [tiny.llama, FAMILIES["qwen3"]])
def test_what_kernels_keep_for_the_backward_is_counted(build, shared, modules):
    slots = tiny.population(build().half(), (4, 4), target_modules=modules)
    rows, prompt, rest = 8, 6, 5
    ids = np.arange(rows * (prompt + rest)).reshape(rows, -1) % 38 + 2
    ids[:, :prompt] = ids[0, :prompt]
    masks = np.zeros(ids.shape, bool)
    masks[:, prompt:] = True
    cpu, step = torch.device("cpu"), KernelForward(slots, slots.names)
    prefix = find_shared_prefixes(np.arange(rows) // 4, ids, masks, cpu) if shared else None
    with step.rows(RowLayout(slots.names, (4, 4))), kernel_reference.instead():
        hidden = step.hidden_at(torch.tensor(ids), torch.arange(rows), prefix)
    kept = hidden.grad_fn.batch.kept
    fields = [value for field in vars(kept[0]).values() for value in flattened(field)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in fields}
    config = slots.base.model.config.to_dict()
    batch = (
        LearnBatch(rows, 2, prompt, rest - 1) if shared else LearnBatch(rows, 0, 0, prompt + rest)
    )
    work = replace(WORK, rank=4, kernels=True, head_norms=build is not tiny.llama)
    planned = saved_bytes(from_config("", config).shape, work, batch, 2, "cuda")
    # The plan has the products with A of all layers.
    missing = 0 if modules == "all-linear" else 2 * batch.tokens * 5 * 4
    assert planned - missing == sum(storages.values())


def flattened(value):
    if isinstance(value, torch.Tensor):
        return [value] if value.numel() else []
    return [one for part in value or () for one in flattened(part)]
