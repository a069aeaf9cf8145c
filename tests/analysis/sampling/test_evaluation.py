"""An adapter judged as a run judges its winner, to the digit."""

import io
import json
import math
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from small_run import small
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from evo_grpo import run
from evo_grpo.analysis.export.export import export
from evo_grpo.analysis.sampling.evaluation import Judged, evaluate_adapter, show_judged
from evo_grpo.cli.commands import app
from evo_grpo.errors import CheckpointError, ConfigError, RunFailedError
from evo_grpo.record.summary import read_summary
from evo_grpo.settings import load
from evo_grpo.sources import resolve
from evo_grpo.types import Score


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = small(
        algorithm__lr=3e-2,
        evolve__hyperparameters={"lr": {"min": 1e-2, "max": 5e-2}},
        evolve__fitness={
            **{"prompts": 8, "test_prompts": 12, "test_samples": 3, "final_samples": 4},
            "correct": 0.5,
        },
    )
    return run(config, out=tmp_path_factory.mktemp("runs") / "sums-1")


@pytest.fixture(scope="module", params=["the run", "its export", "its export and its settings"])
def judged(request, finished, tmp_path_factory):
    """How the same adapter may be named."""
    if request.param == "the run":
        return (finished, None)
    out = export(finished, tmp_path_factory.mktemp("out") / "best")
    config = finished / "population.yaml"
    return (out, config) if request.param == "its export" else (finished, config)


def test_the_numbers_of_the_test_split_are_those_of_the_run(finished, judged):
    found, summary = evaluate_adapter(*judged), read_summary(finished)
    assert (found.own.mean, found.own.se, found.own.n) == tuple(
        summary["best"][name] for name in ("mean", "se", "n")
    )
    assert (found.base.mean, found.base.se) == tuple(summary["base"][n] for n in ("mean", "se"))
    assert (found.gain, found.gain_se) == (summary["gain"], summary["gain_se"])
    assert (found.split, found.samples, found.task) == ("test", 3, "sums")


def test_on_validation_they_are_those_of_the_final_comparison(finished, judged):
    found, summary = evaluate_adapter(*judged, split="validation"), read_summary(finished)
    kind = summary["best"]["kind"]
    (own,) = [one for one in summary["candidates"] if one["kind"] == kind]
    assert (found.own.mean, found.own.n) == (own["validation"]["mean"], own["validation"]["n"])
    assert found.samples == 4


def test_fewer_prompts_and_no_base(finished):
    found = evaluate_adapter(finished, prompts=5, base=False)
    assert found.own.n == 5
    assert (found.base, found.gain, found.interval, found.sign) == (None, None, None, None)
    assert json.loads(json.dumps(found.to_json()))["base"] is None


def figures(score):
    return {name: getattr(score, name) for name in ("mean", "se", "n")}


def test_pass_at_k_is_that_of_the_run(finished):
    found = evaluate_adapter(finished, pass_at=(1, 3))
    assert found.correct == 0.5
    assert [
        {
            **{"k": one.k, "correct": 0.5, "gain": one.gain, "gain_se": one.gain_se},
            **{"base": figures(one.base), "best": figures(one.own)},
        }
        for one in found.passes
    ] == read_summary(finished)["passes"]


def test_greedy_and_pass_at_k(finished):
    greedy = evaluate_adapter(finished, temperature=0, pass_at=1)
    assert (greedy.samples, greedy.temperature) == (1, 0)
    (only,) = greedy.passes
    own, base = (replace(score, rewards=()) for score in (greedy.own, greedy.base))
    assert (only.own, only.base, only.gain) == (own, base, greedy.gain)  # 0 or 1
    found = evaluate_adapter(finished, pass_at=(1, 4))
    assert found.samples == 4
    one, four = found.passes
    assert one.own.mean == pytest.approx(found.own.mean)
    assert four.own.mean > one.own.mean
    assert four.gain == pytest.approx(four.own.mean - four.base.mean)
    assert four.interval[0] < four.gain < four.interval[1]
    assert found.sign in (-1, 0, 1)
    every = evaluate_adapter(finished, prompts=3, pass_at=2, correct=0.0, base=False).passes[0]
    assert (every.own.mean, every.base, every.gain) == (1.0, None, None)
    with pytest.raises(ConfigError, match=r"at temperature 0, where all of them are equal, got 2"):
        evaluate_adapter(finished, temperature=0, pass_at=2)
    with pytest.raises(ConfigError, match=r"pass_at: expected at most 2, .*, got 4; give as many"):
        evaluate_adapter(finished, samples=2, pass_at=4)
    with pytest.raises(ConfigError, match="temperature: expected a number >= 0, got -1"):
        evaluate_adapter(finished, temperature=-1)


def test_another_test_file(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_exact.py").write_text(
        "def exact(completion, answer):\n    return float(completion == answer)\n"
    )
    header = "question,answer\n"
    for name, numbers in (("train", range(20)), ("hard", range(10, 17))):
        rows = (f"{n}+{n}=,{2 * n}\n" for n in numbers)
        (tmp_path / f"{name}.csv").write_text(header + "".join(rows))
    env = {"kind": "dataset", "train": "train.csv", "prompt": "{question}"}
    changed = {"env": {**env, "reward": "my_exact:exact"}}
    config = load(finished / "population.yaml").model_dump(mode="json") | changed
    (tmp_path / "my.yaml").write_text(json.dumps(config))
    given = ["evaluate", str(finished), "my.yaml", "--set", "env.test=hard.csv", "--json"]
    shown = json.loads(CliRunner().invoke(app, [*given, "--pass-at", "1"]).stdout)
    assert (shown["own"]["n"], shown["passes"][0]["k"]) == (7, 1)
    alone = config | {"env": {**changed["env"], "test": "hard.csv"}}
    assert evaluate_adapter(finished, alone).own.mean == shown["own"]["mean"]


def test_an_adapter_of_peft_alone_is_judged_too(finished, tmp_path):
    """Another rank and other layers than those of the configuration; fresh, it is the base."""
    base = AutoModelForCausalLM.from_pretrained(resolve("tiny-sums").path)
    config = LoraConfig(r=3, target_modules=["gate_proj"], task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)  # by chance, other matrices A may come out even with the base
        network = get_peft_model(base, config)
    network.save_pretrained(tmp_path / "peft")
    found = evaluate_adapter(tmp_path / "peft", finished / "population.yaml")
    assert found.gain == 0.0
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.5)
    network.save_pretrained(tmp_path / "peft")
    assert evaluate_adapter(tmp_path / "peft", finished / "population.yaml").gain != 0.0


def test_an_adapter_of_another_base_is_told_of(finished, tmp_path):
    out = export(finished, tmp_path / "best")
    said = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(
        json.dumps({**said, "base_model_name_or_path": "owner/other"})
    )
    with pytest.warns(
        UserWarning, match=r"its base is 'owner/other', but the base of the configuration is"
    ):
        evaluate_adapter(out, finished / "population.yaml", prompts=1)


def test_what_is_no_adapter_is_refused(finished, tmp_path):
    config = finished / "population.yaml"
    with pytest.raises(CheckpointError, match=r"expected a PEFT folder .*, got neither"):
        evaluate_adapter(tmp_path, config)
    merged = export(finished, tmp_path / "merged", merge=True)
    with pytest.raises(CheckpointError, match="got a whole model, such as a merged export"):
        evaluate_adapter(merged, config)
    with pytest.raises(
        ConfigError, match=r"expected a configuration with the base and the task of the PEFT folder"
    ):
        evaluate_adapter(export(finished, tmp_path / "best"))
    with pytest.raises(ConfigError, match="split: expected validation or test, got 'train'"):
        evaluate_adapter(finished, split="train")
    with pytest.raises(ConfigError, match="prompts: expected an integer >= 1"):
        evaluate_adapter(finished, prompts=0)


def test_a_damaged_winner_is_not_judged(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    place = folder / read_summary(folder)["best"]["checkpoint"] / "actor" / "adapter_config.json"
    place.write_text(place.read_text() + " ")
    with pytest.raises(CheckpointError, match="it is not the one that the run recorded"):
        evaluate_adapter(folder)


def test_an_adapter_that_is_not_finite_is_an_error_and_not_a_gain(finished, tmp_path):
    out = export(finished, tmp_path / "best")
    file = out / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({name: torch.full_like(one, math.nan) for name, one in weights.items()}, file)
    config = finished / "population.yaml"
    with pytest.raises(ConfigError, match=r"best: expected finite numbers, got NaN or infinity in"):
        evaluate_adapter(out, config, prompts=2)
    result = CliRunner().invoke(app, ["evaluate", str(out), str(config), "--prompts", "2"])
    assert "nan" not in result.stdout.lower()
    assert result.exit_code == 2
    assert "expected finite numbers" in result.stderr


def test_rewards_that_all_abstain_are_an_error(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_abstaining.py").write_text("def none(completion):\n    return None\n")
    changed = {"env": {"kind": "sums", "reward": "my_abstaining:none"}}
    config = load(finished / "population.yaml").model_dump(mode="json") | changed
    with (
        pytest.warns(UserWarning, match="abstained on all"),
        pytest.raises(RunFailedError, match="every reward function abstained on every"),
    ):
        evaluate_adapter(finished, config, prompts=2)


def shown(result):
    console = Console(file=io.StringIO(), width=80)
    show_judged(console, result)
    return console.file.getvalue()


def test_a_result_with_its_base():
    judged = Judged(
        "best", "sums", "test", 2, 1.0, Score(0.75, 0.05, 64), Score(0.5, 0.06, 64), 0.25, 0.04,
        (0.17, 0.33), sign=1,
    )  # fmt: skip
    assert shown(judged).splitlines() == [
        "best: 0.7500 ± 0.0500 on 64 test prompts of sums, 2 samples each at temperature 1",
        "base: 0.5000 ± 0.0600",
        "gain: +0.2500 ± 0.0400, 95% interval +0.1700 to +0.3300",
        "adapter ahead on these prompts",
    ]
    chance = replace(judged, sign=0)
    assert shown(chance).splitlines()[-1] == "no difference shown"


def test_a_result_alone_and_of_a_single_prompt():
    alone = Judged("best", "sums", "test", 1, 0.5, Score(1.0, math.nan, 1))
    assert shown(alone).splitlines() == [
        "best: 1.0000 on 1 test prompt of sums, 1 sample each at temperature 0.5"
    ]
    single = Judged(
        "best", "sums", "test", 1, 1.0, Score(1.0, math.nan, 1), Score(0.0, math.nan, 1), 1.0,
        math.nan, (math.nan, math.nan),
    )  # fmt: skip
    assert shown(single).splitlines()[-1] == "gain: +1.0000 ± -"
