"""From a constructor's arguments to a cohort without agents."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer

from evo_grpo.cohort.arguments import by_name
from evo_grpo.cohort.cohort import Cohort
from evo_grpo.cohort.options import to_options
from evo_grpo.cohort.settings import AgentSettings
from evo_grpo.errors import ConfigError, EngineUnavailable
from evo_grpo.model.base import SharedBase
from evo_grpo.model.loading import pick_device
from evo_grpo.objective.advantages import ADV_NORM_TO_SCALE
from evo_grpo.schema.search_space import outside


def read_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, default_loss: str
) -> AgentSettings:
    """Name, check and sort a constructor's arguments; see `by_name` and `AgentSettings`."""
    arguments = by_name(args, kwargs)
    arguments.setdefault("loss_type", default_loss)
    return AgentSettings.from_arguments(arguments)


def refuse_outside_ranges(settings: AgentSettings) -> None:
    """Refuse a value that an agent begins with outside of the range in which it may mutate.

    Raises:
        ConfigError: There is one.
    """
    hp_config = settings.evolution.hp_config
    if hp_config is None:
        return
    for name, value, low, high in outside(settings.hparams, hp_config):
        raise ConfigError(
            f"{name}: expected a value inside its range of hp_config, [{low:g}, {high:g}], got "
            f"{value:g}; move it, or widen the range"
        )


def build_cohort(settings: AgentSettings) -> Cohort:
    """Build the base and the parts that agents share; no agent yet.

    Raises:
        ConfigError: When the model is named twice or not at all, or arguments contradict.
        EngineUnavailable: For engines that are not available yet.
    """
    refuse_what_cannot_act(settings)
    lora = settings.adapters.lora_config or LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    base = _base(settings)
    hp_config = settings.evolution.hp_config
    options, seed = to_options(settings), settings.model.seed
    cohort = Cohort(base, lora, options, hp_config=hp_config, seed=seed)
    if settings.memory.torch_compiler is not None:
        base.compile(settings.memory.torch_compiler)
    return cohort


def _base(settings: AgentSettings) -> SharedBase:
    model = settings.model
    if (model.actor_network is None) == (model.model_name is None):
        raise ConfigError(
            "model: expected exactly one of model_name= and actor_network=, got "
            f"model_name={model.model_name!r} and "
            f"actor_network={type(model.actor_network).__name__}"
        )
    if model.actor_network is None:
        name, device = str(model.model_name), model.device
        extra = dict(model.model_config or {})
        base = SharedBase.load(name, device=device, tokenizer=model.tokenizer, **extra)
    else:
        network = model.actor_network
        if any(isinstance(module, BaseTunerLayer) for module in network.modules()):
            raise ConfigError(
                "actor_network: it already carries adapters, of another agent or of its own; make "
                "several agents over one model with GRPO.population(size=...) or agent.clone(); "
                "load weights into an agent with agent.load_checkpoint(folder)"
            )
        base = SharedBase(network.to(pick_device(model.device)), model.tokenizer)
    if model.pad_token_id is not None:
        _warn_of_other_padding(base, model.pad_token_id, model.pad_token)
        base.set_padding(model.pad_token_id, model.pad_token)
    return base


def _warn_of_other_padding(base: SharedBase, pad_id: int, pad_token: str | None) -> None:
    if pad_token is None or base.tokenizer is None or pad_id >= base.vocabulary:
        return
    own = base.tokenizer.convert_ids_to_tokens(pad_id)
    if own != pad_token:
        warnings.warn(
            f"pad_token: expected the text of token {pad_id}, {own!r}, got {pad_token!r}; the id "
            "is what is written into padding",
            UserWarning,
            stacklevel=6,
        )


def refuse_what_cannot_act(settings: AgentSettings) -> None:
    """Say what an argument cannot do here: an error where it would mislead, else a warning."""
    runtime, memory, loss = settings.runtime, settings.memory, settings.loss
    if runtime.use_vllm:
        raise EngineUnavailable(
            "use_vllm=True: this version generates with its own engine, which serves all agents in "
            "one call; leave use_vllm out"
        )
    if runtime.accelerator is not None:
        raise EngineUnavailable(
            "accelerator: training over several processes is not available in this version; leave "
            "it out and pass device="
        )
    if runtime.vllm_config is not None:
        raise ConfigError("vllm_config: has no effect without use_vllm=True; leave it out")
    if loss.adv_norm not in ADV_NORM_TO_SCALE:
        raise ConfigError(
            f"adv_norm: expected one of {sorted(ADV_NORM_TO_SCALE)}, got {loss.adv_norm!r}"
        )
    if settings.model.model_config is not None and settings.model.model_name is None:
        raise ConfigError("model_config: only acts with model_name=; configure the model itself")
    _refuse_lengths(settings)
    hp_config = settings.evolution.hp_config
    may_mutate = hp_config is not None and "beta" in hp_config.names()
    no_kl = settings.hparams.beta == 0 and not may_mutate
    model = settings.model
    mute = {
        "adv_filter_eps": loss.adv_filter_eps != 0 and not loss.filter_zero_adv,
        "use_kl_advantage_shaping": loss.use_kl_advantage_shaping and no_kl,
        "pad_token": model.pad_token is not None and model.pad_token_id is None,
        "micro_batch_size_per_gpu": memory.reduce_memory_peak
        and memory.micro_batch_size_per_gpu not in (None, 1),
        "use_memory_efficient_params": not memory.use_memory_efficient_params,
        "cast_logprobs_to_fp32": not memory.cast_logprobs_to_fp32,
        "calc_position_embeddings": not memory.calc_position_embeddings,
        "use_liger_loss": memory.use_liger_loss,
        "wrap": not runtime.wrap,
        "clone": runtime.clone,
    }
    for name, silent in mute.items():
        if silent:
            warnings.warn(f"{name}: {_MUTE[name]}", UserWarning, stacklevel=5)


def _refuse_lengths(settings: AgentSettings) -> None:
    output = settings.output
    longest, context = output.max_output_tokens, output.max_model_len
    shortest = output.min_output_tokens or 0
    if longest is not None and shortest > longest:
        raise ConfigError(
            f"min_output_tokens: expected at most max_output_tokens ({longest}), got {shortest}; "
            "lower it"
        )
    if longest is not None and context is not None and longest >= context:
        text = (
            f"max_output_tokens: expected less than max_model_len ({context}), so that a prompt "
            f"fits too, got {longest}; raise max_model_len"
        )
        if "max_model_len" in settings.given:
            raise ConfigError(text)
        # Scripts of the reference API leave the default of 1024 in place: completions are cut.
        warnings.warn(text, UserWarning, stacklevel=6)


_MUTE = {
    "adv_filter_eps": "has no effect without filter_zero_adv=True",
    "use_kl_advantage_shaping": "has no effect with beta=0.0, which computes no KL; give a beta",
    "pad_token": "has no effect without pad_token_id; give the id of that token too",
    "micro_batch_size_per_gpu": "has no effect with reduce_memory_peak=True, which takes one row "
    "at a time; leave one of them out",
    "use_memory_efficient_params": "False has no effect: the base exists once and stays in place",
    "cast_logprobs_to_fp32": "False has no effect: log-probs are always computed in float32",
    "calc_position_embeddings": "False has no effect: positions always come from real lengths",
    "use_liger_loss": "falls back to the chunked log-probs built in, which hold no (B, T, V) "
    "tensor either; Liger's kernels serve one adapter at a time",
    "wrap": "False has no effect: nothing is wrapped without an accelerator",
    "clone": "has no effect in the constructor; use agent.clone()",
}
