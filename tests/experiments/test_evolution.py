"""experiments/evolution: its plans and settings, its statistics, what it resumes and reports."""

import itertools
import json
import math
import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from small_run import small

import evo_grpo
from evo_grpo import settings as configuration
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Member, Score

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "evolution"


@pytest.fixture(scope="module", autouse=True)
def _importable():
    """The modules of the folder import each other by their bare names."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).parent == FOLDER:
            del sys.modules[name]


def module_of_the_folder(name):
    """A fixture that is one of its modules."""
    return pytest.fixture(name=name)(lambda: import_module(name))


arms, lines, report, stats, one_run = map(
    module_of_the_folder, ("arms", "lines", "report", "stats", "one_run")
)


@pytest.fixture
def command():
    """run.py, under a name that nothing else has."""
    spec = spec_from_file_location("evolution_run", FOLDER / "run.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------ plans, settings


def test_an_arm_spends_the_budget_of_its_task(arms):
    for task, arm in itertools.product(arms.TASKS.values(), arms.ARMS.values()):
        made, budget, ratio = (
            arms.plan(task, arm),
            arms.budget(task, arm),
            arms.RATIOS.get((task.name, arm.name), 1.0),
        )
        where = f"{task.name}, {arm.name}"
        assert 0.98 * budget <= made.rows <= budget, where
        assert budget == pytest.approx(arms.budget(task) * ratio, abs=1), where
        assert made.validation >= task.validation, where


def test_the_reference_arm_is_the_task_as_it_stands(arms):
    for task in arms.TASKS.values():
        made = arms.plan(task, arms.ARMS[arms.REFERENCE])
        assert (made.rounds, made.steps, made.prompts) == (task.rounds, task.steps, task.prompts)
        assert made.validation == task.validation
        assert made.rows == arms.budget(task)


def test_the_settings_of_an_arm_are_a_run(arms):
    for task, arm in itertools.product(arms.TASKS.values(), arms.ARMS.values()):
        made, where = arms.plan(task, arm), f"{task.name}, {arm.name}"
        config = configuration.from_dict(arms.nested(arms.overrides(task, arm, seed=3)))
        population = config.population
        assert (config.seed, config.record.optuna) == (3, False), where
        assert (population.size, population.rounds) == (made.agents, made.rounds), where
        assert population.steps_per_round == made.steps, where
        assert config.algorithm.prompts_per_step == made.prompts, where
        assert config.evolve.fitness.prompts == made.validation, where
        assert set(config.evolve.hyperparameters) == set(arm.searches), where
        rows = made.agents * made.prompts * config.algorithm.group_size
        trials = task.size if arm.driver == "tpe" else 1
        assert trials * made.rounds * made.steps * rows == made.training, where


def test_places_halve_down_to_what_the_arm_says(arms):
    task = arms.TASKS["sums"]
    assert arms.plan(task, arms.ARMS["new"]).places == (8, 4, 2, 2, 2, 2)
    assert arms.plan(task, arms.ARMS["halving-1"]).places == (8, 4, 2, 1, 1, 1)
    sizes = arms.overrides(task, arms.ARMS["halving-1"], 0)["population.sizes"]
    assert sizes == [8, 4, 2, 1]


def test_an_unknown_lr_is_drawn_once_per_seed_and_for_all_arms_alike(arms):
    task = arms.TASKS["sums"]
    names = [name for name, arm in arms.ARMS.items() if "lr" in arm.searches]
    for seed in range(16):
        found = {arms.overrides(task, arms.ARMS[n], seed)["algorithm.lr"] for n in names}
        assert len(found) == 1
        assert arms.RANGES["lr"]["min"] <= found.pop() <= arms.RANGES["lr"]["max"]
    logs = [math.log10(arms.start_lr(seed)) for seed in range(2000)]
    low, high = (math.log10(arms.RANGES["lr"][end]) for end in ("min", "max"))
    assert np.mean(logs) == pytest.approx((low + high) / 2, abs=0.1)
    assert np.std(logs) == pytest.approx((high - low) / math.sqrt(12), abs=0.05)


# ----------------------------------------------------------------------------------- statistics


def test_the_paired_interval_is_that_of_a_slow_bootstrap(stats):
    rng = np.random.default_rng(5)
    first = {seed: float(v) for seed, v in enumerate(rng.normal(0.8, 0.1, 6))}
    second = {seed: float(v) for seed, v in enumerate(rng.normal(0.7, 0.1, 9)) if seed != 2}
    found = stats.paired(first, second)

    differences = [first[seed] - second[seed] for seed in (0, 1, 3, 4, 5)]
    draws = np.random.default_rng(stats.SEED).integers(5, size=(stats.RESAMPLES, 5))
    means = []
    for draw in draws.tolist():
        total = 0.0
        for index in draw:
            total += differences[index]
        means.append(total / 5)
    means.sort()

    def percentile(share):
        place = share * (len(means) - 1)
        below = int(place)
        return means[below] + (place - below) * (means[below + 1] - means[below])

    assert found.seeds == 5
    assert found.mean == pytest.approx(sum(differences) / 5)
    assert found.low == pytest.approx(percentile(0.025))
    assert found.high == pytest.approx(percentile(0.975))
    assert found.ahead == sum(d > 0 for d in differences)


def test_seeds_are_won_alone_or_shared(stats):
    scores = {"a": {0: 0.9, 1: 0.5, 2: 1.0}, "b": {0: 0.8, 1: 0.5}, "c": {0: 0.1, 1: 0.4}}
    assert stats.times_best(scores) == {"a": 1.5, "b": 0.5, "c": 0.0}


# -------------------------------------------------------------------------------------- one run


def agent(number, member, parent, round, fitness, lr=1e-3):
    score = None if fitness is None else Score(fitness, 0.01, 64)
    return AgentRecord(
        agent=number, member=member, parent=parent, round=round,
        state="failed" if score is None else "ok", hparams=Hparams(lr=lr), score=score,
        metrics={}, tokens=0, wall_seconds=0.0,
    )  # fmt: skip


def test_agents_below_the_base_have_collapsed(one_run):
    fitness = [0.0, 0.05, 0.11, 0.9, None]
    agents = tuple(agent(n, n, None, 0, value) for n, value in enumerate(fitness))
    members = tuple(Member(one.member, one.agent) for one in agents)
    last = RoundRecord(0, agents, {}, members)
    # sd of 64 throws at .12 is .041: .05 is 1.7 of them below, .11 a quarter of one.
    assert one_run.collapsed(last, 0.12, 0.0, 1) == 3 / 5
    assert one_run.collapsed(last, 0.12, 0.05, 1) == 2 / 5
    left = RoundRecord(0, agents, {}, members[1:])
    assert one_run.collapsed(left, 0.12, 0.0, 1) == 2 / 4, "one has left after the round"


def test_the_schedule_follows_the_winner_back_to_its_founder(one_run):
    rounds = [
        RoundRecord(
            0,
            (agent(0, 0, None, 0, 0.2, 1e-2), agent(1, 1, None, 0, 0.5, 3e-3)),
            {},
            members=(Member(2, 0, 1, 1), Member(1, 1)),
        ),
        RoundRecord(
            1,
            (agent(0, 2, 1, 1, 0.6, 2e-3), agent(1, 1, None, 1, 0.5, 3e-3)),
            {},
            members=(Member(2, 0, 1, 1), Member(1, 1)),
        ),
        RoundRecord(2, (agent(0, 2, 1, 2, 0.7, 2e-3), agent(1, 1, None, 2, 0.6, 3e-3)), {}),
    ]
    found = one_run.schedule(rounds, 2)
    assert [(step["round"], step["lr"]) for step in found] == [(0, 3e-3), (1, 2e-3), (2, 2e-3)]
    assert found[0]["group_size"] == 8


def test_a_round_in_the_archive_is_no_round_of_the_schedule(one_run):
    restored = (Member(5, 0, 1, 2),)  # born before round 2 from member 1, which left after round 0
    rounds = [
        RoundRecord(0, (agent(1, 1, None, 0, 0.5, 3e-3),), {}, members=(Member(4, 0, 1, 1),)),
        RoundRecord(1, (agent(0, 4, 1, 1, 0.1, 3e-2),), {}, members=restored),
        RoundRecord(2, (agent(0, 5, 1, 2, 0.6, 1.5e-3),), {}, members=restored),
    ]
    found = one_run.schedule(rounds, 5)
    assert [(step["round"], step["lr"]) for step in found] == [(0, 3e-3), (2, 1.5e-3)]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["default-8", "one"])
@pytest.mark.filterwarnings("ignore:evolve.hyperparameters is empty")
def test_a_run_samples_the_rows_that_were_planned(one_run, arm):
    line = one_run.measure("sums", arm, 0, quick=True)
    assert line["state"] == "ok"
    for purpose in ("training", "evaluation"):
        assert line[purpose]["rows"] == line["planned"][purpose]
        assert 1 <= line[purpose]["tokens"] / line[purpose]["rows"] <= 4
    assert line["test"]["n"] == 32
    assert len(line["schedule"]) == len(line["curve"]) == 1
    assert json.loads(json.dumps(line)) == line


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["new", "halving-1", "search-all"])
def test_an_arm_that_evolves_stays_within_its_rows(one_run, arm):
    line = one_run.measure("sums", arm, 0, quick=True)
    planned = sum(line["planned"].values())
    # Two rounds of 16 validation prompts: an evaluation more or less is much of them.
    assert line["training"]["rows"] == pytest.approx(line["planned"]["training"], rel=0.02)
    assert sum(line[p]["rows"] for p in ("training", "evaluation")) <= 1.1 * planned


@pytest.mark.slow
def test_trials_spend_the_rows_of_the_others(one_run):
    line = one_run.measure("sums", "tpe", 0, quick=True)
    for purpose in ("training", "evaluation"):
        assert line[purpose]["rows"] == line["planned"][purpose]
    assert len(line["curve"]) == 2
    assert line["curve"] == sorted(line["curve"])


def test_a_run_without_a_finite_agent_is_a_result(one_run, monkeypatch):
    def fail(*_):
        raise one_run.RunFailedError("round 0: no agent is finite")

    monkeypatch.setattr(one_run, "_drive", fail)
    line = one_run.measure("sums", "one-high", 0, quick=True)
    assert line["state"] == "failed"
    assert line["test"]["mean"] == 0.0
    assert "no agent is finite" in line["reason"]


# ------------------------------------------------------------------------- the file, the command


def test_what_a_stopped_process_left_of_a_line_is_cut_off(lines, tmp_path):
    path = tmp_path / "sums.jsonl"
    lines.append(path, {"arm": "new", "seed": 0})
    with path.open("a") as file:
        file.write('{"arm": "new", "se')
    assert [line["seed"] for line in lines.read(path)] == [0]
    lines.append(path, {"arm": "new", "seed": 1})
    assert [line["seed"] for line in lines.read(path)] == [0, 1]


def test_a_finished_line_is_not_run_again(command, arms, lines, tmp_path, monkeypatch):
    def made(arm, seed, **changes):
        settings = arms.overrides(arms.TASKS["sums"], arms.ARMS[arm], seed)
        return fixture_line(arm, seed, 0.8, overrides={**settings, **changes})

    lines.append(tmp_path / "sums.jsonl", made("random", 0))
    lines.append(tmp_path / "sums.jsonl", made("random", 1, **{"population.rounds": 7}))
    asked = []

    def play(task, jobs, out, **_):
        asked.extend(jobs)
        for arm, seed in jobs:
            lines.append(out / f"{task}.jsonl", made(arm, seed))

    monkeypatch.setattr(command, "play", play)
    given = ["--task", "sums", "--arms", "random", "new", "--seeds", "0-1", "--out", str(tmp_path)]
    assert command.main(given) == 0
    assert asked == [("new", 0), ("random", 1), ("new", 1)]
    assert command.main(given) == 0
    assert len(asked) == 3


@pytest.mark.slow
def test_the_command_runs_at_its_small_size_and_goes_on(tmp_path):
    given = ["--quick", "--arms", "random", "one", "--seeds", "0", "--jobs", "2"]
    for runs in (0, 2):
        done = subprocess.run(
            [sys.executable, str(FOLDER / "run.py"), *given, "--out", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert f"{runs} of 2 runs are there" in done.stdout
    written = (tmp_path / "sums.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(written) == 2
    line = json.loads(written[0])
    assert {"date", "commit", "versions", "machine", "jobs", "overrides"} <= set(line)
    assert str(FOLDER.parents[1]) not in written[0]


# --------------------------------------------------------------------------------------- report


def fixture_line(arm, seed, test, **changes):
    return {
        "task": "sums", "arm": arm, "seed": seed, "state": "ok",
        "overrides": {"evolve.hyperparameters": {}, "algorithm.lr": 1e-3},
        "training": {"rows": 12288, "tokens": 49000}, "evaluation": {"rows": 3072, "tokens": 12000},
        "planned": {"training": 12288, "evaluation": 3072},
        "test": {"mean": test, "se": 0.01, "n": 500}, "fitness": test + 0.04,
        "curve": [0.3, 0.6, test], "collapsed": 0.25,
        "schedule": [{"round": r, "lr": 1e-3 / (r + 1)} for r in range(3)],
        "seconds_per_round": [1.0, 1.0, 1.0], "wall_seconds": 4.0,
        "date": "2026-11-21", "commit": "0123456789" * 4, "versions": {"torch": "2"}, "jobs": 1,
        "machine": {"processor": "x", "cores": 2, "system": "Linux", "python": "3.11"},
        **changes,
    }  # fmt: skip


@pytest.fixture
def results(lines, tmp_path):
    """Sixteen seeds of three arms: new is .1 ahead of random, and behind one agent."""
    rng = np.random.default_rng(0)
    for seed in range(16):
        level = float(rng.uniform(0.5, 0.8))
        for arm, more in (("one", 0.12), ("random", 0.0), ("tournament-constant", 0.0)):
            lines.append(tmp_path / "sums.jsonl", fixture_line(arm, seed, level + more))
        more = 0.1 + float(rng.normal(0, 0.01))
        lines.append(tmp_path / "sums.jsonl", fixture_line("new", seed, level + more))
    text = "# T\n\nmine\n<!-- results begin -->\nold\n<!-- results end -->\nafter\n"
    text += "<!-- arms begin -->\n<!-- arms end -->\n"
    (tmp_path / "README.md").write_text(text)
    return tmp_path


def test_the_report_writes_tables_between_the_markers(report, results):
    given = ["--results", str(results), "--readme", str(results / "README.md"), "--no-pictures"]
    assert report.main(given) == 0
    text = (results / "README.md").read_text()
    assert report.main(given) == 0
    assert (results / "README.md").read_text() == text
    assert text.startswith("# T\n\nmine\n<!-- results begin -->\n\n### sums\n")
    assert "\nafter\n" in text
    assert "old" not in text
    assert "All 16 seeds" in text
    assert "Seeds 8 to 15, untouched while designing" in text
    assert "commit 0123456;" in text
    rows = [line for line in text.splitlines() if line.startswith("| new |")]
    scores, differences, untouched = rows[0], rows[1], rows[3]
    assert scores.split(" | ")[1] == "16"
    assert scores.split(" | ")[6] == "25%"
    assert "**+.1" in differences or "**+.09" in differences
    assert "16 of 16" in differences
    assert "8 of 8" in untouched
    assert all(f"| {name} |" in text for name in report.ARMS)


def test_an_arm_off_its_planned_rows_is_an_error(command, report, arms, lines, tmp_path):
    def made(arm, **changes):
        settings = arms.overrides(arms.TASKS["sums"], arms.ARMS[arm], 0)
        return fixture_line(arm, 0, 0.8, overrides=settings, **changes)

    names = ["random", "new", "tournament-constant"]
    given = ["--arms", *names, "--seeds", "0", "--out", str(tmp_path)]
    for arm in names:
        lines.append(tmp_path / "sums.jsonl", made(arm))
    assert command.main(given) == 0
    off = made("new", training={"rows": 13000, "tokens": 49000})
    lines.append(tmp_path / "sums.jsonl", off)
    assert report.unplanned([off]) == {"new": pytest.approx(712 / 15360)}
    assert command.main(given) == 1


@pytest.mark.slow
def test_pictures_stand_by_themselves_and_are_equal_for_equal_lines(report, results):
    pytest.importorskip("matplotlib")
    import pictures

    by_arm = report.Results(report.read(results / "sums.jsonl")).by_arm
    drawn = pictures.draw("sums", by_arm, results)
    assert sorted(drawn.values()) == ["curves-sums.svg", "schedules-sums.svg"]
    first = {file: (results / file).read_bytes() for file in drawn.values()}
    pictures.draw("sums", by_arm, results)
    for file, content in first.items():
        assert (results / file).read_bytes() == content
        text = content.decode()
        assert text.count("<svg") == 1
        assert 'href="http' not in text
        assert "<image" not in text
        assert str(results) not in text


def test_a_second_signal_is_judged_by_the_agent_that_it_puts_first():
    from second_signal import Agent, ranked_right, regret

    lucky, good = Agent(0.9, 0.2, 0.5), Agent(0.8, 0.8, 0.7)
    assert regret([lucky, good], 0.0) == pytest.approx(0.2)
    assert regret([lucky, good], 0.5) == 0.0
    assert ranked_right([[lucky, good]], 0.0) == 0.0
    assert ranked_right([[lucky, good], [good, Agent(0.1, 0.1, 0.69)]], 0.5) == 1.0


def test_the_finalists_of_a_run_are_scored_on_test_prompts_too(monkeypatch, tmp_path):
    import finalists

    config = small(evolve__archive=True, evolve__fitness__final_samples=2)
    monkeypatch.setattr(
        finalists, "measure", lambda *of: evo_grpo.run(config, out=tmp_path / "run")
    )
    found = finalists.finalists_of("sums", 0)
    assert {"last"} <= {one["kind"] for one in found} <= {"last", "archive", "mean"}
    assert all(math.isfinite(one["test"]) for one in found)
