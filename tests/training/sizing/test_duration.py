"""The time of a run on a card, by counting, beside what cards took."""

import json

import pytest

from evo_grpo.cli.plan.plan import make_plan
from evo_grpo.settings import from_dict
from evo_grpo.settings.engines.declaration import Shape
from evo_grpo.training.sizing.cards import CARDS, parse_gpu
from evo_grpo.training.sizing.duration import Counted

#: Qwen2.5-0.5B and -3B.
SMALL = Shape(24, 896, 4864, 896, 128, 151936, 14)
MIDDLE = Shape(36, 2048, 11008, 2048, 256, 151936, 16)
#: Milliseconds of a replayed decode step by kernels, NVIDIA H200, 2026-11-28; docs/performance.md.
MEASURED = [
    (SMALL, 64, 1.29, 0.02), (SMALL, 256, 1.62, 0.02), (SMALL, 1024, 3.40, 0.02),
    (MIDDLE, 256, 4.44, 0.1), (MIDDLE, 64, 3.18, 0.25),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "rows", "milliseconds", "within"), MEASURED)
def test_a_decode_step_is_counted_as_it_was_measured(shape, rows, milliseconds, within):
    found = 1e3 * Counted(shape, CARDS["h200"], 8, 8).step(rows, 128)
    assert found == pytest.approx(milliseconds, rel=within)


@pytest.fixture
def planned(tmp_path):
    """Plans a job of a shape of Qwen2, of which config.json alone is there."""
    config = {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
        "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    def plan(gpu, *, steps=4, **changes):
        data = {
            "model": {"name": str(tmp_path), "lora": {"r": 8}}, "env": "sums",
            "population": {"size": 8, "rounds": 2, "steps_per_round": steps},
            "algorithm": {"group_size": 8, "prompts_per_step": 4, "max_output_tokens": 128,
                          "max_model_len": 192},
        }  # fmt: skip
        return make_plan(from_dict({**data, **changes}), gpu=parse_gpu(gpu))

    return plan


def test_twice_the_steps_take_twice_as_long_but_for_evaluations(planned):
    one, two = planned("h200").duration, planned("h200", steps=8).duration
    assert two.generate == pytest.approx(2 * one.generate)
    assert two.learn == pytest.approx(2 * one.learn)
    assert two.evaluate == one.evaluate > 0
    # Eight steps of 127 decode steps, and the prompts; docs/performance.md measures .37 s with a
    # slower prefill.
    assert 8 * 127 * 1.6e-3 < one.generate < 8 * 0.37


def test_where_rates_were_not_measured_the_data_sheet_is_named(planned):
    assert planned("h200").duration.measured.startswith("2026-11-28")
    slower = [planned(name).duration for name in ("h100", "a100-80gb", "rtx-4090", "t4")]
    assert [one.measured for one in slower] == [""] * 4
    totals = [one.total for one in slower]
    assert totals == sorted(totals)


def test_small_micro_batches_read_the_base_more_often(planned):
    engine = {"max_tokens_per_microbatch": 1024}
    assert planned("h100", engine=engine).duration.learn > 1.2 * planned("h100").duration.learn


def test_parts_are_generated_one_after_another(planned):
    def generate(shards):
        return planned("h100", engine={"shards": shards}).duration.generate

    # Eight batches of 32 rows, each of which takes about .8 of the time of 256.
    assert 5 * generate(1) < generate(8) < 8 * generate(1)


def test_checkpointing_is_a_further_forward_pass(planned):
    again = planned("h100", engine={"gradient_checkpointing": True}).duration.learn
    once = planned("h100").duration.learn
    # The base has no gradients: a backward pass costs as much as a forward pass.
    assert again == pytest.approx(1.5 * once, rel=0.05)


def test_torch_s_operations_and_vllm_take_longer_than_kernels(planned):
    kernels = planned("h100").duration
    torch = planned("h100", engine={"kernels": "off"}).duration
    assert torch.generate > 2 * kernels.generate
    assert torch.learn > 2 * kernels.learn
    vllm = planned("h100", engine={"rollout": "vllm"}).duration
    assert kernels.generate < vllm.generate < torch.generate


@pytest.mark.parametrize(
    ("gpu", "engine"),
    [
        ("80GB", {}),
        ("h100", {"quantization": "int8"}),
        ("h100", {"dtype": "float32"}),
        ("h100", {"cuda_graphs": False}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*bitsandbytes")
def test_what_is_not_counted_has_no_time(planned, gpu, engine):
    assert planned(gpu, engine=engine).duration is None


def test_a_run_that_does_not_fit_has_no_time(planned):
    plan = planned("t4", population={"size": 512, "rounds": 2, "sizes": "constant"})
    assert not plan.fit.fits
    assert plan.duration is None
