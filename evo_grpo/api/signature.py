"""The signatures of GRPO, GSPO and CISPO, generated from the settings.

Written by docs/generate; change the declarations in evo_grpo/schema and
evo_grpo/settings instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from evo_grpo.api.by_keyword import by_keyword
from evo_grpo.settings import LoraSettings, LRSchedule, ModelConfig, VLLMSettings

if TYPE_CHECKING:
    from peft import LoraConfig

    from evo_grpo.api.population import Population
    from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter


class AgentSignature(ABC):
    """The constructors of agents and populations."""

    # Longer than 60 lines because every setting is a keyword.
    @by_keyword
    def __init__(
        self,
        *,
        seed: int = 0,
        model: str | ModelConfig | Any = None,
        tokenizer: Any = None,
        lora: LoraSettings | LoraConfig | Mapping[str, Any] = LoraSettings(),
        config: Mapping[str, Any] = MappingProxyType({}),
        trust_remote_code: bool = False,
        adapter: str | None = None,
        lr: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        clip_coef: float | tuple[float, float] = 0.2,
        group_size: int = 8,
        update_epochs: int = 2,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        max_grad_norm: float | None = 1.0,
        weight_decay: float = 0.0,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        batch_size: int | None = None,
        importance_sampling_level: Literal["token", "sequence"] | None = None,
        delta: float | None = None,
        kl_bias_correction: bool = False,
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        vespo_positive: tuple[float, float] = (2.0, 3.0),
        vespo_negative: tuple[float, float] = (3.0, 2.0),
        sampler_correction: Literal[
            "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
        ] = "sequence_mask",
        sampler_ratio_cap: float = 3.0,
        off_policy_mask_threshold: float | None = None,
        loss_type: Literal[
            "grpo", "gspo", "cispo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo"
        ]
        | None = None,
        prompts_per_step: int | None = None,
        max_output_tokens: int | None = None,
        min_output_tokens: int = 0,
        stop: Sequence[str | int] | str | int = (),
        max_model_len: int | None = None,
        adv_norm: Literal["mean_std", "mean_only", "batch_std"] = "mean_std",
        whiten_advantages: bool = False,
        adv_clip_range: float | None = None,
        filter_zero_adv: bool = False,
        adv_filter_eps: float = 0.0,
        mask_truncated_completions: bool = False,
        overlong_buffer: int | None = None,
        overlong_penalty: float = 1.0,
        dynamic_sampling_tokens: int | None = None,
        kl_shaping: bool = False,
        separate_reference: bool = False,
        lr_schedule: LRSchedule | Mapping[str, Any] | None = None,
        hyperparameters: HyperparameterConfig
        | Mapping[str, RLParameter | Mapping[str, Any]]
        | None = None,
        device: str = "auto",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        quantization: Literal["int8", "nf4"] | None = None,
        threads: int | None = None,
        shards: int | None = None,
        overlap: bool | Literal["auto"] = False,
        offload_adapters: bool = False,
        base: Literal["replicated", "sharded"] = "replicated",
        zero: Literal[2, 3] | None = None,
        rollout: Literal["native", "vllm"] = "native",
        vllm: VLLMSettings | Mapping[str, Any] = VLLMSettings(),
        memory: str | None = None,
        max_tokens_per_microbatch: int | None = None,
        max_rows_per_microbatch: int | None = None,
        max_decode_rows: int | None = None,
        max_decode_prompts: int | None = None,
        gradient_checkpointing: bool = False,
        compile: str | None = None,
        cuda_graphs: bool = True,
        kernels: Literal["auto", "on", "off"] = "auto",
    ) -> None:
        """Build one agent over a new base; see `population` for several agents over one base.

        Args:
            seed: Seed of all random numbers; any integer of up to 20 digits.
            model: An embedded model (`tiny-sums`, `tiny-foods`), `smollm2` (after `evo-grpo fetch
                smollm2`), a model folder, a `.gguf` file, or a hub id such as `owner/name`. In
                Python also a transformers module.
            tokenizer: A transformers tokenizer, instead of the model's own.
            lora: The adapter that each agent trains.
            config: Keywords for `from_pretrained`, for instance `{attn_implementation: eager}`.
            trust_remote_code: Run the Python code in the model's files. Only for models that you
                trust.
            adapter: PEFT folder of the adapter from which every agent starts, also the reference of
                the KL term; null starts from the base.
            lr: Learning rate of AdamW. null depends on the model: 1e-3 for the embedded models,
                2e-5 for all others, or the nearest value in a range of yours under
                `evolve.hyperparameters.lr`.
            beta: Weight of the KL divergence from the reference; 0 computes none.
            entropy_coef: Weight of the entropy bonus: each generated token lowers the loss by
                `entropy_coef` times the entropy of the policy there, in nats. 0.001 to 0.01 is
                usual; 0 computes none.
            clip_coef: Clip range of the probability ratio: c in (0, 1] for [1 - c, 1 + c], or the
                bounds `[low, high]` themselves. cispo reads high as its cap; sapo and vespo do not
                clip.
            group_size: Completions per prompt.
            update_epochs: Passes over the rows of a step. With 1 and no `batch_size` the clip range
                cannot act.
            temperature: Sampling temperature in training; the loss uses it too.
            top_p: Nucleus mass kept when sampling; 1 keeps all.
            top_k: Likeliest tokens kept when sampling; 0 keeps all.
            min_p: Least probability kept when sampling, relative to the likeliest token.
            repetition_penalty: Divides the logits of tokens seen before; 1 does nothing.
            max_grad_norm: Gradient norm above which a step is scaled down to it; null never scales.
            weight_decay: AdamW's decoupled weight decay, on the adapter's matrices.
            adam_beta1: Decay rate of AdamW's mean of the gradients.
            adam_beta2: Decay rate of AdamW's mean of the squared gradients. A smaller one follows
                gradients whose size changes.
            batch_size: Completions per optimizer step. null takes all of a GRPO step at once; when
                agents have left and the others take over their completions, it takes them in
                minibatches: two where an agent has two to four times its completions, three up to
                nine times.
            importance_sampling_level: One probability ratio per `token` or per `sequence`; null
                follows the paper of the loss: sequence for gspo and luspo, token for all others.
            delta: Upper bound of the unclipped ratio, for two-sided clipping (INTELLECT-2,
                arXiv:2505.07291); null sets no bound.
            kl_bias_correction: Multiply the KL term by the ratio, so that it is unbiased off-
                policy.
            sapo_temperature_pos: Temperature of sapo for advantages > 0.
            sapo_temperature_neg: Temperature of sapo for other advantages.
            vespo_positive: `[k, lambda]` of vespo for advantages >= 0.
            vespo_negative: `[k, lambda]` of vespo for advantages < 0.
            sampler_correction: Correction for an engine whose log-probs differ from the trainer's:
                weight by the ratio trainer / sampler per token or per sequence, and cap it at
                `sampler_ratio_cap` (truncate) or drop what exceeds the cap (mask). The native
                engine is exact and needs no correction.
            sampler_ratio_cap: The cap of `sampler_correction`.
            off_policy_mask_threshold: Drop rows with a negative advantage whose mean log-ratio old
                / new exceeds this many nats per token (DeepSeek-V3.2, arXiv:2512.02556); null keeps
                all rows.
            loss_type: The loss; null takes that of `kind`. bnpo and dapo are the same loss here: in
                TRL, bnpo divides by the tokens of a micro-batch, but micro-batches do not change
                results here.
            prompts_per_step: Prompts, or episode seeds, of a GRPO step, the same for all agents;
                null takes the number of the environment, which is 4 for a named task.
            max_output_tokens: Longest completion in tokens; null takes that of the task, or 32.
            min_output_tokens: Tokens before which no end token, and no token of `stop`, can be
                sampled; strings of `stop` that are complete before do not count.
            stop: Strings, or ids of tokens, that end a completion beside the end token, for
                instance `</answer>`. The text of the completion ends before the string; the tokens
                that spell it are trained.
            max_model_len: Most tokens of prompt plus completion; null takes the model's context.
            adv_norm: Scale of the advantages, which are rewards minus the mean of their group.
                `mean_std` divides them by the standard deviation of the group, `batch_std` by that
                of the agent's whole step, `mean_only` by nothing.
            whiten_advantages: Whiten the advantages of an agent's step over its valid tokens.
            adv_clip_range: Clamp advantages to [-x, x] after all other steps; null does not clamp.
            filter_zero_adv: First drop the completions with |advantage| <= `adv_filter_eps`.
            adv_filter_eps: Threshold of `filter_zero_adv`; has no effect without it.
            mask_truncated_completions: Leave completions that `max_output_tokens` or the context
                cut off out of the loss and of its means. Their rewards still count in the mean of
                their group.
            overlong_buffer: Soft overlong penalty (DAPO, arXiv:2503.14476): in training, the last
                `overlong_buffer` tokens before `max_output_tokens` lower the reward of a completion
                linearly, from 0 to `-overlong_penalty`. Fitness and the metric `reward` do not
                include it. null: no penalty.
            overlong_penalty: Largest penalty of `overlong_buffer`, in units of reward.
            dynamic_sampling_tokens: Dynamic sampling (DAPO): most further tokens of an agent in a
                GRPO step, for replacing groups whose rewards are all equal by groups of the next
                prompts. A group is sampled if `group_size` times `max_output_tokens` tokens are
                left. null replaces none.
            kl_shaping: Subtract the KL per token from the advantages instead of adding a penalty.
            separate_reference: Keep a frozen adapter per agent as its reference for the KL term.
                false uses one reference for all agents: `model.adapter`, or the base without
                adapters if that is null.
            lr_schedule: Warm-up and cosine decay of lr over GRPO steps; null keeps lr constant.
            hyperparameters: Ranges of the hyperparameters that may mutate; see
                `evolve.hyperparameters`.
            device: `auto` takes the first CUDA device, or the CPU if there is none; or `cpu`,
                `cuda`, `cuda:1`, `mps`.
            dtype: Weights of the base: `auto` is float32 on the CPU and bfloat16 on CUDA.
            quantization: Keep the weights of the base's linear layers in 8 bits (`int8`) or 4
                (`nf4`); adapters stay in float32. Needs bitsandbytes. null keeps the weights in
                `dtype`.
            threads: CPU threads; null takes the default of torch.
            shards: Parts of the population that are computed in separate batches; with fewer
                agents, some are empty. Their number affects the last digits of results; the number
                of processes does not. null takes the number of processes with which the run starts,
                or with `overlap` twice as many.
            overlap: Let the parts of a process take turns: while the rewards of one are computed,
                the others generate and learn. For reward functions and games that wait long, for a
                service for instance; the results are those of as many `shards` without it. `auto`
                decides by the seconds of the first round.
            offload_adapters: Keep the adapters and AdamW's moments of agents that do not compute in
                host memory. The part that computes and the next one are on the device, so it takes
                three `shards` or more. For more agents than a device holds.
            base: `replicated`: each process has the whole base. `sharded`: each process has a part
                of every layer, and each pass gathers the layers; slower, for a base larger than a
                device.
            zero: Train with DeepSpeed's ZeRO: `2` divides the moments and gradients of an adapter
                among the processes, `3` also the layers of the base. All processes train one agent
                after the other together. null trains all agents at once with AdamW.
            rollout: The rollout engine: `native`, which is built in, or `vllm`, which must be
                installed.
            vllm: How vLLM generates.
            memory: Memory that each process may use, such as `24GB` (10^9 bytes) or `24GiB` (2^30).
                null is all of a CUDA device; on a CPU, nothing is chosen by it.
            max_tokens_per_microbatch: Most padded tokens in one forward and backward pass; fewer
                need less memory. null depends on the model on a CPU, from 2,048 (large) to 8,192
                (small); on a CUDA device, or with `memory`, it is as many as fit.
            max_rows_per_microbatch: Most rows in one forward and backward pass; null sets no limit.
            max_decode_rows: Most completions decoded at once; fewer need less memory for the cache.
                null is 1,024 on a CPU, and on a CUDA device, or with `memory`, as many as fit.
            max_decode_prompts: Most prompts of each agent decoded at once; null sets no limit.
            gradient_checkpointing: Recompute activations in the backward pass; slower, but needs
                less memory.
            compile: Mode of torch.compile, for instance `default`; null does not compile. Compiles
                the base's layers without adapters, and on a GPU also the decode step of models of
                the Llama family.
            cuda_graphs: Generate by CUDA graphs, which launch the kernels of a decode step at once.
                Acts on a CUDA device, with the built-in engine, on models of the Llama family.
            kernels: Generate by kernels made for a decode step of many adapters, with the built-in
                engine: `auto` takes them on CUDA devices of compute capability 8.0 or newer, with
                Triton, in half precision, for models of the Llama family; `on` in float32 too;
                `off` takes torch's own. They give other last digits.

        Raises:
            ConfigError: An unknown name, a value of a wrong type or out of range, or values that
                contradict each other.
            ModelError: The base cannot be loaded.
        """
        given = dict(locals())
        del given["self"]
        self._create(given)

    # Longer than 60 lines because every setting is a keyword.
    @classmethod
    @by_keyword
    def population(
        cls,
        *,
        size: int = 8,
        init: Literal["latin_hypercube", "sample", "same"]
        | Sequence[Mapping[str, Any]]
        | Mapping[str, Any] = "latin_hypercube",
        seed: int = 0,
        model: str | ModelConfig | Any = None,
        tokenizer: Any = None,
        lora: LoraSettings | LoraConfig | Mapping[str, Any] = LoraSettings(),
        config: Mapping[str, Any] = MappingProxyType({}),
        trust_remote_code: bool = False,
        adapter: str | None = None,
        lr: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        clip_coef: float | tuple[float, float] = 0.2,
        group_size: int = 8,
        update_epochs: int = 2,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        max_grad_norm: float | None = 1.0,
        weight_decay: float = 0.0,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        batch_size: int | None = None,
        importance_sampling_level: Literal["token", "sequence"] | None = None,
        delta: float | None = None,
        kl_bias_correction: bool = False,
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        vespo_positive: tuple[float, float] = (2.0, 3.0),
        vespo_negative: tuple[float, float] = (3.0, 2.0),
        sampler_correction: Literal[
            "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
        ] = "sequence_mask",
        sampler_ratio_cap: float = 3.0,
        off_policy_mask_threshold: float | None = None,
        loss_type: Literal[
            "grpo", "gspo", "cispo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo"
        ]
        | None = None,
        prompts_per_step: int | None = None,
        max_output_tokens: int | None = None,
        min_output_tokens: int = 0,
        stop: Sequence[str | int] | str | int = (),
        max_model_len: int | None = None,
        adv_norm: Literal["mean_std", "mean_only", "batch_std"] = "mean_std",
        whiten_advantages: bool = False,
        adv_clip_range: float | None = None,
        filter_zero_adv: bool = False,
        adv_filter_eps: float = 0.0,
        mask_truncated_completions: bool = False,
        overlong_buffer: int | None = None,
        overlong_penalty: float = 1.0,
        dynamic_sampling_tokens: int | None = None,
        kl_shaping: bool = False,
        separate_reference: bool = False,
        lr_schedule: LRSchedule | Mapping[str, Any] | None = None,
        hyperparameters: HyperparameterConfig
        | Mapping[str, RLParameter | Mapping[str, Any]]
        | None = None,
        device: str = "auto",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        quantization: Literal["int8", "nf4"] | None = None,
        threads: int | None = None,
        shards: int | None = None,
        overlap: bool | Literal["auto"] = False,
        offload_adapters: bool = False,
        base: Literal["replicated", "sharded"] = "replicated",
        zero: Literal[2, 3] | None = None,
        rollout: Literal["native", "vllm"] = "native",
        vllm: VLLMSettings | Mapping[str, Any] = VLLMSettings(),
        memory: str | None = None,
        max_tokens_per_microbatch: int | None = None,
        max_rows_per_microbatch: int | None = None,
        max_decode_rows: int | None = None,
        max_decode_prompts: int | None = None,
        gradient_checkpointing: bool = False,
        compile: str | None = None,
        cuda_graphs: bool = True,
        kernels: Literal["auto", "on", "off"] = "auto",
    ) -> Population[Any]:
        """Build agents over one shared base. All keywords of the constructor are accepted too.

        Args:
            size: Number of agents.
            init: Initial hyperparameters. `latin_hypercube`: agent 0 has the values of `algorithm`,
                the others cover the ranges of `evolve.hyperparameters` evenly. `sample`: the others
                draw independently from the ranges. `same`: all have the values of `algorithm`. Or a
                list with one mapping per agent, for instance `[{}, {lr: 1.0e-4}, {lr: 3.0e-3, beta:
                0.01}]`. Or `{from: RUN}`, a run folder or a list of them: the best settings found
                there fill half of the places, moved into the ranges, and the others are as for
                `latin_hypercube`; the run records all of them as a list.

        Returns:
            The population, a sequence of agents.
        """
        given = dict(locals())
        del given["cls"]
        return cls._create_population(given)

    @abstractmethod
    def _create(self, given: dict[str, Any]) -> None: ...

    @classmethod
    @abstractmethod
    def _create_population(cls, given: dict[str, Any]) -> Population[Any]: ...
