"""One round: what each stage counts, and a next generation that is what the plan says."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from played_rounds import Memory, adapters, digest, equal, play
from small_run import Told, small

from evo_grpo import run
from evo_grpo.envs.protocol import Experience
from evo_grpo.errors import ConfigError, DataError, ShapeError
from evo_grpo.evolve.explore.on_copy import NoExploration
from evo_grpo.evolve.generation import Generation
from evo_grpo.evolve.protocols import Offspring, rank
from evo_grpo.evolve.select.halving import NoSelection
from evo_grpo.learn.objective.advantages import group_advantages
from evo_grpo.population.evaluate import weighted
from evo_grpo.population.round import (
    Round,
    apply,
    copies_in_order,
    next_slots,
    play_round,
    recorded_parents,
)
from evo_grpo.population.stats import Tally, completion_rows, reward_metrics
from evo_grpo.record.records import RoundRecord
from evo_grpo.schema.hparams import Hparams
from evo_grpo.settings import EvolveConfig, PopulationConfig, RecordConfig
from evo_grpo.training.assemble import prepare, round_settings
from evo_grpo.types import Member, Mutation, Trajectory


def experience(*lengths, ended=None):
    """Completions of these lengths; `ended` says which sampled the end token."""
    ended = [True] * len(lengths) if ended is None else ended
    made = tuple(
        Trajectory("p", "x", (3,) + (5,) * n, (False,) + (True,) * n, (-1.0,) * n, end)
        for n, end in zip(lengths, ended, strict=True)
    )
    return Experience(made, np.zeros((len(lengths), 1)))


def test_a_round_trains_evaluates_keeps_and_evolves():
    prepared, writer, told = prepare(small(population__steps_per_round=2)), Memory(), Told()
    before = adapters(prepared.cohort)
    parts = prepared.cohort, prepared.env, prepared.round_settings, prepared.slots
    record = play_round(Round(*parts, 0, writer, told))
    assert told.calls == [("learn", 0), ("learn", 0), ("evaluate", 0), ("done", 0)]
    assert writer.steps == [(0, 0, [0, 1, 2]), (0, 1, [0, 1, 2])]
    assert writer.checkpoints == [(0, 0), (0, 1), (0, 2)]
    ((committed, completions),) = writer.commits
    assert committed is record
    assert len(completions) == 3 * 2
    assert set(record.seconds) == {
        "generate",
        "reward",
        "learn",
        "evaluate",
        "checkpoint",
        "evolve",
    }
    trained = writer.slots_at_commit[0]
    for agent, slot in enumerate(prepared.slots):
        assert not equal(before[slot], trained[slot])
        entry = record.agents[agent]
        assert entry.agent == agent
        assert entry.checkpoint == f"at/{agent}"
        assert writer.saved[entry.checkpoint] == digest(trained[slot])
        assert entry.score.n == 6
        assert entry.metrics["updates"] <= 2 * 2
        # An equal share of 3 agents x 2 prompts x 4 completions x 2 steps, in whole groups.
        assert entry.metrics["rows"] % entry.hparams.group_size == 0
        assert abs(entry.metrics["rows"] - 2 * 2 * 4) < entry.hparams.group_size
        assert entry.tokens > 0
    assert abs(sum(a.metrics["rows"] for a in record.agents) - 3 * 2 * 4 * 2) <= 2
    assert sum(a.wall_seconds for a in record.agents) > 0
    states = [prepared.cohort.agents[s] for s in prepared.slots]
    assert [s.member for s in states] == list(record.members)
    assert [s.hparams for s in states] == list(record.next_hparams)


def test_all_agents_of_a_step_get_the_same_prompts_and_steps_differ():
    prepared, seen = prepare(small(population__steps_per_round=2)), []
    rollout = prepared.cohort.engine.rollout

    def spy(requests):
        seen.append([[p.index for p in r.prompts] for r in requests])
        return rollout(requests)

    prepared.cohort.engine.rollout = spy
    play(prepared)
    play(prepared, 1)
    assert all(call[0] == call[1] == call[2] for call in seen)
    training, evaluations = [seen[i] for i in (0, 1, 3, 4)], [seen[i] for i in (2, 5)]
    assert len({tuple(call[0]) for call in training}) == 4
    assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize("specialized", [True, False])
def test_a_round_records_what_computed_its_completions(specialized):
    prepared = prepare(small())
    prepared.cohort.base.specialized = specialized
    assert play(prepared).decodes_by == ("layers" if specialized else "modules",)
    assert prepared.cohort.take_decodes_by() == ()  # the next round begins anew


@torch.no_grad()
def overflow(cohort, slot):
    for parameter in cohort.slots.parameters(cohort.agents[slot].adapter):
        parameter.fill_(1e30)


def test_an_agent_whose_policy_is_no_longer_finite_is_failed_and_replaced():
    # All its samples are alike then, so no gradient tells: the evaluation has to.
    prepared = prepare(small())
    overflow(prepared.cohort, prepared.slots[1])
    record = play(prepared)
    assert [a.state for a in record.agents] == ["ok", "failed", "ok"]
    assert record.agents[1].score is None
    assert "finite" in record.agents[1].reason
    assert record.members[1].parent in {0, 2}
    assert all(p.abs().max() < 1e3 for p in adapters(prepared.cohort)[prepared.slots[1]])


def test_a_history_keeps_the_latest_scores(monkeypatch):
    monkeypatch.setattr("evo_grpo.population.round.KEPT_SCORES", 3)
    prepared = prepare(small(population__rounds=9))
    scores = []
    for number in range(5):
        record = play(prepared, number, explorer=NoExploration(), selector=NoSelection())
        scores.append(record.agents[0].score)
        assert prepared.cohort.agents[0].history == scores[-3:]
    assert len(scores) == 5


def test_apply_copies_sets_and_names():
    prepared = prepare(small())
    cohort, slots = prepared.cohort, prepared.slots
    play(prepared, explorer=NoExploration(), selector=NoSelection())
    before = adapters(cohort)
    members = (
        Member(0, 0),
        Member(7, 1, parent=0, born=1, mutation=Mutation("mutate", {"lr": (1.0, 2.0)})),
        Member(2, 2),
    )
    hparams = tuple(
        cohort.agents[s].hparams.replace(lr=lr) for s, lr in zip(slots, (1, 2, 3), strict=True)
    )
    apply(cohort, slots, Generation(members, hparams, (0, 0, 2), 8), inherit_optimizer=True)
    after = adapters(cohort)
    assert equal(after[0], before[0])
    assert equal(after[1], before[0])
    assert equal(after[2], before[2])
    assert [cohort.agents[s].member for s in slots] == list(members)
    assert [cohort.agents[s].optimizer.param_groups[0]["lr"] for s in slots] == [1, 2, 3]
    assert [len(cohort.agents[s].history) for s in slots] == [1, 0, 1]
    assert cohort.next_member == 8


class Best:
    """A selection that keeps the best agents, and copies the very best to `copies` other places."""

    def __init__(self, copies=0, more=0):
        self.copies = copies
        self.more = more
        self.seen = []

    def plan(self, histories, places, rng):
        self.seen.append((histories, places))
        best, *others = rank(histories)
        keep = {best, *others[: places - 1 - self.copies + self.more]}
        empty = [p for p in range(len(histories)) if p not in keep][: self.copies]
        pairs = sorted([*((p, p) for p in keep), *((p, best) for p in empty)])
        return tuple(Offspring(*pair, elite=pair[0] == best) for pair in pairs)


def test_agents_leave_where_the_next_round_has_fewer_places():
    prepared = prepare(small(population__size=4))
    cohort, writer = prepared.cohort, Memory()
    record = play(prepared, writer=writer, selector=Best(copies=1), sizes=[4, 3])
    slots = next_slots(record)
    assert len(slots) == 3
    assert len(record.agents) == 4
    assert len(record.next_hparams) == 3
    (gone,) = set(prepared.slots) - set(slots)
    assert sorted(cohort.agents) == sorted(slots)
    assert f"actor_{gone}" not in cohort.slots.names
    assert not any(f"actor_{gone}." in name for name, _ in cohort.slots.peft.named_parameters())
    assert [cohort.agents[slot].member for slot in slots] == list(record.members)
    trained, parents = (
        writer.slots_at_commit[0],
        recorded_parents(record, [Member(a.member, a.agent) for a in record.agents]),
    )
    assert sum(parent != slot for parent, slot in zip(parents, slots, strict=True)) == 1
    for slot, parent in zip(slots, parents, strict=True):
        assert equal(adapters(cohort)[slot], trained[parent])
    # The survivors play on under their own numbers.
    following = replace(prepared, slots=slots)
    second = play(following, 1, writer, selector=Best(), sizes=[4, 3, 1])
    assert [agent.agent for agent in second.agents] == list(slots)
    assert len(next_slots(second)) == len(cohort.agents) == 1


def test_references_leave_with_their_agents():
    prepared = prepare(small(population__size=2, algorithm__separate_reference=True))
    record = play(prepared, selector=Best(), sizes=[2, 1])
    (slot,) = next_slots(record)
    assert set(prepared.cohort.slots.names) == {f"actor_{slot}", f"reference_{slot}"}


def test_a_selection_sees_the_latest_scores_and_the_places_of_the_next_round():
    prepared, selector = prepare(small(population__rounds=9, population__decisions="every")), Best()
    for number in range(3):
        play(prepared, number, selector=selector, explorer=NoExploration(), window=2)
    assert [places for _, places in selector.seen] == [3, 3, 3]
    assert [[len(h) for h in histories] for histories, _ in selector.seen] == [
        [1, 1, 1],
        [2, 2, 2],
        [2, 2, 2],
    ]


def test_agents_that_take_over_rows_learn_from_them_in_minibatches():
    def of(size, agents, **changes):
        population = PopulationConfig(size=size)
        made = round_settings(population, EvolveConfig(), RecordConfig(), prompts=1, group_size=2)
        return replace(made, **changes).minibatches(agents)

    # Twice the rows in two minibatches, four times in two, nine times in three.
    assert [of(8, agents) for agents in (8, 4, 2, 1)] == [1, 2, 2, 3]
    assert [of(18, agents) for agents in (18, 9, 5, 2)] == [1, 2, 2, 3]
    assert of(8, 2, rows_per_step=None) == 1


def rounds_of(sizes):
    population = PopulationConfig(size=5, sizes=sizes)
    return round_settings(population, EvolveConfig(), RecordConfig(), prompts=1, group_size=2)


def test_places_are_numbers_by_round():
    assert [rounds_of("constant").room(number, 5) for number in (0, 7)] == [5, 5]
    assert [rounds_of([8, 4, 2]).room(number, 8) for number in range(5)] == [8, 4, 2, 2, 2]
    assert rounds_of([8, 4]).room(1, 3) == 3, "no agent comes back"


@pytest.mark.parametrize("places", [[2, 3], [2, 0], [0]])
def test_places_that_cannot_be_filled_are_refused(places):
    with pytest.raises(ConfigError, match=r"places: expected at least one number >= 1, none above"):
        rounds_of(places)


def test_agents_are_recorded_by_their_numbers():
    """Slots that are not 0..N-1, as those of clones: no position reaches the record."""
    prepared = prepare(small(population__size=4))
    for slot in (0, 2):
        prepared.cohort.remove(slot)
    prepared, writer = replace(prepared, slots=(1, 3)), Memory()
    first = play(prepared, 0, writer, selector=Best(copies=1), explorer=NoExploration())
    assert writer.checkpoints == [(0, 1), (0, 3)]
    assert [agent.agent for agent in first.agents] == [1, 3]
    assert {row["agent"] for row in writer.commits[0][1]} == {1, 3}
    assert [member.agent for member in first.members] == [1, 3]
    assert {state.member.agent for state in prepared.cohort.agents.values()} == {1, 3}
    (child,) = [member for member in first.members if member.mutation.op == "clone"]
    second = play(prepared, 1, writer, selector=Best(copies=1), explorer=NoExploration())
    recorded = {agent.agent: agent.member for agent in second.agents}
    assert recorded[child.agent] == child.id
    assert all(
        agent.agent == member.agent
        for agent, member in zip(second.agents, first.members, strict=True)
    )


def test_parents_are_read_back_from_the_record():
    previous = [Member(4, 0), Member(5, 1), Member(6, 2), Member(9, 3, parent=4), Member(7, 8)]
    members = (
        Member(4, 0),  # survives
        Member(10, 1, parent=9),  # copy of slot 3
        Member(11, 2, parent=6, mutation=Mutation("mutate")),  # survives and mutates
        Member(9, 3, parent=4),  # survives; its own parent is still there, and is not copied
    )
    record = RoundRecord(3, (), {}, members, ())
    assert recorded_parents(record, previous) == (0, 3, 2, 3)


def test_reward_metrics_count_dead_groups_and_abstentions():
    done = experience(1, 2, 3, 2, 2, 2, ended=[True] * 3 + [False] * 3)
    nan = float("nan")
    totals = np.array([1.0, 1.0, 1.0, 0.0, 1.0, nan])
    done = replace(done, rewards=totals[:, None])
    metrics = reward_metrics(done, totals, 3, np.ones(1))
    assert metrics["zero_variance"] == 0.5
    assert metrics["reward"] == pytest.approx(4 / 5)
    assert metrics["completion_length"] == 2.0
    assert metrics["ended"] == 0.5
    done = replace(done, rewards=np.full((6, 1), nan))
    nothing = reward_metrics(done, np.full(6, nan), 3, np.ones(1))
    assert np.isnan(nothing["reward"])
    assert nothing["zero_variance"] == 1.0


@pytest.mark.parametrize(("aside", "share"), [(0, 0.75), (1, 2 / 3), (2, 0.5)])
def test_groups_that_were_set_aside_are_not_taken_for_dead(aside, share):
    rewards = np.array([1.0, 0.0, 1.0, 1.0, *[float("nan")] * 4])[:, None]
    done = replace(experience(2, 2), rewards=rewards, metrics={"set_aside": float(aside)})
    metrics = reward_metrics(done, rewards[:, 0], 2, np.ones(1))
    assert metrics["zero_variance"] == pytest.approx(share)


def test_zero_variance_follows_the_advantages():
    # 0.1 + 0.2 and 0.3 are one reward to the advantages, and so are 3e9 * 0.1 + 3e9 * 0.6 and
    # 3e9 * 0.7, though 2e-7 apart; the count of dead groups agrees.
    for weight, rewards in ((1.0, [[0.1, 0.2], [0.3, 0.0]]), (3e9, [[0.1, 0.6], [0.7, 0.0]])):
        table, weights = np.array(rewards), np.full(2, weight)
        totals = weighted(table, weights)
        assert totals[0] != totals[1]
        metrics = reward_metrics(replace(experience(1, 1), rewards=table), totals, 2, weights)
        assert metrics["zero_variance"] == 1.0
        assert not group_advantages(table, 2, weights=weights).any()


def test_a_tally_averages_sums_and_takes_maxima():
    metrics = [
        {"loss": 1.0, "ratio_max": 2.0, "rows": 4.0, "updates": 1.0, "failed": 0.0},
        {"loss": 3.0, "ratio_max": 1.5, "rows": 6.0, "updates": 2.0, "failed": 1.0},
    ]
    tally = Tally(metrics=list(metrics))
    assert tally.means() == {
        "loss": 2.0,
        "ratio_max": 2.0,
        "rows": 10.0,
        "updates": 3.0,
        "failed": 1.0,
    }
    assert tally.failed == "the gradient of 1 step(s) was not finite"
    assert Tally(metrics=metrics[:1]).failed == ""
    assert Tally().means() == {}


def test_completions_are_kept_up_to_the_count():
    done = experience(1, 2, 3).trajectories
    values = [
        {"exact": 0.0, "form": None},
        {"exact": 0.5, "form": 0.5},
        {"exact": 0.5, "form": 0.0},
    ]
    tally = Tally(samples=list(zip(done, [0.0, 1.0, 0.5], strict=True)), rewards=values)
    rows = completion_rows(4, {3: tally, 5: Tally()}, RecordConfig())
    assert [r["rewards"] for r in rows] == values[:2]
    assert [(r["round"], r["agent"], r["reward"], r["tokens"]) for r in rows] == [
        (4, 3, 0.0, 1),
        (4, 3, 1.0, 2),
    ]
    assert completion_rows(4, {3: tally}, RecordConfig(completions=0)) == []


def test_columns_of_the_row_are_kept_beside_a_completion_if_asked_for(tmp_path):
    record = {"completions": 2, "columns": ["a", "question"]}
    folder = run(small(record=record), out=tmp_path / "run")
    lines = (folder / "completions" / "round-0001.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row["columns"]["question"] == row["prompt"] for row in rows)
    assert all(f"{row['columns']['a']:02d}+" == row["prompt"][:3] for row in rows)
    with pytest.raises(DataError, match=r'no column "colour", which record\.columns needs'):
        run(small(record={"columns": ["colour"]}), out=tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def plan_of(parents):
    members = tuple(Member(10 + slot, slot) for slot in range(len(parents)))
    return Generation(members, (Hparams(),) * len(parents), parents, 20)


def test_a_slot_that_is_copied_and_overwritten_is_copied_first():
    def copies(*parents):
        # Ranks of which some have several agents, and none has all.
        return list(copies_in_order(plan_of(parents), [0, 1, 1, 2].__getitem__))

    assert copies(1, 1, 0) == [(0, 2), (1, 0)]
    assert copies(1, 2, 3, 3) == [(1, 0), (2, 1), (3, 2)]
    assert copies(0, 0, 0) == [(0, 1), (0, 2)]
    with pytest.raises(ShapeError, match="each of which overwrites what the next one copies"):
        copies(1, 0)


def test_copies_between_different_ranks_are_made_side_by_side():
    # Agents 0 to 3 on as many ranks, and their children on the same: each rank waits twice at most.
    plan = plan_of((0, 1, 2, 3, 1, 2, 3, 0))
    assert list(copies_in_order(plan, lambda slot: slot % 4)) == [(1, 4), (3, 6), (2, 5), (0, 7)]
