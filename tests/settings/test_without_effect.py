"""Settings that do nothing beside the others: each row of the table is true, to the bit."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_cohort import build_cohort, build_model, learn, make_rows, moments, weights

from evo_grpo import GRPO, HyperparameterConfig, RLParameter, agilerl, run
from evo_grpo.errors import RunDirError
from evo_grpo.learn.objective.losses import LossConfig, token_terms
from evo_grpo.schema.hparams import AgentFields
from evo_grpo.settings import WithoutEffect, from_dict, warnings
from evo_grpo.settings.keywords import agent_settings
from evo_grpo.settings.without_effect import KnownSettings, algorithm_rows, without_effect

ONE_STEP = {"update_epochs": 1, "batch_size": None}
SHAPED = {"kl_shaping": True, "beta": 0.3}
# A setting, a value that is not its default, and the settings beside it.
DEAD = [
    *[("clip_coef", 0.01, {"loss_type": kind}) for kind in ("sapo", "vespo")],
    ("clip_coef", 0.01, ONE_STEP),
    ("clip_coef", 0.01, {"loss_type": "cispo", **ONE_STEP}),
    ("importance_sampling_level", "sequence", {"loss_type": "vespo"}),
    ("importance_sampling_level", "sequence", {"loss_type": "vespo", "beta": 0.3}),
    (
        *("importance_sampling_level", "sequence"),
        {"loss_type": "vespo", "kl_bias_correction": True, **SHAPED},
    ),
    *[("delta", 1.001, {"loss_type": kind}) for kind in ("cispo", "sapo", "vespo")],
    ("delta", 1.3, ONE_STEP),
    ("sapo_temperature_pos", 2.0, {}),
    ("sapo_temperature_neg", 2.0, {"loss_type": "vespo"}),
    ("vespo_positive", (1.0, 1.0), {}),
    ("vespo_negative", (1.0, 1.0), {"loss_type": "sapo"}),
    ("kl_bias_correction", True, {}),
    ("kl_bias_correction", True, SHAPED),
    ("kl_shaping", True, {}),
    ("separate_reference", True, {}),
    ("adv_filter_eps", 0.5, {}),
    ("overlong_penalty", 0.5, {}),
    ("dynamic_sampling_tokens", 31, {"max_output_tokens": 4, "group_size": 8}),
    ("sampler_correction", "token_truncate", {}),
    ("sampler_ratio_cap", 1.0001, {}),
]
# The same settings where they act; those after them act on other things than one learn call.
ACTS = [
    *[("clip_coef", 0.01, {"loss_type": kind}) for kind in ("grpo", "cispo")],
    ("clip_coef", (0.5, 0.9), ONE_STEP),
    ("importance_sampling_level", "sequence", {}),
    (
        *("importance_sampling_level", "sequence"),
        {"loss_type": "vespo", "beta": 0.3, "kl_bias_correction": True},
    ),
    ("delta", 1.011, {"clip_coef": 0.01}),
    ("sapo_temperature_pos", 2.0, {"loss_type": "sapo"}),
    ("sapo_temperature_neg", 2.0, {"loss_type": "sapo"}),
    ("vespo_positive", (1.0, 1.0), {"loss_type": "vespo"}),
    ("vespo_negative", (1.0, 1.0), {"loss_type": "vespo"}),
    ("kl_bias_correction", True, {"beta": 0.3}),
    ("kl_shaping", True, {"beta": 0.3}),
    ("adv_filter_eps", 0.5, {"filter_zero_adv": True}),
    ("sampler_correction", "token_truncate", {"rollout": "vllm"}),
    ("sampler_ratio_cap", 1.0001, {"rollout": "vllm"}),
]


def settings_of(given):
    return agent_settings(
        {"lr": 2e-2, "batch_size": 4, "hyperparameters": {}, **given}, kind="grpo"
    )


def seen(given, **more):
    settings = settings_of(given)
    return KnownSettings(
        settings.algorithm,
        settings.search_space(),
        settings.engine,
        [settings.algorithm.hparams()],
        **{"prompts": 2, **more},
    )


def found(given, **more):
    return {finding.path: str(finding) for finding in without_effect(seen(given, **more))}


def rows_with_a_sampler():
    rng = np.random.default_rng(0)
    return [
        replace(row, sampler_logprobs=rng.normal(-3, 0.3, row.generated).astype(np.float32))
        for row in make_rows(5)
    ]


LEARNED = {}
"""What was learned with the same settings before: the tables name some beside several others."""


def learned(given):
    """Weights and moments after a learn call of several updates."""
    key = json.dumps(given, sort_keys=True)
    if key not in LEARNED:
        LEARNED[key] = learned_anew(given)
    return LEARNED[key]


def learned_anew(given):
    own = dict(given)
    exact = own.pop("rollout", "native") == "native"
    hparams = settings_of(own).algorithm.hparams()
    given = {name: value for name, value in own.items() if name not in AgentFields.model_fields}
    cohort = build_cohort(1, hparams, **given)
    learn(cohort, [0], [rows_with_a_sampler()], exact_sampler=exact)
    return [*weights(cohort, 0), *moments(cohort, 0).values()]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value", "beside"), DEAD)
def test_what_is_warned_of_changes_no_bit(name, value, beside):
    assert name not in found(beside)  # nobody set it
    assert found({**beside, name: value})[name].startswith(f"{name} ")
    assert equal(learned(beside), learned({**beside, name: value}))


@pytest.mark.parametrize(("name", "value", "beside"), ACTS)
def test_what_acts_is_not_warned_of(name, value, beside):
    assert name not in found({**beside, name: value})
    assert not equal(learned(beside), learned({**beside, name: value}))


def test_every_setting_of_the_table_is_proven_dead_and_alive():
    table = {name for name, *_ in algorithm_rows(seen({}))}
    assert table <= {name for name, *_ in DEAD}
    # The frozen reference of an agent that never moved it is the base, to the bit.
    # These act before a learn call: see tests/population/test_steps.py and test_rollouts.py.
    outside = {"separate_reference", "overlong_penalty", "dynamic_sampling_tokens"}
    assert table - outside <= {name for name, *_ in ACTS}
    assert "overlong_penalty" not in found({"overlong_penalty": 0.5, "overlong_buffer": 2})
    enough = {"dynamic_sampling_tokens": 32, "max_output_tokens": 4, "group_size": 8}
    assert "dynamic_sampling_tokens" not in found(enough)
    assert "separate_reference" not in found({"separate_reference": True, "beta": 0.1})


def test_a_delta_below_the_upper_clip_bound_does_what_its_warning_says():
    text = found({"delta": 1.1})["delta"]
    assert text.startswith("delta 1.1 lies below the upper clip bound 1.2: positive advantages are")
    assert "delta" not in found({"delta": 1.25})
    for advantage, same in ((1.0, {"clip_coef": (0.8, 1.1)}), (-1.0, {"delta": 1.2})):
        ends = []
        for config in (LossConfig(delta=1.1), LossConfig(**same)):
            lp = torch.linspace(-1, 1, 41, dtype=torch.float64).requires_grad_()
            terms = token_terms(
                lp[:, None],
                torch.zeros(41, 1, dtype=torch.float64),
                torch.ones(41, 1),
                torch.full((41,), advantage, dtype=torch.float64),
                config=config,
            )
            ends.append((terms.loss.detach(), torch.autograd.grad(terms.loss.sum(), lp)[0]))
        torch.testing.assert_close(ends[0], ends[1], atol=1e-12, rtol=0)


RUN = {"model": "tiny-sums", "env": "sums"}


@pytest.mark.slow
def test_without_copies_it_makes_no_difference_whether_moments_are_inherited():
    ends = []
    for inherit in (True, False):
        population = GRPO.population(size=2, model="tiny-sums", lora={"r": 2}, group_size=2)
        call = {"rounds": 2, "steps_per_round": 1, "fitness": {"prompts": 2}, "progress": False}
        call |= {"selection": "none", "archive": False, "inherit_optimizer": inherit}
        if inherit:
            population.train("sums", **call)
        else:
            with pytest.warns(WithoutEffect, match=r"^evolve.inherit_optimizer has no effect: sel"):
                population.train("sums", **call)
        ends.append([w for slot in (0, 1) for w in weights(population.cohort, slot)])
    assert equal(*ends)


def test_python_warns_as_check_does(tmp_path):
    given = {"delta": 2.0, "loss_type": "sapo"}
    (text,) = warnings(from_dict({**RUN, "algorithm": given}))
    assert text.startswith("delta has no effect with loss_type sapo")
    with pytest.warns(WithoutEffect) as caught:
        GRPO(model=build_model(), **given)
    assert [str(w.message) for w in caught] == [text]
    with pytest.warns(WithoutEffect) as caught:
        GRPO.population(size=1, model=build_model(), **given)
    assert [str(w.message) for w in caught] == [text]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "rounds.jsonl").write_text("{}\n")
    with pytest.warns(WithoutEffect) as caught, pytest.raises(RunDirError):
        run({**RUN, "algorithm": given}, out=tmp_path / "taken", progress=False)
    assert [str(w.message) for w in caught] == [text]


def test_what_was_said_with_the_agents_is_not_said_again():
    with pytest.warns(WithoutEffect):
        population = GRPO.population(
            size=2, model="tiny-sums", lora={"r": 2}, group_size=2, delta=2.0, loss_type="cispo"
        )
    population.train(  # a warning would be an error
        "sums", rounds=1, steps_per_round=1, fitness={"prompts": 2}, progress=False
    )


def test_the_older_interface_warns_by_its_own_names():
    ranges = HyperparameterConfig(clip_coef=RLParameter(min=0.1, max=0.3))
    with pytest.warns(WithoutEffect, match=r"^hp_config.clip_coef: cannot act: with loss_type sap"):
        agilerl.GRPO(actor_network=build_model(), loss_type="sapo", hp_config=ranges)
    with pytest.warns(WithoutEffect, match=r"^clip_coef: cannot act: with loss_type vespo"):
        agilerl.GRPO(actor_network=build_model(), loss_type="vespo", clip_coef=0.3)
    # Its default keeps a reference, which nobody asked for.
    agilerl.GRPO(actor_network=build_model(), beta=0.0)


@pytest.mark.parametrize("beside", [{}, {"max_rows_per_microbatch": 1, "batch_size": None}])
def test_bnpo_is_dapo(beside):
    """The docs say that they are one; with TRL's micro-batches they would not be."""
    assert equal(*(learned({"loss_type": kind, **beside}) for kind in ("bnpo", "dapo")))
    assert not equal(*(learned({"loss_type": kind, **beside}) for kind in ("bnpo", "grpo")))


# The settings of a run, and the beginning of each of its warnings; "none" if there is none. Of 8
# agents 2 are left, which share the rows of all: 4 prompts, 8 completions, 8 / 2.
RANGE = "evolve.hyperparameters={clip_coef: {min: 0.1, max: 0.3}}"
CLIP = f"{RANGE} && algorithm.update_epochs=1"
ENDS = "evolve.hyperparameters={clip_low: {min: 0.7, max: 0.9}, clip_high: {min: 1.1, max: 1.4}}"
GREEDY = "evolve.fitness.temperature=0"
START = "evolve.hyperparameters={lr: {min: 1e-4, max: 1e-2, start: [1e-3, 2e-3]}}"
TWO = "population.size=2 && population.init=[{}, {%s}]"
OF_A_RUN = f"""
seed=0
    none
evolve.hyperparameters={{}}
    evolve.hyperparameters is empty
evolve.hyperparameters={{}} && {TWO % "lr: 5e-3"}
    none
{CLIP}
    none
{CLIP} && population.sizes=constant
    hyperparameters.clip_coef cannot act
{CLIP} && algorithm.batch_size=128
    hyperparameters.clip_coef cannot act
{CLIP} && algorithm.batch_size=127
    none
{CLIP} && algorithm.batch_size=32 && population.sizes=constant
    hyperparameters.clip_coef cannot act
{CLIP} && algorithm.update_epochs=2
    none
{CLIP} && evolve.hyperparameters.update_epochs={{min: 1, max: 2}}
    none
evolve.selection=none && evolve.exploration={{kind: mutate, copies_only: true}}
    evolve.exploration mutate has no effect: it changes only copies
evolve.selection=none && evolve.exploration=on_copy
    evolve.exploration on_copy has no effect: it changes only copies
evolve.selection=none && evolve.exploration=resample
    evolve.exploration resample has no effect: it changes only copies
evolve.selection=none && evolve.exploration=optuna
    evolve.exploration optuna has no effect: it changes only copies
evolve.selection=none && evolve.exploration=none
    none
evolve.selection=halving && evolve.exploration=on_copy
    evolve.exploration on_copy has no effect: it changes only copies
evolve.selection=truncation && evolve.exploration=on_copy
    none
{START} && population.init=same
    hyperparameters.lr.start has no effect
{START} && {TWO % "lr: 2e-3"}
    hyperparameters.lr.start has no effect
{START} && population.init=sample
    none
{RANGE}
    none
{RANGE} && algorithm.loss_type=sapo
    hyperparameters.clip_coef cannot act: with loss_type sapo, which does not clip
{RANGE} && algorithm.loss_type=cispo
    none
{ENDS} && algorithm.loss_type=cispo
    hyperparameters.clip_low cannot act: with loss_type cispo
{ENDS} && algorithm.loss_type=vespo
    hyperparameters.clip_low cannot act && hyperparameters.clip_high cannot act
{ENDS} && algorithm.delta=1.15
    none
{ENDS} && algorithm.delta=1.05
    delta 1.05 lies below the upper clip bound 1.1
algorithm.kl_shaping=true
    kl_shaping has no effect
algorithm.kl_shaping=true && evolve.hyperparameters={{beta: {{min: 0.0, max: 0.1}}}}
    none
algorithm.kl_bias_correction=true && {TWO % "beta: 0.1"}
    none
algorithm.separate_reference=true
    separate_reference has no effect
algorithm.separate_reference=true && evolve.exploration={{kind: 'mine:Explorer'}}
    none
evolve.inherit_optimizer=false && evolve.selection=none
    evolve.inherit_optimizer has no effect
evolve.inherit_optimizer=false && evolve.selection=none && evolve.archive=true
    none
evolve.inherit_optimizer=false && evolve.selection=halving
    evolve.inherit_optimizer has no effect
evolve.inherit_optimizer=false
    none
{GREEDY}
    none
{GREEDY} && evolve.fitness.samples=3
    evolve.fitness.samples has no effect with evolve.fitness.temperature 0
{GREEDY} && evolve.fitness.test_samples=3
    evolve.fitness.test_samples has no effect
{GREEDY} && evolve.fitness.final_samples=3
    evolve.fitness.final_samples has no effect
{GREEDY} && evolve.fitness.racing=3
    evolve.fitness.racing has no effect
algorithm.batch_size=128
    none
algorithm.batch_size=129
    batch_size has no effect: it is 129, and a step of an agent has at most 128 rows
algorithm.batch_size=33 && population.sizes=constant
    batch_size has no effect: it is 33, and a step of an agent has at most 32 rows
algorithm.batch_size=256 && evolve.hyperparameters={{group_size: {{min: 4, max: 16}}}}
    none
engine.base=sharded && engine.quantization=int8
    engine.quantization: expected null on more than one process with engine.base: sharded
engine.zero=3 && engine.quantization=int8
    engine.quantization: expected null on more than one process with engine.zero: 3
"""
LINES = OF_A_RUN.strip().split("\n")


@pytest.mark.parametrize(
    ("overrides", "text"), [*zip(LINES[::2], map(str.strip, LINES[1::2]), strict=True)]
)
def test_a_run_is_warned_of_what_has_no_effect_and_of_nothing_else(overrides, text):
    texts = [] if text == "none" else text.split(" && ")
    warned = warnings(from_dict(RUN, overrides.split(" && ")))
    assert len(warned) == len(texts)
    assert all(one.startswith(begin) for one, begin in zip(warned, texts, strict=True))
