"""What a replay says: the verdict, its file, its table."""

import json
import math
from dataclasses import replace

import pytest
from shown_replay import BETTER, EVEN, replay, schedule, scored
from shown_run import run_folder

from evo_grpo.analysis.export.export import export
from evo_grpo.errors import CheckpointError, RunDirError, RunNotFoundError
from evo_grpo.record.arms import WINNER, Difference, pooled
from evo_grpo.record.names import REPLAY_RESULT, REPLAYED
from evo_grpo.record.replay import read_replay, unmoved, write_replay
from evo_grpo.record.schedule import ScheduledRound
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Score


def test_a_schedule_is_claimed_where_its_interval_is_above_zero():
    found = replay({"schedule-run": BETTER})
    ahead = found.difference("schedule-run", "constant-run")
    assert (ahead.difference, ahead.prompts) == (0.25, 16)
    assert 0 < ahead.low < ahead.difference < ahead.high
    assert ahead.high - ahead.difference == pytest.approx(2.131 * ahead.error, rel=2e-3)
    assert ahead.p < 0.05
    assert found.outcome == "ahead"
    assert found.verdict.startswith(
        "With the tokens of the whole run, the schedule beat its last values held constant: "
        "schedule minus constant +0.250 [+0.1"
    )
    assert replay().outcome == "unclear"
    assert replay().verdict.startswith(
        "With the tokens of the whole run, the schedule and its last values do not differ "
    )


def test_the_last_values_may_be_the_better_ones():
    found = replay({"constant-run": BETTER})
    assert found.outcome == "behind"
    assert "the last values held constant beat the schedule" in found.verdict
    assert found.difference("schedule-run", "constant-run").high < 0


def test_an_interval_of_few_prompts_is_not_enough():
    # Three prompts with the same difference: no spread at all, and yet chance in one case of four.
    tests = {
        "schedule-run": scored(1, 1, 1),
        "constant-run": scored(0, 0, 0),
        WINNER: scored(1, 1, 1),
    }
    found = replay(tests)
    ahead = found.difference("schedule-run", "constant-run")
    assert ahead.low > 0
    assert ahead.p == 0.25
    assert found.outcome == "unclear"
    assert found.verdict.endswith(", and p 0.25 from 3 prompts.")
    assert " p " not in replay().verdict


def shifted(score, by):
    return scored(*(value + by for value in score.per_prompt))


def test_what_lies_between_trainings_of_a_kind_widens_the_interval():
    tests = {
        "schedule-run": [shifted(BETTER, by) for by in (-0.1, 0.0, 0.1)],
        "constant-run": [shifted(EVEN, by) for by in (-0.2, 0.0, 0.2)],
    }
    found = replay(tests).difference("schedule-run", "constant-run")
    alone = replay({"schedule-run": BETTER}).difference("schedule-run", "constant-run")
    assert found.difference == pytest.approx(0.25)
    # Two kinds, (0.02 + 0.08) over four degrees of freedom, a third of it for each of two means.
    seeds = math.sqrt(0.1 / 4 * 2 / 3)
    assert found.error == pytest.approx(math.hypot(alone.error, seeds))
    half = math.hypot(2.131 * alone.error, 2.776 * seeds)  # fifteen and four degrees of freedom
    assert found.high - 0.25 == pytest.approx(half, rel=2e-3)
    assert 0.25 - found.low == pytest.approx(half, rel=2e-3)
    assert (alone.sign, found.sign) == (1, 0)
    assert found.p == pytest.approx(alone.p)


def test_the_winner_is_one_agent_whatever_it_is_compared_with():
    tests = {"schedule-run": [shifted(EVEN, by) for by in (-0.1, 0.0, 0.1)]}
    found = replay(tests).difference("schedule-run", WINNER)
    assert found.error == pytest.approx(math.sqrt(0.01 / 3))  # the prompts add nothing here
    assert found.high == pytest.approx(4.303 * math.sqrt(0.01 / 3), rel=2e-3)


def test_one_training_of_each_claims_nothing():
    found = replay({"schedule-run": BETTER}, repeats=1)
    assert found.difference("schedule-run", "constant-run").low > 0
    assert found.outcome == "unclear"
    assert "no difference is reported as significant" in found.caveat()
    assert math.isnan(found.training("schedule-run").spread)
    assert replay().caveat().startswith("Means of 3 trainings of each kind")


def test_the_mean_of_trainings():
    nan = math.nan
    found = pooled([scored(0.0, 1.0, 0.5), scored(1.0, 1.0, 0.0)])
    assert (found.per_prompt, found.n) == ((0.5, 1.0, 0.25), 3)
    assert found.mean == pytest.approx(7 / 12)
    assert found.se == pytest.approx(0.38188 / math.sqrt(3), rel=1e-4)
    assert pooled([scored(0.0, 1.0), scored(nan, 1.0)]).per_prompt[1] == 1.0
    assert pooled([scored(0.0, 1.0), scored(nan, 1.0)]).n == 1
    assert pooled([scored(0.0, 1.0), scored(0.5)]).n == 0, "rows, then prompts: not the same units"
    nothing = pooled([scored(0.0, 1.0), Score(nan, nan, 0)])
    assert math.isnan(nothing.mean)
    assert replay({"schedule-run": [EVEN, EVEN, Score(nan, nan, 0)]}).outcome == "failed"


def test_the_p_value_counts_both_directions():
    one, other = BETTER, EVEN
    forth = Difference.between("a", [one] * 2, "b", [other] * 2)
    back = Difference.between("b", [other] * 2, "a", [one] * 2)
    assert forth.p == back.p == pytest.approx(2 / 2**8)
    assert (forth.sign, back.sign) == (1, -1)
    assert Difference.between("a", [one], "b", [one]).p == 1


def test_equal_trainings_say_nothing_of_the_schedule():
    still = [ScheduledRound(i, 0, Hparams(lr=1e-3), 64 * (i + 1), 256, 512) for i in range(3)]
    found = replay({"schedule-run": BETTER}, schedule(still))
    assert found.outcome == "same"
    assert "so their difference is chance" in found.verdict


def test_what_a_replay_can_show_where_nothing_moved():
    still = [ScheduledRound(i, 0, Hparams(lr=1e-3), 64, 256, 512) for i in range(3)]
    text = unmoved(schedule(still))
    assert text.startswith("No hyperparameter changed on the winner's line: the schedule is its")
    assert "how far the winner is from agents that were trained outside a population" in text
    assert unmoved(schedule()) == ""


def test_a_training_that_broke_down_tells_nothing():
    found = replay({"constant-run": scored(*(math.nan,) * 16)})
    assert found.outcome == "failed"
    assert found.verdict == (
        "With the tokens of the whole run, there is no result, because a training ended without "
        "a finite reward."
    )
    assert found.difference("constant-run", WINNER).sign == 0


def test_one_test_prompt_tells_nothing():
    one = dict.fromkeys(("schedule-run", WINNER), scored(1.0))
    found = replay({**one, "constant-run": scored(0.0)})
    assert found.outcome == "unclear"
    assert "nan" not in found.verdict
    assert json.dumps(found.frame().astype(object).to_dict("records"), default=str)


def test_it_is_read_as_it_was_written(tmp_path):
    folder = run_folder(tmp_path / "one")
    assert read_replay(folder) is None
    found = replace(replay({"schedule-run": BETTER}), files={"schedule-run/a.json": "ab" * 32})
    write_replay(folder, found)
    assert read_replay(folder) == found
    data = json.loads((folder / REPLAY_RESULT).read_text())
    assert data["format"] == 1
    assert data["schedule"]["rounds"][2]["prompts_per_step"] == 13
    assert [one["name"] for one in data["trained"]] == [one.name for one in found.trained]
    assert (data["outcome"], data["verdict"]) == ("ahead", found.verdict)


def test_a_result_at_two_budgets_is_read_as_what_it_is_at_the_larger_one(tmp_path):
    """As versions before this one wrote it."""
    folder = run_folder(tmp_path / "one", adapter=True)
    found = replay({"schedule-run": BETTER})
    write_replay(folder, found)
    data = json.loads((folder / REPLAY_RESULT).read_text())
    del data["sha256"]
    for one, values in zip(data["trained"], ("schedule", "constant"), strict=True):
        one |= {"values": values, "budget": "run"}
    data["trained"] = [{**data["trained"][0], "name": "schedule-lineage"}, *data["trained"]]
    (folder / REPLAY_RESULT).write_text(json.dumps(data))
    again = read_replay(folder)
    assert again.verdict == found.verdict
    card = (export(folder, tmp_path / "out") / "README.md").read_text()
    assert "| schedule-lineage | 6,176 |" in card


def test_what_is_not_known_is_null_in_the_file(tmp_path):
    folder = run_folder(tmp_path / "one")
    write_replay(folder, replay(dict.fromkeys((*REPLAYED, WINNER), scored(1.0))))
    again = read_replay(folder)
    assert math.isnan(again.differences[0].error)
    assert json.loads((folder / REPLAY_RESULT).read_text())["differences"][0]["low"] is None


def test_damage_and_other_versions_are_named(tmp_path):
    with pytest.raises(RunNotFoundError, match="no run folder"):
        read_replay(tmp_path)
    folder = run_folder(tmp_path / "one")
    write_replay(folder, replay())
    file = folder / REPLAY_RESULT
    data = json.loads(file.read_text())
    del data["sha256"]
    whole = json.dumps(data)
    file.write_text(whole[:100])
    with pytest.raises(
        CheckpointError, match=r"replay\.json: expected the result.*replay .*--force"
    ):
        read_replay(folder)
    file.write_text(whole.replace('"format": 1', '"format": 2'))
    with pytest.raises(RunDirError, match=r"a replay in format 1, got format 2.*--force"):
        read_replay(folder)
    del data["seed"]
    file.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="seed"):
        read_replay(folder)
    for files in (["a"], {"a": 1}, {"../a": "ab"}):
        file.write_text(json.dumps({**json.loads(whole), "files": files}))
        with pytest.raises(CheckpointError, match=r"files.*(should be|below the folder)"):
            read_replay(folder)


def test_as_a_frame():
    found = replay({"schedule-run": BETTER})
    frame = found.frame()
    assert frame["training"].tolist() == ["schedule-run", "constant-run", "winner"]
    assert frame["ahead"].tolist()[:2] == [0.25, 0]
    assert frame.loc[0, "test"] == 0.75
    assert frame["rows"].tolist() == [1544, 1545, 452]
    assert frame["tokens"].dtype == frame["failed_steps"].dtype == "Int64"
