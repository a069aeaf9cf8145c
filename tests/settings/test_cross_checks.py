"""Settings of the engine that contradict each other, each with its remedy."""

import pytest
from small_run import small

from evo_grpo.errors import ConfigError


@pytest.mark.parametrize(("parts", "got"), [({}, 1), ({"shards": 2}, 2), ({"overlap": True}, 2)])
def test_agents_in_host_memory_need_three_parts(parts, got):
    with pytest.raises(
        ConfigError,
        match=r"engine\.offload_adapters: expected false with fewer than 3 parts of the population "
        rf"\({got}\), got true; set engine\.shards to 3 or more",
    ):
        small(engine={"offload_adapters": True, **parts})


def test_three_parts_are_enough_for_agents_in_host_memory():
    assert small(engine={"offload_adapters": True, "shards": 3}).engine.offload_adapters


def test_agents_in_host_memory_are_refused_with_deepspeed():
    with pytest.raises(
        ConfigError, match=r"offload_adapters: expected false with zero 2, got true; leave"
    ):
        small(engine={"offload_adapters": True, "zero": 2})


@pytest.mark.parametrize(
    ("value", "remedy"), [(2, r" \(for 2 parts, write shards: 2, overlap: true\)"), ("many", "")]
)
def test_a_number_of_parts_as_overlap_is_one_problem(value, remedy):
    expected = rf"engine\.overlap: expected true, false or 'auto'{remedy}, got "
    with pytest.raises(ConfigError, match=expected) as caught:
        small(engine={"overlap": value})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("written", "kernels"), [(True, "on"), (False, "off"), ("auto", "auto")])
def test_kernels_may_be_written_as_yaml_reads_on_and_off(written, kernels):
    assert small(engine={"kernels": written}).engine.kernels == kernels
