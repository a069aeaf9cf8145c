"""What a replay says: the verdict, its file, its table."""

import json
import math

import pytest
from shown_replay import replay, schedule, scored
from shown_run import run_folder

from evo_grpo.errors import CheckpointError, RunDirError, RunNotFoundError
from evo_grpo.record.names import REPLAY_RESULT
from evo_grpo.record.replay import WINNER, Difference, Replay, read_replay, write_replay
from evo_grpo.record.schedule import ScheduledRound
from evo_grpo.schema.hparams import Hparams

EVEN = (0.0, 1.0) * 8
BETTER = tuple(min(1.0, value + 0.5) for value in EVEN)


def test_a_schedule_is_claimed_where_its_interval_is_above_zero():
    found = replay({"schedule-run": scored(*BETTER)})
    ahead = found.difference("schedule-run", "constant-run")
    assert (ahead.difference, ahead.prompts) == (0.25, 16)
    assert 0 < ahead.low < ahead.difference < ahead.high
    assert ahead.high - ahead.difference == pytest.approx(1.96 * ahead.error)
    assert ahead.p < 0.05
    assert found.told("run") == "ahead"
    assert found.verdict("run").startswith(
        "With the tokens of the whole run, the training with the schedule beat the one with its "
        "last values: schedule minus constant +0.250 [+0.1"
    )
    assert found.told("lineage") == "untold"
    assert found.verdict("lineage").startswith(
        "With the tokens of the winner's lineage, it cannot be told whether the schedule is better"
    )


def test_the_last_values_may_be_the_better_ones():
    found = replay({"constant-lineage": scored(*BETTER)})
    assert found.told("lineage") == "behind"
    assert "the last values beat the one with the schedule" in found.verdict("lineage")
    assert found.difference("schedule-lineage", "constant-lineage").high < 0


def test_an_interval_of_few_prompts_is_not_enough():
    # Three prompts with the same difference: no spread at all, and yet chance in one case of four.
    tests = {
        "schedule-run": scored(1, 1, 1),
        "constant-run": scored(0, 0, 0),
        WINNER: scored(1, 1, 1),
    }
    tests |= {name: scored(1, 1, 1) for name in ("schedule-lineage", "constant-lineage")}
    found = replay(tests)
    ahead = found.difference("schedule-run", "constant-run")
    assert ahead.low > 0
    assert ahead.p == 0.25
    assert found.told("run") == "untold"


def test_the_p_value_counts_both_directions():
    one, other = scored(*BETTER), scored(*EVEN)
    forth = Difference.between("a", one, "b", other)
    back = Difference.between("b", other, "a", one)
    assert forth.p == back.p == pytest.approx(2 / 2**8)
    assert (forth.sign, back.sign) == (1, -1)
    assert Difference.between("a", one, "b", one).p == 1


def test_equal_trainings_say_nothing_of_the_schedule():
    still = [ScheduledRound(i, 0, Hparams(lr=1e-3), 64 * (i + 1), 256, 512) for i in range(3)]
    found = replay({f"schedule-{b}": scored(*BETTER) for b in ("run", "lineage")}, schedule(still))
    assert found.told("run") == "same"
    assert "so what lies between them is chance" in found.verdict("run")
    # With the rows of the line, what moves is the number of prompts.
    assert found.told("lineage") == "ahead"


def test_a_training_that_broke_down_tells_nothing():
    found = replay({"constant-run": scored(*(math.nan,) * 16)})
    assert found.told("run") == "failed"
    assert found.verdict("run") == (
        "With the tokens of the whole run, nothing can be told, for a training ended without a "
        "finite reward."
    )
    assert found.difference("constant-run", WINNER).sign == 0


def test_one_test_prompt_tells_nothing():
    one = {name: scored(1.0) for name in ("schedule-run", "schedule-lineage", WINNER)}
    zero = {name: scored(0.0) for name in ("constant-run", "constant-lineage")}
    found = replay({**one, **zero})
    assert found.told("run") == "untold"
    assert "nan" not in found.verdict("run")
    assert json.dumps(found.frame().astype(object).to_dict("records"), default=str)


def test_it_is_read_as_it_was_written(tmp_path):
    folder = run_folder(tmp_path / "one")
    assert read_replay(folder) is None
    found = replay({"schedule-run": scored(*BETTER)})
    write_replay(folder, found)
    assert read_replay(folder) == found
    data = json.loads((folder / REPLAY_RESULT).read_text())
    assert data["format"] == 1
    assert data["schedule"]["rounds"][2]["prompts_per_step"] == 13
    assert [one["name"] for one in data["trained"]] == [one.name for one in found.trained]
    assert data["verdicts"]["run"] == {"told": "ahead", "sentence": found.verdict("run")}


def test_what_is_not_known_is_null_in_the_file(tmp_path):
    folder = run_folder(tmp_path / "one")
    names = ("schedule-run", "schedule-lineage", "constant-run", "constant-lineage", WINNER)
    write_replay(folder, replay({name: scored(1.0) for name in names}))
    again = read_replay(folder)
    assert math.isnan(again.differences[0].error)
    assert json.loads((folder / REPLAY_RESULT).read_text())["differences"][0]["low"] is None


def test_damage_and_other_versions_are_named(tmp_path):
    with pytest.raises(RunNotFoundError, match="no run folder"):
        read_replay(tmp_path)
    folder = run_folder(tmp_path / "one")
    write_replay(folder, replay())
    file = folder / REPLAY_RESULT
    whole = file.read_text()
    file.write_text(whole[:100])
    with pytest.raises(
        CheckpointError, match=r"replay\.json: expected the result.*replay .*--force"
    ):
        read_replay(folder)
    file.write_text(whole.replace('"format": 1', '"format": 2'))
    with pytest.raises(RunDirError, match=r"expected a replay in format 1, got format 2.*--force"):
        read_replay(folder)
    data = json.loads(whole)
    del data["seed"]
    file.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="seed"):
        read_replay(folder)


def test_as_a_frame():
    found = replay({"schedule-run": scored(*BETTER)})
    frame = found.frame()
    assert frame["training"].tolist() == [
        *("schedule-lineage", "constant-lineage", "schedule-run", "constant-run", "winner")
    ]
    assert frame["budget"].isna().tolist() == [False] * 4 + [True]
    assert frame["ahead"].tolist()[:4] == [0, 0, 0.25, 0]
    assert frame.loc[2, "test"] == 0.75
    assert frame["rows"].tolist() == [452, 450, 1544, 1545, 452]
    assert frame["tokens"].dtype == frame["failed_steps"].dtype == "Int64"


def test_the_reader_knows_every_field():
    found = replay()
    assert Replay.from_json(json.loads(json.dumps(found.to_json()))) == found
