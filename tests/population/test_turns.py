"""Parts take turns; the runs of the package in which they do."""

import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from played_rounds import train_round
from small_run import Told, outcome, small
from text_games import Broken, Longer

from evo_grpo import GRPO, MultiTurnGym, run
from evo_grpo.envs.episodes.multi_turn import TokenObservationWrapper
from evo_grpo.envs.rewards.functions import RewardFunction
from evo_grpo.envs.rewards.scoring import CompletionBatch, score_batch
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import ConfigError
from evo_grpo.population import turns
from evo_grpo.population.turns import HostWork, Overlap, take_turns
from evo_grpo.settings.env import RewardCalls
from evo_grpo.training.assemble import prepare


def part(name, log, seconds=(), threads=None):
    """Computes, asks for work that takes some seconds, and computes again."""
    for number, wait in enumerate(seconds):
        log.append((name, number))

        def work(number=number, wait=wait):
            if threads is not None:
                threads.append(threading.current_thread())
            time.sleep(wait)
            return number

        assert (yield HostWork(work)) == number
    log.append((name, "end"))
    return name


def test_parts_go_on_in_a_fixed_order_whatever_takes_how_long():
    logs = []
    for waits in ((0.2, 0.0, 0.0), (0.0, 0.1, 0.2)):
        log = []
        parts = [part("a", log, waits), part("b", log, (0.0, 0.0)), part("c", log, waits)]
        assert take_turns(parts, overlap=True) == ["a", "b", "c"]
        logs.append(log)
    first = [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1)]
    last = [("a", 2), ("b", "end"), ("c", 2), ("a", "end"), ("c", "end")]
    assert logs == [first + last] * 2


@pytest.mark.parametrize("names", ["abc", "a"])
def test_without_overlap_parts_end_one_after_the_other_in_this_thread(names):
    log, threads = [], []
    parts = [part(name, log, (0.0,), threads) for name in names]
    assert take_turns(parts, overlap=names == "a") == list(names)
    assert log == [(name, what) for name in names for what in (0, "end")]
    assert set(threads) == {threading.current_thread()}


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_of_a_work_ends_all_parts(overlap):
    closed = []

    def careful():
        try:
            yield HostWork(lambda: time.sleep(0.01))
            yield HostWork(lambda: time.sleep(0.01))
        finally:
            closed.append(True)

    def failing():
        yield HostWork(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        take_turns([careful(), failing(), careful()], overlap=overlap)
    assert len(closed) == (2 if overlap else 1)


def result(config, out):
    """Play a run; return its outcome, but for what says whether parts take turns."""
    found = outcome(run(config, out=out))
    for number, (record, decisions) in enumerate(found["rounds"]):
        files = {n: digest for n, digest in record.files.items() if "attributes" not in n}
        found["rounds"][number] = replace(record, files=files), decisions
    found["files"] = [name for name in found["files"] if name != "notes.jsonl"]
    return found


STEPS = {"population__steps_per_round": 2, "population__rounds": 2, "engine__overlap": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"engine__shards": 7, "engine__overlap": "auto"},
        {"algorithm__dynamic_sampling_tokens": 60, "algorithm__mask_truncated_completions": True},
        {"env__reward": ["two_rewards:exact", "two_rewards:last"], "evolve__fitness__racing": 2},
    ],
    ids=["one each", "dynamic", "rewards"],
)
def test_a_run_in_which_parts_overlap_equals_one_in_which_they_wait(changes, tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "AUTO_SHARE", 0.0)
    overlapping, waiting = (
        result(small(**{"engine__shards": 2} | STEPS | changes | own), tmp_path / name)
        for name, own in (("overlapping", {}), ("waiting", {"engine__overlap": False}))
    )
    assert overlapping == waiting
    if "auto" in changes.values():
        assert "7 parts take turns" in (tmp_path / "overlapping" / "notes.jsonl").read_text()


def test_rewards_of_two_parts_are_under_way_at_once_and_each_step_is_told(monkeypatch):
    judge, met = ReasoningGym.judge, []
    together = threading.Barrier(2, timeout=20)

    def meets(self, groups):
        met.append(together.wait())
        return judge(self, groups)

    monkeypatch.setattr(ReasoningGym, "judge", meets)
    prepared, told = prepare(small(**STEPS | {"population__size": 2})), Told()
    assert prepared.cohort.shards == 2
    tallies, _ = train_round(prepared, told)
    assert len(met) == 2 * 2
    assert told.calls == [("learn", 0)] * 2
    assert [len(tally.metrics) for tally in tallies.values()] == [2, 2]


def test_parts_meet_the_prompts_that_all_agents_would_meet():
    changes, found = {"algorithm__dynamic_sampling_tokens": 60}, []
    for shards in (1, 2, 3):
        prepared = prepare(small(**STEPS | changes | {"engine__shards": shards}))
        batch, asked = prepared.env.batch, set()

        def noted(step, size, batch=batch, asked=asked):
            asked.add((step * size, size))
            return batch(step, size)

        prepared.env.batch = noted
        tallies, starts = train_round(prepared, Told())
        last = [[t.prompt for t, _ in tally.samples] for tally in tallies.values()]
        found.append((last, starts, asked))
    assert found[0] == found[1] == found[2]
    assert found[0][1] >= 4


GAME = {
    "env": {"kind": "python:text_games:Longer", "max_turns": 3},
    "model": "tiny-sums",
    "algorithm__max_output_tokens": 3,
    "population__rounds": 1,
}


def test_games_step_while_others_decode_as_if_all_waited(tmp_path):
    overlapping, waiting = (
        result(small(**STEPS | GAME | {"engine__shards": 3, "engine__overlap": on}),
               tmp_path / str(on))
        for on in (True, False)
    )  # fmt: skip
    assert overlapping == waiting
    assert sum(row["tokens"] for row in overlapping["leaderboard"]) > 50


def gym_for(population, factory=Longer, **settings):
    tokenizer = population.cohort.base.tokenizer
    return MultiTurnGym(
        factory, tokenizer, max_turns=3, max_output_tokens=3, apply_chat_template=False, **settings
    )


def two_agents(**settings):
    small = {"group_size": 2, "prompts_per_step": 2, **settings}
    return GRPO.population(size=2, model="tiny-sums", device="cpu", **small)


ROUND = {"rounds": 1, "steps_per_round": 2, "fitness": {"prompts": 4}}


def test_parts_share_the_environments_that_a_gym_may_have():
    there, most = [], []

    class Counted(Longer):
        def reset(self, seed=None):
            there.append(self)
            most.append(len(there))
            return super().reset(seed)

        def step(self, action):
            step = super().step(action)
            if step[2]:
                there.remove(self)
            return step

    population = two_agents(overlap=True)
    population.train(gym_for(population, Counted, max_environments=5), **ROUND)
    assert max(most) == 4


def test_an_environment_that_parts_cannot_share_is_refused():
    population = two_agents(overlap=True)
    wrapper = TokenObservationWrapper(
        Longer(), population.cohort.base.tokenizer, 3, max_output_tokens=3,
        conversation_template="{observation}",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"engine\.overlap: .* has no side_by_side = True; give"):
        population.train(wrapper, **ROUND)
    with pytest.raises(ConfigError, match=r"of which 2 plays.* has too few max_environments"):
        population.train(gym_for(population, max_environments=1), **ROUND)


def test_auto_decides_once_by_the_seconds_of_a_round_whether_parts_take_turns():
    env = prepare(small()).env
    for reward, expected in ((0.29, False), (0.31, True), (30.0, True)):
        overlap = Overlap("auto", 2)
        assert not overlap.takes_turns(env)
        seconds = {"generate": 1.0, "learn": 2.0, "reward": reward, "evaluate": 9.0}
        text = overlap.decide_after(seconds, env)
        assert text.startswith(f"engine.overlap auto: rewards took {reward:.3g} s")
        assert overlap.takes_turns(env) is expected
        assert overlap.decide_after({"reward": 3.0 - reward, "learn": 1.0}, env) == ""
        assert overlap.takes_turns(env) is expected


def test_what_auto_has_decided_holds_where_an_environment_allows_it():
    population = two_agents(overlap="auto", shards=4)
    cohort = population.cohort
    wrapper = TokenObservationWrapper(
        Longer(), cohort.base.tokenizer, 3, max_output_tokens=3,
        conversation_template="{observation}",
    )  # fmt: skip
    gym, *others = [gym_for(population, max_environments=9), MultiTurnGym.of(wrapper),
                    gym_for(population, max_environments=3)]  # fmt: skip
    slow = {"reward": 9.0, "learn": 1.0}
    assert [cohort.overlap.decide_after(slow, other) for other in others] == ["", ""]
    assert not cohort.overlap.takes_turns(gym)
    assert gym.width == 2  # as when they take turns: `auto` never changes what is in a batch
    assert "4 parts take turns" in cohort.overlap.decide_after(slow, gym)
    found = [(cohort.overlap.takes_turns(env), env.width) for env in (gym, *others)]
    assert found == [(True, 2), (False, 1), (False, 3)]


def test_a_step_in_which_all_games_fail_counts_its_seeds_once():
    population = two_agents(overlap=True, prompts_per_step=8)
    seeds = set(gym_for(population).batch(0, 8))
    gym = gym_for(population, lambda: Broken(lambda seed: seed in seeds, turn=0))
    with pytest.warns(UserWarning, match="nothing to learn from"):
        (record,) = population.train(gym, **ROUND)
    assert [agent.metrics["empty_steps"] for agent in record.agents] == [1.0, 1.0]


def test_no_function_is_called_after_an_interruption(tmp_path):
    function = RewardFunction("slow", partial(slow_reward, folder=str(tmp_path)))
    batch = CompletionBatch(["a"] * 500, [{}] * 500, ["p"] * 500, ["row 0"] * 500)

    def scoring():
        yield HostWork(lambda: score_batch([function], batch, RewardCalls(reward_timeout=None)))

    def interrupts():
        while not (tmp_path / "calls").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    # A worker of pytest-xdist ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupts).start()
        with pytest.raises(KeyboardInterrupt):
            take_turns([scoring(), part("b", [], (0.0,))], overlap=True)
    finally:
        signal.signal(signal.SIGINT, before)
    time.sleep(0.1)
    made = (tmp_path / "calls").stat().st_size
    time.sleep(0.2)
    assert made == (tmp_path / "calls").stat().st_size < 500


def slow_reward(completion, folder):
    with (Path(folder) / "calls").open("a") as file:
        file.write("x")
    time.sleep(0.01)
    return 0.0
