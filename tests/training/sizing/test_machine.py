"""The memory of a machine: the batches that fit there, refusals, and changes that would fit."""

import pytest
import torch
from loopback_hub import QWEN3_4B
from small_run import outcome, small

from evo_grpo import resume, run
from evo_grpo.errors import ConfigError
from evo_grpo.record.folder import read_config
from evo_grpo.settings import DoubtfulSetting, from_dict
from evo_grpo.training import resolve
from evo_grpo.training.sizing import machine
from evo_grpo.training.sizing.machine import (
    LIMITS,
    ROOM,
    Setup,
    changed,
    choose_limits,
    fit_of,
    propose,
)
from evo_grpo.training.sizing.memory import MemoryPlan, Part
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
    changes = found.changes
    assert found.plan.peak <= capacity * ROOM
    fit = fit_of(changed(given, changes), setup)
    assert fit is not None
    assert fit.fits
    assert fit.plan.peak == found.plan.peak
    for name in changes:
        fewer = {key: value for key, value in changes.items() if key != name}
        try:
            rest = changed(given, fewer)
        except ConfigError:  # the rest contradicts itself
            continue
        plan = setup.plan(rest, **choose_limits(rest, setup))
        assert plan is not None
        assert not plan.fits(capacity * ROOM), name


def test_agents_in_host_memory_are_proposed_before_fewer_agents():
    given = from_dict(
        {
            "model": {"name": "tiny-sums", "lora": {"r": 64}},
            "env": "sums",
            "population": {"size": 32, "sizes": "constant"},
            "algorithm": {"max_output_tokens": 512, "max_model_len": 1024},
        }
    )
    setup = CARD._replace(capacity=80 * 10**9)
    fit = fit_of(given, setup)
    assert fit is not None
    assert fit.proposal.changes == {"engine.shards": 4, "engine.offload_adapters": True}


def test_on_a_cpu_the_memory_is_proposed_by_which_a_run_chooses_its_limits():
    given = small(population__size=32, algorithm__prompts_per_step=64)
    setup = Setup(read_model_size("tiny-sums"), 32, "float32", "cpu", 700 * 10**6)
    fit = fit_of(given, setup)
    assert fit is not None
    assert not fit.fits
    assert fit.sentence().endswith(" with --set engine.memory=700MB")
    told = fit_of(changed(given, {"engine.memory": "700MB"}), setup)
    assert told is not None
    assert told.fits


def test_a_small_card_gets_less_of_what_takes_most():
    wide, narrow = (
        choose_limits(config(), CARD._replace(capacity=capacity))
        for capacity in (80 * 10**9, 40 * 10**9)
    )
    rows, tokens = LIMITS
    assert wide[rows] > narrow[rows] > 0
    assert wide[tokens] > narrow[tokens] >= 1024
    assert choose_limits(config(max_decode_rows=5, max_tokens_per_microbatch=77), CARD) == {}


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
    setup = Setup(read_model_size("tiny-sums"), 4, "float32", "cpu", 600 * 10**6)
    assert {name: getattr(engine, name) for name in LIMITS} == choose_limits(given, setup)
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


PLAN = MemoryPlan(
    "float32",
    (Part("process", 100, ""), Part("agents", 300, "population.size")),
    (Part("keys", 50, "engine.max_decode_rows"),),
    (Part("activations", 600, "engine.max_tokens_per_microbatch"),),
)


def test_what_cannot_fit_is_refused_and_what_may_not_fit_is_warned_of(monkeypatch):
    monkeypatch.setattr(Setup, "plan", lambda *_: PLAN)
    setup = Setup(read_model_size("tiny-sums"), 4, "float32", "cpu", 1000)
    resolve._check_memory(small(), None)  # nothing is known
    resolve._check_memory(small(), setup)
    takes = "the run takes about 1.0 kB of memory and this machine has"
    largest = r"the largest part is activations \(600 bytes\)"
    with pytest.warns(DoubtfulSetting, match=f"^{takes} 800 bytes; {largest}; evo-grpo check"):
        resolve._check_memory(small(), setup._replace(capacity=800))
    lower = "lower engine.max_tokens_per_microbatch; evo-grpo check proposes values"
    with pytest.raises(ConfigError, match=f"^memory: {takes} 799 bytes; {largest}: {lower}$"):
        resolve._check_memory(small(), setup._replace(capacity=799))


def test_a_card_that_others_use_has_the_memory_that_is_free(monkeypatch):
    monkeypatch.setattr(resolve, "pick_device", torch.device)
    given = small(engine={"device": "cuda", "dtype": "bfloat16"})
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 10 << 30)
    for free, left, place in (
        (69, 80, "the CUDA device"),  # the rest is this process's own
        (20, 30, "the CUDA device, 54 GB of which others use,"),
    ):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _, free=free: (free << 30, 80 << 30))
        setup = resolve._setup(given, None, 1)
        assert (setup.place, setup.capacity) == (place, left << 30)
        # vLLM takes its share of the whole card.
        assert setup.total == 80 << 30


def test_a_run_is_refused_before_its_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("evo_grpo.training.sizing.machine.machine_memory", lambda: 100 << 20)

    def load(*_given, **_keywords):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("evo_grpo.training.assemble.SharedBase.load", load)
    with pytest.raises(ConfigError, match=r"memory: the run takes .* and this machine has 105 MB"):
        run(small(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    there = machine.machine_memory()
    assert there is not None
    assert there > 1 << 28
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_CGROUPS", (str(limit), str(tmp_path / "none")))
    limit.write_text("max\n")
    assert (machine.machine_memory() or 0) >= there
    limit.write_text(f"{64 << 20}\n")
    assert machine.machine_memory() == 64 << 20
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.machine_memory() == 16 << 20
