"""Agents in host memory: what is on the device, and the runs that follow from it."""

from contextlib import contextmanager

import pytest
import rehearsal
import torch
from small_run import Told, outcome, small
from tiny_cohort import PLAIN, build_cohort, build_model, make_rows

from evo_grpo import resume, run
from evo_grpo.errors import RunFailedError
from evo_grpo.learn.rows import AgentBatch
from evo_grpo.population.cohort.offload import Offload

pytestmark = pytest.mark.device

EVOLVES = {
    "population__size": 5,
    "population__rounds": 2,
    "population__steps_per_round": 2,
    "engine__shards": 3,
    "engine__overlap": True,
    "algorithm__beta": 0.02,
    "algorithm__separate_reference": True,
    "evolve__archive": True,
    "evolve__significance": 0.5,
    "evolve__hyperparameters": {
        "lr": {"min": 1e-4, "max": 1e-2},
        "lora.r": {"min": 1, "max": 4},
    },
    "evolve__fitness__final_samples": 2,
}


def placed(device, on, **changes):
    return small(
        engine__device=device, engine__dtype="float32", engine__offload_adapters=on, **changes
    )


def seen(folder):
    """The leaderboard, the completions and the bytes of all tensors of all checkpoints."""
    found = outcome(folder)
    files = sorted(folder.rglob("*.safetensors"))
    assert len(files) > 10
    tensors = {str(file.relative_to(folder)): file.read_bytes() for file in files}
    return found["leaderboard"], found["completions"], tensors


@pytest.fixture(scope="module")
def evolved(device, tmp_path_factory):
    """What a run without agents in host memory leaves."""
    return seen(run(placed(device, False, **EVOLVES), out=tmp_path_factory.mktemp("off") / "run"))


def test_a_run_that_evolves_is_the_same_with_agents_in_host_memory(evolved, device, tmp_path):
    assert seen(run(placed(device, True, **EVOLVES), out=tmp_path / "on")) == evolved


def test_a_run_is_resumed_with_agents_in_host_memory(evolved, device, tmp_path):
    folder = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        run(placed(device, False, **EVOLVES), out=folder, observer=Told(("evaluate", 1)))
    settings = folder / "population.yaml"
    text = settings.read_text()
    settings.write_text(text.replace("offload_adapters: false", "offload_adapters: true"))
    assert settings.read_text() != text
    assert seen(resume(folder)) == evolved


@pytest.mark.parametrize(
    "changes",
    [
        {"engine__shards": 3, "algorithm__beta": 0.1},
        {
            "population__size": 4,
            "engine__shards": 4,
            "engine__overlap": True,
            "model__lora": {"r": 2, "target_modules": ["q_proj"], "dropout": 0.1},
            "evolve__fitness__racing": 0.5,
        },
    ],
    ids=["shards", "modules"],
)
def test_a_run_is_the_same_with_agents_in_host_memory(changes, device, tmp_path):
    off, on = (run(placed(device, on, **changes), out=tmp_path / f"{on}") for on in (False, True))
    assert seen(off) == seen(on)


def in_parts(device, agents, on):
    """Agents, each a part of its own, that have taken two steps in turn."""
    cohort = build_cohort(
        agents, PLAIN.replace(beta=0.1), model=build_model().to(device), warm=False,
        shards=agents, offload_adapters=on, separate_reference=True,
    )  # fmt: skip
    slots = list(range(agents))
    cohort.place(slots)
    cohort.parts_here(slots)
    for slot in 2 * slots:
        cohort.learn([AgentBatch(slot, make_rows(7 + slot))], stream=("learn",))
    return cohort


def test_agents_that_do_not_compute_are_not_on_the_device(device):
    if device != rehearsal.NAME:
        pytest.skip(f"bytes are counted on the rehearsal device, these tests run on {device}")
    agents, used = 6, []
    for on in (False, True):
        before = rehearsal.bytes_in_use()
        cohort = in_parts(device, agents, on)
        used.append(rehearsal.bytes_in_use() - before)
        numbers = sum(p.numel() for p in cohort.slots.parameters("actor_0"))
        del cohort
    away = agents - 2  # one part computes and the next one was fetched
    # Weights, two moments and a reference; without it, stacked weights of each part are kept too.
    assert used[0] - used[1] >= away * 16 * numbers


@pytest.fixture
def parted(device):
    """Three agents, each a part, of which the first is on the device and the second is fetched."""
    if device == "cpu":
        pytest.skip("the host is the device")
    cohort = in_parts(device, 3, on=True)
    cohort.bring([0])
    return cohort


def on_host(cohort, slot):
    return {p.device.type for p in cohort.slots.parameters(f"actor_{slot}")} == {"cpu"}


def test_a_fetched_agent_that_is_overwritten_is_fetched_again(parted):
    assert [on_host(parted, slot) for slot in range(3)] == [False, True, True]
    parted.copy(2, 1)
    parted.bring([1])
    assert not on_host(parted, 1)
    for one, two in zip(*(parted.slots.parameters(f"actor_{i}") for i in (1, 2)), strict=True):
        assert torch.equal(one.cpu(), two.cpu())
    states = [parted.agents[slot].optimizer.state_dict()["state"] for slot in (1, 2)]
    for place, values in states[0].items():
        for name, value in values.items():
            assert value.device.type != "cpu"
            assert torch.equal(value.cpu(), states[1][place][name].cpu())


def test_an_agent_that_is_alone_on_the_device_leaves_it_for_the_base(parted):
    parted.bring([-1])
    assert all(on_host(parted, slot) for slot in range(3))


@pytest.mark.parametrize(
    ("method", "where"), [("_host_bytes", "the host"), ("_to_device", "the device")]
)
def test_a_lack_of_memory_is_named_and_loses_nothing(parted, monkeypatch, method, where):
    before = parted.slots.state("actor_0"), parted.slots.state("actor_2")

    def fails(self, asked):
        raise MemoryError

    monkeypatch.setattr(Offload, method, fails)
    with pytest.raises(RunFailedError, match=rf"offload_adapters: {where} ran out of memory"):
        parted.bring([2])
    for name, values in zip(("actor_0", "actor_2"), before, strict=True):
        assert all(torch.equal(v, values[k]) for k, v in parted.slots.state(name).items())


def test_memory_that_cannot_be_pinned_is_reported_once_and_used(parted, monkeypatch):
    empty = torch.empty

    def refuses(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuses)
    parted.offload._pins = True
    before = parted.slots.state("actor_0")
    with pytest.warns(UserWarning, match=r"pins no further .* \(CUDA error.*\(ulimit -l\)"):
        parted.bring([1])
    parted.bring([2])
    assert on_host(parted, 0)
    assert all(torch.equal(v, before[k]) for k, v in parted.slots.state("actor_0").items())


class Stream:
    """A stream that notes what is asked of it; see `test_copies_run_beside_what_computes`."""

    def __init__(self, name, noted):
        self.name, self.noted = name, noted

    def wait_stream(self, other):
        self.noted.append(f"{self.name} waits for {other.name}")

    def synchronize(self):
        self.noted.append(f"the host waits for {self.name}")


def test_copies_run_beside_what_computes(parted, monkeypatch):
    noted = []
    main, side = Stream("main", noted), Stream("side", noted)

    @contextmanager
    def entered(stream):
        noted.append(f"copies on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(parted.offload, "_stream", side)
    monkeypatch.setattr(parted.offload, "_on_cuda", True)
    slot = ["side waits for main", "copies on side"]
    arrives = ["main waits for side", "the host waits for main", "main waits for side"]
    parted.bring([1])  # it was fetched before; an actor and a reference are fetched next
    assert noted == [*arrives, *slot, *slot]
    noted.clear()
    parted.bring([1])  # what computes next does not wait for the next part
    assert noted == []
    parted.copy(0, 2)  # what was fetched of it is not used
    parted.bring([2])
    assert noted == [*arrives[:2], *slot, *slot, arrives[2], *slot, *slot]
