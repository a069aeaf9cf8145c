"""Agents in host memory where the host is the device; tests/device has those of other devices."""

import torch
from tiny_cohort import PLAIN, build_cohort, make_rows, moments, weights

from evo_grpo.learn.rows import AgentBatch


def test_on_a_cpu_agents_stay_where_they_are():
    found = []
    for on in (False, True):
        cohort = build_cohort(3, PLAIN, shards=3, offload_adapters=on)
        cohort.place([0, 1, 2])
        cohort.parts_here([0, 1, 2])
        before = [p.data_ptr() for p in cohort.slots.parameters("actor_2")]
        for slot in (0, 1):
            cohort.learn([AgentBatch(slot, make_rows(7 + slot))], stream=("learn",))
        assert [p.data_ptr() for p in cohort.slots.parameters("actor_2")] == before
        found.append([*weights(cohort, 0), *weights(cohort, 1), *moments(cohort, 1).values()])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
