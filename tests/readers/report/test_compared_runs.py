import html
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import shown_replay
import shown_run
from shown_replay import BETTER
from typer.testing import CliRunner

from evo_grpo.cli.commands import app
from evo_grpo.errors import ConfigError
from evo_grpo.evolve.intervals import student
from evo_grpo.readers.report.compared_runs import (
    compare_runs,
    differences_table,
    plot_progress,
    results_table,
)
from evo_grpo.readers.report.run_page import write_report
from evo_grpo.record.arms import Difference, comparison_arms
from evo_grpo.record.files import seal
from evo_grpo.record.names import CONFIG, SUMMARY
from evo_grpo.record.replay import write_replay
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.summary import read_summary
from evo_grpo.settings import to_yaml
from evo_grpo.training.recorded_inputs import inputs_of

AHEAD, BEHIND = (f"winner {where} on these prompts" for where in ("ahead", "behind"))
NONE = "no difference shown"


def run(path, per_prompt=None, mean=None, **edits):
    """A finished run whose winner has these rewards on the test prompts."""
    folder = shown_run.run_folder(str(path))
    summary = read_summary(folder)
    if per_prompt is not None:
        values = np.array(per_prompt)
        error = float(values.std(ddof=1) / math.sqrt(len(values)))
        summary["best"] |= {"mean": float(values.mean()), "se": error, "n": len(values),
                            "per_prompt": list(per_prompt)}  # fmt: skip
    if mean is not None:
        summary["best"]["mean"] = mean
    (folder / SUMMARY).write_text(json.dumps(summary))
    text = (folder / CONFIG).read_text()
    for old, new in edits.values():
        assert old in text
        text = text.replace(old, new, 1)
    (folder / CONFIG).write_text(text)
    return folder


def test_runs_on_the_same_prompts_are_compared_prompt_by_prompt(tmp_path):
    rng = np.random.default_rng(0)
    hard = rng.random(64)  # what both share
    one, two = hard + 0.01 * rng.random(64), hard + 0.1 + 0.01 * rng.random(64)
    found = compare_runs([run(tmp_path / "one", one), run(tmp_path / "two", two)])
    (ahead,) = found.differences
    difference = two - one
    error = difference.std(ddof=1) / 8
    assert ahead.why == ""
    assert ahead.difference == pytest.approx(difference.mean())
    reach = student(0.975, 63) * error
    assert ahead.low == pytest.approx(difference.mean() - reach)
    assert ahead.high == pytest.approx(difference.mean() + reach)
    assert ahead.verdict == AHEAD
    # Unpaired, what makes prompts hard would have hidden it.
    wide = 1.96 * math.hypot(one.std(ddof=1), two.std(ddof=1)) / 8
    assert wide > difference.mean()


@pytest.mark.parametrize(
    ("edits", "why", "verdict"),
    [
        ({"seed": ("seed: 0", "seed: 1")}, "seed differs", "not tested"),
        ({"env": ("max_turns: 16", "max_turns: 8")}, "env differs", "not tested"),
        ({"env": ("kind: sums", "kind: foods")}, "env differs", "different rewards"),
        (
            {"prompts": ("test_prompts: 256", "test_prompts: 64")},
            "test_prompts differs",
            "not tested",
        ),
        ({"reward": ("reward: null\n    objectives", "reward: exact\n    objectives")},
         "what fitness measures differs", "different rewards"),
        ({"goal": ("objectives: []", "objectives: [tokens, fitness]")},
         "what fitness measures differs", "different rewards"),
    ],
)  # fmt: skip
def test_of_runs_on_other_prompts_nothing_is_claimed(tmp_path, edits, why, verdict):
    rewards = np.linspace(0, 1, 16)
    found = compare_runs(
        [run(tmp_path / "one", rewards), run(tmp_path / "two", rewards + 0.5, **edits)]
    )
    (one,) = found.differences
    assert why in one.why
    assert one.difference == pytest.approx(0.5)
    assert math.isnan(one.low)
    assert one.verdict == verdict
    assert differences_table(found).rows[0][2] == ("-", None)


def of_files(path, *, rows=40, better=2, reward="len(completion)", test=None, inputs=True):
    """A finished run that read these rows and this reward; the greater `better`, the better it is.

    Both have the same names in every run.
    """
    Path("rows.jsonl").write_text("".join(f'{{"question": "{n}?"}}\n' for n in range(rows)))
    Path("test.jsonl").write_text('{"question": "?"}\n')
    Path("my_rewards.py").write_text("from my_lengths import reward\n")
    Path("my_lengths.py").write_text(f"def reward(completion):\n    return {reward}\n")
    folder = run(path, np.linspace(0, 1, 6) * 0.01 + 0.1 * better)
    names = ["env.kind=dataset", "env.train=rows.jsonl", "env.reward=my_rewards:reward"]
    config = shown_run.small_config(*names, *([f"env.test={test}"] if test else []))
    (folder / CONFIG).write_text(to_yaml(config))
    if inputs:
        with RunDir.open(folder) as opened:
            opened.write("inputs.json", seal(asdict(inputs_of(config))))
    return folder


@pytest.mark.parametrize(
    ("changed", "why", "verdict"),
    [
        ({}, "", AHEAD),
        ({"rows": 41}, "the file of env.train has changed", "not tested"),
        ({"rows": 41, "test": "test.jsonl"}, "", AHEAD),
        ({"reward": "-len(completion)"}, "the file of env.reward: my_rewards:reward (my_lengths)",
         "different rewards"),
        ({"inputs": False}, "the file of env.train is not on record for both",
         "different rewards"),
    ],
)  # fmt: skip
def test_rows_or_a_reward_that_changed_under_the_same_name_are_noticed(
    tmp_path, monkeypatch, changed, why, verdict
):
    monkeypatch.chdir(tmp_path)
    same = {"test": changed["test"]} if "test" in changed else {}
    runs = [of_files("one", better=1, **same), of_files("two", better=2, **changed)]
    (one,) = compare_runs(runs).differences
    assert one.why.startswith(why)
    assert bool(one.why) == bool(why)
    assert one.verdict == verdict
    assert one.difference == pytest.approx(0.1)


def test_four_of_256_prompts_are_no_claim_whatever_the_interval_says(tmp_path):
    better = np.zeros(256)
    better[:4] = 1
    (one,) = compare_runs(
        [run(tmp_path / "one", np.zeros(256)), run(tmp_path / "two", better)]
    ).differences
    assert one.low > 0
    assert (one.p, one.verdict) == (pytest.approx(0.125), NONE)


def test_more_runs_ask_for_more(tmp_path):
    """Six prompts, all one way, have p = 2 / 64."""
    better, zero = np.ones(6), np.zeros(6)
    runs = [run(tmp_path / name, zero if name == "a" else better) for name in "abc"]
    assert [d.verdict for d in compare_runs(runs[:2]).differences] == [AHEAD]
    assert [d.verdict for d in compare_runs(runs).differences] == [NONE, NONE]


def test_an_environment_of_python_is_not_known_to_be_the_same(tmp_path):
    rewards, kind = np.linspace(0, 1, 16), ("kind: sums", "kind: object:Mine")
    found = compare_runs(
        [run(tmp_path / "one", rewards, env=kind), run(tmp_path / "two", rewards, env=kind)]
    )
    assert "env is an object of Python" in found.differences[0].why


def test_of_runs_that_counted_rows_and_prompts_nothing_is_claimed(tmp_path):
    found = compare_runs([run(tmp_path / "one"), run(tmp_path / "two", [0.0, 1.0] * 9)])
    assert found.differences[0].why == "they counted their prompts in different ways"
    assert found.differences[0].verdict == "not tested"


def test_an_unfinished_run_has_no_test_result(tmp_path):
    unfinished = shown_run.run_folder(str(tmp_path / "two"), rounds=1, summary=False)
    found = compare_runs([run(tmp_path / "one"), unfinished])
    assert found.differences[0].why == "not judged yet"
    assert found.differences[0].verdict == "not known"
    assert results_table(found).rows[1][1] == ("-", None)
    assert differences_table(found).rows[0][1] == ("-", None)
    assert results_table(found).rows[1][5] == ("1 (unfinished)", 1)


def test_a_removed_setting_that_changed_nothing_is_no_difference(tmp_path):
    old = {"off": ("\nevolve:\n", "\nevolve:\n  recombine: none\n  svd_noise: 0.1\n")}
    found = compare_runs([run(tmp_path / "one"), run(tmp_path / "two", **old)])
    assert found.settings == {"evolve.svd_noise": [None, 0.1]}


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = compare_runs([run(tmp_path / "a" / "run"), run(tmp_path / "b" / "run")])
    assert list(found.names) == ["a/run", "b/run"]


def test_progress_is_the_best_so_far_against_all_tokens(tmp_path):
    found = compare_runs([run(tmp_path / "one"), run(tmp_path / "two")])
    first = found.runs[0]
    rounds = [replace(record, evaluation_tokens=50) for record in first.rounds]
    changed = replace(found, runs=[replace(first, rounds=rounds), found.runs[1]])
    trace = plot_progress(changed).data[0]
    assert list(trace.x) == [2050, 4100]
    assert list(trace.y) == [0.5, 0.75]


def test_the_page_of_a_run_shows_its_comparison_and_its_replay(tmp_path):
    folder, found = run(tmp_path / "one"), shown_replay.replay({"schedule-run": BETTER})
    (folder / "compare").mkdir()
    apart = Difference("evolved", "guess", 0.75, 0.01, 0.7, 0.8, 0.001, 64, 1)
    result = shown_run.comparison(guess=0.25, evolved=1.0) | {"differences": [asdict(apart)]}
    (folder / "compare" / "compare.json").write_text(json.dumps(result))
    write_replay(folder, found)
    page = write_report(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    bodies = (page.partition(f'<section id="{id}"')[2] for id in ("comparison", "replay"))
    comparison, replay = (body.partition("</section")[0] for body in bodies)
    for section, arms in ((comparison, comparison_arms(result)), (replay, found.arms())):
        for arm in arms.arms:
            assert arms.label(arm.name) in section
            assert f"{arm.test.mean:.3f} ± {arm.test.se:.3f}" in section
        for one in arms.differences:
            assert f"[{one.low:.3f}, {one.high:.3f}]" in section
        for sentence in arms.sentences:
            assert html.escape(sentence) in section


def test_one_run_or_the_same_twice_is_refused(tmp_path):
    one = run(tmp_path / "one")
    with pytest.raises(ConfigError, match="at least two run folders, got 1"):
        compare_runs([one])
    with pytest.raises(ConfigError, match="expected different runs"):
        compare_runs([one, tmp_path / "one" / ".." / "one"])


def test_the_command_prints_tables_and_writes_a_page(tmp_path):
    rewards = np.linspace(0.3, 0.5, 9)
    one, two = run(tmp_path / "one", rewards), run(tmp_path / "two", rewards - 0.2)
    page = tmp_path / "both.html"
    result = CliRunner().invoke(app, ["compare", str(one), str(two), "-o", str(page)])
    assert result.exit_code == 0, result.output
    assert "0.200 ± 0.023" in result.stdout
    assert BEHIND in result.stdout
    caveat = "one training each tells nothing of the settings of the runs."
    assert caveat in " ".join(result.stdout.split())
    assert result.stdout.endswith(f"wrote {page}\n")
    shown = re.sub(r"<(script|style).*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.S)
    results = shown[shown.index('<section id="results"') :]
    assert results.count("<tr") >= 3  # a head and two runs
    assert "0.200 ± 0.023" in results
    assert BEHIND in results
    assert caveat in results
    assert shown.count('class="chart"') >= 1
