"""One vocabulary: what is measured is in it."""

import pytest
from small_run import small

from evo_grpo import run
from evo_grpo.readers.trackers.base import values_of
from evo_grpo.record.history import WHERE, metric_rows
from evo_grpo.record.log import RoundDone
from evo_grpo.record.vocabulary import VOCABULARY, metric, over_steps

SEVERAL_TURNS = {"dropped", "empty_steps", "turns", "cut"}


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """Every name under which a run of one turn says something."""
    from evo_grpo.record.folder import read_rounds

    config = small(algorithm__overlong_buffer=1, algorithm__dynamic_sampling_tokens=50)
    folder = run(config, out=tmp_path_factory.mktemp("runs") / "run")
    rows, rounds = metric_rows(folder), read_rounds(folder)
    steps = {name for row in rows for name in row if name not in WHERE}
    whole = values_of(RoundDone(1, rounds[-1])).values
    of_agents = {name for who, values in whole.items() if who != "population" for name in values}
    return steps, of_agents, set(whole["population"]), rounds


def test_every_metric_of_a_run_is_in_it(heard):
    steps, of_agents, population, rounds = heard
    for names, per in ((steps, "step"), (of_agents, "round"), (population, "population")):
        assert {name: getattr(metric(name), "per", None) for name in names} == dict.fromkeys(
            names, per
        )
    means = {name for record in rounds for agent in record.agents for name in agent.metrics}
    assert all(metric(name) is not None for name in means)


def test_nothing_is_in_it_that_no_run_says(heard):
    steps, of_agents, population, _ = heard
    plain = {m.name for m in VOCABULARY if not m.name.endswith(">")}
    later = {"test/best", "test/base", "rank_error"}
    assert plain - steps - of_agents - population == SEVERAL_TURNS | later


def test_a_round_has_of_its_steps_what_it_says(heard):
    steps, _, _, rounds = heard
    for record in rounds:
        for agent in record.agents:
            kept = {name for name in agent.metrics if name != "dead_steps"}
            without = set() if agent.hparams.beta > 0 else {"kl"}
            assert kept == {name for name in steps if over_steps(name) != "none"} - without


def test_families_and_names_of_others():
    assert metric("reward/length") is metric("reward/<function>")
    assert over_steps("reward/length") == "mean"
    assert over_steps("ratio_max") == "max"
    assert over_steps("rows") == "sum"
    assert over_steps("tokens") == "none"
    assert metric("of an environment of mine") is None
    assert over_steps("of an environment of mine") == "mean"
