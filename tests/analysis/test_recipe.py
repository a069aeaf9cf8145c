"""The file that `evo-grpo recipe` writes: the line of a winner as the settings of another run."""

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import HP_CONFIG, make_run
from shown_run import run_folder
from small_run import edited, small
from typer.testing import CliRunner

from evo_grpo import recipe, run
from evo_grpo import settings as configuration
from evo_grpo.analysis.recipe import recipe_settings
from evo_grpo.cli.commands import app
from evo_grpo.errors import ConfigError, RunFailedError
from evo_grpo.evolve.explore.schedule import ScheduleExploration
from evo_grpo.evolve.protocols import Candidate
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.replay import Schedule, ScheduledRound, read_schedule, winner_schedule
from evo_grpo.schema.hparams import Hparams
from evo_grpo.schema.search_space import outside
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
            hparams = explorer.explore(Candidate(hparams, round=number), space, rng)
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
    found = recipe_settings(config(), schedule, rounds, STEPS, model=None)
    own = [one.hparams for one in schedule.rounds]
    trained = trained_with(found)
    for number, hparams in enumerate(trained):
        assert hparams == own[number * len(own) // rounds]
        assert not list(outside(hparams, found.search_space()))


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
    found = recipe_settings(own, schedule, 2, STEPS, model=None)
    assert found.search_space()["lora.target_modules"].choices == ("mlp", "q")
    assert found.evolve.exploration.rounds == [{"round": 2, "lora.target_modules": "q"}]


def test_one_agent_takes_the_prompts_of_the_winner_in_its_last_round():
    schedule = line(Hparams(lr=1e-3), Hparams(lr=1e-3), rows=256)
    found = recipe_settings(config(archive=True), schedule, 2, STEPS, model=None)
    assert not found.evolve.archive  # a return to an earlier round would leave the schedule
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
    found = recipe_settings(searched, schedule, 2, STEPS, model=None)
    assert found.model.lora.rank_alpha == (4, 6.0)  # the scale stays
    assert found.algorithm.loss_type == "dapo"
    assert list(found.env.prompts) == ["terse"]
    assert found.search_space().names() == ["lora.r"]
    assert found.evolve.exploration == ScheduleExploration(rounds=[{"round": 2, "lora.r": 6}])


def test_a_rank_that_changes_leaves_an_alpha_that_was_searched():
    ranges = {"lora.r": {"choices": [4, 8, 16]}, "lora.alpha": {"min": 4, "max": 64}}
    own = config(hyperparameters=ranges)
    steps = [Hparams(lr=1e-3, lora_r=r, lora_alpha=16.0) for r in (4, 8, 16)]
    found = recipe_settings(own, line(*steps), 3, STEPS, model=None)
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
    found = recipe_settings(searched, line(one, one), 2, 4, model=None)
    assert found.env.reward_weights == {"other": 0.5, "digits": 0.25}


def test_a_schedule_of_lr_and_limits_follow_the_new_length_and_model():
    own = config()
    own = own.replace(
        algorithm=own.algorithm.replace(lr_schedule={"steps": 20}),
        engine=own.engine.replace(max_decode_rows=64, shards=4, overlap=True),
        model=own.model.replace(trust_remote_code=True),
    )
    schedule = line(Hparams(lr=1e-3), Hparams(lr=1e-3))
    found = recipe_settings(own, schedule, 10, 8, model="other")
    assert found.algorithm.lr_schedule.steps == 80
    assert (found.engine.max_decode_rows, found.engine.shards) == (None, 4)
    assert (found.model.name, found.model.trust_remote_code) == ("other", False)


def test_what_the_winner_found_is_a_setting_of_the_recipe():
    searched = from_dict(
        {
            "model": {"name": "tiny-sums", "lora": {"target_sets": {"q": ["q_proj"], "mlp": MLP}}},
            "env": "sums",
            "population": {"size": 4, "rounds": 2, "steps_per_round": STEPS},
            "algorithm": {"lr": 1e-3, "beta": 0.1, "lr_schedule": {"steps": 8}},
            "evolve": {
                "hyperparameters": {
                    "lr": {"min": 1e-4, "max": 1e-2},
                    "adv_norm": {"choices": ["mean_std", "mean_only"]},
                    "adam_beta2": {"min": 0.9, "max": 0.999},
                    "max_output_tokens": {"min": 2, "max": 8},
                    "lora.target_modules": {"choices": ["q", "mlp"]},
                }
            },
        }
    )
    first = Hparams(
        lr=1e-3,
        beta=0.1,
        adv_norm="mean_only",
        adam_beta2=0.95,
        max_output_tokens=6,
        lora_target_modules="mlp",
    )
    schedule = line(first, first.replace(lr=2e-3))
    found = recipe_settings(searched, schedule, 2, STEPS, model=None)
    algorithm = found.algorithm
    assert (algorithm.adv_norm, algorithm.adam_beta2) == ("mean_only", 0.95)
    assert algorithm.max_output_tokens == 6
    assert found.model.lora.target_modules == MLP
    assert list(found.evolve.hyperparameters) == ["lr"]
    assert from_written(to_yaml(found), "recipe") == found


@pytest.fixture
def folder(tmp_path):
    return run_folder(tmp_path / "one")


def test_a_run_of_the_recipe_trains_with_the_schedule_of_the_winner(tmp_path):
    ran = run(small(), out=tmp_path / "run", progress=False)
    written = recipe(ran, tmp_path / "recipe.yaml")
    again = run(written, out=tmp_path / "again", progress=False)
    own = [one.hparams for one in read_schedule(ran).rounds]
    assert [record.agents[0].hparams for record in read_rounds(again)] == own
    assert all(len(record.agents) == 1 for record in read_rounds(again))


def test_the_file_begins_with_where_its_values_come_from(folder, tmp_path):
    written = recipe(folder, tmp_path / "recipe.yaml", rounds=6)
    comments, _, text = written.read_text().partition("\n\n")
    assert all(line.startswith("#") for line in comments.splitlines())
    assert f"the winner of {folder}: member 2 over tiny-sums" in comments
    assert "scored 0.807 on the test prompts, the base 0.331" in comments
    found = yaml.safe_load(text)
    length = {"size": 1, "rounds": 6, "steps_per_round": 4}
    assert found["population"] | length == found["population"]
    (lr,) = found["evolve"]["hyperparameters"].values()
    assert (lr["min"], lr["max"]) == (0.001, 0.0012)
    entries = [{"round": 4, "lr": 0.0012}]
    assert found["evolve"]["exploration"] == {"kind": "schedule", "rounds": entries}
    again = configuration.load(written)
    assert configuration.from_dict(yaml.safe_load(configuration.to_yaml(again))) == again


def test_a_file_that_exists_is_replaced_with_force_only(folder, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"already exists.*--force"):
        recipe(folder, file)
    with pytest.raises(RunFailedError, match="cannot be written"):
        recipe(folder, tmp_path, force=True)
    assert file.read_text() == "mine"
    assert configuration.load(recipe(folder, file, force=True)).population.size == 1


def test_a_model_name_from_a_stranger_adds_no_line_to_the_file(folder, tmp_path):
    edited(folder, model__name="a/b\nengine: {device: mps}\n#")
    found = yaml.safe_load(recipe(folder, tmp_path / "recipe.yaml").read_text())
    assert found["engine"]["device"] == "auto"


def test_the_command_writes_a_file_that_the_next_command_reads(folder, tmp_path):
    file = tmp_path / "longer.yaml"
    given = ["recipe", str(folder), "-o", str(file), "--rounds", "3", "--steps", "2"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert f"wrote {file}; next: evo-grpo check {file}" in result.stdout
    found = configuration.load(file).population
    assert (found.size, found.rounds, found.steps_per_round) == (1, 3, 2)
