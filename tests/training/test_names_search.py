"""KL shaping, decay rates of AdamW, longest completions and warm-ups, each agent at its own."""

import json
import math

import optuna
import pandas as pd
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from small_run import Told, outcome, small, stopped_and_resumed

from evo_grpo import (
    GRPO,
    RLParameter,
    evaluate_adapter,
    export,
    leaderboard,
    replay,
    resume,
    run,
    write_report,
)
from evo_grpo.errors import ConfigError
from evo_grpo.readers.trackers.base import of_agent, values_of
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.log import RoundDone
from evo_grpo.record.steering import ask
from evo_grpo.schema.hparams import Hparams

SHAPING, WARMUP = "kl_shaping", "lr_schedule.warmup_proportion"
SEARCHED = {
    SHAPING: {"choices": [True, False]},
    "adam_beta1": {"min": 0.5, "max": 0.98},
    "adam_beta2": {"min": 0.9, "max": 0.9995},
    "max_output_tokens": {"min": 2, "max": 4},
    "lr_schedule": {"warmup_proportion": {"min": 0.01, "max": 0.6}},
}
#: What cuts answers off earns no rewards; the entropy bonus has a gradient without them.
CUT = {"algorithm__entropy_coef": 0.1}
NAMES = {*SEARCHED, WARMUP} - {"lr_schedule"}
GIVEN = {"algorithm__beta": 0.5, "algorithm__lr_schedule": {"steps": 3}}
ALONE = {"population__size": 1, "evolve__selection": "none", "evolve__exploration": "none"}
STILL = {"evolve__selection": "none", "evolve__exploration": "none"}


def searched(**changes):
    eager = {"kind": "mutate", "no_mutation": 0, "choice": 0.4}
    own = {"evolve__hyperparameters": SEARCHED, "evolve__exploration": eager}
    return small(**{**own, **GIVEN, **changes})


def digests(folder, slot=0):
    return [record.agents[slot].adapter_sha256 for record in read_rounds(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(searched(population__size=4), out=tmp_path_factory.mktemp("names") / "run")


@pytest.mark.parametrize(
    ("name", "value", "of_run", "given"),
    [
        (SHAPING, True, {"algorithm__kl_shaping": True}, {}),
        ("max_output_tokens", 2, {"algorithm__max_output_tokens": 2}, CUT),
        (
            "max_output_tokens",
            2,
            {"algorithm__max_output_tokens": 2},
            {**CUT, "algorithm__loss_type": "dr_grpo"},
        ),
        (WARMUP, 0.6, {"algorithm__lr_schedule": {"steps": 3, "warmup_proportion": 0.6}}, {}),
    ],
    ids=["kl_shaping", "max_output_tokens", "max_output_tokens of dr_grpo", "warm-up"],
)
@pytest.mark.filterwarnings("ignore:.*had nothing to learn from")
def test_an_agent_trains_with_its_own_value_as_with_that_of_the_run(
    name, value, of_run, given, tmp_path
):
    short = {"population__rounds": 1, "population__steps_per_round": 2}
    given = {**ALONE, **GIVEN, **given, **short}
    own = small(**given, evolve__hyperparameters=SEARCHED, population__init=[{name: value}])
    other = small(**{**given, "evolve__hyperparameters": {}, **of_run})
    plain = small(**given, evolve__hyperparameters={})
    found = [digests(run(one, out=tmp_path / str(n))) for n, one in enumerate((own, other, plain))]
    assert found[0] == found[1] != found[2]


@pytest.mark.filterwarnings("ignore:.*had nothing to learn from")
def test_agents_of_one_batch_with_other_limits_learn_as_beside_their_like(tmp_path):
    given = {**STILL, **GIVEN, **CUT, "population__size": 2, "population__rounds": 1}
    given |= {"population__steps_per_round": 2, "evolve__hyperparameters": SEARCHED}

    def scores(limits, out):
        start = [{"max_output_tokens": limit} for limit in limits]
        (record,) = read_rounds(run(small(**given, population__init=start), out=out))
        return [(agent.score, agent.tokens) for agent in record.agents]

    mixed = scores([2, 4], tmp_path / "mixed")
    assert mixed[0] == scores([2, 2], tmp_path / "2")[0]
    assert mixed[1] == scores([4, 4], tmp_path / "4")[1]


def test_every_name_is_drawn_recorded_and_shown_and_all_but_the_warm_up_mutate(whole, tmp_path):
    rounds = read_rounds(whole)
    first, *others = rounds[0].agents
    assert first.hparams.named().items() >= {
        (SHAPING, False), ("adam_beta1", 0.9), ("max_output_tokens", 4), (WARMUP, 0.05),
    }  # fmt: skip
    assert [agent.hparams.kl_shaping for agent in (first, *others)].count(True) == 2
    # One in each third of the range of 1 - beta2, by its logarithm.
    low, high = math.log(0.0005), math.log(0.1)
    thirds = [3 * (math.log(1 - a.hparams.adam_beta2) - low) / (high - low) for a in others]
    assert sorted(map(math.floor, thirds)) == [0, 1, 2]
    members = [member for record in rounds for member in record.members]
    moved = {name for member in members for name in member.mutation.changes}
    assert moved
    assert moved <= NAMES - {WARMUP}
    begun = {agent.hparams.warmup_proportion for agent in rounds[0].agents}
    assert {agent.hparams.warmup_proportion for agent in rounds[-1].agents} <= begun
    last = rounds[-1]
    texts = values_of(RoundDone(1, last)).texts
    for agent in last.agents:  # trackers draw numbers, so a choice is told in words
        assert texts[of_agent(agent.agent)].endswith(f"; kl_shaping {agent.hparams.kl_shaping}")
    table = leaderboard(whole)
    assert set(table.columns) >= NAMES
    assert str(table[SHAPING].dtype) == "boolean"
    assert set(pd.read_csv(whole / "leaderboard.csv")[SHAPING]) <= {True, False}
    page = (write_report(whole, tmp_path / "report.html")).read_text()
    assert all(name in page for name in NAMES)
    storage = JournalStorage(JournalFileBackend(str(whole / "journal.log")))
    trial = optuna.load_study(study_name=None, storage=storage).trials[0]
    assert trial.params.keys() >= NAMES
    assert set(trial.distributions[SHAPING].choices) == {True, False}
    assert isinstance(
        trial.distributions["max_output_tokens"], optuna.distributions.IntDistribution
    )


def test_a_resumed_search_ends_as_one_that_was_not_stopped(whole, tmp_path):
    config = searched(population__size=4)
    stopped = stopped_and_resumed(config, tmp_path / "stopped", ("learn", 1))
    assert outcome(whole) == outcome(stopped)


@pytest.mark.parametrize("exploration", ["resample", {"kind": "optuna"}])
def test_other_explorations_draw_them_too(exploration, tmp_path):
    folder = run(searched(evolve__exploration=exploration), out=tmp_path / "run")
    rounds = read_rounds(folder)
    begun = {agent.hparams.warmup_proportion for agent in rounds[0].agents}
    for hparams in (hparams for record in rounds for hparams in record.next_hparams):
        assert 0.9 <= hparams.adam_beta2 <= 0.9995
        assert isinstance(hparams.kl_shaping, bool)
        assert hparams.max_output_tokens in (2, 3, 4)
        assert hparams.warmup_proportion in begun


@pytest.mark.filterwarnings("ignore:.*had nothing to learn from")
def test_an_agent_answers_up_to_its_own_limit_in_a_run_after_it_and_from_its_export(tmp_path):
    lengths = {"evolve__hyperparameters": {"max_output_tokens": {"choices": [1, 4]}}}
    start = {"population__init": [{"max_output_tokens": n} for n in (1, 1, 1)]}
    config = small(**STILL, **lengths, **start, population__rounds=1)
    folder = run(config, out=tmp_path / "run")
    (record,) = read_rounds(folder)
    assert {agent.tokens for agent in record.agents} == {8}  # of 2 prompts of 4 completions
    assert record.evaluation_tokens == 18  # of 3 agents on 6 prompts
    best = json.loads((folder / "summary.json").read_text())["best"]
    assert evaluate_adapter(folder).own.mean == best["mean"]
    place = export(folder, tmp_path / "export", anyway=True)
    assert json.loads((place / "export.json").read_text())["max_output_tokens"] == 1
    assert "max_new_tokens=1," in (place / "README.md").read_text()
    assert evaluate_adapter(place, config).own.mean == best["mean"]


def test_they_are_set_by_hand_and_replayed(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(searched(population__rounds=2), out=folder, observer=Told(("learn", 0)))
    for name, value, text in (
        (SHAPING, 1, "kl_shaping: expected true or false"),
        ("adam_beta2", 1.0, r"adam_beta2: expected a number in \[0, 1\), got 1.0; 0.999 is usual"),
        ("adam_beta2", 0.5, r"inside of its range \[0.9, 0.9995\], got 0.5"),
        ("max_output_tokens", 5, r"inside of its range \[2, 4\], got 5"),
        ("warmup", 0.1, "warmup: unknown key"),
    ):
        with pytest.raises(ConfigError, match=text):
            ask(folder, "set", agent=0, values={name: value})
    values = {SHAPING: True, "adam_beta2": 0.99, "max_output_tokens": 3, WARMUP: 0.5}
    ask(folder, "set", agent=0, values=values)
    resume(folder)
    agent = read_rounds(folder)[1].agents[0]
    assert agent.hparams.named().items() >= values.items()
    assert 0 <= replay(folder, repeats=1).winner.mean <= 1


def test_python_searches_true_and_false_and_sets_the_decay_rates(tmp_path):
    ranges = {
        SHAPING: RLParameter(choices=[True, False]),
        "adam_beta2": RLParameter(min=0.9, max=0.999),
    }
    population = GRPO.population(
        size=2, model="tiny-sums", device="cpu", group_size=4, beta=0.1, adam_beta1=0.8,
        hyperparameters=ranges,
    )  # fmt: skip
    fitness = {"prompts": 4, "test_prompts": 3}
    population.train("sums", rounds=1, steps_per_round=1, progress=False, fitness=fitness)
    assert sorted(agent.hparams.kl_shaping for agent in population) == [False, True]
    (group,) = population[0].state.optimizer.param_groups
    assert group["betas"] == (0.8, population[0].hparams.adam_beta2)


AT = "evolve.hyperparameters"


@pytest.mark.parametrize(
    ("ranges", "changes", "text"),
    [
        ({SHAPING: {"min": 0, "max": 1}}, {}, f"{AT}.{SHAPING}: expected choices"),
        ({SHAPING: {"choices": [0, 1]}}, {}, "expected true and false, which values of kl_shaping"),
        ({SHAPING: {"choices": ["true"]}}, {}, "expected true and false, which values of"),
        ({SHAPING: {"choices": [True, True]}}, {}, "each choice once, got"),
        ({SHAPING: True}, {}, f"{AT}.{SHAPING}: expected {{choices: [true, false]}}, got true"),
        ({"group_size": {"choices": [True, 4]}}, {}, "expected names alone, numbers alone, or"),
        ({"group_size": {"choices": [True]}}, {}, "expected integers, which values of group_size"),
        ({"adam_beta2": {"min": 0.9, "max": 1}}, {}, "adam_beta2.max: expected a number in [0, 1)"),
        ({}, {"algorithm__adam_beta1": -0.1}, "adam_beta1: expected a number in [0, 1), got"),
        ({}, {"algorithm__adam_beta2": 0.9999999}, "a number from 0 to 0.999999, which float32"),
        ({"max_output_tokens": {"min": 0, "max": 4}}, {}, f"{AT}.max_output_tokens.min: expected"),
        (
            {"max_output_tokens": {"min": 2, "max": 4}},
            {"algorithm__min_output_tokens": 3},
            "algorithm.min_output_tokens: expected at most the least max_output_tokens (2), got 3",
        ),
        (
            {"max_output_tokens": {"min": 2, "max": 40}},
            {"algorithm__max_model_len": 32},
            f"{AT}.max_output_tokens: expected less than max_model_len (32)",
        ),
        (
            {WARMUP: {"min": 0.1, "max": 0.4}},
            {},
            f"algorithm.lr_schedule: expected a schedule where {AT}.{WARMUP} is searched",
        ),
        (
            {WARMUP: {"min": 0.1, "max": 0.4}},
            {"algorithm__lr_schedule": {"steps": 9}},
            f"algorithm.{WARMUP}: expected a value inside {AT}.{WARMUP} [0.1, 0.4], got 0.05",
        ),
        ({"quantization": {"choices": ["int8"]}}, {}, "nothing of that name can mutate"),
    ],
)  # fmt: skip
def test_wrong_input_is_named_before_anything_trains(ranges, changes, text):
    with pytest.raises(ConfigError) as raised:
        small(
            **{"evolve__hyperparameters": ranges or {"lr": {"min": 1e-4, "max": 1e-2}}, **changes}
        )
    assert text in str(raised.value)


def test_shaping_that_is_searched_without_a_kl_is_said_to_have_no_effect(tmp_path):
    alone = {SHAPING: {"choices": [True, False]}}
    with pytest.warns(match=r"hyperparameters\.kl_shaping has no effect with beta 0"):
        run(small(**ALONE, evolve__hyperparameters=alone, population__rounds=1), out=tmp_path / "r")


def test_a_loss_and_a_ratio_level_that_contradict_each_other_cannot_be_set():
    choices = {"loss_type": RLParameter(choices=["grpo", "dapo"])}
    level = {"importance_sampling_level": "token"}
    agent = GRPO(model="tiny-sums", device="cpu", hyperparameters=choices, **level)
    with pytest.raises(ConfigError, match="expected 'sequence' with loss_type='gspo', got 'token'"):
        agent.hparams = agent.hparams.replace(loss_type="gspo")
    assert agent.hparams.loss_type == "grpo"


def test_a_rank_above_the_narrowest_layer_is_refused_in_settings_and_by_hand():
    text = r"lora\.r: expected ranks of at most \d+, the width of the narrowest layer"
    with pytest.raises(ConfigError, match=text):
        GRPO(model="tiny-sums", device="cpu", lora={"r": 4096})
    agent = GRPO(model="tiny-sums", device="cpu", hyperparameters={"lora.r": {"min": 1, "max": 8}})
    with pytest.raises(ConfigError, match=text):
        agent.hparams = agent.hparams.replace(lora_r=4096)


class Foreign:
    """Proposes a rank above the width of every layer."""

    def explore(self, candidate, hp_config, rng):
        """Return the candidate at rank 4096."""
        old = candidate.hparams
        if candidate.elite:
            return old, {}
        return old.replace(lora_r=4096), {"lora.r": (old.lora_r, 4096)}


def test_an_exploration_that_returns_what_no_agent_can_have_ends_the_run_before_its_record(
    tmp_path,
):
    config = {
        "model": "tiny-sums",
        "device": "cpu",
        "hyperparameters": {"lora.r": {"min": 1, "max": 8}},
    }
    population = GRPO.population(size=2, group_size=4, **config)
    fitness = {"prompts": 4, "test_prompts": 3}
    how = {"rounds": 2, "steps_per_round": 1, "progress": False, "fitness": fitness}
    with pytest.raises(ConfigError, match=r"lora\.r: expected ranks of at most"):
        population.train("sums", exploration=Foreign(), **how, out=tmp_path / "run")
    assert not read_rounds(tmp_path / "run")


def test_a_request_before_the_first_round_knows_the_rank_of_the_adapter(tmp_path):
    given = {"evolve__hyperparameters": {}, "population__rounds": 1, "model__lora__r": 4}
    first = run(small(**ALONE, **given), out=tmp_path / "first")
    actor = first / read_rounds(first)[0].agents[0].checkpoint / "actor"
    folder = tmp_path / "run"
    config = small(evolve__hyperparameters={"lora.r": {"min": 1, "max": 8}}, model={
        "name": "tiny-sums", "adapter": str(actor)
    })  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        run(config, out=folder, observer=Told(("learn", 0)))
    with pytest.raises(ConfigError, match=r"expected a change, got its present values: lora\.r 4"):
        ask(folder, "set", agent=0, values={"lora.r": 4})


def test_a_decay_rate_moves_by_its_distance_from_one():
    range_ = RLParameter(min=0.9, max=0.9995, dtype="float")
    from evo_grpo.evolve.explore.step import step

    after, changes = step(Hparams(adam_beta2=0.99), "adam_beta2", range_, 0.99)
    assert after.adam_beta2 == pytest.approx(1 - 0.01 * 0.8)
    assert changes == {"adam_beta2": (0.99, after.adam_beta2)}
