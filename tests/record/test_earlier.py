"""`population.init: {from: RUN}`: the best settings of earlier runs start another one."""

import io
from dataclasses import replace

import pytest
import yaml
from random_runs import make_run
from rich.console import Console
from shown_run import SUMMARY, run_folder
from small_run import small

from evo_grpo import resume, run
from evo_grpo.cli.plan.plan import make_plan
from evo_grpo.cli.plan.render import render_plan
from evo_grpo.errors import ConfigError
from evo_grpo.record.files import to_line
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.history import resolved_start
from evo_grpo.record.run_dir import RunDir
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.problems import shown_value
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter
from evo_grpo.settings import from_dict, to_yaml

FIRST = Hparams(lr=1e-4, beta=0.0)
LR = HyperparameterConfig(lr=RLParameter(1e-5, 1e-2))


def earlier(path, size=4, rounds=2, seed=0, summary=True):
    """A finished run of random values; its winner is the best agent of the last round."""
    records = make_run(size, rounds, seed)
    config = from_dict({"model": "tiny-sums", "env": "sums", "population": {"size": size}})
    with RunDir.create(path, "one", to_yaml(config)) as folder:
        for record in records:
            folder.append_round(replace(record, files={}))
        best = max(records[-1].agents, key=lambda one: one.score.mean)
        own = {"agent": best.agent, "member": best.member, "checkpoint": best.checkpoint}
        if summary:
            summary = {**SUMMARY, "rounds": rounds, "best": {**SUMMARY["best"], **own}}
            folder.write("summary.json", to_line(summary))
    return path, sorted(records[-1].agents, key=lambda one: -one.score.mean)


def resolved(runs, space=LR, size=8, first=FIRST):
    given = runs if isinstance(runs, list) else [runs]
    return resolved_start({"from": [str(one) for one in given]}, first, space, size, 7)


def test_the_best_settings_fill_half_of_the_places_and_the_others_cover_the_ranges(tmp_path):
    path, ranked = earlier(tmp_path / "one", size=8)
    best = list(dict.fromkeys(one.hparams.lr for one in ranked))
    assert len(best) > 2
    found = resolved(path, size=5)
    assert found[0] == {}
    assert [one["lr"] for one in found[1:3]] == best[:2]
    low, high = sorted(one["lr"] for one in found[3:])
    assert 1e-5 < low <= 10**-3.5 < high <= 1e-2


def test_of_several_runs_the_first_of_each_comes_before_the_second_of_any(tmp_path):
    one, its = earlier(tmp_path / "one", seed=1)
    two, others = earlier(tmp_path / "two", seed=2)
    found = [values["lr"] for values in resolved([one, two])[1:4]]
    assert found[:2] == [its[0].hparams.lr, others[0].hparams.lr]
    assert found[2] == next(a.hparams.lr for a in its[1:] if a.hparams.lr != found[0])


def test_values_outside_of_the_ranges_are_moved_inside_and_equal_ones_count_once(tmp_path):
    path, _ = earlier(tmp_path / "one")
    narrow = HyperparameterConfig(lr=RLParameter(1e-9, 1e-8))
    found = resolved(path, narrow, first=Hparams(lr=1e-9))
    # All agents of the run are above the range: one setting, at its end.
    assert found[1] == {"lr": 1e-8}
    assert all(values["lr"] < 1e-8 for values in found[2:])


def test_only_what_both_runs_search_is_taken_over(tmp_path):
    path, ranked = earlier(tmp_path / "one")
    space = HyperparameterConfig(
        temperature=RLParameter(0.5, 2.0),  # the earlier run had 1 throughout
        clip_low=RLParameter(0.5, 0.95),  # it searched clip_coef, the same range in another form
        loss_type=RLParameter(choices=["grpo", "dapo"]),
    )
    first = Hparams(temperature=0.7, clip_coef=(0.8, 1.28), loss_type="dapo")
    values = resolved(path, space, first=first)[1]
    assert values["temperature"] == 0.7
    assert values["loss_type"] == "dapo"
    assert values["clip_low"] == pytest.approx(1 - ranked[0].hparams.clip_coef)


def test_a_run_records_the_settings_and_resumes_without_the_earlier_one(tmp_path):
    path, ranked = earlier(tmp_path / "one")
    config = small(population__init={"from": str(path)}, population__size=4)
    ran = run(config, out=tmp_path / "run", progress=False)
    written = yaml.safe_load((ran / "population.yaml").read_text())["population"]["init"]
    assert written[1]["lr"] == max(ranked[0].hparams.lr, 1e-4)  # the range begins there
    assert set(written[1]) == {"lr", "beta", "clip_coef", "group_size"}
    begun = [agent.hparams.lr for agent in read_rounds(ran)[0].agents]
    assert begun == [1e-3, *(values["lr"] for values in written[1:])]
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(render_plan(make_plan(config), "run.yaml"))
    assert f"agent 1 with lr {shown_value(written[1]['lr'])}, beta" in console.export_text()
    path.rename(tmp_path / "elsewhere")
    assert len(read_rounds(resume(ran, rounds=4, progress=False))) == 4


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ("latin_hypercub", "did you mean 'latin_hypercube'"),
        ({"form": "runs/one"}, r"or \{from: RUN\}, got"),
        ({"from": []}, r"or \{from: RUN\}, got"),
        ({"from": 3}, r"or \{from: RUN\}, got"),
        ({"from": "one", "size": 2}, r"or \{from: RUN\}, got"),
    ],
)
def test_an_init_that_is_none_is_refused(init, expected):
    with pytest.raises(ConfigError, match=rf"population\.init: .*{expected}"):
        from_dict({"model": "tiny-sums", "env": "sums", "population": {"init": init}})


def test_a_run_that_gives_no_settings_is_named_by_check_before_anything_trains(tmp_path):
    empty = run_folder(tmp_path / "empty", rounds=0, summary=False)
    nothing, _ = earlier(tmp_path / "nothing")
    cases = {
        str(tmp_path / "none"): "no run folder: expected one with rounds.jsonl",
        str(empty): "expected a run with a finished round, got one without; continue it with",
        str(nothing): "expected a run that searched some of top_k, as this one does, got one that "
        "searched beta, clip_coef, group_size, lr",
    }
    for path, message in cases.items():
        config = from_dict(
            {
                "model": "tiny-sums",
                "env": "sums",
                "population": {"init": {"from": path}},
                "evolve": {"hyperparameters": {"top_k": {"min": 0, "max": 9}}},
            }
        )
        with pytest.raises(ConfigError, match=message):
            make_plan(config)
    with pytest.raises(ConfigError, match=r"population\.size of at least 2"):
        resolved(nothing, size=1)
