"""Which agent of a run is taken: the winner, or one by its number, with what is there to be had."""

import shutil

import pytest
from shown_run import SUMMARY, run_folder
from small_run import Told, small

from evo_grpo import run
from evo_grpo.analysis.export.export import export
from evo_grpo.errors import CheckpointError, ConfigError, RunNotFoundError
from evo_grpo.record.choice import choose_of
from evo_grpo.record.family import best_agent, best_ever
from evo_grpo.record.files import seal
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.names import BEST
from evo_grpo.record.run_dir import kept_checkpoints


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(small(), out=tmp_path_factory.mktemp("runs") / "one")


def test_nobody_by_name_is_the_winner(finished):
    choice = choose_of(finished)
    assert choice.is_winner
    best = choice.view.summary["best"]
    assert choice.agent is choice.view.winner
    assert choice.agent.record.round == 2
    assert choice.title == f"agent {best['agent']}, member {best['member']}"


def test_an_agent_is_taken_after_its_last_round_or_the_one_named(finished):
    rounds = read_rounds(finished)
    for number, record in enumerate(rounds):
        for one in record.agents:
            choice = choose_of(finished, agent=one.agent, round=number)
            assert choice.agent.record == one
            assert choice.checkpoint == one.checkpoint
            assert choice.files == record.files_of(one.checkpoint)
            # Its line ends there, however long the member lived.
            assert [r.round for r in choice.agent.lines[0]] == list(range(number + 1))
            assert choose_of(finished, member=one.member, round=number).agent.record == one
    last = choose_of(finished, agent=1)
    assert last.agent.record == next(one for one in rounds[-1].agents if one.agent == 1)
    assert last.agent.name == "agent 1"
    earlier = choose_of(finished, agent=1, round=0)
    assert earlier.agent.name == "agent 1 as it was after round 1"
    assert not earlier.is_winner


def test_a_member_is_taken_after_its_last_round_and_a_round_alone_is_its_best_agent(finished):
    rounds = read_rounds(finished)
    for member in {one.member for record in rounds for one in record.agents}:
        lived = [one for record in rounds for one in record.agents if one.member == member]
        assert choose_of(finished, member=member).agent.record == lived[-1]
    for number, record in enumerate(rounds):
        assert choose_of(finished, round=number).agent.record == best_agent(record)


def test_the_winner_by_its_number_is_still_the_winner(finished):
    best = choose_of(finished).agent
    assert choose_of(finished, agent=best.agent).is_winner
    assert choose_of(finished, member=best.member, round=2).is_winner


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "archive"), [("all", True), ("last", False), (2, True)])
def test_the_best_ever_is_kept_and_offered_whatever_else_is(tmp_path, keep, archive):
    config = small(record__checkpoints=keep, evolve__archive=archive, seed=5)
    folder = run(config, out=tmp_path / "run")
    rounds = read_rounds(folder)
    choice = choose_of(folder, best_ever=True)
    assert choice.agent.record == best_ever(rounds)
    place = folder / choice.checkpoint
    assert (place / "actor" / "adapter_model.safetensors").is_file()
    assert choice.files == rounds[choice.agent.record.round].files_of(
        choice.agent.record.checkpoint
    )
    # That it is kept shows only where it is none of the last round.
    shutil.rmtree(folder / choice.agent.record.checkpoint, ignore_errors=True)
    assert choose_of(folder, best_ever=True).checkpoint == BEST


def test_what_was_removed_is_refused_with_what_is_there(tmp_path):
    folder = run(small(record__checkpoints="best"), out=tmp_path / "run")
    rounds = read_rounds(folder)
    kept, ever = kept_checkpoints(rounds, "best"), best_ever(rounds)
    for record in rounds:
        for one in record.agents:
            wanted = {"agent": one.agent, "round": record.round}
            if one.checkpoint in kept:
                assert choose_of(folder, **wanted).checkpoint == one.checkpoint
            elif one == ever:
                assert choose_of(folder, **wanted).checkpoint == BEST
            else:
                with pytest.raises(CheckpointError) as caught:
                    choose_of(folder, **wanted)
                said = str(caught.value)
                assert f"agent {one.agent} after round {record.round + 1} does not exist" in said
                assert "record.checkpoints says which are kept; `all` keeps each" in said
                there = [a for a in rounds[2].agents if a.checkpoint in kept]
                listed = ", ".join(f"agent {a.agent} of round 3" for a in there)
                assert f"take one of: {listed}" in said
                assert said.endswith(f"the best ever: agent {ever.agent} of round {ever.round + 1}")


def test_an_unfinished_run_offers_its_best_so_far(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(small(), out=tmp_path / "run", observer=Told(("done", 1)))
    rounds = read_rounds(tmp_path / "run")
    choice = choose_of(tmp_path / "run")
    assert not choice.is_winner
    assert choice.agent.record.round == len(rounds) - 1
    assert choose_of(tmp_path / "run", best_ever=True).agent.record == best_ever(rounds)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"agent": 9}, r"^agent: expected one of 0, 1, 2, got 9$"),
        ({"agent": 9, "round": 1}, r"expected one that played round 2 of 0, 1, 2, got 9"),
        ({"member": 99}, r"^member: expected one of 0, 1, 2.*, got 99$"),
        ({"round": 3}, r"^round: expected one of the finished rounds, 1 to 3, got 4$"),
        ({"round": -1}, r"1 to 3, got 0$"),
        (
            {"agent": 1, "member": 1},
            r"expected one of agent, member, best ever and prefer, got agent",
        ),
        ({"agent": 1, "best_ever": True}, r"got agent and best ever"),
        ({"round": 1, "best_ever": True}, r"got best ever and round"),
    ],
)
def test_whom_there_is_not(finished, wanted, message):
    with pytest.raises(ConfigError, match=message):
        choose_of(finished, **wanted)


@pytest.mark.parametrize("unknown", [{"member": 77}, {"kind": "mean", "agent": None, "member": 77,
                                                     "parents": [77, 78]}])  # fmt: skip
def test_an_agent_that_is_named_is_taken_also_where_the_summary_names_no_member(tmp_path, unknown):
    folder = run_folder(tmp_path / "run", adapter=True)
    summary = {**SUMMARY, "best": {**SUMMARY["best"], **unknown}}
    (folder / "summary.json").write_text(seal(summary))
    with pytest.raises(RunNotFoundError, match="member 77: expected one that finished a round"):
        choose_of(folder)
    choice = choose_of(folder, agent=1)
    assert (choice.title, choice.is_winner, choice.loss) == ("agent 1, member 2", False, "")
    card = (export(folder, tmp_path / "out", agent=1) / "README.md").read_text()
    assert "No agent is judged on test prompts" in card or "No agent was judged" in card


def test_a_run_that_is_none_and_one_without_rounds(tmp_path):
    with pytest.raises(RunNotFoundError):
        choose_of(tmp_path, agent=1)
    folder = run_folder(tmp_path / "one", rounds=0, summary=False)
    with pytest.raises(CheckpointError, match=r"nothing to export.*evo-grpo resume"):
        choose_of(folder, agent=1)
