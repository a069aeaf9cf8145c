"""Whether a run fits: refused before anything is loaded, with the setting that lowers the most."""

import subprocess

import pytest
from small_run import small

from evo_grpo import run
from evo_grpo.errors import ConfigError
from evo_grpo.model.llama.families import FAMILIES
from evo_grpo.training.sizing import planning
from evo_grpo.training.sizing.memory import MemoryPlan, Part
from evo_grpo.training.sizing.model_size import read_model_size

PLAN = MemoryPlan(
    "float32",
    (Part("process", 100, ""), Part("agents", 300, "population.size")),
    (Part("keys", 50, "engine.max_decode_rows"),),
    (Part("activations", 600, "engine.max_tokens_per_microbatch"),),
)


def test_the_model_types_of_the_joined_layers_are_those_that_the_plan_knows():
    assert set(planning.SPECIALISED) == set(FAMILIES)


def test_what_cannot_fit_is_refused():
    planning.check_fits(PLAN, 800, "this machine")
    with pytest.raises(
        ConfigError,
        match=r"fits into the 799 bytes of this machine, got one that takes about 1.0 kB; the "
        r"largest part is activations with 600 bytes: lower engine.max_tokens_per_microbatch",
    ):
        planning.check_fits(PLAN, 799, "this machine")


def test_what_is_unknown_fits():
    planning.check_fits(None, 10, "this machine")
    planning.check_fits(PLAN, None, "this machine")


def test_a_run_is_refused_before_its_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("evo_grpo.training.resolve.machine_memory", lambda: 100 << 20)

    def load(*_given, **_keywords):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("evo_grpo.training.assemble.SharedBase.load", load)
    with pytest.raises(ConfigError, match=r"memory: expected a run that fits into the 105 MB of"):
        run(small(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_agents_are_dealt_to_processes():
    config = small(population__size=8, algorithm__prompts_per_step=64)
    size = read_model_size("tiny-sums")
    whole, half = (
        planning.plan_memory(config, size, 32, dtype="float32", device="cpu", processes=n)
        for n in (1, 2)
    )
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
        planning.plan_memory(
            small(**{f"engine__{name}": value for name, value in given.items()}),
            size, 32, dtype="float32", device="cpu", processes=4,
        )
        for given in ({}, engine)
    ]  # fmt: skip
    whole, part = ({p.name: p.bytes for p in plan.held}["base"] for plan in plans if plan)
    assert part < whole / 2


def test_the_agents_of_a_shard_are_in_one_batch_and_a_sharded_base_has_as_many_parts():
    size = read_model_size("tiny-sums")

    def plan(processes=1, **engine):
        config = small(population__size=8, algorithm__prompts_per_step=64, engine=engine)
        found = planning.plan_memory(
            config, size, 32, dtype="float32", device="cpu", processes=processes
        )
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
        found = planning.plan_memory(config, size, 32, dtype="float32", device=device)
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


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    there = planning.machine_memory()
    assert there is not None
    assert there > 1 << 28
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(planning, "_LIMITS", (str(limit), str(tmp_path / "none")))
    limit.write_text("max\n")
    assert (planning.machine_memory() or 0) >= there
    limit.write_text(f"{64 << 20}\n")
    assert planning.machine_memory() == 64 << 20
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert planning.machine_memory() == 16 << 20


def test_cuda_devices_are_asked_of_the_drivers_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(planning, "_SIGNS_OF_A_DEVICE", (str(tmp_path / "device"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert planning.cuda_devices() == []
    (tmp_path / "device").touch()
    assert planning.cuda_devices() is None  # a device without the tool
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '81559\\n40960\\n'\n")
    tool.chmod(0o755)
    assert planning.cuda_devices() == [81559 << 20, 40960 << 20]
    tool.write_text("#!/bin/sh\nprintf '[N/A]\\n40960\\n'\n")
    assert planning.cuda_devices() == [None, 40960 << 20]
    for chosen, left in (
        ("1", [40960 << 20]),
        ("1,0", [40960 << 20, None]),
        ("1,7,0", [40960 << 20]),
        ("GPU-5d3f", [None]),
        ("-1", []),
        ("", []),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert planning.cuda_devices() == left, chosen
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert planning.cuda_devices() == []
    tool.write_text("no program")
    assert planning.cuda_devices() is None


def test_a_driver_that_does_not_answer_is_not_waited_for(monkeypatch):
    def hang(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(planning.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(planning.subprocess, "run", hang)
    assert planning.cuda_devices() is None
