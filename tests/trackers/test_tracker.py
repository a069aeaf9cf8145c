"""A tracker never ends a run, never makes it wait, and says once what went wrong."""

import json
import os
import subprocess
import sys
import threading
import time
import warnings

import pytest
from small_run import Told, outcome, small

import evo_grpo
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.step_metrics import metric_rows
from evo_grpo.settings import RecordConfig
from evo_grpo.settings.trackers import MODULES, TrackerConfig
from evo_grpo.trackers import Tracker, channel, tracker
from evo_grpo.trackers.told import Beginning, Entry
from evo_grpo.trackers.tracker import Trackers
from evo_grpo.trackers.worker import NICENESS
from evo_grpo.training import resume, run

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


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    return run(CONFIG, out=tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture(scope="module")
def plain(plain_run):
    return outcome(plain_run)


def test_a_tracker_of_accelerate_hears_everything_in_order(tmp_path):
    heard = Object()
    folder = run(CONFIG, out=tmp_path / "run", observer=Tracker(heard))
    assert heard.settings["population.steps_per_round"] == 2
    assert heard.ended == 1
    # Two steps and a round, three times, then the end.
    assert [step for step, _ in heard.logged] == [1, 2, 2, 3, 4, 4, 5, 6, 6, 6]
    rows = {(r["round"] * 2 + r["step"] + 1, r["agent"]): r for r in metric_rows(folder)}
    for step, values in heard.logged:
        for name, value in values.items():
            metric, _, who = name.partition("/agent-")
            if who and metric in rows[step, int(who)]:
                assert value == rows[step, int(who)][metric]
    last = read_rounds(folder)[-1]
    fitness = [agent.score.mean for agent in last.agents]
    (whole,) = [v for s, v in heard.logged if s == 6 and "fitness/best" in v]
    assert whole["fitness/best"] == max(fitness)
    assert whole["fitness/mean"] == pytest.approx(sum(fitness) / 3)
    assert whole["round"] == 3
    assert set(heard.logged[-1][1]) == {"test/best", "test/base"}


def test_accelerates_own_class_is_one(tmp_path):
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
    run(CONFIG, out=tmp_path / "run", observer=follower)
    assert heard == ["start", 3, 1, 2, 2, 3, 4, 4, 5, 6, 6, 6, "finish"]


def test_several_follow_one_run_and_change_nothing(tmp_path, plain):
    one, two = Object(), Object()

    class Both(evo_grpo.Observer):
        pass

    from evo_grpo.record.observer import Several

    observer = Several([Tracker(one), Both(), Tracker(two)])
    folder = run(CONFIG, out=tmp_path / "run", observer=observer)
    assert one.logged == two.logged
    assert outcome(folder) == plain


def test_one_that_fails_is_left_with_one_warning_and_the_run_goes_on(tmp_path, plain):
    broken, sound = Failing(), Object()
    from evo_grpo.record.observer import Several

    with pytest.warns(UserWarning, match="tracker own") as told:
        folder = run(
            CONFIG, out=tmp_path / "run", observer=Several([Tracker(broken), Tracker(sound)])
        )
    (warning,) = told
    assert str(warning.message) == (
        "tracker own: RuntimeError: no more \\x1b[31m room; the run goes on, and its own files "
        "have everything"
    )
    assert [step for step, _ in broken.logged] == [1]
    assert len(sound.logged) == 10
    assert outcome(folder) == plain


class Exiting(Object):
    def log(self, values, step=None):
        raise SystemExit(3)


def test_one_that_exits_has_failed_like_any(tmp_path, plain):
    with pytest.warns(UserWarning, match="tracker own: SystemExit: 3; the run goes on") as told:
        folder = run(CONFIG, out=tmp_path / "run", observer=Tracker(Exiting()))
    assert len(told) == 1
    assert outcome(folder) == plain


def test_ctrl_c_at_the_end_of_a_run_leaves_no_tracker_unfinished(monkeypatch):
    waits = channel.Channel.wait
    interrupts = [KeyboardInterrupt]

    def interrupted(self, *given, **named):
        if interrupts:
            raise interrupts.pop()
        waits(self, *given, **named)

    monkeypatch.setattr(channel.Channel, "wait", interrupted)
    one, two = Blocking(), Blocking()

    def follow_to_the_end():
        with Trackers([one, two]) as follower:
            follower.started(None, 1, 0, None)
            take_steps(follower, range(4))
            one.go_on.set()
            threading.Timer(0.3, two.go_on.set).start()
            follower.finished({"best": {"mean": 1.0}})

    with pytest.raises(KeyboardInterrupt):
        follow_to_the_end()
    for heard in (one, two):
        assert [step for step, _ in heard.logged] == [1, 2, 3, 4, 4]
        assert heard.ended == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
def test_a_fork_waits_for_no_tracker_of_its_parent():
    heard = Object()
    with Tracker(heard) as follower, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        follower.started(None, 1, 0, None)
        if (child := os.fork()) == 0:
            warnings.simplefilter("error")
            try:
                follower.close(stopped=True)
            finally:
                os._exit(0 if sys.exc_info()[0] is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert heard.ended == 1


def test_one_that_blocks_misses_entries_and_is_given_up_at_the_end(tmp_path, plain, monkeypatch):
    monkeypatch.setattr(channel, "WAITING", 3)
    monkeypatch.setattr(tracker, "SECONDS_TO_FINISH", 0.3)
    stuck = Blocking()
    with pytest.warns(UserWarning, match="tracker own: it has not written all within") as told:
        folder = run(CONFIG, out=tmp_path / "run", observer=Tracker(stuck))
    stuck.go_on.set()
    assert len(told) == 1
    assert outcome(folder) == plain


def test_one_that_was_too_slow_says_how_much_it_misses(tmp_path, monkeypatch):
    monkeypatch.setattr(channel, "WAITING", 2)
    monkeypatch.setattr(channel, "SECONDS_TO_GATHER", 0.01)
    slow = Blocking()
    follower = Tracker(slow)
    follower.started(None, 1, 0, None)
    take_steps(follower, range(1))
    assert slow.waits.wait(30)
    take_steps(follower, range(1, 10))
    slow.go_on.set()
    with pytest.warns(UserWarning, match="it was too slow, and misses 7 entries"):
        follower.close()


def take_steps(follower, steps):
    for step in steps:
        follower.step_done(0, step, {0: {"reward": 0.5}})


def heard_so_far(tracker, count):
    until = time.monotonic() + 20
    while len(tracker.logged) < count and time.monotonic() < until:
        time.sleep(0.01)
    return [step for step, _ in tracker.logged]


def test_steps_wait_for_each_other_and_the_end_of_a_round_is_told_at_once(plain_run, monkeypatch):
    monkeypatch.setattr(channel, "SECONDS_TO_GATHER", 60.0)
    heard = Object()
    with Tracker(heard) as follower:
        follower.started(None, 1, 0, None)
        take_steps(follower, range(2))
        time.sleep(0.2)
        assert heard.logged == []
        follower.round_done(read_rounds(plain_run)[0])
        assert heard_so_far(heard, 3) == [1, 2, 2]


def test_steps_that_fill_half_of_the_queue_are_told_at_once(monkeypatch):
    monkeypatch.setattr(channel, "SECONDS_TO_GATHER", 60.0)
    monkeypatch.setattr(channel, "WAITING", 6)
    heard = Object()
    with Tracker(heard) as follower:
        follower.started(None, 1, 0, None)
        take_steps(follower, range(4))
        assert heard_so_far(heard, 4) == [1, 2, 3, 4]


def test_a_stopped_run_closes_its_trackers(tmp_path, monkeypatch):
    heard = Object()
    with pytest.raises(KeyboardInterrupt), Tracker(heard) as follower:
        run(CONFIG, out=tmp_path / "run", observer=Both(follower, Told(("evaluate", 1))))
    assert heard.ended == 1
    assert [step for step, _ in heard.logged] == [1, 2, 2, 3, 4]


class Both(evo_grpo.Observer):
    """Tells two, the second of which ends the run."""

    def __init__(self, *observers):
        for name in ("started", "stage", "step_done", "round_done", "finished"):
            setattr(self, name, lambda *a, n=name: [getattr(o, n)(*a) for o in observers])


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


# --- in a process of its own ----------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package that stands for wandb."""
    place = tmp_path / "packages"

    def write(text):
        (place / "wandb").mkdir(parents=True)
        (place / "wandb" / "__init__.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(place), prepend=":")
        monkeypatch.syspath_prepend(place)

    return write


FAKE = """
class Settings:
    def __init__(self, **settings): pass
class Run:
    def log(self, values, step): {log}
    def finish(self): pass
def init(**arguments): {init}
"""


def follow(folder):
    config = small(population__steps_per_round=2, record__trackers=["wandb"])
    return run(config, out=folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ImportError('of another version')", "ImportError: of another version"),
        (FAKE.format(log="0", init="raise OSError('no disk')"), "OSError: no disk"),
        (FAKE.format(log="1 / 0", init="return Run()"), "ZeroDivisionError: division by zero"),
        (FAKE.format(log="import os; os._exit(7)", init="return Run()"), "ended with code 7"),
        (FAKE.format(log="import os; os.kill(os.getpid(), 9)", init="return Run()"), "code -9"),
    ],
)
def test_a_package_that_fails_in_any_way_ends_nothing(tmp_path, package, plain, text, said):
    package(text)
    with pytest.warns(UserWarning, match="tracker wandb: ") as told:
        folder = follow(tmp_path / "run")
    (warning,) = told
    assert said in str(warning.message)
    assert [a.adapter_sha256 for r in read_rounds(folder) for a in r.agents]
    assert outcome(folder)["leaderboard"] == plain["leaderboard"]
    assert (folder / "trackers/wandb.log").is_file()


def test_a_package_leaves_the_processor_to_the_run(tmp_path, package, plain):
    log = "import os; open({!r}, 'w').write(str(os.nice(0)))".format(str(tmp_path / "niceness"))
    package(FAKE.format(log=log, init="return Run()"))
    follow(tmp_path / "run")
    assert int((tmp_path / "niceness").read_text()) >= min(19, os.nice(0) + NICENESS)


def test_what_python_prints_before_the_package_is_no_failure(tmp_path, package):
    package(FAKE.format(log="0", init="return Run()"))
    (tmp_path / "packages/sitecustomize.py").write_text("print('hello'); print('[3]')")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follow(tmp_path / "run")


def test_half_a_line_is_the_end_of_a_run_that_was_killed(tmp_path, package):
    log = tmp_path / "log"
    package(FAKE.format(log=f"open({str(log)!r}, 'a').write(f'{{step}}\\n')", init="return Run()"))
    state = tmp_path / "wandb.json"
    beginning = Beginning("wandb", "run", "project", str(tmp_path), str(state), {})
    entry = Entry(1, 0, {"agent-00": {"reward": 0.5}})
    done = subprocess.run(
        [sys.executable, "-P", "-m", "evo_grpo.trackers.worker"],
        input=beginning.line + entry.line + Entry(2, 0, entry.values).line[:20],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, json.loads(done.stdout)) == (0, {"done": True}), done.stderr
    assert log.read_text().split() == ["1"]
    assert json.loads(state.read_text())["place"] == [1, 0]


def test_a_run_waits_for_what_is_written_and_for_no_package_that_takes_its_time_to_end(
    tmp_path, package, monkeypatch
):
    log = tmp_path / "log"
    monkeypatch.setenv("MAY_END", str(tmp_path / "may-end"))
    ends = (
        "def hold():\n"
        "    import os, time\n"
        "    while not os.path.exists(os.environ['MAY_END']): time.sleep(0.05)\n"
        "import atexit; atexit.register(hold)\n"
    )
    write = f"open({str(log)!r}, 'a').write(f'{{step}}\\n')"
    package(ends + FAKE.format(log=write, init="return Run()"))
    before = threading.enumerate()
    follow(tmp_path / "run")
    assert log.read_text().split() == ["1", "2", "2", "3", "4", "4", "5", "6", "6", "6"]
    (waits,) = [t for t in threading.enumerate() if t.name == "tracker-wandb" and t not in before]
    (tmp_path / "may-end").touch()
    waits.join(30)
    assert not waits.is_alive()


@pytest.mark.slow
def test_a_package_that_hangs_is_ended_with_the_run(tmp_path, package, monkeypatch):
    monkeypatch.setattr(tracker, "SECONDS_TO_FINISH", 2.0)
    monkeypatch.setattr(tracker, "PATIENCE", 8.0)
    package(FAKE.format(log="import time; time.sleep(600)", init="return Run()"))
    began = time.monotonic()
    with pytest.warns(UserWarning, match="tracker wandb: it is still writing after 2 s"):
        follow(tmp_path / "run")
    assert time.monotonic() - began < 60
    # Its process ends by itself, and with it the thread that hears of that.
    for thread in [t for t in threading.enumerate() if t.name == "tracker-wandb"]:
        thread.join(30)
        assert not thread.is_alive()


def test_a_process_that_was_told_all_goes_on_after_a_stop_and_a_resume_waits_for_it(
    tmp_path, package, monkeypatch
):
    monkeypatch.setattr(tracker, "SECONDS_TO_STOP", 1.5)
    log = tmp_path / "log"
    package(
        FAKE.format(
            log=f"import time; time.sleep(0.6); open({str(log)!r}, 'a').write(f'{{step}}\\n')",
            init="return Run()",
        )
    )
    config = small(population__steps_per_round=2, record__trackers=["wandb"])
    with pytest.raises(KeyboardInterrupt):
        run(config, out=tmp_path / "run", observer=Told(("evaluate", 1)))
    resume(tmp_path / "run")
    assert log.read_text().split() == ["1", "2", "2", "3", "4", "4", "5", "6", "6", "6"]


def test_a_process_whose_run_was_replaced_writes_no_more(tmp_path):
    from evo_grpo.trackers.backends.protocol import Progress
    from evo_grpo.trackers.state import RunReplaced, State

    file = tmp_path / "wandb.json"
    state = State(file)
    state.keep(Progress("one", (1, 0)))
    assert state.read() == Progress("one", (1, 0))
    file.with_suffix(".lock").unlink()
    with pytest.raises(RunReplaced, match="has been removed"):
        state.keep(Progress("one", (2, 0)))
    file.unlink()
    other = State(file)
    other.keep(Progress("two", (1, 0)))
    with pytest.raises(RunReplaced, match="belongs to another run"):
        state.keep(Progress("one", (2, 0)))
    file.write_text("{")
    assert other.read() == Progress()
    for one in (state, other):
        one.close()


def test_it_goes_on_after_what_it_has_written(tmp_path, package):
    log = tmp_path / "log"
    package(
        FAKE.format(
            log=f"open({str(log)!r}, 'a').write(f'{{step}} {{len(values)}}\\n')",
            init=f"open({str(log)!r}, 'a').write(arguments['id'] + '\\n'); return Run()",
        )
    )
    config = small(population__steps_per_round=2, record__trackers=["wandb"])
    with pytest.raises(KeyboardInterrupt):
        run(config, out=tmp_path / "run", observer=Told(("evaluate", 1)))
    resume(tmp_path / "run")
    first, *lines = log.read_text().splitlines()
    starts = [n for n, line in enumerate(lines) if line == first]
    assert len(starts) == 1
    steps = [int(line.split()[0]) for n, line in enumerate(lines) if n not in starts]
    assert steps == [1, 2, 2, 3, 4, 4, 5, 6, 6, 6]
    state = json.loads((tmp_path / "run/trackers/wandb.json").read_text())
    assert state == {"id": first, "place": [6, 2]}


# --- what is refused before the first round -------------------------------------------------------


@pytest.mark.parametrize("kind", MODULES)
def test_a_missing_package_is_refused_with_its_remedy(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("evo_grpo.settings.trackers.find_spec", lambda name: None)
    remedy = rf'record.trackers: {kind} .*pip install "evo-grpo\[{kind}\]"'
    config = small(record__trackers=[kind])
    with pytest.raises(EngineUnavailable, match=remedy):
        run(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(EngineUnavailable, match=remedy):
        Tracker(kind)
    population = evo_grpo.GRPO.population(size=2, model="tiny-sums", device="cpu")
    with pytest.raises(EngineUnavailable, match=remedy):
        population.train("sums", trackers=[kind], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_trackers_of_a_population_need_its_folder():
    population = evo_grpo.GRPO.population(size=2, model="tiny-sums", device="cpu")
    with pytest.raises(ConfigError, match=r"trackers: expected out= too"):
        population.train("sums", trackers=["tensorboard"])


def test_what_is_no_tracker_is_refused():
    with pytest.raises(ConfigError, match=r"expected 'tensorboard', .* without store_init_conf"):
        Tracker(3)
    with pytest.raises(ConfigError, match="expected no options beside an object, got project"):
        Tracker(Object(), project="mine")
    with pytest.raises(ConfigError, match="kind: expected 'tensorboard'"):
        Tracker("tensorbord")


@pytest.mark.parametrize(
    ("trackers", "said"),
    [
        (["wandb", "wandb"], r"trackers\[1\].kind: expected each kind once"),
        ([{"kind": "tensorboard", "online": True}], "online: tensorboard takes folder alone"),
        (
            [{"kind": "mlflow", "server": "http://me:secret@host"}],
            "server: expected a URL without user and password",
        ),
        (3, "trackers: expected a list, got 3"),
    ],
)
def test_settings_that_cannot_be_are_refused(trackers, said):
    with pytest.raises(ConfigError, match=said) as error:
        small(record__trackers=trackers)
    assert "secret" not in str(error.value)


def test_a_tracker_may_be_given_by_its_kind_alone():
    assert RecordConfig(trackers="wandb").trackers == [TrackerConfig(kind="wandb")]
    assert RecordConfig(trackers=None).trackers == []


def test_no_warning_where_nothing_is_wrong(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(CONFIG, out=tmp_path / "run", observer=Tracker(Object()))
