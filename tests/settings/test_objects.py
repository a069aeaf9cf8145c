"""Rows and functions from Python in place of their names."""

import pandas as pd
import pytest

from evo_grpo.errors import ConfigError
from evo_grpo.settings import EnvConfig, from_dict, load, to_yaml

ROWS = [{"question": "1+1=", "answer": "2"}]


def exact(completion, answer):
    return float(completion == answer)


def test_objects_are_kept_and_a_file_has_their_descriptions():
    frame = pd.DataFrame(ROWS)
    given = {"kind": "dataset", "train": ROWS, "test": frame, "reward": [exact, "mine:other"]}
    config = from_dict({"model": "tiny-sums", "env": given})
    assert config.env.train.value == ROWS
    assert config.env.test.value is frame
    assert config.env.reward[0].value is exact
    assert config.replace(name="other").env == config.env
    assert config.env.objects() == [
        "env.train (list of 1 rows)",
        "env.test (DataFrame of 1 rows)",
        "env.reward (exact)",
    ]
    written = to_yaml(config)
    assert "train: object:list of 1 rows" in written
    assert "- object:exact\n  - mine:other" in written


def test_a_file_names_its_rows(tmp_path):
    path = tmp_path / "population.yaml"
    path.write_text(
        "model: tiny-sums\nenv: {kind: dataset, train: [{question: a}], reward: 'm:f'}\n"
    )
    with pytest.raises(ConfigError, match=r"got the rows themselves: env.train .*\.jsonl"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": 5}, "train: expected the name of a file, a dataset of the Hub, or .* got 5"),
        ({"train": ""}, "train: expected a string that is not empty"),
        ({"reward": [exact, 3]}, r"reward\[1\]: expected a function as a string, .* got 3"),
        ({"reward": 7}, "reward: expected a function as a string, a mapping with kind"),
        ({"few_shot": {"rows": 0, "answer": "x"}}, "few_shot.rows: expected an integer >= 1, or"),
    ],
)
def test_what_is_neither_name_nor_object_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        EnvConfig(kind="dataset", **changes)
