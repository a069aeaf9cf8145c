"""Ranks and alphas of adapters, `lora.r` and `lora.alpha`, of which every agent has its own."""

import json
from itertools import pairwise
from pathlib import Path

import optuna
import pytest
import tiny
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from peft import LoraConfig
from safetensors.torch import load_file
from small_run import Told, outcome, small, stopped_and_resumed

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
from evo_grpo.errors import ConfigError
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.steering import ask
from evo_grpo.settings import from_dict
from evo_grpo.training import judge
from evo_grpo.training.sizing.machine import Setup
from evo_grpo.training.sizing.model_size import lora_parameters, read_model_size

RANKS = {"lora.r": {"min": 1, "max": 16}}
EAGER = {"kind": "mutate", "no_mutation": 0, "step": "factors"}
ALONE = {
    "population__size": 1,
    "evolve__selection": "none",
    "evolve__exploration": "none",
}


def searched(**changes):
    return small(**{"evolve__hyperparameters": RANKS, "evolve__exploration": EAGER, **changes})


def digests(folder):
    return [agent.adapter_sha256 for record in read_rounds(folder) for agent in record.agents]


def saved_rank(folder, agent):
    config = json.loads((folder / agent.checkpoint / "actor/adapter_config.json").read_text())
    weights = load_file(folder / agent.checkpoint / "actor/adapter_model.safetensors")
    assert {len(value) for key, value in weights.items() if "lora_A" in key} == {config["r"]}
    return config["r"]


def test_an_agent_trains_at_its_own_rank_as_at_that_of_the_run(tmp_path):
    own = run(searched(**ALONE, population__init=[{"lora.r": 6}]), out=tmp_path / "own")
    of_run = {"evolve__hyperparameters": {}, "model__lora__r": 6}
    other = run(small(**ALONE, **of_run), out=tmp_path / "six")
    without = run(small(**ALONE, evolve__hyperparameters={}), out=tmp_path / "two")
    assert digests(own) == digests(other) != digests(without)


def test_the_first_agent_begins_with_the_rank_of_the_run_and_the_others_cover_the_range(tmp_path):
    folder = run(searched(population__rounds=1, population__size=5), out=tmp_path / "run")
    agents = read_rounds(folder)[0].agents
    first, *others = [agent.hparams.lora_r for agent in agents]
    assert first == 2
    # One in each quarter of the range by the logarithm.
    quarters = [(1, 1), (1, 3), (3, 7), (7, 16)]
    assert all(a <= r <= b for r, (a, b) in zip(sorted(others), quarters, strict=True))
    assert [saved_rank(folder, agent) for agent in agents] == [first, *others]


@pytest.mark.parametrize(
    "ranges",
    [RANKS, {"lora": {"r": {"choices": [1, 2, 8]}, "alpha": {"min": 1, "max": 64}}}],
    ids=["range", "choices and alpha"],
)
def test_a_resumed_search_ends_as_one_that_was_not_stopped(ranges, tmp_path):
    own = {"algorithm__separate_reference": True, "algorithm__beta": 0.02, "evolve__archive": True}
    choice = {**EAGER, "choice": 2.0}
    config = searched(evolve__hyperparameters=ranges, evolve__exploration=choice, **own)
    whole = run(config, out=tmp_path / "whole")
    stopped = stopped_and_resumed(config, tmp_path / "stopped", ("learn", 1))
    assert outcome(whole) == outcome(stopped)
    rounds = read_rounds(whole)
    assert any("lora.r" in m.mutation.changes for record in rounds for m in record.members)
    for agent in (agent for record in rounds for agent in record.agents):
        assert saved_rank(whole, agent) == agent.hparams.lora_r
    assert {name for name in leaderboard(whole).columns if name.startswith("lora.")} == (
        {"lora.r"} if ranges is RANKS else {"lora.r", "lora.alpha"}
    )


def test_the_round_after_a_cut_records_its_error(tmp_path):
    folder = run(searched(population__rounds=4, seed=4), out=tmp_path / "run")
    rounds = read_rounds(folder)
    cuts = 0
    for before, record in pairwise(rounds):
        had = {agent.member: agent.hparams.lora_r for agent in before.agents}
        for agent in record.agents:
            old = had.get(agent.member, had.get(agent.parent))
            is_cut = agent.hparams.lora_r < old
            cuts += is_cut
            assert ("rank_error" in agent.metrics) == is_cut
            assert not is_cut or 0 < agent.metrics["rank_error"] < 1
    assert cuts
    assert all("rank_error" not in agent.metrics for agent in rounds[0].agents)


@pytest.mark.parametrize("exploration", ["resample", "optuna", "on_copy"])
def test_every_exploration_takes_integers_in_the_range(exploration, tmp_path):
    folder = run(searched(evolve__exploration=exploration), out=tmp_path / "run")
    for record in read_rounds(folder):
        for hparams in record.next_hparams:
            assert isinstance(hparams.lora_r, int)
            assert 1 <= hparams.lora_r <= 16


def test_the_winner_is_exported_with_its_rank_and_a_mean_of_unequal_ranks_is_judged(tmp_path):
    final = {"final_samples": 2, "prompts": 6, "test_prompts": 6, "test_samples": 2}
    folder = run(searched(evolve__fitness=final), out=tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    assert "mean" in {one["kind"] for one in summary["candidates"]}
    assert evaluate_adapter(folder).own.mean == summary["best"]["mean"]
    made = export(folder, out=tmp_path / "export", anyway=True)
    assert evaluate_adapter(made, folder / "population.yaml").own.mean == summary["best"]["mean"]


@pytest.mark.slow
def test_what_reads_a_run_and_trains_beside_it_takes_ranks(tmp_path):
    folder = run(searched(seed=4), out=tmp_path / "run")
    journal = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    study = optuna.load_study(study_name=None, storage=journal)
    assert isinstance(study.trials[0].distributions["lora.r"], optuna.distributions.IntDistribution)
    assert all(isinstance(trial.params["lora.r"], int) for trial in study.trials)
    assert any("train/rank_error" in trial.user_attrs for trial in study.trials)
    assert "lora.r" in Path(write_report(folder, tmp_path / "report.html")).read_text()
    assert {arm["name"] for arm in compare(folder)["arms"]} == {"guess", "random", "evolved"}
    assert 0 <= replay(folder).training("schedule-run").test.mean <= 1


@pytest.mark.slow
def test_a_mean_of_unequal_ranks_wins_and_is_loaded_and_replayed_with_the_larger(
    tmp_path, monkeypatch
):
    def mean(candidates, scores, level):
        del scores, level
        return [one.kind for one in candidates].index("mean")

    monkeypatch.setattr(judge, "best_finalist", mean)
    final = {"final_samples": 2, "prompts": 6, "test_prompts": 6, "test_samples": 2}
    folder = run(searched(evolve__fitness=final), out=tmp_path / "run")
    best = json.loads((folder / "summary.json").read_text())["best"]
    ranks = {a.member: a.hparams.lora_r for a in read_rounds(folder)[-1].agents}
    first, second = (ranks[member] for member in best["parents"])
    config = json.loads((folder / best["checkpoint"] / "actor/adapter_config.json").read_text())
    assert config["r"] == max(first, second) > min(first, second)
    assert evaluate_adapter(folder).own.mean == best["mean"]
    assert 0 <= replay(folder).winner.mean <= 1


def test_a_rank_is_set_by_hand(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(searched(population__rounds=2), out=folder, observer=Told(("learn", 0)))
    for name, value, text in (
        ("lora.rank", 4, "did you mean 'lora.r'"),
        ("lora.r", 17, r"inside of its range \[1, 16\], got 17"),
        ("lora.r", 0, r"lora\.r: expected an integer >= 1"),
        ("lora.r", 2.5, r"lora\.r: expected an integer >= 1"),
        ("lora.alpha", 4.0, "lora.alpha: unknown key"),
    ):
        with pytest.raises(ConfigError, match=text):
            ask(folder, "set", agent=0, values={name: value})
    ask(folder, "set", agent=0, values={"lora.r": 5})
    resume(folder)
    agent = read_rounds(folder)[1].agents[0]
    assert agent.hparams.lora_r == saved_rank(folder, agent) == 5


def test_a_start_adapter_is_cut_or_grows_to_the_rank_of_each_agent(tmp_path):
    given = {"evolve__hyperparameters": {}, "population__rounds": 1, "model__lora__r": 4}
    first = run(small(**ALONE, **given), out=tmp_path / "first")
    folder = first / read_rounds(first)[0].agents[0].checkpoint / "actor"
    same = {"population__rounds": 1, "algorithm__lr": 1e-12, "model__adapter": str(folder)}
    start = [{"lora.r": 4}, {"lora.r": 9}, {"lora.r": 2}]
    own = run(searched(**same, model__lora__r=4, population__init=start), out=tmp_path / "own")
    kept, grown, cut = read_rounds(own)[0].agents
    assert "rank_error" not in kept.metrics
    assert "rank_error" not in grown.metrics
    assert 0 < cut.metrics["rank_error"] < 1
    assert kept.score.mean == grown.score.mean


def test_a_saved_population_and_agent_keep_their_ranks(tmp_path):
    population = GRPO.population(
        size=3,
        model="tiny-sums",
        device="cpu",
        lora={"r": 2, "use_rslora": True},
        hyperparameters={"lora.r": RLParameter(choices=[1, 2, 8])},
        group_size=4,
        beta=0.01,
        separate_reference=True,
    )
    fitness = {"prompts": 4, "test_prompts": 3}
    population.train(
        "sums", rounds=2, steps_per_round=1, progress=False, fitness=fitness, out=tmp_path / "run"
    )
    agent = population[1]
    agent.hparams = agent.hparams.replace(lora_r=1)
    population.cohort.freeze_reference(agent.slot)
    agent.hparams = agent.hparams.replace(lora_r=5)
    assert ranks_of(agent) == [5, 1]
    population.save(tmp_path / "saved")
    again = type(population).load(tmp_path / "saved", device="cpu")
    for one, other in zip(population, again, strict=True):
        assert one.hparams == other.hparams
        assert ranks_of(one) == ranks_of(other)
    agent.save_checkpoint(tmp_path / "agent")
    one = GRPO.load(tmp_path / "agent", device="cpu")
    assert ranks_of(one) == ranks_of(agent)
    clone = agent.clone()
    assert ranks_of(clone) == ranks_of(agent)


def ranks_of(agent):
    state, slots = agent.state, agent.cohort.slots
    return [slots.lora_config(name).r for name in (state.adapter, state.reference)]


def test_the_memory_is_planned_for_the_largest_rank():
    size = read_model_size("tiny-sums")

    def agents(config):
        plan = Setup(size, 8, "float32", "cpu").plan(config)
        return next(part.bytes for part in plan.held if part.name == "agents")

    at = [agents(small(evolve__hyperparameters={}, model__lora__r=r)) for r in (2, 16)]
    assert agents(searched()) == at[1] > at[0]
    assert lora_parameters(size, searched().largest_lora) > 0


LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
AT = "evolve.hyperparameters.lora.r"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"evolve__hyperparameters": {"lora.r": {"min": 0, "max": 4}}}, f"{AT}.min: expected an"),
        ({"evolve__hyperparameters": {"lora.r": {"min": -1, "max": 4}}}, f"{AT}.min: expected"),
        (
            {"evolve__hyperparameters": {"lora.r": {"min": 1.5, "max": 4}}},
            f"{AT}: expected integers for min and max, got 1.5 and 4",
        ),
        (
            {"evolve__hyperparameters": {"lora.r": {"choices": [2, 2.5]}}},
            f"{AT}.choices: expected integers, which values of lora.r are",
        ),
        (
            {"evolve__hyperparameters": {"lora": {"r": {"choices": [2, 4, 4]}}}},
            f"{AT}.choices: expected each choice once, got",
        ),
        (
            {"evolve__hyperparameters": {"lora.r": {"choices": [2, 0]}}},
            f"{AT}.choices: expected an integer >= 1, or null, got 0",
        ),
        (
            {"evolve__hyperparameters": {"lora.rank": {"min": 1, "max": 4}}},
            "lora.rank: nothing of that name can mutate. Did you mean 'lora.r'?",
        ),
        (
            {"evolve__hyperparameters": {"lora": {"lora_alpha": {"min": 1, "max": 4}}}},
            "lora.lora_alpha: nothing of that name can mutate. Did you mean 'lora.alpha'?",
        ),
        (
            {"model__lora": {"r": 32}},
            f"model.lora.r: expected a value inside {AT} [1, 16], got 32; move it, or widen the",
        ),
        (
            {
                "evolve__hyperparameters": {"lora.alpha": {"min": 1, "max": 2}},
                "model__lora": {"r": 4},
            },
            "model.lora.alpha: expected a value inside evolve.hyperparameters.lora.alpha [1, 2], "
            "got 8",
        ),
        (
            {"model__lora": {**LORA, "rank_pattern": {"q_proj": 4}}},
            "model.lora.rank_pattern: expected none where lora.r is searched, got {'q_proj': 4}; "
            "remove it, or evolve.hyperparameters.lora.r",
        ),
        (
            {"model__lora": {**LORA, "alpha_pattern": {"q_proj": 4.0}}},
            "model.lora.alpha_pattern: expected none where lora.r is searched",
        ),
        (
            {"engine__vllm": {"max_lora_rank": 8}},
            "engine.vllm.max_lora_rank: expected at least 16, the largest rank of an agent, got 8",
        ),
        (
            {"population__init": [{"lora.r": 2}, {"lora.r": 20}, {}]},
            "population.init[1].lora.r: expected a value inside of its range [1, 16], got 20",
        ),
    ],
)
def test_what_a_search_over_ranks_refuses(changes, text):
    with pytest.raises(ConfigError) as caught:
        searched(**changes)
    assert text in str(caught.value)


def test_a_rank_above_the_narrowest_layer_is_refused(tmp_path):
    wide = searched(evolve__hyperparameters={"lora.r": {"min": 1, "max": 4096}})
    text = (
        r"evolve\.hyperparameters\.lora\.r: expected ranks of at most \d+, the width of the narro"
    )
    with pytest.raises(ConfigError, match=text):
        run(wide, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=text.removeprefix(r"evolve\.")):
        GRPO(model=tiny.llama(), device="cpu", hyperparameters={"lora.r": {"min": 1, "max": 99}})


@pytest.mark.parametrize(
    ("lora", "text"),
    [
        (
            LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={"q_proj": 2}),
            r"lora\.rank_pattern: expected none where lora\.r is searched",
        ),
        (
            LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="orthogonal"),
            r"lora\.init_lora_weights: expected another than 'orthogonal'",
        ),
        (
            LoraConfig(r=32, target_modules=["q_proj"]),
            r"lora\.r: expected a value inside hyperparameters\.lora\.r \[1, 16\], got 32",
        ),
    ],
)
def test_what_a_search_over_ranks_refuses_of_an_object(lora, text):
    with pytest.raises(ConfigError, match=text):
        GRPO(model="tiny-sums", device="cpu", lora=lora, hyperparameters=RANKS)


def test_settings_reach_a_nested_range():
    nested = {"r": {"min": 1, "max": 16}, "alpha": {"choices": [2, 4]}}
    config = searched(evolve__hyperparameters={"lora": nested})
    assert config == from_dict(json.loads(config.model_dump_json()))
    assert set(config.search_space().names()) == {"lora.r", "lora.alpha"}
    # As --set evolve.hyperparameters.lora.r.max=12 does over a file with the other form.
    both = searched(evolve__hyperparameters={**RANKS, "lora": {"r": {"max": 12}}})
    assert (both.search_space()["lora.r"].min, both.search_space()["lora.r"].max) == (1, 12)
