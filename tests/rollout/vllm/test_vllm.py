"""vLLM itself, on a CPU; `make test-vllm` runs it. One process of it serves most of the tests."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch
from engine_contract import RolloutContract, logprobs_of, prompts
from small_run import small
from stop_cases import completions, cut_alike, slots_of, tokenizer_of
from tiny_cohort import PLAIN, UNREWARDED
from vllm_doubles import settings_of

from evo_grpo import settings as configuration
from evo_grpo.envs.single_turn import SingleTurnPlay
from evo_grpo.errors import EngineUnavailable, RunFailedError
from evo_grpo.learn.rows import AgentBatch, rows_from_trajectories
from evo_grpo.model.base import SharedBase
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.record.folder import read_rounds
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.rollout.vllm.vllm_engine import VLLMEngine

pytestmark = pytest.mark.vllm
TEXTS = ("12+07=", "3+4=", "10+22=", "5+5=")
CONFIGURATIONS = 20
"""Of stop strings, for each kind of tokenizer."""
GAP = 2e-4
"""Nats by which vLLM's log-probs may differ from PEFT's."""


class Shared:
    """A vLLM that outlives the engines over it: it takes 15 seconds to start."""

    def __init__(self, link):
        self.ask = link.ask

    def close(self):
        pass


def embedded():
    return SharedBase.load("tiny-sums", device="cpu")


def population(ranks):
    slots = tiny.population(embedded(), ranks)
    for index, name in enumerate(slots.names):
        tiny.stir(slots, name, 20 + index, scale=0.5)
    return slots


@pytest.fixture(scope="module")
def first(python):
    """The engine that has started vLLM."""
    settings = settings_of(python=python, engine={"max_decode_rows": 256})
    engine = VLLMEngine(population((4,) * 8), settings.replace(model="tiny-sums"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def make(first):
    """Makes engines over slots of the embedded model."""
    return lambda slots: VLLMEngine(slots, settings_of(), link=Shared(first._link))


class TestContract(RolloutContract):
    TELLS_BEHIND_FILTERS = False
    LOGPROB_GAP = GAP

    def own_slots(self):
        return population((4, 4))

    @pytest.fixture
    def make(self, make):
        return make


def requests_for(slots, adapters, samples=4, **sampling):
    asked = prompts(slots.base, *TEXTS)
    settings = Sampling(**{"max_output_tokens": 8} | sampling)
    return [
        RolloutRequest(i, adapter, asked, samples, settings, 50 + i)
        for i, adapter in enumerate(adapters)
    ]


def by_peft(slots, request, prompt, completion):
    """Log-probs of a completion by PEFT's own forward."""
    slots.activate(request.adapter)
    ids = torch.tensor([prompt.token_ids + completion.token_ids])
    with torch.no_grad():
        table = torch.log_softmax(slots.peft(input_ids=ids).logits[0].float(), -1)
    start = len(prompt.token_ids) - 1
    return [table[start + i, token].item() for i, token in enumerate(completion.token_ids)]


def gaps_to_peft(slots, requests, answers):
    """Differences in nats of all log-probs of some answers."""
    gaps = []
    for request, groups in zip(requests, answers, strict=True):
        for group in groups:
            for completion in group.completions:
                expected = by_peft(slots, request, group.prompt, completion)
                gaps += map(lambda a, b: abs(a - b), completion.logprobs, expected)
    return gaps


def test_eight_adapters_of_several_ranks_in_one_batch_are_pefts(make):
    slots = population((4, 2, 8, 4, 1, 8, 3, 4))
    engine = make(slots)
    requests = requests_for(slots, slots.names, samples=8)
    gaps = gaps_to_peft(slots, requests, engine.rollout(requests))
    assert len(gaps) > 500
    print(f"largest gap of {len(gaps)} log-probs: {max(gaps):.1e} nats")
    assert max(gaps) <= GAP
    # Adapters that answer alike would show no mistake.
    group = engine.rollout(requests[:1])[0][0]
    own = [by_peft(slots, r, group.prompt, group.completions[0]) for r in requests]
    assert all(
        max(abs(a - b) for a, b in zip(one, other, strict=True)) > 50 * GAP
        for i, one in enumerate(own)
        for other in own[:i]
    )
    engine.close()


def test_after_an_update_the_new_weights_answer(make):
    made = []

    def factory(slots, settings):
        made.append(make(slots))
        return made[-1]

    settings = settings_of(algorithm={"lr": 0.02})
    cohort = Cohort(embedded(), tiny.lora(4), settings, engine=factory)
    for _ in range(3):
        cohort.add(PLAIN.replace(lr=0.02))
    asked, slots = prompts(cohort.base, *TEXTS), list(cohort.agents)

    def checked(step):
        sampling = Sampling(max_output_tokens=6)
        groups = cohort.generate(slots, asked, stream=("t", step), samples=4, sampling=sampling)
        for slot, mine in zip(slots, groups, strict=True):
            request = RolloutRequest(slot, f"actor_{slot}", asked, 4, sampling, 0)
            for group in mine:
                for completion in group.completions:
                    expected = logprobs_of(cohort.slots, request, group.prompt, completion)
                    assert completion.logprobs == pytest.approx(expected, abs=GAP)
        return groups

    before = checked(0)
    for step in range(2):
        batches = []
        for slot, mine in zip(slots, before, strict=True):
            play = SingleTurnPlay(UNREWARDED, [asked], [4])
            play.tell([mine])
            (experience,) = play.experiences()
            signs = torch.tensor([1.0, -1.0] * 8).numpy()
            rows = rows_from_trajectories(experience.trajectories, signs)
            batches.append(AgentBatch(slot, rows if slot < 2 else []))
        metrics = cohort.learn(batches, stream=("l", step))
        assert all(0 < m["sampler_gap"] < 1e-4 for m in metrics[:2])
        before = checked(step + 1)
    assert len(made) == 1


def test_agents_and_vllm_take_turns_until_it_is_killed_asleep(python, monkeypatch):
    """Here its worker frees nothing, but its scheduler stops, and level 2 loads its base again."""
    monkeypatch.setattr("evo_grpo.rollout.vllm.vllm_engine.can_sleep", lambda base: True)

    def started(level):
        settings = settings_of(python=python, sleep_level=level).replace(model="tiny-sums")
        return VLLMEngine(population((4,) * 8), settings)

    def answers(engine, step):
        """Change all weights, wake, generate and sleep."""
        slots = engine.slots
        for index, name in enumerate(slots.names):
            tiny.stir(slots, name, 100 * step + index, scale=0.5)
            slots.mark_changed(name)
        engine.wake()
        requests = requests_for(slots, slots.names)
        found = engine.rollout(requests)
        engine.sleep()
        assert max(gaps_to_peft(slots, requests, found)) <= GAP
        # Weights of another agent or step would have been noticed.
        for request, answer in zip([*requests[1:], requests[0]], found, strict=True):
            assert max(gaps_to_peft(slots, [request], [answer])) > 50 * GAP
        return found

    engine = started(2)
    each = [answers(engine, step) for step in range(3)]
    # What vLLM's worker says to each of 3 calls of sleep, and of 2 pairs that wake.
    assert engine._link.log.read_text().count("sleep mode is not supported on CPU") == 7
    os.kill(engine._link.pid, signal.SIGKILL)
    with pytest.raises(
        RunFailedError, match=r"by signal 9 \(SIGKILL\) while waking; .* with: evo-grpo resume RUN"
    ):
        engine.wake()
    engine.close()
    again = started(1)
    assert [answers(again, step) for step in (1, 2)] == each[1:]
    again.close()


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_completions_are_cut_where_one_row_alone_is_cut(kind, python):
    slots, tokenizer = slots_of(kind, head_dim=32), tokenizer_of(kind)  # vLLM has no less
    # It gets the tokenizer where it starts with a string.
    started = VLLMEngine(slots, settings_of(python=python, algorithm={"stop": ["q"]}))

    def sample(requests, **algorithm):
        own = settings_of(algorithm=algorithm)
        return completions(VLLMEngine(slots, own, link=Shared(started._link)).rollout(requests))

    draw = random.Random(kind)
    each = [cut_alike(draw, tokenizer, sample, apart=False) for _ in range(CONFIGURATIONS)]
    assert sum(each) > CONFIGURATIONS // 3
    started.close()


def test_a_base_that_vllm_cannot_run_is_named(python):
    """GPT-2, for which vLLM has no LoRA."""
    slots = tiny.population(tiny.gpt2(), (4,))
    with pytest.raises(
        EngineUnavailable,
        match=r"raised ValueError while starting: GPT2\w* does not support LoRA yet; fix that",
    ):
        VLLMEngine(slots, settings_of(python=python))


# --- whole runs -----------------------------------------------------------------------------------


def command(*arguments):
    return [sys.executable, "-m", "evo_grpo", *map(str, arguments)]


@pytest.fixture
def file(tmp_path, python):
    config = small(
        population__size=4,
        population__rounds=4,
        env__args={"high": 20},
        engine={
            "device": "cpu",
            "rollout": "vllm",
            # Not in the memory that other tests write to meanwhile.
            "vllm": {"python": python, "adapter_folder": str(tmp_path / "adapters")},
        },
    )
    path = tmp_path / "run.yaml"
    path.write_text(configuration.to_yaml(config))
    return path


def children(parent):
    """The processes of vLLM that a process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and b"server.py" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, IndexError, ValueError):
            continue
    return found


def scratch(tmp_path):
    places = (tmp_path / "adapters", Path(os.environ["TMPDIR"]))
    return {path for place in places for path in place.glob("evo-grpo-vllm-*")}


def weights(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted((folder / "checkpoints").rglob("adapter_model.safetensors"))
    }


def test_a_whole_run_and_one_that_lost_vllm_and_was_resumed(file, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = subprocess.run(command("run", file, "--out", whole), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rounds = read_rounds(whole)
    assert len(rounds) == 4
    gaps = [agent.metrics["sampler_gap"] for record in rounds for agent in record.agents]
    assert all(0 < gap < 1e-4 for gap in gaps)
    assert json.loads((whole / "summary.json").read_text())["rounds"] == 4
    assert (tmp_path / "adapters").is_dir()
    assert scratch(tmp_path) == set()

    with subprocess.Popen(
        command("run", file, "--out", killed), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        lines = []
        while not (killed / "rounds.jsonl").exists() or not read_rounds(killed):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        (vllm,) = children(process.pid)
        os.kill(vllm, signal.SIGKILL)
        lines, errors = process.communicate(timeout=60)
    assert process.returncode == 1, lines
    assert f"vLLM's process {vllm}" in errors
    assert "was ended by signal 9 (SIGKILL)" in errors
    assert "continue with: evo-grpo resume" in errors
    assert "Traceback" not in errors
    (log,) = [path for path in scratch(tmp_path) if path.suffix == ".log"]
    assert str(log) in errors
    log.unlink()
    assert 1 <= len(read_rounds(killed)) < 4
    done = subprocess.run(command("resume", killed), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # The draws follow from the seed, and on this CPU so do vLLM's numbers.
    assert weights(killed) == weights(whole)
    assert scratch(tmp_path) == set()
