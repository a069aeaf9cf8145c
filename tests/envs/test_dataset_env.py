"""DatasetEnv: the task `dataset` of a configuration, with rows and functions from Python."""

import json

import pandas as pd
import pytest
from small_run import small

from evo_grpo import DatasetEnv, ReasoningGym, run
from evo_grpo.envs.resolve import resolve_environment
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.settings.objects import PythonObject
from evo_grpo.training.recorded_inputs import read_inputs_of

SUMS = [{"question": f"{n:02d}+01=", "answer": f"{n + 1:03d}"} for n in range(32)]
ROWS = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(30)]


def right(completion, answer):
    return float(completion == answer)


def shorter(completion):
    return -len(completion)


def resolved(env, tokenizer, seed=3):
    return resolve_environment(
        env, tokenizer=tokenizer, seed=seed, max_output_tokens=None, batch_size=4
    )


def starts(env):
    return [env.batch(step) for step in range(3)], [env.prompts(s) for s in ("validation", "test")]


@pytest.mark.parametrize("given", [ROWS, pd.DataFrame(ROWS), "a file"], ids=["list", "frame", "f"])
def test_it_is_the_task_of_a_configuration_with_the_same_rows(
    given, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows_of_mine.py").write_text(
        "def right(completion, answer):\n    return float(completion == answer)\n"
    )
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = {"kind": "dataset", "train": str(file), "prompt": "{question}"}
    named = resolved({**task, "reward": "rows_of_mine:right"}, tokenizer)
    env = DatasetEnv(file if isinstance(given, str) else given, right, prompt="{question}")
    made = resolved(env, tokenizer)
    assert isinstance(made, ReasoningGym)
    assert starts(made) == starts(named)
    assert made.batch_size == 4
    assert starts(resolved(env, tokenizer, seed=4)) != starts(made)


def test_rewards_weights_and_calls_are_those_given(tokenizer):
    env = DatasetEnv(
        ROWS, [right, shorter], reward_weights=[1.0, 0.1], test=ROWS[:3], reward_timeout=5.0
    )
    assert repr(env) == "DatasetEnv('dataset': 30 train, 3 test; right, shorter)"
    task = resolved(env, tokenizer).task
    assert [(r.name, r.weight) for r in task.rewards] == [("right", 1.0), ("shorter", 0.1)]
    assert task.calls.reward_timeout == 5.0
    assert list(task.splits["test"]) == ROWS[:3]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"prompt": "{query}"}, DataError, 'no column "query"'),
        ({"reward": "right"}, ConfigError, "env.reward: "),
        ({"reward_timeout": -1}, ConfigError, "reward_timeout: "),
        ({"reward_timeouts": 1}, ConfigError, "reward_timeouts: unknown key; did you mean 'rew"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(given, error, message):
    with pytest.raises(error, match=message):
        DatasetEnv(**{"train": ROWS, "reward": right, **given})


def test_a_dataset_dict_stands_for_its_splits(tokenizer):
    datasets = pytest.importorskip("datasets")
    parts = {"train": ROWS[:20], "validation": ROWS[20:25], "test": ROWS[25:], "unlabelled": []}
    splits = {name: rows for name, rows in parts.items() if rows}
    whole = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    )
    expected = {name: splits[name] for name in ("train", "validation", "test")}
    for given in (whole, splits):
        task = DatasetEnv(given, right, prompt="{question}").task(0)
        assert {name: list(map(dict, rows)) for name, rows in task.splits.items()} == expected
        config = {"kind": "dataset", "train": given, "prompt": "{question}", "reward": right}
        made = resolved(config, tokenizer).task
        assert {name: list(map(dict, rows)) for name, rows in made.splits.items()} == expected
    own = DatasetEnv(whole, right, prompt="{question}", test=ROWS[:2]).task(0)
    assert list(map(dict, own.splits["test"])) == ROWS[:2]
    assert PythonObject(whole).description == "DatasetDict with train, validation, test"


def test_images_are_refused_by_their_column():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"question": datasets.Value("string"), "photo": datasets.Image()})
    rows = {
        "question": [f"what {n}?" for n in range(30)],
        "photo": [{"bytes": b"x", "path": None}] * 30,
    }
    photos = datasets.Dataset.from_dict(rows, features=features)
    with pytest.raises(DataError, match=r'train: .*got "photo" of the type Image, .*leave it out'):
        DatasetEnv(photos, shorter, prompt="{question}")
    named = datasets.ClassLabel(names=["Image(x)", 'Audio("y")'])  # no more than names
    texts = photos.remove_columns("photo").add_column("of", [0] * 30).cast_column("of", named)
    DatasetEnv(texts, shorter, prompt="{question}")
    several = {**features, "photo": datasets.Sequence(datasets.Image())}
    rows = {**rows, "photo": [[one] for one in rows["photo"]]}
    album = datasets.Dataset.from_dict(rows, features=datasets.Features(several))
    with pytest.raises(DataError, match=r'train: .*got "photo" of the type Image'):
        DatasetEnv(album, shorter, prompt="{question}")
    plain = [{"question": "what?", "photo": {"bytes": b"x", "path": str(n)}} for n in range(30)]
    with pytest.raises(DataError, match=r'row 0: .*"photo" is dict, such as of an image'):
        DatasetEnv(plain, shorter, prompt="{question} {photo}")


def test_a_run_takes_a_dataset_dict_and_records_its_splits(tmp_path):
    splits = {"train": SUMS[:20], "validation": SUMS[20:26], "test": SUMS[26:]}
    env = {"kind": "dataset", "train": splits, "prompt": "{question}", "reward": right}
    folder = run(small(env=env), out=tmp_path / "run")
    apart = {**env, **splits}
    other = run(small(env=apart), out=tmp_path / "apart")
    files = [read_inputs_of(one).files for one in (folder, other)]
    assert files[0] == files[1]
    assert set(files[0]) >= {"env.train", "env.validation", "env.test"}
