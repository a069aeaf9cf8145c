"""The constructor's arguments that say what a cohort's agents share: to options and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from evo_grpo.cohort.cohort import Cohort
from evo_grpo.cohort.settings import AgentSettings
from evo_grpo.cohort.state import DEFAULT_OUTPUT_TOKENS, CohortOptions
from evo_grpo.learner.options import LearnOptions, Shaping
from evo_grpo.objective.advantages import ADV_NORM_TO_SCALE
from evo_grpo.objective.losses import LossConfig

#: Each agent's hyperparameters stand in for these.
_PER_AGENT = ("clip_coef", "beta")


def to_options(settings: AgentSettings) -> CohortOptions:
    """Return what a constructor's arguments tell a cohort; `to_arguments` is the way back."""
    memory, output, loss = settings.memory, settings.output, settings.loss
    loss_type: Any = loss.loss_type
    return CohortOptions(
        learn=LearnOptions(
            loss=LossConfig(
                loss_type=loss_type,
                max_completion_length=output.max_output_tokens or DEFAULT_OUTPUT_TOKENS,
            ),
            max_rows=1 if memory.reduce_memory_peak else memory.micro_batch_size_per_gpu,
            gradient_checkpointing=memory.gradient_checkpointing,
            shaping=Shaping(
                filter_zero=loss.filter_zero_adv,
                filter_eps=loss.adv_filter_eps,
                whiten=loss.whiten_advantages,
                use_kl=loss.use_kl_advantage_shaping,
                clip_range=loss.adv_clip_range,
            ),
        ),
        adv_scale=ADV_NORM_TO_SCALE[loss.adv_norm],
        max_output_tokens=output.max_output_tokens,
        min_output_tokens=output.min_output_tokens or 0,
        max_model_len=output.max_model_len,
        separate_reference=settings.adapters.use_separate_reference_adapter,
        max_decode_prompts=output.hf_generate_chunk_size,
        lr_schedule=settings.evolution.cosine_lr_schedule_config,
    )


def to_arguments(options: CohortOptions) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that say the same as a cohort's options.

    Args:
        options: Those of any cohort, also of one that a run built without a constructor.

    Returns:
        The arguments by name, and the paths of options that no argument can bring back.
    """
    learn, shaping = options.learn, options.learn.shaping
    norms = {scale: norm for norm, scale in ADV_NORM_TO_SCALE.items()}
    arguments = {
        "loss_type": learn.loss.loss_type,
        "micro_batch_size_per_gpu": learn.max_rows,
        "gradient_checkpointing": learn.gradient_checkpointing,
        "filter_zero_adv": shaping.filter_zero,
        "adv_filter_eps": shaping.filter_eps,
        "whiten_advantages": shaping.whiten,
        "use_kl_advantage_shaping": shaping.use_kl,
        "adv_clip_range": shaping.clip_range,
        # "batch" has no name among the arguments.
        "adv_norm": norms.get(options.adv_scale, "mean_std"),
        "max_output_tokens": options.max_output_tokens,
        "min_output_tokens": options.min_output_tokens,
        "max_model_len": options.max_model_len,
        "use_separate_reference_adapter": options.separate_reference,
        "hf_generate_chunk_size": options.max_decode_prompts,
        "cosine_lr_schedule_config": options.lr_schedule,
    }
    # The way there and back shows what is lost, also of options that are added later.
    back = _flat(asdict(to_options(AgentSettings.from_arguments(arguments))))
    lost = [path for path, value in _flat(asdict(options)).items() if value != back[path]]
    mine = [f"learn.loss.{name}" for name in _PER_AGENT]
    return arguments, [path for path in lost if path not in mine]


def cohort_arguments(cohort: Cohort) -> tuple[dict[str, Any], list[str]]:
    """Return `to_arguments` of a cohort, with what else it knows of its constructor's arguments."""
    arguments, lost = to_arguments(cohort.options)
    return {**arguments, "seed": cohort.seed, "hp_config": cohort.hp_config or None}, lost


def _flat(options: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return {"learn.loss.beta": 0.0, ...} of nested mappings; a schedule stays whole."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping) and name != "lr_schedule":
            flat.update(_flat(value, f"{above}{name}."))
        else:
            flat[above + name] = value
    return flat
