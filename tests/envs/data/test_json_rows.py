"""JSON that Python itself reads badly, or not at all."""

import json

import pytest

from evo_grpo.envs.data.json_rows import MOST_LEVELS
from evo_grpo.envs.data.tables import read_rows
from evo_grpo.errors import DataError


def deep(levels):
    return '{"a": ' * (levels - 1) + "[" + "]" + "}" * (levels - 1)


@pytest.fixture
def refused(tmp_path):
    """`refused(text)`: the messages for a second line, and a second row, that must not pass."""

    def messages(text):
        lines, whole = tmp_path / "rows.jsonl", tmp_path / "rows.json"
        lines.write_text(f'{{"q": "fine"}}\n{text}\n', encoding="utf-8")
        whole.write_text(f'[{{"q": "fine"}}, {text}]', encoding="utf-8")
        found = []
        for path in (lines, whole):
            with pytest.raises(DataError) as caught:
                read_rows(path, "train")
            found.append(str(caught.value))
            assert len(found[-1]) < 500
        assert found[0].startswith(f"train: line 2 of {str(lines)!r} ")
        assert found[1].startswith("train: ")
        assert repr(str(whole)) in found[1]
        return found

    return messages


@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 900, 100_000])
def test_a_row_that_is_nested_too_deep_is_named_with_its_line(refused, levels):
    for message in refused(deep(levels)):
        assert "is nested too deep: expected at most 200 lists and objects within" in message


def test_a_row_of_200_levels_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(deep(MOST_LEVELS))
    assert read_rows(path) == [json.loads(deep(MOST_LEVELS))]


@pytest.mark.parametrize(
    "row", ['{"q": "a\\ud800b"}', '{"q": {"b": ["\\uDC80"]}}', '{"\\udfff": 1}', '["\\ud83d"]']
)
def test_half_a_character_is_named_with_its_line(refused, row):
    for message in refused(row):
        assert "has a string with half a character (a lone surrogate): '" in message
        message.encode()  # it can be printed


def test_two_halves_are_one_character(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "\\ud83d\\ude00"}\n')
    assert read_rows(path) == [{"q": "\U0001f600"}]


def test_an_integer_that_python_does_not_read_is_named_with_its_line(refused):
    for message in refused('{"q": ' + "1" * 5000 + "}"):
        assert "cannot be read: Exceeds the limit (4300 digits)" in message


def test_many_rows_are_not_deep(tmp_path):
    path = tmp_path / "rows.json"
    rows = [{"q": [[n]]} for n in range(500)]
    path.write_text(json.dumps(rows))
    assert read_rows(path) == rows
