"""`evo_grpo.Tracker` never ends training, never makes it wait, and says once what went wrong."""

import threading

import pytest
from small_run import outcome, small

import evo_grpo
from evo_grpo import run
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.readers.trackers import base
from evo_grpo.readers.trackers.base import Tracker
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.history import WHERE, metric_rows
from evo_grpo.record.observer import ObserverList
from evo_grpo.settings.trackers import KINDS

CONFIG = small(population__steps_per_round=2)


class Object:
    """What accelerate calls a GeneralTracker."""

    name = "own"

    def __init__(self):
        self.settings, self.logged, self.ended = None, [], 0

    def store_init_configuration(self, values):
        self.settings = values

    def log(self, values, step=None):
        self.logged.append((step, values))

    def finish(self):
        self.ended += 1


class Failing(Object):
    def log(self, values, step=None):
        if step == 2:
            raise RuntimeError("no more \x1b[31m room")
        super().log(values, step)


class Blocking(Object):
    def __init__(self):
        super().__init__()
        self.waits, self.go_on = threading.Event(), threading.Event()

    def log(self, values, step=None):
        self.waits.set()
        self.go_on.wait(30)
        super().log(values, step)


def test_a_tracker_of_accelerate_hears_everything_in_order(tmp_path):
    heard = Object()
    folder = run(CONFIG, out=tmp_path / "run", observer=Tracker(heard))
    assert heard.settings["population.steps_per_round"] == 2
    assert heard.ended == 1
    # Two steps and a round, three times, then the end.
    assert [step for step, _ in heard.logged] == [1, 2, 2, 3, 4, 4, 5, 6, 6, 6]
    rows = {(r["round"] * 2 + r["step"] + 1, r["agent"]): r for r in metric_rows(folder)}
    for step, values in heard.logged[:2]:
        shown = {name.partition("/agent-")[::2]: value for name, value in values.items()}
        assert shown == {
            (name, f"{agent:02d}"): value
            for agent in range(3)
            for name, value in rows[step, agent].items()
            if name not in WHERE and value is not None
        }
    last = read_rounds(folder)[-1]
    fitness = [agent.score.mean for agent in last.agents]
    (whole,) = [v for s, v in heard.logged if s == 6 and "fitness/best" in v]
    assert whole["fitness/best"] == max(fitness)
    assert whole["fitness/mean"] == pytest.approx(sum(fitness) / 3)
    assert whole["round"] == 3
    assert set(heard.logged[-1][1]) == {"test/best", "test/base"}


def test_accelerates_own_class_is_one():
    from accelerate.tracking import GeneralTracker

    heard = []

    class Own(GeneralTracker):
        name = "mine"
        requires_logging_directory = False
        main_process_only = False
        tracker = None

        def start(self):
            heard.append("start")

        def store_init_configuration(self, values):
            heard.append(values["seed"])

        def log(self, values, step=None, **_):
            heard.append(step)

        def finish(self):
            heard.append("finish")

    follower = Tracker(Own())
    assert follower.kind == "mine"
    follower.started(None, 1, 0, CONFIG)
    take_steps(follower, range(2))
    follower.finished({"best": {"mean": 0.5}})
    assert heard == ["start", 3, 1, 2, 2, "finish"]


def test_one_that_fails_is_left_with_one_warning_and_the_run_goes_on(tmp_path):
    broken, sound = Failing(), Object()
    with pytest.warns(UserWarning, match="tracker own") as told:
        folder = run(
            CONFIG, out=tmp_path / "run", observer=ObserverList([Tracker(broken), Tracker(sound)])
        )
    (warning,) = told
    assert str(warning.message) == (
        "tracker own: RuntimeError: no more \\x1b[31m room; training continues without it"
    )
    assert [step for step, _ in broken.logged] == [1]
    assert len(sound.logged) == 10
    assert outcome(folder) == outcome(run(CONFIG, out=tmp_path / "plain"))


def test_one_that_blocks_is_given_up_at_the_end(monkeypatch):
    monkeypatch.setattr(base, "SECONDS_TO_FINISH", 0.3)
    follower = Tracker(stuck := Blocking())
    follower.started(None, 1, 0, None)
    take_steps(follower, range(2))
    with pytest.warns(UserWarning, match="own: it has not written all entries within") as told:
        follower.finished({})
    stuck.go_on.set()
    assert len(told) == 1


def test_one_that_was_too_slow_says_how_much_it_misses(monkeypatch):
    monkeypatch.setattr(base, "WAITING", 2)
    slow = Blocking()
    follower = Tracker(slow)
    follower.started(None, 1, 0, None)
    take_steps(follower, range(1))
    assert slow.waits.wait(30)
    take_steps(follower, range(1, 10))
    slow.go_on.set()
    with pytest.warns(UserWarning, match="it was too slow and missed 7 entries"):
        follower.close()


def take_steps(follower, steps):
    for step in steps:
        follower.step_done(0, step, {0: {"reward": 0.5}})


def test_a_population_without_a_folder_is_followed_over_several_calls():
    heard = Object()
    population = evo_grpo.GRPO.population(
        size=2, model="tiny-sums", group_size=2, prompts_per_step=2, device="cpu"
    )
    with Tracker(heard) as follower:
        for _ in range(2):
            population.train(
                "sums",
                rounds=1,
                steps_per_round=2,
                sizes="constant",
                fitness={"prompts": 2},
                observer=follower,
                progress=False,
            )
    assert [step for step, _ in heard.logged] == [1, 2, 2, 3, 4, 4]
    assert heard.ended == 1


# --- what is refused before the first round -------------------------------------------------------


@pytest.fixture(scope="module")
def untrained():
    return evo_grpo.GRPO.population(size=2, model="tiny-sums", device="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_package_is_refused_with_its_remedy(tmp_path, monkeypatch, untrained, kind):
    monkeypatch.setattr("evo_grpo.settings.trackers.find_spec", lambda name: None)
    remedy = rf'record.trackers: {kind} .*pip install "evo-grpo\[{kind}\]"'
    config = small(record__trackers=[kind])
    with pytest.raises(EngineUnavailable, match=remedy):
        run(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(EngineUnavailable, match=remedy):
        Tracker(kind)
    with pytest.raises(EngineUnavailable, match=remedy):
        untrained.train("sums", trackers=[kind], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_trackers_of_a_population_need_its_folder(untrained):
    with pytest.raises(ConfigError, match=r"trackers: expected out= too"):
        untrained.train("sums", trackers=["tensorboard"])


def test_what_is_no_tracker_is_refused():
    with pytest.raises(ConfigError, match=r"expected 'tensorboard', .* without store_init_conf"):
        Tracker(3)
    with pytest.raises(ConfigError, match=r"and no options, got .* beside project"):
        Tracker(Object(), project="mine")
    with pytest.raises(ConfigError, match="kind: expected 'tensorboard'"):
        Tracker("tensorbord")
