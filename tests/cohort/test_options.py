"""Arguments become options and come back as the same arguments; what cannot is named."""

from dataclasses import replace

import pytest
from evo_grpo.cohort.options import cohort_arguments, to_arguments, to_options
from evo_grpo.cohort.settings import AgentSettings
from tiny_cohort import build_cohort

from evo_grpo import CosineLRScheduleConfig
from evo_grpo.cohort.state import CohortOptions
from evo_grpo.learner.options import LearnOptions
from evo_grpo.objective.losses import LossConfig

#: Every argument that options know, at another value than its default.
OTHERS = {
    "loss_type": "dr_grpo",
    "micro_batch_size_per_gpu": 3,
    "gradient_checkpointing": False,
    "filter_zero_adv": True,
    "adv_filter_eps": 0.25,
    "whiten_advantages": True,
    "use_kl_advantage_shaping": True,
    "adv_clip_range": 2.0,
    "adv_norm": "mean_only",
    "max_output_tokens": 4,
    "min_output_tokens": 2,
    "max_model_len": 48,
    "use_separate_reference_adapter": False,
    "hf_generate_chunk_size": 5,
    "cosine_lr_schedule_config": CosineLRScheduleConfig(8, 0.5),
}


def options_of(**arguments):
    return to_options(AgentSettings.from_arguments(arguments))


@pytest.mark.parametrize("name", [None, *OTHERS])
def test_there_and_back(name):
    given = {} if name is None else {name: OTHERS[name]}
    options = options_of(**given)
    assert (name is None) == (options == options_of())
    arguments, lost = to_arguments(options)
    assert lost == []
    assert options_of(**arguments) == options
    assert {n: arguments[n] for n in given} == given


def test_all_at_once():
    assert to_arguments(options_of(**OTHERS)) == (OTHERS, [])


def test_the_older_spelling_of_one_row_comes_back_in_the_newer():
    arguments, lost = to_arguments(options_of(reduce_memory_peak=True))
    assert (arguments["micro_batch_size_per_gpu"], lost) == (1, [])


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("learn.token_budget", CohortOptions(LearnOptions(token_budget=64))),
        ("learn.loss.delta", CohortOptions(LearnOptions(LossConfig(delta=4.0)))),
        ("adv_scale", CohortOptions(adv_scale="batch")),
        ("weight_decay", CohortOptions(weight_decay=0.1)),
        ("max_decode_rows", CohortOptions(max_decode_rows=7)),
    ],
)
def test_what_no_argument_says_is_named(path, options):
    loss = replace(options.learn.loss, max_completion_length=32)
    _, lost = to_arguments(replace(options, learn=replace(options.learn, loss=loss)))
    assert lost == [path]


def test_a_length_of_the_loss_alone_is_named():
    loss = LossConfig("dr_grpo", max_completion_length=5)
    assert to_arguments(CohortOptions(LearnOptions(loss)))[1] == [
        "learn.loss.max_completion_length"
    ]


def test_each_agents_own_clip_and_beta_are_not_missed():
    loss = LossConfig(clip_coef=0.3, beta=0.5, max_completion_length=32)
    assert to_arguments(CohortOptions(LearnOptions(loss)))[1] == []


def test_a_cohort_knows_its_seed_and_mutations_too():
    cohort = build_cohort(seed=11, max_model_len=40)
    arguments, lost = cohort_arguments(cohort)
    assert (arguments["seed"], arguments["hp_config"], arguments["max_model_len"]) == (11, None, 40)
    assert lost == ["learn.loss.max_completion_length"]
