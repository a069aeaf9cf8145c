"""Layers with an adapter, `lora.target_modules`: each agent has one of several sets by name."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import tiny
from peft import LoraConfig
from safetensors.torch import load_file
from small_run import Told, outcome, small, stopped_and_resumed
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from evo_grpo import (
    GRPO,
    RLParameter,
    compare,
    evaluate_adapter,
    export,
    leaderboard,
    replay,
    resume,
    run,
    write_report,
)
from evo_grpo.cli.commands import app
from evo_grpo.errors import ConfigError
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.steering import ask
from evo_grpo.settings import from_dict
from evo_grpo.settings.run import warnings
from evo_grpo.sources import resolve
from evo_grpo.training import judge
from evo_grpo.training.assemble import environment_for
from evo_grpo.training.sizing.model_size import lora_parameters, read_model_size

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
SETS = {"attention": ATTENTION, "mlp": MLP, "all": "all-linear"}
NAME = "lora.target_modules"
CHOICES = {NAME: {"choices": list(SETS)}}
EAGER = {"kind": "mutate", "no_mutation": 0, "choice": 2.0}
ALONE = {
    "population__size": 1,
    "evolve__selection": "none",
    "evolve__exploration": "none",
}
FINAL = {"final_samples": 2, "prompts": 6, "test_prompts": 6, "test_samples": 2}


def searched(**changes):
    given = {
        "model__lora": {"r": 2, "target_sets": SETS},
        "evolve__hyperparameters": CHOICES,
        "evolve__exploration": EAGER,
    }
    return small(**{**given, **changes})


def saved_layers(folder, agent):
    actor = folder / agent.checkpoint / "actor"
    config = json.loads((actor / "adapter_config.json").read_text())
    saved = load_file(actor / "adapter_model.safetensors")
    found = {key.split(".lora_")[0].rpartition(".")[2] for key in saved}
    ends = {name.rpartition(".")[2] for name in config["target_modules"]}
    assert ends == found
    return found


def layers_of(name):
    return {*ATTENTION, *MLP} if name == "all" else set(SETS[name])


def digests(folder):
    return [agent.adapter_sha256 for record in read_rounds(folder) for agent in record.agents]


def test_an_agent_trains_its_own_layers_as_those_of_the_run(tmp_path):
    start = {"population__init": [{NAME: "mlp"}]}
    own = run(searched(**ALONE, **start), out=tmp_path / "own")
    of_run = {"evolve__hyperparameters": {}, "model__lora": {"r": 2, "target_modules": MLP}}
    other = run(small(**ALONE, **of_run), out=tmp_path / "mlp")
    assert digests(own) == digests(other)
    assert [a.metrics["grad_norm"] for r in read_rounds(own) for a in r.agents] == [
        a.metrics["grad_norm"] for r in read_rounds(other) for a in r.agents
    ]


def test_a_resumed_search_ends_as_one_that_was_not_stopped(tmp_path):
    own = {"algorithm__separate_reference": True, "algorithm__beta": 0.02, "evolve__archive": True}
    ranges = {**CHOICES, "lora.r": {"min": 1, "max": 6}}
    config = searched(evolve__hyperparameters=ranges, **own)
    whole = run(config, out=tmp_path / "whole")
    stopped = stopped_and_resumed(config, tmp_path / "stopped", ("learn", 1))
    assert outcome(whole) == outcome(stopped)
    rounds = read_rounds(whole)
    assert rounds[0].agents[0].hparams.lora_target_modules == "attention"
    assert {a.hparams.lora_target_modules for a in rounds[0].agents} == set(SETS)
    assert any(NAME in m.mutation.changes for record in rounds for m in record.members)
    for agent in (agent for record in rounds for agent in record.agents):
        assert saved_layers(whole, agent) == layers_of(agent.hparams.lora_target_modules)
    assert NAME in leaderboard(whole).columns


def test_the_round_after_layers_were_left_out_records_the_error(tmp_path):
    folder = run(searched(population__rounds=4), out=tmp_path / "run")
    cuts = 0
    for before, record in pairwise(read_rounds(folder)):
        had = {agent.member: agent.hparams.lora_target_modules for agent in before.agents}
        for agent in record.agents:
            old = had.get(agent.member, had.get(agent.parent))
            is_cut = not layers_of(old) <= layers_of(agent.hparams.lora_target_modules)
            cuts += is_cut
            assert ("rank_error" in agent.metrics) == is_cut
            assert not is_cut or 0 < agent.metrics["rank_error"] <= 1
    assert cuts


@pytest.mark.parametrize("both", [["attention", "mlp"], ["q_proj", "up_proj"]])
def test_a_mean_of_unequal_layers_has_those_of_both_and_is_exported(both, tmp_path, monkeypatch):
    def mean(candidates, scores, level):
        del scores, level
        return [one.kind for one in candidates].index("mean")

    monkeypatch.setattr(judge, "best_finalist", mean)
    # The layers of both are a set with a name, or none.
    sets = SETS if both == ["attention", "mlp"] else {name: [name] for name in both}
    config = searched(
        model__lora={"r": 2, "target_sets": sets},
        population__size=2,
        population__rounds=2,
        population__init=[{NAME: both[0]}, {NAME: both[1]}],
        evolve__hyperparameters={NAME: {"choices": both}},
        evolve__selection="none",
        evolve__exploration="none",
        evolve__fitness=FINAL,
    )
    monkeypatch.setattr(judge, "founder_of", lambda rounds, member: 0)
    folder = run(config, out=tmp_path / "run")
    best = json.loads((folder / "summary.json").read_text())["best"]
    saved = load_file(folder / best["checkpoint"] / "actor/adapter_model.safetensors")
    found = {key.split(".lora_")[0].rpartition(".")[2] for key in saved}
    assert found == {name for one in both for name in sets[one]}
    attributes = json.loads((folder / best["checkpoint"] / "attributes.json").read_text())
    name = attributes["hparams"].get("lora_target_modules")
    assert name == ("all" if sets is SETS else None)
    assert evaluate_adapter(folder).own.mean == best["mean"]
    made = export(folder, out=tmp_path / "export", anyway=True)
    assert evaluate_adapter(made, folder / "population.yaml").own.mean == best["mean"]
    agent = GRPO.load(folder / best["checkpoint"], device="cpu")
    environment_for(agent.cohort, "sums")  # gives no name to layers that have none
    assert agent.hparams.lora_target_modules == name
    assert {m.rpartition(".")[2] for m in modules_of(agent)} == found


@pytest.mark.slow
def test_what_reads_a_run_and_trains_beside_it_takes_layers(tmp_path):
    folder = run(searched(evolve__fitness=FINAL), out=tmp_path / "run")
    assert NAME in Path(write_report(folder, tmp_path / "report.html")).read_text()
    assert {arm["name"] for arm in compare(folder)["arms"]} == {"guess", "random", "evolved"}
    assert 0 <= replay(folder).training("schedule-run").test.mean <= 1


def test_layers_are_set_by_hand(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(searched(population__rounds=2), out=folder, observer=Told(("learn", 0)))
    for name, value, text in (
        ("lora.target_module", "mlp", "did you mean 'lora.target_modules'"),
        (NAME, "mpl", "expected one of attention, mlp, all, got mpl"),
    ):
        with pytest.raises(ConfigError, match=text):
            ask(folder, "set", agent=0, values={name: value})
    ask(folder, "set", agent=0, values={NAME: "mlp"})
    resume(folder)
    agent = read_rounds(folder)[1].agents[0]
    assert agent.hparams.lora_target_modules == "mlp"
    assert saved_layers(folder, agent) == set(MLP)


def test_a_start_adapter_loses_or_gets_layers(tmp_path):
    given = {"evolve__hyperparameters": {}, "population__rounds": 1}
    first = run(small(**ALONE, **given), out=tmp_path / "first")  # of q_proj and v_proj
    folder = first / read_rounds(first)[0].agents[0].checkpoint / "actor"
    same = {"population__rounds": 1, "algorithm__lr": 1e-12, "model__adapter": str(folder)}
    sets = {"both": ["q_proj", "v_proj"], "more": ["q_proj", "v_proj", "up_proj"], "q": ["q_proj"]}
    config = searched(
        **same,
        model__lora={"target_sets": sets},
        evolve__hyperparameters={NAME: {"choices": list(sets)}},
        population__init=[{NAME: name} for name in sets],
    )
    own = run(config, out=tmp_path / "own")
    kept, more, cut = read_rounds(own)[0].agents
    assert "rank_error" not in kept.metrics
    assert "rank_error" not in more.metrics
    assert 0 < cut.metrics["rank_error"] < 1
    assert kept.score.mean == more.score.mean


def modules_of(agent):
    return agent.cohort.slots.modules(agent.state.adapter)


@pytest.mark.filterwarnings("ignore:checkpoint .* tokenizer cannot be written")
def test_a_population_over_a_module_is_saved_with_its_layers(tmp_path):
    population = GRPO.population(
        size=3,
        model=AutoModelForCausalLM.from_pretrained(resolve("tiny-sums").path),
        tokenizer=AutoTokenizer.from_pretrained(resolve("tiny-sums").path),
        device="cpu",
        lora={"r": 2, "target_sets": SETS},
        hyperparameters={NAME: RLParameter(choices=list(SETS))},
        group_size=4,
    )
    fitness = {"prompts": 4, "test_prompts": 3}
    population.train(
        "sums", rounds=2, steps_per_round=1, progress=False, fitness=fitness, out=tmp_path / "run"
    )
    agent = population[1]
    agent.hparams = agent.hparams.replace(lora_target_modules="mlp")
    assert len(modules_of(agent)) == 12
    with pytest.raises(ConfigError, match=r"got 'attentoin'; did you mean 'attention'"):
        agent.hparams = agent.hparams.replace(lora_target_modules="attentoin")
    assert modules_of(agent.clone()) == modules_of(agent)
    population.save(tmp_path / "saved")
    again = type(population).load(tmp_path / "saved", device="cpu")
    for one, other in zip(population, again, strict=True):
        assert one.hparams == other.hparams
        assert modules_of(one) == modules_of(other)
    again[1].hparams = again[1].hparams.replace(lora_target_modules="all")
    assert len(modules_of(again[1])) == 28


def test_the_command_line_runs_a_search_over_layers(tmp_path):
    file = tmp_path / "population.yaml"
    data = json.loads(searched(population__rounds=2).model_dump_json())
    file.write_text(json.dumps(data))
    checked = CliRunner().invoke(app, ["check", str(file)])
    assert "one of 3 sets of layers, attention, mlp, all: up to" in " ".join(checked.output.split())
    done = CliRunner().invoke(app, ["run", str(file), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    for agent in read_rounds(tmp_path / "run")[-1].agents:
        found = saved_layers(tmp_path / "run", agent)
        assert found == layers_of(agent.hparams.lora_target_modules)


def test_the_memory_is_planned_for_all_layers_and_unused_sets_are_told():
    size = read_model_size("tiny-sums")
    every = small(model__lora={"r": 2}, evolve__hyperparameters={}).model.lora
    assert lora_parameters(size, searched().largest_lora) == lora_parameters(size, every)
    two = {NAME: {"choices": ["attention", "mlp"]}}
    config = searched(evolve__hyperparameters=two)
    assert config.largest_lora.target_modules == [*ATTENTION, *MLP]
    assert lora_parameters(size, config.largest_lora) == lora_parameters(size, every)
    patterns = {"q": r".*\.q_proj", "up": ["up_proj"]}
    own = {"target_sets": patterns, "r": 2}
    config = searched(model__lora=own, evolve__hyperparameters={NAME: {"choices": list(patterns)}})
    both = small(
        model__lora={"r": 2, "target_modules": ["q_proj", "up_proj"]}, evolve__hyperparameters={}
    )
    assert lora_parameters(size, config.largest_lora) == lora_parameters(size, both.model.lora)
    (text,) = [
        one for one in warnings(searched(evolve__hyperparameters={})) if "target_sets" in one
    ]
    assert "of which all agents have none: search them" in text


def test_settings_of_layers_are_written_and_read():
    config = searched(evolve__hyperparameters={"lora": {"target_modules": CHOICES[NAME]}})
    assert config == from_dict(json.loads(config.model_dump_json()))
    assert config.search_space().names() == [NAME]


AT = f"evolve.hyperparameters.{NAME}"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"evolve__hyperparameters": {NAME: {"choices": ["attention", "mpl"]}}},
            f"{AT}.choices: expected one of model.lora.target_sets: attention, mlp, all, got "
            "'mpl'; did you mean 'mlp'?",
        ),
        (
            {"model__lora": {"r": 2}},
            f"{AT}.choices: expected one of model.lora.target_sets: none, got 'attention'; add it",
        ),
        (
            {"evolve__hyperparameters": {NAME: {"choices": ["mlp", "mlp"]}}},
            f"{AT}.choices: expected each choice once, got",
        ),
        (
            {"evolve__hyperparameters": {NAME: {"choices": [["q_proj"], ["up_proj"]]}}},
            f"{AT}.choices: expected names alone, numbers alone, or true and false, got",
        ),
        (
            {"evolve__hyperparameters": {NAME: {"min": 1, "max": 2}}},
            f"{AT}: expected choices, a list of possible values, got min and max",
        ),
        (
            {"evolve__hyperparameters": {"target_modules": {"choices": ["mlp"]}}},
            "target_modules: nothing of that name can mutate. Did you mean 'lora.target_modules'?",
        ),
        (
            {"model__lora": {"target_sets": {"attention": [], "mlp": MLP, "all": "all-linear"}}},
            "model.lora.target_sets.attention: expected a string, or a list of at least one string",
        ),
        (
            {"model__lora": {"target_sets": SETS | {"mlp": "(gate"}}},
            "model.lora.target_sets.mlp: expected all-linear, a list of names, or a regular",
        ),
        (
            {"model__lora": {"target_sets": SETS, "target_modules": ["q_proj"]}},
            "model.lora.target_modules: expected none where lora.target_modules is searched",
        ),
        (
            {"model__lora": {"target_sets": SETS, "rank_pattern": {"q_proj": 4}}},
            "model.lora.rank_pattern: expected none where lora.target_modules is searched",
        ),
        (
            {"population__init": [{NAME: "mpl"}, {}, {}]},
            f"population.init[0].{NAME}: expected one of attention, mlp, all, got mpl",
        ),
    ],
)
def test_what_a_search_over_layers_refuses(changes, text):
    with pytest.raises(ConfigError) as caught:
        searched(**changes)
    assert text in str(caught.value)


def test_layers_that_the_model_lacks_are_named_before_anything_trains(tmp_path):
    sets = {"attention": ATTENTION, "mlp": ["gate_prj", "up_proj"]}
    choices = {NAME: {"choices": list(sets)}}
    config = searched(model__lora={"target_sets": sets}, evolve__hyperparameters=choices)
    text = r"lora\.target_sets\.mlp: expected layers of .*, got 'gate_prj', .* mean 'gate_proj'"
    with pytest.raises(ConfigError, match=r"model\." + text):
        run(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=text):
        GRPO(model=tiny.llama(), device="cpu", lora={"target_sets": sets}, hyperparameters=choices)
    with pytest.raises(ConfigError, match="target_sets: none"):
        GRPO(model="tiny-sums", device="cpu", lora=LoraConfig(r=4), hyperparameters=choices)


def test_a_rank_is_held_against_all_layers():
    sets = {"v": ["v_proj"], "o": ["o_proj"]}
    ranges = {NAME: {"choices": ["o", "v"]}, "lora.r": {"min": 1, "max": 20}}
    with pytest.raises(ConfigError, match=r"lora\.r: expected ranks of at most 16, .*v_proj, got"):
        GRPO(model=tiny.llama(), device="cpu", lora={"target_sets": sets}, hyperparameters=ranges)
