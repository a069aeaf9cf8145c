"""Whole runs over a double of vLLM, in this process or in a child."""

import json
import os

import pytest
from small_run import outcome, small
from vllm_doubles import doubled

from evo_grpo import resume, run
from evo_grpo.errors import EngineUnavailable, RunFailedError
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.observer import Observer

#: Tokens that no model has chosen earn nothing.
NO_SIGNAL = pytest.mark.filterwarnings("ignore:round 1 had nothing to learn from:UserWarning")


def config(*, rounds=2, device="cpu", **vllm):
    engine = {"device": device, "rollout": "vllm", "vllm": vllm}
    return small(engine=engine, population__rounds=rounds)


@pytest.fixture
def order(monkeypatch, tmp_path):
    """A file with what the double is to do in its next call."""
    monkeypatch.setenv("EVO_GRPO_DOUBLE_ORDER", str(tmp_path / "order"))
    return tmp_path / "order"


@pytest.fixture
def echo(double_in_child, monkeypatch, tmp_path):
    """A double that loads no torch; yields the file with what is done to it."""
    monkeypatch.setenv("EVO_GRPO_DOUBLE", "echo")
    monkeypatch.setenv("EVO_GRPO_DOUBLE_LOG", str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.fixture(scope="module")
def sleepy():
    """Settings of a vLLM that sleeps while agents learn, as if this device could."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("vllm_engine", "process"):
            patch.setattr(f"evo_grpo.rollout.vllm.{module}.can_sleep", lambda base: True)
        patch.setattr("torch.cuda.is_available", lambda: False)
        yield {"device": "auto", "sleep_level": 2}


def calls(file, name):
    lines = map(json.loads, file.read_text().splitlines())
    return [what for called, what in lines if called == name]


def processes():
    """The processes of vLLM that this one has started."""
    found = set()
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as stat, open(f"/proc/{entry}/cmdline") as command:
                parent = int(stat.read().rpartition(")")[2].split()[1])
                if parent == os.getpid() and "vllm/server.py" in command.read():
                    found.add(entry)
        except OSError:
            continue
    return found


class AfterFirst(Observer):
    """Orders something of the double once the first round is over."""

    def __init__(self, order, what):
        self.order = order
        self.what = what

    def round_done(self, record):
        if record.round == 0:
            self.order.write_text(self.what)


@NO_SIGNAL
def test_a_run_starts_one_vllm_and_ends_it(echo, tmp_path):
    run(config(), out=tmp_path / "out")
    (made,) = calls(echo, "LLM")
    assert made["model"].endswith("tiny-sums")
    asked = [(len(what["adapters"]), bool(what["bare"])) for what in calls(echo, "generate")]
    # It is tried; then all agents are asked in one call each time; at last the base and the best.
    assert asked[:2] == [(1, False), (0, True)]
    assert set(asked[2:-2]) == {(3, False)}
    assert asked[-2:] == [(1, False), (0, True)]
    assert processes() == set()


@NO_SIGNAL
@pytest.mark.parametrize(("what", "doing"), [("kill", "sampling"), ("asleep kill", "waking")])
def test_a_run_whose_vllm_dies_ends_with_whole_rounds_and_is_resumed(
    echo, order, sleepy, tmp_path, what, doing
):
    folder = tmp_path / "killed"
    with pytest.raises(
        RunFailedError, match=rf"by signal 9 \(SIGKILL\) while {doing}; .* with: evo-grpo resume"
    ):
        run(config(rounds=3, **sleepy), out=folder, observer=AfterFirst(order, what))
    assert len(read_rounds(folder)) == 1
    assert processes() == set()
    order.unlink()
    resume(folder)
    assert len(read_rounds(folder)) == 3
    assert len(calls(echo, "LLM")) == 2


@pytest.fixture(scope="module")
def whole(sleepy, tmp_path_factory):
    """The folder of a run of two rounds with the double in this process."""
    with pytest.MonkeyPatch.context() as patch, doubled(patch):
        return run(config(**sleepy), out=tmp_path_factory.mktemp("runs") / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["raise", "asleep raise"])
def test_a_resumed_run_equals_one_that_was_not_stopped(
    whole, double, order, sleepy, tmp_path, what
):
    folder = tmp_path / "stopped"
    with pytest.raises(RunFailedError, match="raised RuntimeError: the double was"):
        run(config(**sleepy), out=folder, observer=AfterFirst(order, what))
    stopped, _ = double.made[-1].calls[-1]
    assert stopped == ("wake_up" if what.startswith("asleep") else "generate")
    assert len(read_rounds(folder)) == 1
    order.unlink()
    resume(folder)
    assert outcome(folder) == outcome(whole)
    # Its log-probs are the trainer's, but for rounding.
    for record in read_rounds(whole):
        assert all(0 < agent.metrics["sampler_gap"] < 1e-4 for agent in record.agents)


def test_a_missing_vllm_leaves_no_folder(tmp_path):
    with pytest.raises(EngineUnavailable, match="needs the package vllm"):
        run(config(), out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_vllm_is_found_before_another_run_is_replaced(tmp_path):
    native = small(population__rounds=1)
    folder = run(native, out=tmp_path / "out")
    before = outcome(folder)
    with pytest.raises(EngineUnavailable, match="needs the package vllm"):
        run(config(), out=folder, force=True)
    assert outcome(folder) == before


def test_a_vllm_that_does_not_start_leaves_no_folder(echo, tmp_path):
    with pytest.raises(
        EngineUnavailable, match="raised ValueError while starting: too large; fix that"
    ):
        run(config(options={"fail": "too large"}), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
