"""The winner's schedule from records, and the four trainings that replay it."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import make_run, with_scores
from shown_replay import schedule as shown_schedule
from shown_run import SUMMARY, run_folder

from evo_grpo.errors import RunDirError, RunNotFoundError
from evo_grpo.record.files import to_line
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.names import REPLAYED
from evo_grpo.record.run_dir import RunDir
from evo_grpo.record.schedule import ScheduledRound, read_schedule, trainings, winner_schedule
from evo_grpo.schema.hparams import Hparams
from evo_grpo.types import Mutation

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
    schedule, constant = plans
    assert schedule.hparams == tuple(one.hparams for one in found.rounds)
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
    schedule, constant = trainings(shown_schedule())
    assert {values.lr for values in constant.hparams} == {2e-3}
    assert schedule.prompts == ((32,) * 4, (32,) * 4, (26,) * 4)
    assert schedule.rows == 512 + 512 + 520
    assert constant.rows == 1545  # 1,544 in groups of five


def test_what_moves():
    still = [ScheduledRound(i, 0, Hparams(lr=1e-3), 8 * (i + 1), 32, 64) for i in range(3)]
    assert not shown_schedule(still).moves
    assert shown_schedule().moves


def test_as_json_and_as_a_frame():
    made = shown_schedule()
    assert made.to_json()["rounds"][0] == {
        **asdict(made.rounds[0]),
        "hparams": made.rounds[0].hparams.to_dict(),
        "prompts_per_step": 4,
    }
    frame = made.frame()
    assert frame["prompts_per_step"].tolist() == [4, 8, 13]
    assert frame["lr"].tolist() == [4e-3, 4e-3, 2e-3]
    assert list(frame.columns)[:3] == ["round", "member", "lr"]
    assert "temperature" in frame.columns  # it may move in the run
    assert frame["tokens"].dtype == "Int64"


def test_read_from_a_run_folder(tmp_path):
    folder = run_folder(tmp_path / "one")
    found = read_schedule(folder)
    assert found == winner_schedule(
        read_rounds(folder), winner(2) | {"checkpoint": found.checkpoint}, 4
    )
    assert [one.hparams.lr for one in found.rounds] == [1e-3, 1.2e-3]


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunNotFoundError, match="no run folder"):
        read_schedule(tmp_path)


def test_an_unfinished_run_is_to_be_resumed_first(tmp_path):
    folder = run_folder(tmp_path / "one", summary=False)
    with pytest.raises(RunDirError, match=r"expected a finished run.*evo-grpo resume .*one"):
        read_schedule(folder)


def test_a_winner_of_one_round_has_no_schedule(tmp_path):
    folder = run_folder(tmp_path / "one", rounds=1, summary=False)
    with RunDir.open(folder) as opened:
        best = {"kind": "last", "member": 0, "checkpoint": "checkpoints/round-0000/agent-00"}
        opened.write("summary.json", to_line({**SUMMARY, "best": {**SUMMARY["best"], **best}}))
    with pytest.raises(RunDirError, match=r"two rounds or more, got member 0.*population\.rounds"):
        read_schedule(folder)


def test_a_run_recorded_with_objects_says_what_no_file_names(tmp_path):
    folder = run_folder(tmp_path / "one")
    file = folder / "population.yaml"
    first = "# Recorded by Population.train with objects that no file can name: env (Mine)\n"
    file.write_text(first + file.read_text())
    with pytest.raises(RunDirError, match=r"with env \(Mine\), which no file can name"):
        read_schedule(folder)
