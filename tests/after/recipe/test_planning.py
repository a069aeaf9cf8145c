"""The line of a winner as the settings of another run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import HP_CONFIG, make_run

from evo_grpo.after.recipe.planning import Size, recipe_settings
from evo_grpo.evolve.explore.protocol import Candidate
from evo_grpo.evolve.explore.schedule import ScheduleExploration
from evo_grpo.record.schedule import Schedule, ScheduledRound, winner_schedule
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.outside import outside
from evo_grpo.settings import from_dict
from evo_grpo.settings.yaml import from_written, to_yaml

STEPS = 4
MLP = ["up_proj", "down_proj"]


def config(**evolve):
    return from_dict(
        {
            "model": {"name": "tiny-sums", "lora": {"r": 8, "alpha": 12.0}},
            "env": "sums",
            "population": {"size": 4, "rounds": 5, "steps_per_round": STEPS},
            "algorithm": {"lr": 1e-3, "prompts_per_step": 6},
            "evolve": {"hyperparameters": HP_CONFIG.parameters, **evolve},
        }
    )


def line(*hparams, rows=256):
    rounds = tuple(ScheduledRound(i, 0, one, rows, 0, 4 * rows) for i, one in enumerate(hparams))
    names = ("lr",)
    return Schedule("last", 0, "checkpoints/best", STEPS, names, rounds, 4 * rows, 0)


def trained_with(found):
    """The hyperparameters of the only agent in each round of a run."""
    space = found.search_space()
    hparams = found.algorithm.first_hparams(space, found.model.lora.rank_alpha)
    values = []
    for number in range(found.population.rounds):
        if number:
            explorer, rng = found.evolve.exploration, np.random.default_rng(0)
            hparams, _ = explorer.explore(Candidate(hparams, round=number), space, rng)
        values.append(hparams)
    return values


@settings(max_examples=40)
@given(seed=st.integers(0, 500), rounds=st.integers(1, 12))
def test_one_agent_trains_with_the_values_of_the_line_at_the_same_share(seed, rounds):
    records = make_run(4, 5, seed)
    for record in records:
        for agent in record.agents:
            agent.metrics["rows"] = 64.0
    winner = {"kind": "last", "member": records[-1].agents[0].member, "checkpoint": "c"}
    schedule = winner_schedule(records, winner, STEPS)
    found = recipe_settings(config(), schedule, Size(1, rounds, STEPS), model=None)
    own = [one.hparams for one in schedule.rounds]
    trained = trained_with(found)
    for number, hparams in enumerate(trained):
        assert hparams == own[number * len(own) // rounds]
        assert not list(outside(hparams, found.search_space()))


def test_a_population_searches_a_factor_of_three_around_the_line():
    schedule = line(Hparams(lr=1e-3, group_size=8), Hparams(lr=2e-3, group_size=8))
    found = recipe_settings(config(), schedule, Size(3, 6, 5), model=None)
    space = found.search_space()
    assert (space["lr"].min, space["lr"].max) == (pytest.approx(3.333e-4), 6e-3)
    assert (space["group_size"].min, space["group_size"].max) == (3, 16)  # 16 was the maximum
    assert "beta" not in space.names()  # 0 in every round
    assert (found.algorithm.lr, found.algorithm.prompts_per_step) == (1e-3, 8)
    assert (found.population.size, found.population.rounds) == (3, 6)
    assert found.evolve.selection.kind == "tournament"


def test_a_schedule_that_changes_the_layers_keeps_their_names():
    own = config()
    lora = own.model.lora.replace(
        target_modules="all-linear", target_sets={"q": ["q_proj"], "mlp": MLP}
    )
    choices = {"lora.target_modules": {"choices": ["q", "mlp"]}}
    own = own.replace(
        model=own.model.replace(lora=lora), evolve=own.evolve.replace(hyperparameters=choices)
    )
    first = Hparams(lr=1e-3, lora_target_modules="mlp")
    schedule = line(first, first.replace(lora_target_modules="q"))
    found = recipe_settings(own, schedule, Size(1, 2, STEPS), model=None)
    assert found.search_space()["lora.target_modules"].choices == ("mlp", "q")
    assert found.evolve.exploration.rounds == [{"round": 2, "lora.target_modules": "q"}]


def test_one_agent_does_not_go_back_to_an_earlier_round_which_would_leave_the_schedule():
    schedule = line(Hparams(lr=1e-3), Hparams(lr=2e-3))
    own = config(archive=True)
    alone = recipe_settings(own, schedule, Size(1, 2, STEPS), model=None)
    assert not alone.evolve.archive
    several = recipe_settings(own, schedule, Size(4, 2, STEPS), model=None)
    assert several.evolve.archive


def test_one_agent_takes_the_prompts_of_the_winner_in_its_last_round():
    schedule = line(Hparams(lr=1e-3), Hparams(lr=1e-3), rows=256)
    found = recipe_settings(config(), schedule, Size(1, 2, STEPS), model=None)
    assert found.algorithm.prompts_per_step == 256 // STEPS // 8
    assert found.evolve.exploration.kind == "none"
    assert not found.search_space()


def test_a_rank_and_a_prompt_that_were_found_are_settings_of_the_recipe():
    searched = from_dict(
        {
            "model": {"name": "tiny-sums", "lora": {"r": 8, "alpha": 12.0}},
            "env": {"kind": "sums", "prompts": {"plain": {}, "terse": {"prompt": "{question}"}}},
            "evolve": {
                "hyperparameters": {
                    "lr": {"min": 1e-4, "max": 1e-2},
                    "lora.r": {"min": 2, "max": 16},
                    "loss_type": {"choices": ["grpo", "dapo"]},
                    "prompt": {"choices": ["plain", "terse"]},
                }
            },
        }
    )
    one = Hparams(lr=1e-3, lora_r=4, loss_type="dapo", prompt="terse")
    schedule = line(one, one.replace(lora_r=6))
    found = recipe_settings(searched, schedule, Size(1, 2, STEPS), model=None)
    assert found.model.lora.rank_alpha == (4, 6.0)  # the scale stays
    assert found.algorithm.loss_type == "dapo"
    assert list(found.env.prompts) == ["terse"]
    assert found.search_space().names() == ["lora.r"]
    assert found.evolve.exploration == ScheduleExploration(rounds=[{"round": 2, "lora.r": 6}])


def test_a_rank_that_changes_leaves_an_alpha_that_was_searched():
    ranges = {"lora.r": {"choices": [4, 8, 16]}, "lora.alpha": {"min": 4, "max": 64}}
    own = config(hyperparameters=ranges)
    steps = [Hparams(lr=1e-3, lora_r=r, lora_alpha=16.0) for r in (4, 8, 16)]
    found = recipe_settings(own, line(*steps), Size(1, 3, STEPS), model=None)
    adapters = [(one.lora_r, one.lora_alpha) for one in trained_with(found)]
    assert adapters == [(4, 16), (8, 16), (16, 16)]


def test_weights_of_rewards_that_were_found_replace_those_of_the_run():
    searched = from_dict(
        {
            "model": "tiny-sums",
            "env": {"kind": "sums", "reward_weights": {"other": 0.5, "digits": 1.0}},
            "evolve": {
                "hyperparameters": {"reward_weights.digits": {"min": 0.1, "max": 2.0}},
                "fitness": {"reward": "other"},
            },
        }
    )
    one = Hparams(lr=1e-3, reward_weights={"digits": 0.25})
    found = recipe_settings(searched, line(one, one), Size(1, 2, 4), model=None)
    assert found.env.reward_weights == {"other": 0.5, "digits": 0.25}


def test_a_schedule_of_lr_and_limits_follow_the_new_length_and_model():
    own = config()
    own = own.replace(
        algorithm=own.algorithm.replace(lr_schedule={"steps": 20}),
        engine=own.engine.replace(max_decode_rows=64, shards=4, overlap=True),
        model=own.model.replace(trust_remote_code=True),
    )
    schedule = line(Hparams(lr=1e-3), Hparams(lr=1e-3))
    found = recipe_settings(own, schedule, Size(1, 10, 8), model="other")
    assert found.algorithm.lr_schedule.steps == 80
    assert (found.engine.max_decode_rows, found.engine.shards) == (None, 4)
    assert (found.model.name, found.model.trust_remote_code) == ("other", False)


def test_what_the_winner_found_is_a_setting_of_the_recipe():
    run = from_dict(
        {
            "model": {"name": "tiny-sums", "lora": {"target_sets": {"q": ["q_proj"], "mlp": MLP}}},
            "env": "sums",
            "population": {"size": 4, "rounds": 2, "steps_per_round": STEPS},
            "algorithm": {"lr": 1e-3, "beta": 0.1, "lr_schedule": {"steps": 8}},
            "evolve": {
                "hyperparameters": {
                    "lr": {"min": 1e-4, "max": 1e-2},
                    "kl_shaping": {"choices": [True, False]},
                    "adam_beta2": {"min": 0.9, "max": 0.999},
                    "max_output_tokens": {"min": 2, "max": 8},
                    "lr_schedule.warmup_proportion": {"min": 0.01, "max": 0.5},
                    "lora.target_modules": {"choices": ["q", "mlp"]},
                }
            },
        }
    )
    first = Hparams(
        lr=1e-3,
        beta=0.1,
        kl_shaping=True,
        adam_beta2=0.95,
        max_output_tokens=6,
        warmup_proportion=0.25,
        lora_target_modules="mlp",
    )
    schedule = line(first, first.replace(lr=2e-3))
    found = recipe_settings(run, schedule, Size(1, 2, STEPS), model=None)
    algorithm = found.algorithm
    assert (algorithm.kl_shaping, algorithm.adam_beta2, algorithm.max_output_tokens) == (
        True,
        0.95,
        6,
    )
    assert algorithm.lr_schedule.warmup_proportion == 0.25
    assert found.model.lora.target_modules == MLP
    assert list(found.evolve.hyperparameters) == ["lr"]
    around = recipe_settings(run, schedule, Size(4, 2, STEPS), model=None)
    beta2 = around.evolve.hyperparameters["adam_beta2"]
    assert (beta2.min, beta2.max) == pytest.approx((0.9, 1 - 0.05 / 3), rel=1e-4)
    for one in (found, around):
        assert from_written(to_yaml(one), "recipe") == one
