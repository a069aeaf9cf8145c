"""The engine of a cohort: made by its factory, asleep while agents learn."""

from dataclasses import replace

import pytest
from fake_engines import SkewedEngine
from tiny_cohort import build_cohort, fresh, make_rows

from evo_grpo.learn.rows import AgentBatch
from evo_grpo.population.checkpoints.read import load_agent
from evo_grpo.population.checkpoints.write import save_agent
from evo_grpo.types import Prompt


def build(size=2, **options):
    return build_cohort(size, engine=SkewedEngine.factory(**options))


def sample(cohort, slots=(0, 1)):
    return cohort.generate(list(slots), [Prompt(0, "", (3, 4, 5))], stream=("sample",), samples=2)


def learn(cohort, slots=(0, 1), change=lambda row: row):
    batches = [AgentBatch(s, [change(r) for r in fresh(make_rows(s))]) for s in slots]
    return cohort.learn(batches, stream=("learn",))


def test_the_factory_is_called_once_at_first_use_with_the_cohorts_limits():
    made = []

    def factory(slots, settings):
        made.append((slots, settings))
        return SkewedEngine(slots, settings)

    cohort = build_cohort(
        2, engine=factory, max_decode_rows=7, max_decode_prompts=3, max_model_len=40
    )
    learn(cohort)
    assert made == []
    assert cohort.engine is cohort.engine
    assert made == [(cohort.slots, cohort.settings)]


def changes(tmp_path):
    def load(cohort):
        save_agent(cohort, 0, tmp_path)
        load_agent(cohort, 1, tmp_path)

    return {
        "learn": (lambda c: learn(c, [1]), {"actor_1"}),
        "learn all": (learn, {"actor_0", "actor_1"}),
        "copy": (lambda c: c.copy(0, 1), {"actor_1"}),
        "load": (load, {"actor_1"}),
        "add": (lambda c: c.add(c.agents[0].hparams), {"actor_2"}),
        "freeze": (lambda c: c.freeze_reference(0), {"reference_0"}),
        "nothing": (lambda c: None, set()),
        "remove": (lambda c: c.remove(0), set()),
        "failed step": (
            lambda c: learn(c, [1], lambda row: replace(row, advantage=float("nan"))),
            set(),
        ),
    }


@pytest.mark.parametrize("name", changes(None))
def test_what_changed_has_a_new_version_and_nothing_else(name, tmp_path):
    cohort = build()
    known = cohort.slots.versions
    change, expected = changes(tmp_path)[name]
    change(cohort)
    found = {slot for slot, version in cohort.slots.versions.items() if known.get(slot) != version}
    assert found == expected


def test_the_engine_sleeps_while_agents_learn_and_wakes_before_it_samples(monkeypatch):
    cohort = build()
    sample(cohort)
    engine, learned = cohort.engine, cohort.learner.learn
    engine.calls.clear()
    monkeypatch.setattr(
        cohort.learner,
        "learn",
        lambda *given, **more: engine.calls.append(("learn", ())) or learned(*given, **more),
    )
    learn(cohort)
    learn(cohort)
    sample(cohort)
    sample(cohort)
    kinds = [kind for kind, _ in engine.calls]
    assert kinds == ["sleep", "learn", "learn", "wake", "rollout", "rollout"]


def test_a_closed_engine_is_another_one_at_its_next_use():
    cohort = build()
    cohort.close_engine()
    sample(cohort)
    first = cohort.engine
    learn(cohort)
    cohort.close_engine()
    cohort.close_engine()
    assert [kind for kind, _ in first.calls] == ["rollout", "sleep", "close"]
    sample(cohort)
    assert cohort.engine is not first
    assert cohort.engine.calls == [("rollout", ("actor_0", "actor_1"))]
