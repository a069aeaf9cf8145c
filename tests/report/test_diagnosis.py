from dataclasses import replace

import pytest
import shown_run
from random_runs import make_run

from evo_grpo.report.diagnosis import diagnose
from evo_grpo.report.run_contents import RunContents
from evo_grpo.types import Decision


def found(rounds, **more):
    return diagnose(RunContents("run", rounds, **more))


def with_metric(rounds, number, **metrics):
    """The rounds with metrics of agent 0 in one of them."""
    changed = rounds[number].agents
    first = replace(changed[0], metrics={**changed[0].metrics, **metrics})
    out = list(rounds)
    out[number] = replace(rounds[number], agents=(first, *changed[1:]))
    return out


def test_a_healthy_run_has_nothing_to_say():
    assert found(make_run(3, 3)) == []
    assert found([]) == []


@pytest.mark.parametrize(
    ("metrics", "what", "remedy"),
    [
        ({"kl": 0.8}, "KL from the base exploded in agent 0 at round 3: 0.8 nats", "Raise beta"),
        ({"ratio_max": 1234.0}, "probability 1,234 times in agent 0 at round 3", "Lower lr"),
        ({"clip_fraction": 0.55}, "55% of the tokens were clipped in agent 0", "Lower lr"),
        ({"sampler_gap": 0.2}, "log-probs were 0.2 nats off", "native engine"),
        ({"ended": 0.1}, "Only 10% of the completions ended", "max_output_tokens"),
        ({"zero_variance": 0.95}, "95% of the groups had equal rewards", "partial reward"),
        ({"dropped": 3.0}, "3 episodes dropped", "completions/"),
        ({"set_aside": 1.0}, "1 group set aside", "mend it"),
    ],
)
def test_a_metric_beyond_its_bound_is_told_with_its_remedy(metrics, what, remedy):
    (one,) = found(with_metric(make_run(3, 4), 2, **metrics))
    assert what in one.what
    assert remedy in one.remedy


@pytest.mark.parametrize("name", ["kl", "ratio_max", "clip_fraction", "ended", "zero_variance"])
def test_a_healthy_value_and_nan_are_not_told(name):
    assert found(with_metric(make_run(3, 4), 2, **{name: float("nan")})) == []
    healthy = {"ended": 0.9}.get(name, 0.01)
    assert found(with_metric(make_run(3, 4), 2, **{name: healthy})) == []


def test_only_the_first_three_places_are_named():
    rounds = make_run(3, 5)
    for number in range(5):
        rounds = with_metric(rounds, number, kl=2.0)
    (one,) = found(rounds)
    assert "round 1, agent 0 at round 2, agent 0 at round 3 and 2 more times" in one.what


def test_failures_are_told_with_the_reason_and_come_first():
    rounds = with_metric(make_run(4, 4, 1, failures=0.4), 3, ended=0.1)
    first, *_ = found(rounds)
    assert first.what.startswith("Failed: agent ")
    assert "loss is nan" in first.what
    assert first.serious


def test_a_collapse_is_told():
    rounds = make_run(3, 3)
    gone = Decision("collapsed", 1, None, float("nan"), float("nan"), 0, "it can no longer learn")
    rounds[1] = replace(rounds[1], decisions=(gone,))
    (one,) = found(rounds)
    assert one.what.startswith("Collapsed and left: agent 1 at round 2 (lr ")


def test_entropy_that_is_gone_is_told():
    rounds = with_metric(with_metric(make_run(3, 3), 0, entropy=1.0), 2, entropy=0.01)
    (one,) = found(rounds)
    assert "Entropy fell below 5% of the first round's in agent 0 at round 3" in one.what


def test_memory_that_ran_out_is_told():
    rounds = make_run(2, 2)
    rounds[1] = replace(rounds[1], reduced={"max_decode_rows": 128})
    (one,) = found(rounds)
    assert "max_decode_rows was lowered to 128" in one.what
    assert "engine.max_decode_rows: 128" in one.remedy


@pytest.mark.parametrize(("value", "end"), [(1e-4, "lower"), (1e-2, "upper"), (1e-3, None)])
def test_a_winner_at_the_end_of_a_range_is_told(value, end):
    rounds = make_run(2, 1)
    agents = tuple(replace(a, hparams=a.hparams.replace(lr=value)) for a in rounds[0].agents)
    rounds = [replace(rounds[0], agents=agents, mutable=("lr",))]
    ranges = {"evolve": {"hyperparameters": {"lr": {"min": 1e-4, "max": 1e-2}}}}
    said = [one.what for one in found(rounds, config=ranges)]
    assert said == ([] if end is None else [said[0]])
    assert end is None or f"is at the {end} end of its range" in said[0]


def test_a_winner_that_is_not_better_than_the_base_is_told():
    summary = {**shown_run.SUMMARY, "gain": 0.01, "gain_se": 0.02}
    (one,) = found(shown_run.two_rounds(), summary=summary)
    assert "not significantly better than the base: +0.010 ± 0.020" in one.what
    assert found(shown_run.two_rounds(), summary=shown_run.SUMMARY) == []


def test_a_tie_at_the_end_is_told():
    (one,) = found(shown_run.two_rounds(), summary=shown_run.mean_won())
    assert "cannot tell the winner from another finalist" in one.what
    assert not one.serious
