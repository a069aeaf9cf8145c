"""What single values must be."""

import math
import pickle
import re
from decimal import Decimal

import numpy as np
import pytest

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.schema import validation as rules
from evo_grpo.schema.problems import Problem, Problems


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (rules.whole(), [0, -3, np.int64(2)], [1.0, True, "1", None]),
        (rules.whole(1), [1, np.int32(9)], [0, 1.5, True, math.nan]),
        (rules.above_zero(), [1, 0.5, np.float32(2)], [0, -1.0, math.inf, math.nan, "1", True]),
        (rules.not_negative(), [0, 0.5], [-0.1, math.inf, math.nan, None, Decimal(1)]),
        (rules.text(), ["a"], ["", 1, None, b"a"]),
        (rules.flag(), [True, False], [0, 1, None, "yes"]),
        (rules.whole(1).or_none(), [None, 1], [0, "x"]),
    ],
)
def test_a_rule_accepts_the_good_and_names_the_bad(rule, good, bad):
    for value in good:
        rule.check("setting", value)
    for value in bad:
        with pytest.raises(ConfigError) as info:
            rule.check("setting", value)
        assert str(info.value) == f"setting: expected {rule.expected}, got {value!r}"


def test_names_without_a_rule_pass():
    rules.check_all({"a": rules.flag()}, {"b": 3})
    with pytest.raises(ConfigError, match=r"^a: "):
        rules.check_all({"a": rules.flag()}, {"a": 3})


def test_what_came_is_one_short_line():
    with pytest.raises(ConfigError) as info:
        rules.flag().check("n", np.zeros((40, 40)))
    assert len(str(info.value)) < 130
    assert "\n" not in str(info.value)


def test_a_folder_may_be_there_or_yet_to_be_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, str(tmp_path / "a" / "b"), "a", "."):
        assert rules.check_folder("path", path).absolute().is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nowhere")
    remedy = "; choose another path, or move the file away$"
    for path in (file, link):
        expected = f"path: expected a folder or a place for one, got {str(path)!r}, a file"
        with pytest.raises(CheckpointError, match=f"^{re.escape(expected)}{remedy}"):
            rules.check_folder("path", path)
    below = f"got {str(file / 'a' / 'b')!r}, a path below {str(file)!r}, a file"
    with pytest.raises(CheckpointError, match=f"{re.escape(below)}{remedy}"):
        rules.check_folder("path", file / "a" / "b")
    with pytest.raises(ConfigError, match=r"^path: expected the path of a folder, got None$"):
        rules.check_folder("path", None)


def test_a_null_character_is_no_path():
    expected = (
        r"^path: expected a folder or a place for one, got 'a\\x00b', .* choose another path$"
    )
    with pytest.raises(CheckpointError, match=expected):
        rules.check_folder("path", "a\0b")


def test_numbers_of_numpy_become_plain_wherever_they_are():
    value = {"a": (np.float32(0.5), [np.int64(2), True]), "b": "x", "c": None}
    plain = rules.plain_number(value)
    assert plain == {"a": (0.5, [2, True]), "b": "x", "c": None}
    assert [type(v) for v in (plain["a"][0], *plain["a"][1])] == [float, int, bool]
    assert rules.plain_number(value["b"]) == "x"


def test_an_integer_that_no_float_holds_is_no_number():
    for rule in (rules.above_zero(), rules.not_negative(), rules.computable(1e-6, 1e6)):
        with pytest.raises(ConfigError, match=r"^setting: expected a finite number .*, got 1000"):
            rule.check("setting", 10**400)


def test_problems_are_the_same_in_another_process():
    problems = Problems(Problem(("a", 0), "no"), Problem((), "nothing"), source="run.yaml")
    there = pickle.loads(pickle.dumps(problems))
    assert str(there) == str(problems)
    assert there.problems == problems.problems
