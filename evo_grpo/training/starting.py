"""The start of a run's agents: the adapter they start from, and checks of their base and settings.

Rollouts follow the settings of a run and not the model's generation_config, because agents should
sample from the policy in their loss. Most options of generation_config have no counterpart in the
loss. For example, a suppressed token still has a probability under the policy, so the ratio would
assume another distribution than the one that was sampled.
"""

import hashlib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors.torch import save
from torch import Tensor

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.model.base import SharedBase
from evo_grpo.model.digest import base_digest, tokenizer_digest
from evo_grpo.model.llama.departures import can_join_layers, departures_of
from evo_grpo.model.llama.weights import is_llama_family
from evo_grpo.model.lora import configs
from evo_grpo.model.lora.adapter_files import WEIGHTS, AdapterCopy, read_adapter
from evo_grpo.model.lora.load import fit_slot, plan_copy
from evo_grpo.places import find
from evo_grpo.population.checkpoints.read import refuse_foreign_files
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.population.ranks.team import Team
from evo_grpo.rollout.native.ability import mixes_lengths
from evo_grpo.schema.validation import shown
from evo_grpo.settings import LoraSettings, ModelConfig
from evo_grpo.settings.algorithm import AlgorithmConfig
from evo_grpo.settings.model import pattern_problems, searched
from evo_grpo.training.sizing.model_size import ModelSize, adapted_layers, rank_in
from evo_grpo.types import Slot

_SEARCHED = ("r", "alpha", "target_modules")


def lora_config(lora: LoraSettings) -> LoraConfig:
    """Convert the settings of an adapter into a LoraConfig of PEFT."""
    alpha = lora.alpha if lora.alpha is not None else 2 * lora.r
    return LoraConfig(
        r=lora.r,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType] -- PEFT types it as int and takes floats
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules,
        use_rslora=lora.use_rslora,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        task_type="CAUSAL_LM",
    )


def read_start(model: ModelConfig) -> AdapterCopy | None:
    """Read the adapter that agents start from; None if they start from the base.

    Raises ConfigError unless the adapter is plain LoRA with finite weights and, if `model.lora` is
    set, matches it.
    """
    if model.adapter is None:
        return None
    folder = find(model.adapter)
    refuse_foreign_files(folder)
    adapter = AdapterCopy(read_adapter(folder), configs.read_config(folder))
    try:
        configs.check_lora_config(adapter.config, remedy=configs.MERGE)
    except ConfigError as error:
        raise ConfigError(f"model.adapter {model.adapter}: {error}") from error
    for key, tensor in adapter.state.items():
        # Floats of 8 bits have no isfinite; they are refused by their dtype.
        if tensor.dtype.itemsize > 1 and not tensor.isfinite().all():
            raise ConfigError(
                f"model.adapter {model.adapter}: expected finite numbers, got NaN or infinity in "
                f"{key} of {folder / WEIGHTS}; give one that was saved before its training diverged"
            )
    if model.lora.is_default:
        return adapter
    for field, theirs, ours in configs.differences(adapter.config, lora_config(model.lora)):
        if not configs.only_names_modules(field):
            raise ConfigError(
                f"model.lora: expected {field} {theirs!r} of model.adapter {model.adapter}, got "
                f"{ours!r}; leave model.lora out to take the adapter's own settings"
            )
    return adapter


def with_adapter(model: ModelConfig, base: ModelSize, searched: Collection[str]) -> ModelConfig:
    """Return model settings whose `lora` is read from `adapter` and checked against the base.

    `searched` has the names of the hyperparameters that may change; those of LoRA keep the values
    in `model.lora`.
    """
    start = read_start(model)
    if start is None:
        return model
    config, lora = start.config, model.lora
    names = {configs.module_of(key) for key in start.state if ".lora_" in key}
    named = config.target_modules if config.layers_to_transform is None else None
    of_adapter = LoraSettings(
        r=config.r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=_plain(named or names),
        exclude_modules=_plain(config.exclude_modules),
        target_sets=lora.target_sets,
        use_rslora=config.use_rslora,
        rank_pattern=config.rank_pattern or {},
        alpha_pattern=config.alpha_pattern or {},
    )
    _check_tensors(start.state, base, of_adapter, model)
    # An adapter takes the rank, the alpha and the layers of its agent where these are searched.
    updates = {name: getattr(lora, name) for name in _SEARCHED if f"lora.{name}" in searched}
    of_adapter = of_adapter.model_copy(update=updates)
    return model.model_copy(update={"lora": of_adapter})


def _plain(modules: str | Iterable[str] | None) -> Any:  # noqa: ANN401 -- as `LoraSettings` takes it
    return modules if modules is None or isinstance(modules, str) else sorted(modules)


def _check_tensors(
    state: Mapping[str, Tensor], base: ModelSize, lora: LoraSettings, model: ModelConfig
) -> None:
    """Refuse an adapter whose tensors are not exactly A and B of the layers that `lora` names."""
    if not base.linears:
        return
    layers = adapted_layers(base, lora)
    if not model.lora.is_default and adapted_layers(base, model.lora).keys() != layers.keys():
        raise ConfigError(
            f"model.lora: expected the layers of model.adapter {model.adapter}, got "
            f"target_modules {model.lora.target_modules!r}; leave model.lora out to take the "
            "adapter's own settings"
        )
    shapes = {
        f"base_model.model.{name}.lora_{part}.weight": shape
        for name, (inputs, outputs) in layers.items()
        for part, shape in (
            ("A", (rank_in(name, lora), inputs)),
            ("B", (outputs, rank_in(name, lora))),
        )
    }
    for key in sorted({*shapes, *state}):
        tensor = state.get(key)
        got = "none" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
        if (
            tensor is None
            or tuple(tensor.shape) != shapes.get(key)
            or not tensor.is_floating_point()
            or tensor.dtype.itemsize < 2
        ):
            raise ConfigError(
                f"model.adapter {model.adapter}: expected A and B of the linear layers of "
                f"{base.name} that its adapter_config.json names, the head left out: as {key} "
                f"{shapes.get(key, 'none')} of 16 bits or more, got {got}; give an adapter of this "
                f"base, or {configs.MERGE}"
            )


#: Options of generation_config by the value, beside None, with which they do nothing. `generate`
#: takes the prompt for the encoder's input, also of a model that has no encoder.
_OPTIONS: Mapping[int | None, tuple[str, ...]] = {
    None: (
        *("sequence_bias", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
        *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
        *("watermarking_config", "constraints", "force_words_ids", "dola_layers", "top_h"),
        "stop_strings",
    ),
    0: (
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"),
        *("penalty_alpha", "min_length", "min_new_tokens"),
    ),
    1: (
        *("guidance_scale", "encoder_repetition_penalty", "num_beams", "typical_p"),
        "repetition_penalty",
    ),
}


def check_adapters(cohort: Cohort) -> None:
    """Check that the base allows adapters of every searched rank, alpha and set of layers."""
    space, lora = cohort.hp_config, cohort.slots.config
    if not searched(space):
        return
    problems = list(pattern_problems(space, lora, ("hyperparameters",)))
    if "lora.r" in space.names() and lora.init_lora_weights == "orthogonal":
        text = "expected another than 'orthogonal' where lora.r is searched, since PEFT draws it "
        problems.append(("init_lora_weights", f"{text}for even ranks only; leave it out"))
    for name, text in problems:
        raise ConfigError(f"lora.{name}: {text}")
    cohort.slots.target_sets.check()
    for name in cohort.settings.lora.searched_sets(space):
        cohort.slots.target_sets.modules(name)


def start_with(cohort: Cohort, slots: Sequence[Slot], start: AdapterCopy) -> None:
    """Copy the start adapter into actors and references, so that the KL term is relative to it."""
    states = [cohort.agents[slot] for slot in slots if cohort.is_local(slot)]
    names = [s.adapter for s in states] + [s.reference for s in states if s.has_reference]
    for name in names:
        fit_slot(cohort.slots, name, cohort.slots.config)
    if not cohort.settings.algorithm.separate_reference:
        names.append(cohort.references.add_start())  # all agents share this reference
    model = cohort.settings.model
    folder = None if model is None else model.adapter
    try:
        plans = [plan_copy(cohort.slots, n, start, Path(folder or "of the model")) for n in names]
    except CheckpointError as error:
        why = str(error).removeprefix("checkpoint ")
        source, remedy = "model.adapter", f"give an adapter of this base, or {configs.MERGE}"
        if folder is None:
            source, remedy = "the adapter", "or leave lora out to take the adapter's own"
        raise ConfigError(f"{source} {why}; {remedy}") from error
    for note in plans[0].notes:
        warnings.warn(note, UserWarning, stacklevel=4)
    for plan in plans:
        plan.apply()
    for state in states:
        state.optimizer = cohort.fresh_optimizer(state.slot, state.hparams)
        cohort.set_hparams(state.slot, state.hparams)  # its own rank, to which the adapter is cut


def check_same_base(team: Team, base: SharedBase, start: AdapterCopy | None) -> None:
    """Raise an error if bases or start adapters differ among ranks; all ranks call this."""
    if team.size == 1:
        return
    adapter = None if start is None else hashlib.sha256(save(start.state) + start.config_json())
    local_digests = {
        "weights": base_digest(base),
        "tokenizer": tokenizer_digest(base),
        "start adapter": adapter and adapter.hexdigest(),
    }
    digests = team.gather(local_digests)
    for rank, theirs in enumerate(digests):
        unlike = [name for name, digest in theirs.items() if digest != digests[0][name]]
        if unlike:
            raise ConfigError(
                f"model: expected the same base on all {team.size} ranks, got {base.name!r} with "
                f"another {' and another '.join(unlike)} on rank {rank} than on rank 0; give both "
                "the same files"
            )


def agree_on_path(team: Team, base: SharedBase, *, native: bool) -> None:
    """Agree among ranks on whether specialised code runs the base; refuse a base that cannot run.

    Call this before the base is divided among ranks: a test forward that fails would interrupt a
    pass of all ranks. Without `native`, warn of changes to the model object, because vLLM reads
    only the model's files.
    """
    if native:
        mixes_lengths(base, {})
    # The probe compares rounded numbers, so its result may differ between machines.
    answers = team.gather(can_join_layers(base, {}))
    if not native and base.specialized and is_llama_family(base):
        departures = departures_of(base, {})
        if departures and team.rank == 0:
            kind = base.model.config.model_type
            warnings.warn(
                f"engine.rollout: the engine samples from model {base.name!r} as an ordinary "
                f"{kind} model, which it is not ({departures[0]}): what is sampled is not what "
                "trains; set engine.rollout: native",
                UserWarning,
                stacklevel=2,
            )
    if any(answers) and not all(answers):
        base.specialized = False


def warn_of_processors(base: SharedBase, algorithm: AlgorithmConfig, mutates: bool = False) -> None:
    """Warn once of all options of the model's generation_config that rollouts do not apply.

    `mutates` says whether the repetition penalty is a hyperparameter that mutates.
    """
    config: Any = getattr(base.model, "generation_config", None)
    given = {
        name: value
        for neutral, names in _OPTIONS.items()
        for name in names
        if (value := getattr(config, name, None)) not in (None, [], (), {}, neutral)
    }
    if mutates:
        given.pop("repetition_penalty", None)
    strings = given.get("stop_strings", [])
    if set([strings] if isinstance(strings, str) else strings) <= set(algorithm.stop):
        given.pop("stop_strings", None)
    settings = {
        "repetition_penalty": algorithm.repetition_penalty,
        "min_length": algorithm.min_output_tokens,
        "min_new_tokens": algorithm.min_output_tokens,
    }
    options = [f"{name}={shown(v)}" for name, v in given.items() if v != settings.get(name)]
    if options:
        warnings.warn(
            f"generation_config of {base.name!r}: rollouts follow the settings of the run and "
            f"ignore {', '.join(options)}; set these options to None there, or those that have one "
            "to their setting (algorithm.repetition_penalty, min_output_tokens, stop), or the "
            "trained model answers differently under generate than in training",
            UserWarning,
            stacklevel=4,
        )
