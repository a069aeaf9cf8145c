"""Settings of the engine that contradict each other, each with its remedy."""

import pytest
from small_run import small

from evo_grpo.errors import ConfigError
from evo_grpo.settings import warnings


@pytest.mark.parametrize("parts", [{}, {"shards": 2}, {"overlap": 2}])
def test_agents_in_host_memory_need_three_parts(parts):
    got = parts.get("shards", 1) * parts.get("overlap", 1)
    with pytest.raises(
        ConfigError,
        match=rf"(?s)engine\.offload_adapters: expected false with fewer than 3 parts .* got true "
        rf"with {got}; set engine\.shards or engine\.overlap so that their product is 3 or more",
    ):
        small(engine={"offload_adapters": True, **parts})


@pytest.mark.parametrize("parts", [{"shards": 3}, {"overlap": 3}, {"shards": 2, "overlap": 2}])
def test_three_parts_are_enough_for_agents_in_host_memory(parts):
    assert small(engine={"offload_adapters": True, **parts}).engine.offload_adapters


def test_agents_in_host_memory_are_refused_with_deepspeed():
    with pytest.raises(ConfigError, match=r"offload_adapters: expected false with zero 2, whose"):
        small(engine={"offload_adapters": True, "zero": 2})


def test_a_device_whose_memory_is_the_hosts_gains_nothing():
    engine = {"offload_adapters": True, "shards": 3}
    said = "engine.offload_adapters has no effect with engine.device cpu, whose memory is the"
    assert any(said in line for line in warnings(small(engine={"device": "cpu", **engine})))
    assert not any(
        "offload" in line for line in warnings(small(engine={"device": "auto", **engine}))
    )


@pytest.mark.parametrize("parts", [1, 65, 2.5, True, "many"])
def test_a_wrong_number_of_parts_is_one_problem(parts):
    expected = r"engine\.overlap: expected a number of parts in \[2, 64\], 'auto' or null, got "
    with pytest.raises(ConfigError, match=expected) as caught:
        small(engine={"overlap": parts})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("written", "kernels"), [(True, "on"), (False, "off"), ("auto", "auto")])
def test_kernels_may_be_written_as_yaml_reads_on_and_off(written, kernels):
    assert small(engine={"kernels": written}).engine.kernels == kernels
