"""The engine of a cohort: made by its factory, and informed of every adapter that changed."""

from dataclasses import replace

import pytest
from fake_engines import SkewedEngine
from tiny_cohort import build_cohort, fresh, make_rows

from evo_grpo.checkpoints.read import load_agent
from evo_grpo.checkpoints.write import save_agent
from evo_grpo.learner.rows import AgentBatch
from evo_grpo.rollout.native.engine import NativeEngine
from evo_grpo.types import Prompt


def build(size=2, **options):
    return build_cohort(size, engine=SkewedEngine.factory(**options))


def sample(cohort, slots=(0, 1)):
    return cohort.generate(list(slots), [Prompt(0, "", (3, 4, 5))], stream=("sample",), samples=2)


def learn(cohort, slots=(0, 1), change=lambda row: row):
    batches = [AgentBatch(s, [change(r) for r in fresh(make_rows(s))]) for s in slots]
    return cohort.learn(batches, stream=("learn",))


def test_the_native_engine_is_the_default():
    assert isinstance(build_cohort().engine, NativeEngine)


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


def test_every_adapter_is_published_before_the_first_rollout():
    cohort = build()
    sample(cohort)
    (publish, versions), rollout = cohort.engine.calls
    assert (publish, rollout) == ("publish", ("rollout", ("actor_0", "actor_1")))
    assert versions.keys() == {"actor_0", "actor_1"}


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
def test_what_changed_is_published_before_the_next_rollout_and_nothing_else(name, tmp_path):
    cohort = build()
    sample(cohort)
    engine = cohort.engine
    known = dict(engine.calls[0][1])
    change, expected = changes(tmp_path)[name]
    engine.calls.clear()
    change(cohort)
    sample(cohort, cohort.agents)
    published = [versions for kind, versions in engine.calls if kind == "publish"]
    assert [kind for kind, _ in engine.calls][-1] == "rollout"
    assert len(published) == bool(expected)
    for versions in published:
        assert versions.keys() == expected
        assert all(known.get(adapter) != version for adapter, version in versions.items())


def test_a_version_is_never_used_twice():
    cohort, seen = build(2), set()
    for _ in range(3):
        learn(cohort)
        cohort.slots.add("spare")
        cohort.slots.copy("actor_0", "spare")
        versions = set(cohort.slots.versions.values())
        assert len(versions) == 3
        assert not versions & seen
        seen |= versions
        cohort.slots.remove("spare")


def test_the_engine_sleeps_while_agents_learn_and_wakes_before_it_is_told_of_changes(monkeypatch):
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
    assert kinds == ["sleep", "learn", "learn", "wake", "publish", "rollout", "rollout"]


def test_a_closed_engine_is_another_one_at_its_next_use():
    cohort = build()
    cohort.keeper.close()
    sample(cohort)
    first = cohort.engine
    learn(cohort)
    cohort.keeper.close()
    cohort.keeper.close()
    assert [kind for kind, _ in first.calls] == ["publish", "rollout", "sleep", "close"]
    sample(cohort)
    assert cohort.engine is not first
    assert [kind for kind, _ in cohort.engine.calls] == ["publish", "rollout"]
    assert cohort.engine.calls[0][1].keys() == {"actor_0", "actor_1"}
