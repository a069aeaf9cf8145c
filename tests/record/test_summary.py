"""summary.json as it was written, or an error that names the field."""

import copy
import json

import pytest
from shown_run import SUMMARY, mean_won

from evo_grpo.errors import CheckpointError
from evo_grpo.record.summary import gain_interval, gain_sign, read_summary


def changed(path, value):
    summary = copy.deepcopy(SUMMARY)
    place = summary
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return summary


def test_there_is_none_before_the_end(tmp_path):
    assert read_summary(tmp_path) is None


@pytest.mark.parametrize("summary", [SUMMARY, mean_won(), changed(("best", "se"), None)])
def test_it_comes_back(tmp_path, summary):
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert read_summary(tmp_path) == summary


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not JSON"),
        ("{", "it is not JSON"),
        ("[" * 3000, "it is not JSON"),
        ("[]", r"a mapping, got \[\]"),
        ("null", "a mapping, got None"),
        ("{}", "split: field required"),
        (json.dumps(changed(("base",), [])), "base: .*got \\[\\]"),
        (json.dumps(changed(("best", "member"), "2")), "best.member: .*valid integer, got '2'"),
        (json.dumps(changed(("best", "kind"), "first")), "best.kind: input should be .*'first'"),
        (json.dumps(changed(("best", "agent"), None)), "best: expected an agent"),
        (json.dumps(changed(("best", "checkpoint"), "../x")), "below the folder, got '../x'"),
        (json.dumps(changed(("files",), {"/etc/passwd": ""})), "below the folder"),
        (json.dumps(changed(("candidates", 0, "tie"), "no")), r"candidates\[0\].tie: .*got 'no'"),
    ],
)
def test_damage_is_named_with_its_field(tmp_path, text, message):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"summary.json: .*{message}.*; delete it, then"):
        read_summary(tmp_path)


@pytest.mark.parametrize(("better", "sign"), [(4, 0), (6, 1), (-6, -1)])
def test_a_gain_is_claimed_by_the_test_and_not_by_its_interval(better, sign):
    """Four of 256 prompts have p = 1/8, and a Student interval that excludes zero."""
    rewards = [float(n < abs(better)) for n in range(256)]
    scores = [{"mean": sum(r) / 256, "se": 0.01, "n": 256, "per_prompt": r} for r in
              (rewards, [0.0] * 256)]  # fmt: skip
    names = ("best", "base") if better > 0 else ("base", "best")
    gain = better / 256
    summary = {**SUMMARY, **dict(zip(names, scores, strict=True)), "gain": gain, "gain_se": 0.006}
    assert gain_interval(summary)[0] > 0 or better < 0
    assert gain_sign(summary) == sign
