"""What agents search besides numbers of the algorithm: the rank, alpha and layers of an adapter, KL
shaping, decay rates, longest completions, warm-ups, prompts by name, and weights of rewards.
"""

import json
import math
from itertools import pairwise

import jsonschema
import numpy as np
import optuna
import pandas as pd
import pytest
import tiny
from numpy.testing import assert_array_equal
from peft import LoraConfig
from safetensors.torch import load_file
from small_run import SETTINGS, Told, outcome, small, stopped_and_resumed, study_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from evo_grpo import (
    GRPO,
    DatasetEnv,
    ReasoningGym,
    RLParameter,
    compare,
    evaluate_adapter,
    export,
    leaderboard,
    replay,
    resume,
    run,
    sample,
    write_report,
)
from evo_grpo.cli.commands import app
from evo_grpo.envs.asking import asking
from evo_grpo.envs.describing import environment_parts
from evo_grpo.envs.registry import build_multi_turn, build_task
from evo_grpo.envs.rewards.weights import fitness_rewards
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.population.evaluate import weighted
from evo_grpo.readers.trackers.base import of_agent, values_of
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.log import RoundDone
from evo_grpo.record.steering import ask
from evo_grpo.settings import EnvConfig, from_dict, json_schema
from evo_grpo.settings.run import warnings
from evo_grpo.sources import resolve
from evo_grpo.training import judge
from evo_grpo.training.assemble import environment_for
from evo_grpo.training.sizing.machine import Setup
from evo_grpo.training.sizing.model_size import lora_parameters, read_model_size

RANK, ALPHA, LAYERS = "lora.r", "lora.alpha", "lora.target_modules"
WEIGHT = "reward_weights.last"
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
SETS = {"attention": ATTENTION, "mlp": MLP, "all": "all-linear"}
PROMPTS = {"plain": {}, "swapped": {"prompt": "{b}+{a}="}, "zero": {"prompt": "0+{a}+{b}="}}
FINAL = {"final_samples": 2, "prompts": 6, "test_prompts": 6, "test_samples": 2}
FITNESS = {**SETTINGS["evolve"]["fitness"], "reward": "exact"}
TWO = {"env__reward": ["two_rewards:exact", "two_rewards:last"], "evolve__fitness": FITNESS}
RANGES = {
    RANK: {"min": 1, "max": 16},
    ALPHA: {"min": 1, "max": 64},
    LAYERS: {"choices": list(SETS)},
    "adam_beta1": {"min": 0.5, "max": 0.98},
    "adam_beta2": {"min": 0.9, "max": 0.9995},
    "max_output_tokens": {"min": 2, "max": 4},
    "prompt": {"choices": list(PROMPTS)},
    WEIGHT: {"min": 0.1, "max": 2.0},
}
#: The settings that a search needs.
NEEDS = {
    LAYERS: {"model__lora": {"r": 2, "target_sets": SETS}},
    "prompt": {"env__prompts": PROMPTS},
    WEIGHT: TWO,
}
STILL = {"evolve__selection": "none", "evolve__exploration": "none"}
ALONE = {**STILL, "population__size": 1, "record__optuna": False}
#: What cuts answers off earns no rewards; the entropy bonus has a gradient without them.
CUT = {"algorithm__entropy_coef": 0.1}
TINY = {"model": "tiny-sums", "device": "cpu", "group_size": 4}
SHORT = {
    **{"rounds": 1, "steps_per_round": 1, "progress": False},
    "fitness": {"prompts": 4, "test_prompts": 3},
}
ROWS = [{"question": f"{n:02d}+01=", "answer": f"{n + 1:03d}"} for n in range(30)]


def searched(*names, **changes):
    """The small run with a search over these names, or over all of them."""
    names = names or tuple(RANGES)
    eager = {"kind": "mutate", "no_mutation": 0, "choice": 2.0, "step": "factors"}
    ranges = {name: RANGES[name] for name in names}
    settings = {"evolve__hyperparameters": ranges, "evolve__exploration": eager}
    for name in names:
        settings |= NEEDS.get(name, {})
    return small(**{**settings, **changes})


def adapters(**changes):
    own = {"algorithm__separate_reference": True, "algorithm__beta": 0.02, "evolve__archive": True}
    return searched(RANK, ALPHA, LAYERS, population__rounds=4, **own, **changes)


def others(**changes):
    names = [name for name in RANGES if not name.startswith("lora.")]
    return searched(*names, population__size=4, **changes)


SEARCHES = {"adapters": adapters, "others": others}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The folders of a run of each of the two searches."""
    folders = {name: tmp_path_factory.mktemp(name) / "run" for name in SEARCHES}
    return {name: run(SEARCHES[name](), out=folder) for name, folder in folders.items()}


def agents_of(folder):
    return [agent for record in read_rounds(folder) for agent in record.agents]


def saved_adapter(folder, checkpoint):
    """The rank of a saved adapter and the ends of the names of its layers."""
    actor = folder / checkpoint / "actor"
    config = json.loads((actor / "adapter_config.json").read_text())
    saved = load_file(actor / "adapter_model.safetensors")
    assert {len(value) for key, value in saved.items() if "lora_A" in key} == {config["r"]}
    return config["r"], {key.split(".lora_")[0].rpartition(".")[2] for key in saved}


def layers_of(name):
    return {*ATTENTION, *MLP} if name == "all" else set(SETS[name])


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    ("name", "value", "of_run", "given"),
    [
        (RANK, 6, {"model__lora__r": 6}, {}),
        (LAYERS, "mlp", {"model__lora": {"r": 2, "target_modules": MLP}}, {}),
        ("max_output_tokens", 2, {"algorithm__max_output_tokens": 2}, CUT),
        (
            *("max_output_tokens", 2, {"algorithm__max_output_tokens": 2}),
            {**CUT, "algorithm__loss_type": "dr_grpo"},
        ),
        ("prompt", "swapped", {"env__prompts": None, "env__prompt": "{b}+{a}="}, {}),
        (WEIGHT, 0.3, {"env__reward_weights": {"last": 0.3}}, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*had nothing to learn from")
def test_an_agent_trains_with_its_own_value_as_with_that_of_the_run(
    name, value, of_run, given, tmp_path
):
    given = {**ALONE, **given, "population__rounds": 1, "population__steps_per_round": 2}
    given["evolve__fitness__test_prompts"] = 1
    own = searched(name, **given, population__init=[{name: value}])
    other = searched(name, **{**given, "evolve__hyperparameters": {}, **of_run})
    plain = searched(name, **given)
    found = []
    for number, config in enumerate((own, other, plain)):
        (agent,) = agents_of(run(config, out=tmp_path / str(number)))
        values = [agent.metrics[metric] for metric in ("reward", "grad_norm")]
        found.append((agent.adapter_sha256, agent.score, values))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]


@pytest.mark.parametrize("search", SEARCHES)
def test_a_resumed_search_ends_as_one_that_was_not_stopped(search, played, tmp_path):
    stopped = stopped_and_resumed(SEARCHES[search](), tmp_path / "stopped", ("learn", 1))
    assert outcome(stopped) == outcome(played[search])


def test_an_agent_is_saved_with_its_rank_and_layers(played):
    for agent in agents_of(played["adapters"]):
        rank, layers = saved_adapter(played["adapters"], agent.checkpoint)
        assert (rank, layers) == (
            agent.hparams.lora_r,
            layers_of(agent.hparams.lora_target_modules),
        )


def test_the_round_after_a_cut_of_rank_or_layers_records_its_error(played):
    rounds = read_rounds(played["adapters"])
    assert all("rank_error" not in agent.metrics for agent in rounds[0].agents)
    had, cuts, kept = {}, 0, 0
    for before, record in pairwise(rounds):
        had |= {agent.member: agent.hparams for agent in before.agents}
        for agent in record.agents:
            old, new = had.get(agent.member, had.get(agent.parent)), agent.hparams
            layers = layers_of(old.lora_target_modules) <= layers_of(new.lora_target_modules)
            is_cut = new.lora_r < old.lora_r or not layers
            assert ("rank_error" in agent.metrics) == is_cut
            assert not is_cut or 0 < agent.metrics["rank_error"] <= 1
            cuts, kept = cuts + is_cut, kept + (not is_cut)
    assert cuts
    assert kept


def test_the_first_population_covers_every_range_and_begins_with_the_values_of_the_run(played):
    first, *drawn = [agent.hparams for agent in read_rounds(played["others"])[0].agents]
    assert first.named().items() >= {
        ("adam_beta1", 0.9), ("max_output_tokens", 4), ("prompt", "plain"), (WEIGHT, 1.0),
    }  # fmt: skip
    assert {one.prompt for one in (first, *drawn)} == set(PROMPTS)
    # One in each third of the range of 1 - beta2, by its logarithm.
    low, high = math.log(0.0005), math.log(0.1)
    thirds = [3 * (math.log(1 - one.adam_beta2) - low) / (high - low) for one in drawn]
    assert sorted(map(math.floor, thirds)) == [0, 1, 2]
    first, *drawn = [agent.hparams for agent in read_rounds(played["adapters"])[0].agents]
    assert (first.lora_r, first.lora_target_modules) == (2, "attention")
    assert {one.lora_target_modules for one in (first, *drawn)} == set(SETS)
    halves = [(1, 4), (4, 16)]
    ranks = sorted(one.lora_r for one in drawn)
    assert all(low <= rank <= high for rank, (low, high) in zip(ranks, halves, strict=True))


def test_a_search_is_recorded_and_shown(played, tmp_path):
    for folder, names in (
        (played["adapters"], {RANK, ALPHA, LAYERS}),
        (played["others"], set(RANGES) - {RANK, ALPHA, LAYERS}),
    ):
        rounds = read_rounds(folder)
        changes = [m.mutation.changes for record in rounds for m in record.members]
        moved = {name for change in changes for name in change}
        assert moved
        assert moved <= names
        assert set(leaderboard(folder).columns) >= names
        assert set(pd.read_csv(folder / "leaderboard.csv").columns) >= names
        page = write_report(folder, tmp_path / "report.html").read_text()
        assert all(name in page for name in names)
        assert study_of(folder).trials[0].params.keys() >= names
    texts = values_of(RoundDone(1, rounds[-1])).texts
    for agent in rounds[-1].agents:  # trackers draw numbers, so a choice is told in words
        assert f"prompt {agent.hparams.prompt}" in texts[of_agent(agent.agent)]
    kinds = study_of(folder).trials[0].distributions
    assert set(kinds["prompt"].choices) == set(PROMPTS)
    assert isinstance(kinds["max_output_tokens"], optuna.distributions.IntDistribution)


@pytest.mark.parametrize("exploration", ["resample", "optuna"])
def test_every_exploration_proposes_what_the_ranges_allow(exploration, tmp_path):
    config = searched(evolve__exploration=exploration)
    rounds = read_rounds(run(config, out=tmp_path / "run"))
    space = config.search_space()
    for hparams in (hparams for record in rounds for hparams in record.next_hparams):
        assert all(space[name].allows(hparams.get(name)) for name in space.names())
        assert {type(hparams.lora_r), type(hparams.max_output_tokens)} == {int}


@pytest.mark.slow
@pytest.mark.parametrize("search", SEARCHES)
def test_what_reads_a_run_and_trains_beside_it_takes_a_search(search, played):
    assert {arm["name"] for arm in compare(played[search])["arms"]} == {
        *("guess", "random", "evolved")
    }
    assert 0 <= replay(played[search]).training("schedule-run").test.mean <= 1


def test_values_are_set_by_hand(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(searched(population__rounds=2), out=folder, observer=Told(("learn", 0)))
    for name, value, text in (
        ("lora.rank", 4, "did you mean 'lora.r'"),
        (RANK, 17, r"inside of its range \[1, 16\], got 17"),
        (RANK, 0, r"lora\.r: expected an integer in \[1, 65536\]"),
        (RANK, 2.5, r"lora\.r: expected an integer in \[1, 65536\]"),
        ("lora.target_module", "mlp", "did you mean 'lora.target_modules'"),
        (LAYERS, "mpl", "expected one of attention, mlp, all, got mpl"),
        ("adam_beta2", 1.0, r"adam_beta2: expected a number in \[0, 1\), got 1.0; 0.999 is usual"),
        ("adam_beta2", 0.5, r"inside of its range \[0.9, 0.9995\], got 0.5"),
        ("max_output_tokens", 5, r"inside of its range \[2, 4\], got 5"),
        ("warmup", 0.1, "warmup: unknown key"),
        ("prompt", "swaped", "expected one of plain, swapped, zero, got swaped"),
        ("reward_weights.lst", 1.0, "did you mean 'reward_weights"),
        (WEIGHT, 3.0, "inside of its range"),
    ):
        with pytest.raises(ConfigError, match=text):
            ask(folder, "set", agent=0, values={name: value})
    values = {RANK: 5, LAYERS: "mlp", "adam_beta2": 0.99, "max_output_tokens": 3}
    values |= {"prompt": "swapped", WEIGHT: 1.5}
    ask(folder, "set", agent=0, values=values)
    resume(folder)
    agent = read_rounds(folder)[1].agents[0]
    assert agent.hparams.named().items() >= values.items()
    assert saved_adapter(folder, agent.checkpoint) == (5, set(MLP))


AT = "evolve.hyperparameters"
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
ASKS = {"role": "user", "content": "{a}"}


def ranges(**by_name):
    return {"evolve__hyperparameters": by_name}


def of(name, low=None, high=None, **choices):
    return {"evolve__hyperparameters": {name: choices or {"min": low, "max": high}}}


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        (RANK, of(RANK, 0, 4), f"{AT}.{RANK}.min: expected an"),
        (RANK, of(RANK, choices=[2, 0]), "expected an integer in [1, 65536], or null, got 0"),
        (RANK, of("lora.rank", 1, 4), "nothing of that name can mutate. Did you mean 'lora.r'?"),
        (RANK, {"model__lora": {"r": 32}},
         f"expected a value inside {AT}.{RANK} [1, 16], got"),
        (RANK, {**of(ALPHA, 1, 2), "model__lora": {"r": 4}},
         f"model.lora.alpha: expected a value inside {AT}.{ALPHA} [1, 2], got 8"),
        (RANK, {"model__lora": {**LORA, "rank_pattern": {"q_proj": 4}}},
         "model.lora.rank_pattern: expected none where lora.r is searched, got {'q_proj': 4}; "),
        (RANK, {"engine__vllm": {"max_lora_rank": 8}},
         "max_lora_rank: expected at least 16, the largest rank of an agent, got 8"),
        (RANK, {"population__init": [{RANK: 2}, {RANK: 20}, {}]},
         "population.init[1].lora.r: expected a value inside of its range [1, 16], got 20"),
        (RANK, of(RANK, 1, 10**9), f"{AT}.{RANK}.max: expected an integer in [1, 65536]"),
        (LAYERS, of(LAYERS, choices=["attention", "mpl"]),
         f"{AT}.{LAYERS}.choices: expected one of model.lora.target_sets: attention, mlp, all, "
         "got 'mpl'; did you mean 'mlp'?"),
        (LAYERS, {"model__lora": {"r": 2}}, "target_sets: none, got 'attention'; add it"),
        (LAYERS, of(LAYERS, 1, 2), f"{LAYERS}: expected choices, a list of possible values, got"),
        (LAYERS, {"model__lora": {"target_sets": SETS | {"attention": []}}},
         "model.lora.target_sets.attention: expected a string, or a list of at least one string"),
        (LAYERS, {"model__lora": {"target_sets": SETS, "target_modules": ["q_proj"]}},
         "model.lora.target_modules: expected none where lora.target_modules is searched"),
        (LAYERS, {"model__lora": {"target_sets": SETS | {"mlp": ["gate_prj", "up_proj"]}}},
         "model.lora.target_sets.mlp: expected layers of tiny-sums"),
        *(("lr", of(name, 0.1, 0.4), f"{AT}.{name}: nothing of that name can mutate")
          for name in ("kl_shaping", "lr_schedule.warmup_proportion")),
        ("prompt", ranges(prompt=True), "expected {choices: [...]}, got true"),
        ("lr", ranges(group_size={"choices": [True]}), "choices: expected names alone, or"),
        ("adam_beta2", of("adam_beta2", 0.9, 1), "adam_beta2.max: expected a number in [0, 1)"),
        ("adam_beta2", {"algorithm__adam_beta1": -0.1}, "adam_beta1: expected a number in [0, 1),"),
        ("adam_beta1", {"algorithm__adam_beta2": 0.9999999},
         "a number from 0 to 0.999999, which float32"),
        ("max_output_tokens", of("max_output_tokens", 0, 4), "max_output_tokens.min: expected"),
        ("max_output_tokens", {"algorithm__min_output_tokens": 3},
         "algorithm.min_output_tokens: expected at most the least max_output_tokens (2), got 3"),
        ("max_output_tokens", {**of("max_output_tokens", 2, 40), "algorithm__max_model_len": 32},
         f"{AT}.max_output_tokens: expected less than max_model_len (32)"),
        ("prompt", of("prompt", choices=["plain", "swaped"]),
         "one of env.prompts: plain, swapped, zero, got 'swaped'; did you mean 'swapped'?"),
        ("prompt", {"env__prompts": None}, "expected one of env.prompts: none, got 'plain'; add"),
        ("prompt", {"population__init": [{"prompt": "plain"}, {"prompt": "no"}, {}]},
         "population.init[1].prompt: expected one of plain, swapped, zero, got no"),
        ("lr", {"env__prompts": {"a": {"prompt": "{c}"}}},
         'no column "c", which env.prompts.a needs'),
        ("lr", {"env__prompts": {"a": "Be brief."}},
         "env.prompts.a.system_prompt: expected messages for the chat template, got the raw"),
        ("lr", {"env__prompts": {"a": {"promt": "{a}"}}}, "env.prompts.a.promt: unknown key; did"),
        ("lr", {"env__prompts": {}}, "env.prompts: expected a mapping of at least one name to a"),
        ("lr", {"env__prompts": {"a": {"prompt": "{a}", "conversation": [ASKS]}}},
         "env.prompts.a: expected prompt or conversation, got both; remove one"),
        (WEIGHT, of("reward_weights.lst", 0, 1),
         "reward_weights.lst: expected a reward function of the task, exact, last, got "
         "'lst'. Did you mean \"last\"?"),
        (WEIGHT, {"env__reward_weights": [1, 5]},
         "env.reward_weights: expected a value inside of its range [0.1, 2] as the weight of"),
        (WEIGHT, {"evolve__fitness": {**FITNESS, "reward": "exakt"}},
         "evolve.fitness.reward: expected a reward function of the task, exact, last, got "
         "'exakt'. Did you mean \"exact\"?"),
        (WEIGHT, {"evolve__fitness": {**FITNESS, "reward": None}},
         f"evolve.fitness.reward: expected a measure that does not depend on {WEIGHT}"),
        (WEIGHT, {"evolve__fitness": {**FITNESS, "reward": {"exact": 0}}},
         "evolve.fitness.reward: expected the name of a reward function, or a mapping of names"),
        (WEIGHT, {"env__reward_weights": {"lst": 1}},
         "reward_weights: expected a reward function of the task, exact, last, got 'lst'"),
        (WEIGHT, {"env__reward_weights": [0, 0]},
         "one number per reward function, not all"),
        (WEIGHT, {"env__reward_weights": {"exact": 0, "last": 0.0}},
         "reward_weights: expected one that is not 0, got 0 for each of exact, last"),
        (WEIGHT, of(WEIGHT, 0, 1e300), f"{WEIGHT}.max: expected"),
        (WEIGHT, of("reward_weights.", 0, 1), "nothing of that name can mutate"),
    ],
)  # fmt: skip
def test_a_wrong_search_is_named_before_anything_is_loaded(
    name, changes, text, tmp_path, monkeypatch
):
    monkeypatch.setattr("evo_grpo.training.assemble.build_cohort", None)
    monkeypatch.setitem(RANGES, "lr", {"min": 1e-4, "max": 1e-2})
    with pytest.raises((ConfigError, DataError)) as raised:
        run(searched(name, **changes), out=tmp_path / "run")
    assert text in str(raised.value)
    assert not (tmp_path / "run").exists()


LLAMA = {"model": "tiny.llama", "device": "cpu"}


@pytest.mark.parametrize(
    ("given", "ranges", "text"),
    [
        ({"lora": {"r": 10**9}}, {}, r"lora\.r: expected an integer in \[1, 65536\], got 10000"),
        (
            LLAMA | {"lora": {"target_sets": {"mlp": ["gate_prj"]}}},
            {LAYERS: {"choices": ["mlp"]}},
            r"target_sets\.mlp: expected layers of .*, got 'gate_prj', .* mean 'gate_proj'",
        ),
        ({"lora": LoraConfig(r=4)}, {LAYERS: {"choices": ["mlp"]}}, "target_sets: none"),
        (
            {"lora": LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={"q_proj": 2})},
            *({RANK: RANGES[RANK]}, r"lora\.rank_pattern: expected none where lora\.r is searched"),
        ),
        (
            {"lora": LoraConfig(r=4, init_lora_weights="orthogonal")},
            *({RANK: RANGES[RANK]}, r"init_lora_weights: expected another than 'orthogonal'"),
        ),
        (
            {"lora": LoraConfig(r=32, target_modules=["q_proj"])},
            *({RANK: RANGES[RANK]}, r"expected a value inside hyperparameters\.lora\.r \[1, 16\]"),
        ),
    ],
)
def test_a_search_that_does_not_fit_a_model_or_an_adapter_object_is_refused(given, ranges, text):
    given = {**TINY, **given}
    if given["model"] == "tiny.llama":
        given["model"] = tiny.llama()
    with pytest.raises(ConfigError, match=text):
        GRPO(**given, hyperparameters=ranges)


def test_nested_ranges_are_those_of_dotted_names():
    nested = {"r": {"min": 1, "max": 16}, "alpha": {"choices": [2, 4]}}
    config = searched(
        LAYERS, evolve__hyperparameters={"lora": nested | {"target_modules": RANGES[LAYERS]}}
    )
    assert config == from_dict(json.loads(config.model_dump_json()))
    assert set(config.search_space().names()) == {RANK, ALPHA, LAYERS}
    # As --set evolve.hyperparameters.lora.r.max=12 does over a file with the other form.
    both = searched(RANK, **ranges(**{RANK: RANGES[RANK], "lora": {"r": {"max": 12}}}))
    assert (both.search_space()[RANK].min, both.search_space()[RANK].max) == (1, 12)


# --- adapters -----------------------------------------------------------------------------------


def first_best(monkeypatch):
    """Let the mean of the survivors win."""

    def mean(candidates, scores, level):
        del scores, level
        return [one.kind for one in candidates].index("mean")

    monkeypatch.setattr(judge, "best_finalist", mean)
    monkeypatch.setattr(judge, "founder_of", lambda rounds, member: 0)


@pytest.mark.parametrize(
    ("both", "sets"),
    [
        (["attention", "mlp"], SETS),  # a set with a name has the layers of both
        (["q_proj", "up_proj"], {name: [name] for name in ("q_proj", "up_proj")}),
    ],
)
def test_a_mean_has_the_layers_of_both_and_the_larger_rank_and_is_exported(
    both, sets, tmp_path, monkeypatch
):
    first_best(monkeypatch)
    config = searched(
        RANK,
        LAYERS,
        **STILL,
        population__size=2,
        population__rounds=2,
        population__init=[{LAYERS: both[0], RANK: 3}, {LAYERS: both[1], RANK: 5}],
        model__lora={"r": 3, "target_sets": sets},
        evolve__hyperparameters={LAYERS: {"choices": both}, RANK: RANGES[RANK]},
        evolve__fitness=FINAL,
    )
    folder = run(config, out=tmp_path / "run")
    best = summary_of(folder)["best"]
    layers = {name for one in both for name in sets[one]}
    assert saved_adapter(folder, best["checkpoint"]) == (5, layers)
    attributes = json.loads((folder / best["checkpoint"] / "attributes.json").read_text())
    name = attributes["hparams"].get("lora_target_modules")
    assert name == ("all" if sets is SETS else None)
    assert evaluate_adapter(folder).own.mean == best["mean"]
    made = export(folder, out=tmp_path / "export", anyway=True)
    assert evaluate_adapter(made, folder / "population.yaml").own.mean == best["mean"]
    agent = GRPO.load(folder / best["checkpoint"], device="cpu")
    environment_for(agent.cohort, "sums")  # gives no name to layers that have none
    assert agent.hparams.lora_target_modules == name
    assert {module.rpartition(".")[2] for module in modules_of(agent)} == layers
    assert 0 <= replay(folder, repeats=1).winner.mean <= 1


def test_a_start_adapter_takes_the_rank_or_the_layers_of_each_agent(tmp_path):
    given = {"evolve__hyperparameters": {}, "population__rounds": 1, "model__lora__r": 4}
    first = run(small(**ALONE, **given), out=tmp_path / "first")  # of q_proj and v_proj
    actor = first / agents_of(first)[0].checkpoint / "actor"
    same = {"population__rounds": 1, "algorithm__lr": 1e-12, "model__adapter": str(actor)}
    sets = {"both": ["q_proj", "v_proj"], "more": ["q_proj", "v_proj", "up_proj"], "q": ["q_proj"]}
    of_ranks = {"model__lora__r": 4, "population__init": [{RANK: rank} for rank in (4, 9, 2)]}
    of_layers = {
        "model__lora": {"target_sets": sets},
        "evolve__hyperparameters": {LAYERS: {"choices": list(sets)}},
        "population__init": [{LAYERS: name} for name in sets],
    }
    for name, changes in ((RANK, of_ranks), (LAYERS, of_layers)):
        kept, grown, cut = agents_of(run(searched(name, **same, **changes), out=tmp_path / name))
        assert "rank_error" not in {*kept.metrics, *grown.metrics}
        assert 0 < cut.metrics["rank_error"] < 1
        assert kept.score.mean == grown.score.mean
    # A request before the first round knows the rank of the adapter.
    config = searched(RANK, model={"name": "tiny-sums", "adapter": str(actor)})
    with pytest.raises(KeyboardInterrupt):
        run(config, out=tmp_path / "run", observer=Told(("learn", 0)))
    with pytest.raises(ConfigError, match=r"expected a change, got its present values: lora\.r 4"):
        ask(tmp_path / "run", "set", agent=0, values={RANK: 4})


def modules_of(agent):
    return agent.cohort.slots.modules(agent.state.adapter)


def ranks_of(agent):
    state, slots = agent.state, agent.cohort.slots
    return [slots.lora_config(name).r for name in (state.adapter, state.reference)]


@pytest.mark.filterwarnings("ignore:checkpoint .* tokenizer cannot be written")
def test_a_saved_population_and_agent_keep_their_ranks_and_layers(tmp_path):
    population = GRPO.population(
        size=3,
        **{**TINY, "model": AutoModelForCausalLM.from_pretrained(resolve("tiny-sums").path)},
        tokenizer=AutoTokenizer.from_pretrained(resolve("tiny-sums").path),
        lora={"r": 2, "use_rslora": True, "target_sets": SETS},
        hyperparameters={
            LAYERS: RLParameter(choices=list(SETS)),
            RANK: RLParameter(choices=[1, 2, 8]),
        },
        beta=0.01,
        separate_reference=True,
    )
    population.train("sums", **{**SHORT, "rounds": 2}, out=tmp_path / "run")
    agent = population[1]
    agent.hparams = agent.hparams.replace(lora_target_modules="mlp", lora_r=1)
    assert len(modules_of(agent)) == 12
    with pytest.raises(ConfigError, match=r"got 'attentoin'; did you mean 'attention'"):
        agent.hparams = agent.hparams.replace(lora_target_modules="attentoin")
    population.cohort.freeze_reference(agent.slot)
    agent.hparams = agent.hparams.replace(lora_r=100)  # above the width of some layers
    assert ranks_of(agent) == [100, 1]
    population.save(tmp_path / "saved")
    again = type(population).load(tmp_path / "saved", device="cpu")
    for one, other in zip(population, again, strict=True):
        assert one.hparams == other.hparams
        assert (ranks_of(one), modules_of(one)) == (ranks_of(other), modules_of(other))
    clone = agent.clone()
    assert (ranks_of(clone), modules_of(clone)) == (ranks_of(agent), modules_of(agent))
    again[1].hparams = again[1].hparams.replace(lora_target_modules="all")
    assert len(modules_of(again[1])) == 28


def test_check_names_the_sets_of_layers(tmp_path):
    file = tmp_path / "population.yaml"
    file.write_text(searched(LAYERS).model_dump_json())
    shown = CliRunner().invoke(app, ["check", str(file)]).output
    assert "one of 3 sets of layers, attention, mlp, all: up to" in " ".join(shown.split())


def test_the_memory_is_planned_for_the_largest_adapter_and_unused_sets_are_told():
    size = read_model_size("tiny-sums")

    def agents(config):
        plan = Setup(size, 8, "float32", "cpu").plan(config)
        return next(part.bytes for part in plan.held if part.name == "agents")

    def fixed(**lora):
        return small(evolve__hyperparameters={}, model__lora=lora)

    at = [agents(fixed(r=r, target_modules=["q_proj", "v_proj"])) for r in (2, 16)]
    assert agents(searched(RANK)) == at[1] > at[0]
    every = lora_parameters(size, fixed(r=2).model.lora)
    assert lora_parameters(size, searched(LAYERS).largest_lora) == every
    two = searched(LAYERS, **of(LAYERS, choices=["attention", "mlp"]))
    assert two.largest_lora.target_modules == [*ATTENTION, *MLP]
    patterns = {"q": r".*\.q_proj", "up": ["up_proj"]}
    config = searched(
        LAYERS, model__lora={"target_sets": patterns, "r": 2}, **of(LAYERS, choices=list(patterns))
    )
    both = fixed(r=2, target_modules=["q_proj", "up_proj"]).model.lora
    assert lora_parameters(size, config.largest_lora) == lora_parameters(size, both)
    (text,) = [
        one
        for one in warnings(searched(LAYERS, evolve__hyperparameters={}))
        if "target_sets" in one
    ]
    assert "of which all agents have none: search them" in text


class Foreign:
    """Proposes a loss that contradicts the level of the ratios."""

    def explore(self, candidate, hp_config, rng):
        old = candidate.hparams
        if candidate.elite:
            return old
        return old.replace(loss_type="gspo")


def test_an_exploration_that_returns_what_no_agent_can_have_ends_the_run_before_its_record(
    tmp_path,
):
    population = GRPO.population(size=2, **TINY, importance_sampling_level="token")
    for agent in population:
        agent.hparams = agent.hparams.replace(loss_type="dapo")
    how = {**SHORT, "rounds": 2, "exploration": Foreign(), "out": tmp_path / "run"}
    with pytest.raises(ConfigError, match="expected 'sequence' with loss_type='gspo'"):
        population.train("sums", **how)
    assert not read_rounds(tmp_path / "run")


# --- values of the algorithm --------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*had nothing to learn from")
def test_agents_of_one_batch_with_other_limits_learn_as_beside_their_like(tmp_path):
    given = {**STILL, **CUT, "population__size": 2, "population__rounds": 1}

    def scores(limits, out):
        start = [{"max_output_tokens": limit} for limit in limits]
        config = searched("max_output_tokens", **given, population__init=start)
        return [(agent.score, agent.tokens) for agent in agents_of(run(config, out=out))]

    mixed = scores([2, 4], tmp_path / "mixed")
    assert mixed[0] == scores([2, 2], tmp_path / "2")[0]
    assert mixed[1] == scores([4, 4], tmp_path / "4")[1]


@pytest.mark.filterwarnings("ignore:.*had nothing to learn from")
def test_an_agent_answers_up_to_its_own_limit_in_a_run_after_it_and_from_its_export(tmp_path):
    start = {"population__init": [{"max_output_tokens": n} for n in (1, 1, 1)]}
    lengths = of("max_output_tokens", choices=[1, 4])
    config = small(**STILL, **lengths, **start, population__rounds=1)
    folder = run(config, out=tmp_path / "run")
    (record,) = read_rounds(folder)
    assert {agent.tokens for agent in record.agents} == {8}  # of 2 prompts of 4 completions
    assert record.evaluation_tokens == 18  # of 3 agents on 6 prompts
    best = summary_of(folder)["best"]
    assert evaluate_adapter(folder).own.mean == best["mean"]
    place = export(folder, tmp_path / "export", anyway=True)
    assert json.loads((place / "export.json").read_text())["max_output_tokens"] == 1
    assert "max_new_tokens=1," in (place / "README.md").read_text()
    assert evaluate_adapter(place, config).own.mean == best["mean"]


def test_a_loss_and_a_ratio_level_that_contradict_each_other_cannot_be_set():
    choices = {"loss_type": RLParameter(choices=["grpo", "dapo"])}
    agent = GRPO(**TINY, hyperparameters=choices, importance_sampling_level="token")
    with pytest.raises(ConfigError, match="expected 'sequence' with loss_type='gspo', got 'token'"):
        agent.hparams = agent.hparams.replace(loss_type="gspo")
    assert agent.hparams.loss_type == "grpo"


# --- prompts ------------------------------------------------------------------------------------


def exact(completion, answer):
    return float(completion == answer)


def two_agents(*prompts):
    space = {"prompt": RLParameter(choices=list(prompts))}
    return GRPO.population(size=2, **TINY, hyperparameters=space)


def test_without_a_search_all_agents_have_the_first_prompt(tmp_path):
    short = {"population__rounds": 1}
    with pytest.warns(UserWarning, match="of which all agents have the first: search them with"):
        several = run(small(env__prompts=PROMPTS, **short), out=tmp_path / "several")
    assert outcome(several) == outcome(run(small(**short), out=tmp_path / "one"))


def test_the_winner_is_exported_and_asked_with_its_prompt(tmp_path):
    start = {"population__rounds": 1, "population__init": [{"prompt": "swapped"}]}
    folder = run(searched("prompt", **ALONE, **start), out=tmp_path / "run")
    best = summary_of(folder)["best"]
    assert evaluate_adapter(folder).own.mean == best["mean"]
    asked, _ = sample(folder, rows=[0], n=1)
    row = build_task(EnvConfig(kind="sums", args={"high": 20}), 3).splits["validation"][0]
    assert asked.prompt == f"{row['b']}+{row['a']}="
    made = export(folder, out=tmp_path / "export", anyway=True)
    assert json.loads((made / "export.json").read_text())["prompt"] == "swapped"
    assert "prompt: swapped, of env.prompts of the run" in (made / "README.md").read_text()
    with pytest.warns(UserWarning, match="trained with the prompt 'swapped', which env.prompts"):
        evaluate_adapter(made, small())
    assert evaluate_adapter(made, folder / "population.yaml").own.mean == best["mean"]


def test_an_environment_from_python_has_prompts_which_its_record_keeps(tmp_path):
    env = DatasetEnv(
        ROWS, exact, prompt="{question}", prompts={"a": {}, "b": {"prompt": "0{question}"}}
    )
    population = two_agents("a", "b")
    with pytest.raises(ConfigError, match=r"choices: expected one of env\.prompts: none, got 'a'"):
        population.train("sums", **SHORT)
    population.train(env, **SHORT, out=tmp_path / "first")
    assert [agent.hparams.prompt for agent in agents_of(tmp_path / "first")] == ["a", "b"]

    def gym(other):
        tokenizer = population[0].cohort.base.tokenizer
        prompts = {"a": {}, "b": {"prompt": other}}
        return ReasoningGym(ROWS, ROWS[:6], tokenizer, exact, "{question}", prompts=prompts)

    population = two_agents("b", "a")
    population.train(gym("0{question}"), **SHORT, out=tmp_path / "run")
    assert [agent.hparams.prompt for agent in agents_of(tmp_path / "run")] == ["b", "a"]
    assert environment_parts(gym("0{question}"), 0) != environment_parts(gym("1{question}"), 0)
    asked, _ = sample(tmp_path / "run", ["07+01="], agent=0, n=1)
    assert asked.prompt == "007+01="


def test_a_named_prompt_is_a_system_message_or_a_template_of_its_own():
    env = EnvConfig(
        kind="dataset",
        train=[{"question": f"What is {n}?", "answer": str(n)} for n in range(20)],
        reward="two_rewards:exact",
        few_shot={"rows": [{"question": "What is 1?", "answer": "1"}], "answer": "{answer}"},
        prompts={
            "brief": "Be brief.",
            "none": {},
            "own": {"conversation": [{"role": "user", "content": "{question} Think."}]},
        },
    )

    def messages(name):
        return asking(env, 0, name).template.messages({"question": "What is 7?"})

    brief = messages("brief")
    assert brief[0] == {"role": "system", "content": "Be brief."}
    assert messages(None) == brief
    assert messages("none") == brief[1:]
    assert messages("none")[1] == {"role": "assistant", "content": "1"}
    assert messages("own")[-1]["content"] == "What is 7? Think."
    assert messages("own")[0]["content"] == "What is 1? Think."


def test_prompts_of_one_row_are_the_same_row_under_each_name():
    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny-sums").path)
    prompts = {"q": {}, "a": {"prompt": "{answer}? {question}"}}
    gym = ReasoningGym(ROWS, ROWS[:4], tokenizer, exact, "Q: {question}", prompts=prompts)
    for split in ("train", "validation", "test"):
        first = gym.prompts(split)
        other = gym.under("a", first)
        assert [one.columns for one in other] == [one.columns for one in first]
        texts = [f"{one.columns['answer']}? {one.columns['question']}" for one in other]
        assert [one.text for one in other] == texts
        assert gym.under("q", first) == first


def test_an_episode_has_no_prompts_by_name():
    env = EnvConfig(kind="python:games:make", prompts={"a": "Be brief."})
    with pytest.raises(ConfigError, match=r"env\.prompts"):
        build_multi_turn(env, 0)


def test_the_schema_takes_a_system_prompt_as_a_string():
    check = jsonschema.Draft202012Validator(json_schema()).validate
    settings = {"model": "tiny-sums", "env": {"kind": "sums", "prompts": {"a": "Be brief."}}}
    check(settings)
    space = {"prompt": {"choices": ["a"]}, "lr": {"min": 1e-4, "max": 1e-2}}
    check({**settings, "evolve": {"hyperparameters": space}})
    with pytest.raises(jsonschema.ValidationError):
        check({**settings, "evolve": {"hyperparameters": {"lr": {"max": 1e-2}}}})


# --- weights of rewards -------------------------------------------------------------------------


def test_fitness_and_the_test_measure_the_reward_that_they_name(tmp_path):
    short = {"population__rounds": 1, "env__reward_weights": [1.0, 0.5]}
    folder = run(searched(WEIGHT, **short), out=tmp_path / "run")
    first, *drawn = [agent.hparams.reward_weights["last"] for agent in agents_of(folder)]
    assert first == 0.5
    assert len({first, *drawn}) == 3
    summary = summary_of(folder)
    # Two completions per prompt, each right or wrong.
    assert all(0 <= value <= 1 for value in summary["base"]["per_prompt"])
    assert {value * 2 % 1 for value in summary["best"]["per_prompt"]} == {0.0}
    assert evaluate_adapter(folder).own.mean == summary["best"]["mean"]
    both = {**FITNESS, "reward": {"exact": 1.0, "last": 1.0}}
    more = run(searched(WEIGHT, **short, evolve__fitness=both), out=tmp_path / "both")
    assert summary_of(more)["base"]["mean"] > summary["base"]["mean"]


class Named:
    reward_names = ("exact", "last")
    weights = np.array([1.0, 1.0])


def test_a_completion_whose_fitness_reward_abstains_counts_as_one_without_a_reward():
    rewards = np.array([[1.0, 0.5], [math.nan, 0.5], [0.0, math.nan]])
    assert_array_equal(weighted(*fitness_rewards(Named, rewards, "exact")), [1, math.nan, 0])
    found = weighted(*fitness_rewards(Named, rewards, {"last": 2.0, "exact": 1.0}))
    assert_array_equal(found, [2, 1, 0])
    assert_array_equal(weighted(*fitness_rewards(Named, rewards, None)), [1.5, 0.5, 0])


def test_a_population_from_python_searches_weights(tmp_path):
    def last(completion):
        return int(completion[-1]) / 9 if completion[-1:].isdigit() else 0.0

    env = DatasetEnv(ROWS, [exact, last], prompt="{question}", reward_weights={"last": 0.25})
    population = GRPO.population(size=3, **TINY, hyperparameters={WEIGHT: RANGES[WEIGHT]})
    how = {name: value for name, value in SHORT.items() if name != "fitness"}
    with pytest.raises(
        ConfigError, match=r"evolve\.fitness\.reward: .* reward_weights\.last, .*name the"
    ):
        population.train(env, **how)
    fitness = {"reward": "exact", **SHORT["fitness"]}
    population.train(env, **how, fitness=fitness, out=tmp_path / "run")
    agent = agents_of(tmp_path / "run")[0]
    assert agent.hparams.reward_weights == {"last": 0.25}
    assert not math.isnan(agent.score.mean)


def test_an_agent_with_a_weight_is_not_trained_on_other_rewards():
    population = GRPO.population(size=2, **TINY)
    agent = population[0]
    agent.cohort.set_hparams(0, agent.hparams.with_value(WEIGHT, 0.5))
    with pytest.raises(ConfigError, match=r"reward_weights\.last of an agent: expected a reward"):
        population.train("sums", **SHORT)
