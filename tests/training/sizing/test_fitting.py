"""What is chosen where a limit is null, and what is proposed where a run does not fit."""

import pytest
from loopback_hub import QWEN3_4B
from small_run import outcome, small

from evo_grpo import resume, run
from evo_grpo.record.config import read_config
from evo_grpo.settings import from_dict
from evo_grpo.training.sizing.fitting import (
    ROOM,
    ROWS,
    TOKENS,
    Setup,
    changed,
    fill_limits,
    propose,
)
from evo_grpo.training.sizing.model_size import from_config, read_model_size

CARD = Setup(from_config("Qwen/Qwen3-4B", QWEN3_4B), 512, "bfloat16", "cuda", 24 * 10**9)


def config(**engine):
    return from_dict(
        {
            "model": {"name": "tiny-sums", "lora": {"r": 16}},
            "env": "sums",
            "algorithm": {"max_output_tokens": 512, "max_model_len": 1024},
            "engine": engine,
        }
    )


@pytest.mark.parametrize(
    ("engine", "capacity"),
    [
        ({}, 16e9),
        ({}, 80e9),
        ({"quantization": "int8"}, 24e9),
        ({"max_decode_rows": 4096, "max_tokens_per_microbatch": 16384}, 24e9),
        ({"rollout": "vllm"}, 16e9),
        ({"rollout": "vllm", "vllm": {"sleep_level": 1}}, 24e9),
        ({"rollout": "vllm", "vllm": {"sleep_level": 2}, "quantization": "int8"}, 80e9),
    ],
)
def test_what_is_proposed_fits_and_nothing_of_it_can_be_left_out(engine, capacity):
    setup = CARD._replace(capacity=int(capacity))
    given = config(**engine)
    found = propose(given, setup)
    if found is None:
        assert engine.get("rollout") == "vllm"
        assert capacity == 16e9  # two copies of the base alone take 16 GB
        return
    proposed = changed(given, found.changes)
    plan = setup.plan(fill_limits(proposed, setup))
    assert plan is not None
    assert plan.fits(capacity * ROOM)
    for name in set(found.changes) - {ROWS, TOKENS}:
        fewer = {key: value for key, value in found.changes.items() if key != name}
        rest = changed(given, {**fewer, ROWS: None, TOKENS: None})
        filled = fill_limits(rest, setup, few_rows=128, few_tokens=1024)
        assert not setup.fits(filled), name


def test_agents_in_host_memory_are_proposed_before_fewer_agents():
    given = from_dict(
        {
            "model": {"name": "tiny-sums", "lora": {"r": 64}},
            "env": "sums",
            "population": {"size": 32, "sizes": "constant"},
            "algorithm": {"max_output_tokens": 512, "max_model_len": 1024},
        }
    )
    setup = CARD._replace(capacity=48 * 10**9)
    found = propose(given, setup)
    assert found is not None
    assert found.changes["engine.offload_adapters"] is True
    assert found.changes["engine.shards"] == 4
    assert "population.size" not in found.changes
    assert setup.fits(fill_limits(changed(given, found.changes), setup))


def test_a_small_card_gets_less_of_what_takes_most():
    wide, narrow = (
        fill_limits(config(), CARD._replace(capacity=capacity)).engine
        for capacity in (80 * 10**9, 40 * 10**9)
    )
    assert wide.max_decode_rows > narrow.max_decode_rows > 0
    assert wide.max_tokens_per_microbatch > narrow.max_tokens_per_microbatch >= 1024
    given = config(max_decode_rows=5, max_tokens_per_microbatch=77)
    assert fill_limits(given, CARD) == given


def test_vllm_has_to_hold_the_base_in_its_share_and_frees_it_in_its_sleep():
    def plan(**vllm):
        given = config(rollout="vllm", max_decode_rows=64, max_tokens_per_microbatch=1024,
                       vllm=vllm)  # fmt: skip
        return CARD.plan(given)

    (sentence,) = plan().shortages
    assert sentence.startswith("engine.vllm.gpu_memory_utilization 0.3 gives vLLM 7.2 GB, and its")
    awake, level1, level2 = (
        plan(gpu_memory_utilization=0.5, sleep_level=level) for level in (0, 1, 2)
    )
    assert awake.shortages == level1.shortages == ()
    assert level1.peak == level2.peak < awake.peak
    # Asleep, vLLM keeps its process alone: the trainer learns in the rest.
    share = int(0.5 * CARD.capacity)
    freed = sum(p.bytes for p in awake.held) - sum(p.bytes for p in level1.held)
    assert freed == share - (1 << 30)
    elsewhere = plan(devices=[1], gpu_memory_utilization=0.9)
    assert not any("vLLM" in part.name for part in elsewhere.parts)


@pytest.mark.slow
def test_a_run_records_the_numbers_that_fit_and_a_resume_keeps_them(tmp_path, monkeypatch):
    given = small(population__rounds=2, engine__memory="600MB", record__optuna=False)
    folder = run(given, out=tmp_path / "run")
    engine = read_config(folder).engine
    expected = fill_limits(
        given, Setup(read_model_size("tiny-sums"), 4, "float32", "cpu", 600 * 10**6)
    ).engine
    assert (engine.max_decode_rows, engine.max_tokens_per_microbatch) == (
        expected.max_decode_rows,
        expected.max_tokens_per_microbatch,
    )
    assert (engine.max_decode_rows, engine.max_tokens_per_microbatch) != (None, None)
    # With the numbers written down, the run is the same to the bit, and it goes on with them.
    numbers = {
        "engine__max_decode_rows": engine.max_decode_rows,
        "engine__max_tokens_per_microbatch": engine.max_tokens_per_microbatch,
    }
    explicit = small(population__rounds=2, engine__memory="600MB", record__optuna=False, **numbers)
    same = run(explicit, out=tmp_path / "explicit")
    assert outcome(same) == outcome(folder)
    monkeypatch.setattr("evo_grpo.training.resolve._with_limits", None)  # only a new run chooses
    resume(folder, rounds=3)
    assert read_config(folder).engine == engine


def test_without_a_stated_memory_a_cpu_chooses_nothing(tmp_path):
    folder = run(small(population__rounds=1, record__optuna=False), out=tmp_path / "run")
    engine = read_config(folder).engine
    assert (engine.max_decode_rows, engine.max_tokens_per_microbatch) == (None, None)
    assert engine.decode_rows == 1024
