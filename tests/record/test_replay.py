"""The winner's schedule from records, the trainings that replay it, and what a replay says."""

import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import make_run, with_scores
from shown_replay import BETTER, EVEN, replay, schedule, scored
from shown_run import SUMMARY, run_folder

from evo_grpo.analysis.export.export import export
from evo_grpo.errors import CheckpointError, RunDirError, RunNotFoundError
from evo_grpo.record.arms import WINNER, Difference, pooled
from evo_grpo.record.files import to_line
from evo_grpo.record.folder import with_objects
from evo_grpo.record.names import REPLAY_RESULT, REPLAYED
from evo_grpo.record.replay import (
    ScheduledRound,
    read_replay,
    read_schedule,
    trainings,
    unmoved,
    winner_schedule,
    write_replay,
)
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Mutation, Score

STEPS = 4
PROPERTY = settings(max_examples=40)


def played(rounds, rows=120):
    """The same rounds, in which all agents sampled equally many rows in whole groups."""
    found = []
    for record in rounds:
        agents = tuple(
            replace(
                agent,
                metrics={
                    **agent.metrics,
                    "rows": float(
                        max(STEPS, rows // len(record.agents) // agent.hparams.group_size)
                        * agent.hparams.group_size
                    ),
                },
            )
            for agent in record.agents
        )
        found.append(replace(record, agents=agents))
    return found


def winner(member, kind="last", **more):
    return {"kind": kind, "member": member, "checkpoint": "checkpoints/best", **more}


def rows_of(record):
    return sum(int(agent.metrics["rows"]) for agent in record.agents)


def test_of_the_best_of_the_last_round():
    rounds = played(make_run(size=4, rounds=5))
    best = max(rounds[-1].agents, key=lambda agent: agent.score.mean)
    found = winner_schedule(rounds, winner(best.member), STEPS)
    assert [one.round for one in found.rounds] == [0, 1, 2, 3, 4]
    assert found.rounds[-1].member == found.member == best.member
    assert found.last == best.hparams
    for one, record in zip(found.rounds, rounds, strict=True):
        (own,) = [agent for agent in record.agents if agent.member == one.member]
        assert (one.hparams, one.tokens) == (own.hparams, own.tokens)
        assert one.rows == own.metrics["rows"]
        assert one.run_rows == rows_of(record)
        assert found.prompts_per_step(one) == one.rows / STEPS / own.hparams.group_size
    assert found.run_rows == sum(map(rows_of, rounds))
    assert found.run_tokens == sum(agent.tokens for r in rounds for agent in r.agents)


def test_of_the_best_ever_ends_where_it_was_the_best():
    rounds = played(make_run(size=2, rounds=4))
    rounds[1] = with_scores(rounds[1], [0.2, 5.0])
    best = rounds[1].agents[1]
    found = winner_schedule(rounds, winner(best.member, "archive"), STEPS)
    assert [one.round for one in found.rounds] == [0, 1]
    assert found.last == best.hparams
    assert found.run_rows == sum(map(rows_of, rounds))  # the run paid for all its rounds


def test_of_a_mean_follows_its_first_parent():
    rounds = played(make_run(size=3, rounds=3))
    first, second = rounds[-1].agents[2], rounds[-1].agents[0]
    parents = [first.member, second.member]
    found = winner_schedule(rounds, winner(99, "mean", parents=parents), STEPS)
    assert found.member == 99
    assert found.parents == (first.member, second.member)
    assert found.rounds == winner_schedule(rounds, winner(first.member), STEPS).rounds
    assert found.rounds[-1].member == first.member


def test_after_a_return_to_the_best_ever_the_rounds_between_are_left_out():
    rounds = played(make_run(size=2, rounds=4))
    rounds[0] = with_scores(rounds[0], [9.0, 0.1])
    best = rounds[0].agents[0]
    restored = replace(
        rounds[3].agents[0], member=77, parent=best.member, mutation=Mutation("restore")
    )
    rounds[3] = replace(rounds[3], agents=(restored, rounds[3].agents[1]))
    for number in (1, 2):  # the best itself was lost in between
        agents = [replace(a, member=50 + i, parent=1) for i, a in enumerate(rounds[number].agents)]
        rounds[number] = replace(rounds[number], agents=tuple(agents))
    found = winner_schedule(rounds, winner(77), STEPS)
    assert [one.round for one in found.rounds] == [0, 3]
    plans = trainings(found)
    assert {len(plan.hparams) for plan in plans} == {2}
    # The rows of the two rounds that are missing are spread over the others.
    assert abs(plans[0].rows - found.run_rows) <= found.last.group_size


def test_dropped_episodes_were_sampled_too():
    rounds = played(make_run(size=2, rounds=2))
    agents = [
        replace(a, metrics={**a.metrics, "rows": a.metrics["rows"] - 3, "dropped": 3.0})
        for a in rounds[1].agents
    ]
    with_drops = [rounds[0], replace(rounds[1], agents=tuple(agents))]
    member = rounds[1].agents[0].member
    assert winner_schedule(with_drops, winner(member), STEPS) == winner_schedule(
        rounds, winner(member), STEPS
    )


@PROPERTY
@given(
    size=st.integers(1, 6),
    rounds=st.integers(2, 6),
    seed=st.integers(0, 500),
    rows=st.integers(1, 400),
)
def test_every_training_samples_the_rows_of_the_run_within_a_group(size, rounds, seed, rows):
    records = played(make_run(size, rounds, seed, places=[max(1, size - 2)]), rows)
    found = winner_schedule(records, winner(records[-1].agents[0].member), STEPS)
    plans = trainings(found)
    assert tuple(plan.name for plan in plans) == REPLAYED
    moving, constant = plans
    assert moving.hparams == tuple(one.hparams for one in found.rounds)
    assert set(constant.hparams) == {found.last}
    counts = [count for of_round in constant.prompts for count in of_round]
    assert max(counts) - min(counts) <= 1
    for plan in plans:
        assert [len(counts) for counts in plan.prompts] == [STEPS] * len(found.rounds)
        counts = [count for of_round in plan.prompts for count in of_round]
        assert min(counts) >= 1
        if min(counts) > 1:  # else a step got a prompt that it could not go without
            assert abs(plan.rows - found.run_rows) <= max(v.group_size for v in plan.hparams)


def test_the_example_in_numbers():
    moving, constant = trainings(schedule())
    assert {values.lr for values in constant.hparams} == {2e-3}
    assert moving.prompts == ((32,) * 4, (32,) * 4, (26,) * 4)
    assert moving.rows == 512 + 512 + 520
    assert constant.rows == 1545  # 1,544 in groups of five


def test_a_schedule_as_json():
    made = schedule()
    assert made.to_json()["rounds"][0] == {
        **asdict(made.rounds[0]),
        "hparams": made.rounds[0].hparams.to_dict(),
        "prompts_per_step": 4,
    }


def test_a_run_without_a_schedule_says_why(tmp_path):
    with pytest.raises(RunNotFoundError, match="no run folder"):
        read_schedule(tmp_path)
    folder = run_folder(tmp_path / "unfinished", summary=False)
    with pytest.raises(RunDirError, match=r"expected a finished run.*evo-grpo resume .*unfinished"):
        read_schedule(folder)
    folder = run_folder(tmp_path / "short", rounds=1, summary=False)
    best = {"kind": "last", "member": 0, "checkpoint": "checkpoints/round-0000/agent-00"}
    summary = {**SUMMARY, "best": {**SUMMARY["best"], **best}}
    (folder / "summary.json").write_text(to_line(summary))
    with pytest.raises(RunDirError, match=r"two rounds or more, got member 0.*population\.rounds"):
        read_schedule(folder)
    folder = run_folder(tmp_path / "python")
    file = folder / "population.yaml"
    file.write_text(with_objects(file.read_text(), ["env (Mine)"]))
    with pytest.raises(RunDirError, match=r"with env \(Mine\), which no file can name"):
        read_schedule(folder)


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
    assert "the schedule and its last values do not differ significantly" in replay().verdict
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
    assert unmoved(schedule(still)).startswith(
        "No hyperparameter changed on the winner's line: the schedule is its last values."
    )
    assert unmoved(schedule()) == ""


def test_trainings_without_rewards_or_of_one_prompt_tell_nothing():
    found = replay({"constant-run": scored(*(math.nan,) * 16)})
    assert found.outcome == "failed"
    assert "there is no result, because a training ended without a finite" in found.verdict
    assert found.difference("constant-run", WINNER).sign == 0
    one = dict.fromkeys(("schedule-run", WINNER), scored(1.0))
    found = replay({**one, "constant-run": scored(0.0)})
    assert found.outcome == "unclear"
    assert "nan" not in found.verdict


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
    write_replay(folder, replay(dict.fromkeys((*REPLAYED, WINNER), scored(1.0))))
    assert math.isnan(read_replay(folder).differences[0].error)
    assert json.loads((folder / REPLAY_RESULT).read_text())["differences"][0]["low"] is None


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
