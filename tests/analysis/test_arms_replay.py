"""replay: the winner's schedule and its last values, trained beside a run that stays as it was."""

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import replace as changed
from types import SimpleNamespace

import pytest
import shown_replay
from small_run import Told, small

import evo_grpo
from evo_grpo import run
from evo_grpo.analysis.arms import replay, train
from evo_grpo.errors import CheckpointError, ConfigError, RunDirError, RunFailedError
from evo_grpo.population.checkpoints.read import load_agent
from evo_grpo.population.evaluate import evaluate
from evo_grpo.readers.terminal.progress import Pace
from evo_grpo.record.family import best_ever
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.names import REPLAYED
from evo_grpo.record.observer import Observer
from evo_grpo.record.replay import read_replay, read_schedule, trainings
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.summary import read_summary
from evo_grpo.seeding import derive
from evo_grpo.training.assemble import add_agents, build_parts, prepare

#: With this seed the winner's hyperparameters move, and the best agent ever is one of round 1.
CONFIG = small(
    seed=7,
    population__sizes=[3, 2, 2],
    population__steps_per_round=2,
    algorithm__lr=5e-3,
    evolve__hyperparameters__lr={"min": 1e-3, "max": 2e-2},
    evolve__archive=True,
)


def digests(folder):
    """Every file of a run, but its replay and its lock."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock" and "replay" not in path.parts
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(CONFIG, out=tmp_path_factory.mktemp("runs") / "small-1")


@pytest.fixture(scope="module")
def replayed(finished, tmp_path_factory):
    """A replay of a copy of the run, the copy, and what an observer heard."""
    folder = tmp_path_factory.mktemp("replayed") / "small-1"
    shutil.copytree(finished, folder)
    told = Told()
    return replay(folder, repeats=2, observer=told), folder, told


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "small-1")
    return tmp_path / "small-1"


def adapters(folder):
    return {
        name: (folder / "replay" / name / "actor" / "adapter_model.safetensors").read_bytes()
        for name in REPLAYED
    }


@pytest.mark.slow
def test_what_it_leaves(replayed, finished):
    found, folder, told = replayed
    assert evo_grpo.replay is replay
    assert digests(folder) == digests(finished)
    assert {p.name for p in (folder / "replay").iterdir()} == {"replay.json", *REPLAYED}
    assert read_replay(folder) == found
    assert found.files == {
        str(path.relative_to(folder / "replay")): hashlib.sha256(path.read_bytes()).hexdigest()
        for name in REPLAYED
        for path in (folder / "replay" / name).rglob("*")
        if path.is_file()
    }
    assert len(set(adapters(folder).values())) == 2
    rounds = len(found.schedule.rounds)
    learned = [("learn", number) for number in range(rounds) for _ in range(2)]
    assert told.calls == [("started", 0), *learned, ("test", rounds - 1)]


def test_the_trainings_are_those_that_were_planned(replayed, finished):
    found, folder, _ = replayed
    assert found.schedule == read_schedule(finished)
    for one, plan in zip(found.trained, trainings(found.schedule), strict=True):
        assert (one.name, one.prompts, one.rows) == (plan.name, plan.prompts, plan.rows)
        assert 0 < one.tokens <= 4 * one.rows  # at most four tokens a completion
        assert one.failed_steps == 0
        attributes = json.loads((folder / "replay" / one.name / "attributes.json").read_text())
        assert attributes["steps"] == 2 * len(found.schedule.rounds)
        assert attributes["hparams"] == found.schedule.last.to_dict()


def test_all_are_judged_on_the_same_prompts_with_the_same_draws(replayed):
    found, folder, _ = replayed
    agents = CONFIG.agents().replace(seed=derive(CONFIG.seed, "replay"))
    assert found.seed == agents.seed
    cohort, env, _ = build_parts(CONFIG, agents)
    slots = add_agents(cohort, 3, "same")
    places = [folder / "replay" / name for name in REPLAYED]
    for slot, place in zip(slots, [*places, folder / found.schedule.checkpoint], strict=True):
        load_agent(cohort, slot, place)
    results = evaluate(
        cohort, env, slots, env.prompts("test", 6), samples=2, temperature=1.0, stream=("test",)
    )
    scores = [result.score for result in results]
    assert scores == [*(one.tests[0] for one in found.trained), found.winner]
    assert any(one.tests[0] != one.tests[1] for one in found.trained)


def test_nothing_but_the_data_is_drawn_as_in_the_run(replayed):
    """Fresh agents of a replay begin with other matrices than those of the run."""
    found, _, _ = replayed
    cohort, env, _ = build_parts(CONFIG, CONFIG.agents().replace(seed=found.seed))
    (slot,) = add_agents(cohort, 1, "same")
    own = prepare(CONFIG)
    assert env.prompts("test", 6) == own.env.prompts("test", 6)
    assert env.batch(3, 2) == own.env.batch(3, 2)
    name = cohort.agents[slot].adapter
    first, other = (c.slots.parameters(name)[0] for c in (cohort, own.cohort))
    assert not first.equal(other)


def test_each_agent_learns_what_its_plan_says(finished, monkeypatch):
    seen = []

    def spy(cohort, env, slots, prompts, *, prompts_per_agent, stream, **more):
        values = [cohort.agents[slot].hparams for slot in slots]
        seen.append((stream, values, tuple(prompts_per_agent), [p.index for p in prompts]))
        return len(prompts)

    monkeypatch.setattr("evo_grpo.analysis.arms.train_step", spy)
    plans = trainings(read_schedule(finished))
    cohort, env, _ = build_parts(CONFIG, CONFIG.agents())
    slots = add_agents(cohort, 2, "same")
    train(cohort, env, slots, plans, Observer(), to_test=0)
    assert [stream for stream, *_ in seen] == [
        (r, s) for r in range(len(plans[0].hparams)) for s in (0, 1)
    ]
    for (round, step), values, counts, _ in seen:
        assert values == [plan.hparams[round] for plan in plans]
        assert counts == tuple(plan.prompts[round][step] for plan in plans)
    # Prompts are handed out without a gap, in the order of the run.
    handed = [index for *_, prompts in seen for index in prompts]
    assert handed == [prompt.index for prompt in env.batch(0, len(handed))]


def test_the_time_left_is_right_within_a_factor_of_two_after_the_first_step(monkeypatch):
    """Rounds grow fourfold, and the first step takes half as long again as the others."""
    now, to_test = [0.0], 400

    def step(cohort, env, slots, prompts, *, prompts_per_agent, watch, **more):
        groups = zip(prompts_per_agent, slots, strict=True)
        rows = sum(prompts * cohort.agents[slot].group_size for prompts, slot in groups)
        seconds = Counter(generate=0.01 * rows, learn=0.02 * rows)
        for name, value in seconds.items():
            watch.seconds[name] = watch.seconds.get(name, 0) + value * (1 if now[0] else 1.5)
        now[0] = sum(watch.seconds.values())
        return len(prompts)

    class Watching(Observer):
        def stage(self, round, name, done, total):
            assert 0 <= done <= total
            pace.stage(name, done, total)
            left.append((now[0], pace.left()))

    monkeypatch.setattr("evo_grpo.analysis.arms.train_step", step)
    plans, agents = trainings(shown_replay.schedule()), {}
    cohort = SimpleNamespace(agents=agents, set_hparams=agents.__setitem__)
    env = SimpleNamespace(batch=lambda step, size: [None] * size)
    pace, left = Pace(lambda: now[0], whole=True), []
    pace.start(3, 0)
    train(cohort, env, range(2), plans, Watching(), to_test=to_test)
    end = now[0] + 0.01 * to_test
    assert left[0] == (0, None)
    assert len(left) == 12
    for at, expected in left[1:]:
        assert 0.5 < expected / (end - at) < 2


@pytest.mark.filterwarnings("ignore:evolve.hyperparameters is empty")
def test_where_nothing_moved_a_replay_says_so_before_it_trains(tmp_path):
    config = small(population__size=2, population__rounds=2, evolve__hyperparameters={})
    folder = run(config, out=tmp_path / "run")
    heard = []

    class Watching(Observer):
        def note(self, text):
            heard.append(text)

        def started(self, *arguments):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(folder, observer=Watching())
    (text,) = heard
    assert text.startswith("No hyperparameter changed on the winner's line")


def test_a_finished_replay_is_returned_as_it_is_unless_forced(replayed, monkeypatch):
    found, folder, _ = replayed
    before = (folder / "replay" / "replay.json").stat().st_mtime_ns
    told = Told()
    assert replay(folder, observer=told) == replay(folder, repeats=2, observer=told) == found
    assert told.calls == []
    for changes in ({"force": True}, {"repeats": 1}):
        with pytest.raises(KeyboardInterrupt):
            replay(folder, **changes, observer=Told(("learn", 1)))
    # Whoever stops it keeps the earlier one.
    assert read_replay(folder) == found
    assert (folder / "replay" / "replay.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_an_interrupted_replay_starts_anew_and_gives_the_same(copy, replayed):
    with pytest.raises(KeyboardInterrupt):
        replay(copy, repeats=1, observer=Told(("test", 2)))
    assert not (copy / "replay").exists()
    # As a kill in the middle of the writing leaves it.
    (copy / "replay" / "constant-run" / "actor").mkdir(parents=True)
    (copy / "replay" / "mine.txt").write_text("mine")
    again = replay(copy, repeats=2)
    assert changed(again, wall_seconds=replayed[0].wall_seconds) == replayed[0]
    assert adapters(copy) == adapters(replayed[1])
    assert (copy / "replay" / "mine.txt").read_text() == "mine"


def test_the_run_is_locked_meanwhile(copy):
    with (
        RunDir.open(copy),
        pytest.raises(RunDirError, match="in use by process"),
    ):
        replay(copy)
    with pytest.raises(ConfigError, match=r"repeats: expected an integer >= 1, got 0"):
        replay(copy, repeats=0)

    class Meddling(Observer):
        def stage(self, round, name, done, total):
            RunDir.open(copy)

    with pytest.raises(RunDirError, match="in use by process"):
        replay(copy, observer=Meddling())


@pytest.mark.slow
def test_only_the_winners_checkpoint_is_needed(copy):
    kept = copy / read_schedule(copy).checkpoint
    shutil.copytree(kept, copy.parent / "kept")
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(
        CheckpointError, match=r"checkpoint of the run's winner, member \d.*no folder"
    ):
        replay(copy)
    shutil.copytree(copy.parent / "kept", kept)
    assert replay(copy, repeats=1).trained


def test_a_disk_that_is_full_names_the_command(copy, monkeypatch):
    def full(*arguments, **given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("evo_grpo.analysis.arms.save_agent", full)
    with pytest.raises(RunFailedError, match=r"No space left.*continue with: evo-grpo replay RUN"):
        replay(copy, repeats=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["last", "archive", "mean"])
def test_every_kind_of_winner_is_replayed(copy, kind):
    """As if the final comparison had taken another finalist."""
    first, second = read_rounds(copy)[-1].agents[:2]
    ever = best_ever(read_rounds(copy))
    assert ever.round > 0
    best = {
        "last": {"member": first.member, "checkpoint": first.checkpoint},
        "archive": {"member": ever.member, "checkpoint": "checkpoints/best"},
        "mean": {
            "agent": None,
            "member": 90,
            "parents": [first.member, second.member],
            "checkpoint": second.checkpoint,
        },
    }[kind]
    summary = read_summary(copy)
    summary["best"] |= {"kind": kind, **best}
    (copy / "summary.json").write_text(json.dumps(summary))
    found = replay(copy)
    assert found.repeats == len(found.trained[0].tests) == 3
    assert (found.schedule.kind, found.schedule.member) == (kind, best["member"])
    assert found.winner.n == 6
