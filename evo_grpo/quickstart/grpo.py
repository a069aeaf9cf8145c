"""GRPO on any `nn.Module` that maps ids to logits: no population, no LoRA, no tokenizer.

    trainer = GRPO(model=model, ref_model=ref_model, reward_fn=reward_fn, group_size=4)
    metrics = trainer.train(prompts=prompt_ids, n_epochs=3)

The whole model is trained. Names and defaults follow the rlox page, which this answers to; the
loss is its policy gradient, -mean(A * sum_t lp_t) + kl_coef * mean_t(lp - ref), over tokens up to
and with the end token. `level="token"` averages over tokens instead of summing per sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from evo_grpo.errors import CheckpointError, ConfigError
from evo_grpo.objective.advantages import group_advantages
from evo_grpo.quickstart.checks import (
    RULES,
    check_models,
    check_prompts,
    logits_of,
    optimizer_of,
    refuse_not_finite,
    rewards_of,
)
from evo_grpo.quickstart.diagnostics import ROLLING, StepMetrics, metrics_figure
from evo_grpo.rollout.draws import key_tensor, uniform
from evo_grpo.rollout.sampling import RowSampling, Sampling, sample_tokens
from evo_grpo.seeding import derive
from evo_grpo.validation import check_all, check_folder, whole

__all__ = ["GRPO", "StepMetrics", "metrics_figure"]

RewardFn = Callable[[Tensor, Tensor], Sequence[float]]


@final
class GRPO:
    """Group Relative Policy Optimization of a whole model (Shao et al. 2024, arXiv:2402.03300).

    Args:
        model: `forward(input_ids (B, T) int64) -> logits (B, T, V)`, or to what holds them as
            `logits`, as the models of transformers do; trained in place.
        ref_model: The frozen reference of the KL term, of the same signature.
        reward_fn: `reward_fn(completions (B, C) int64, prompts (B, T) int64) -> B numbers`. After
            the end token a completion holds `pad_id`.
        group_size: Completions per prompt, >= 2.
        kl_coef: Weight of the KL term, >= 0.
        learning_rate: Adam's, > 0; None is 1e-4.
        max_new_tokens: Tokens per completion, >= 1.
        max_grad_norm: Gradient-norm clip, > 0.
        temperature: Of sampling and of the log-probs, > 0.
        advantage_clip: Clamp advantages to [-x, x], None for no clamp.
        level: "sequence" sums log-probs per completion, "token" averages over all tokens.
        eos_id: Ends a completion, None for a fixed length.
        pad_id: Fills completions after the end token.
        optimizer: Instead of Adam over the model's parameters; with a learning rate of its own.
        seed: Root of the sampling streams.

    Raises:
        ConfigError: For a value of another type or out of range, or one that cannot act.
    """

    def __init__(  # noqa: PLR0913 -- the page's own arguments; all but three have defaults
        self,
        model: nn.Module,
        ref_model: nn.Module,
        reward_fn: RewardFn,
        group_size: int = 4,
        kl_coef: float = 0.1,
        learning_rate: float | None = None,
        max_new_tokens: int = 8,
        max_grad_norm: float = 1.0,
        *,
        temperature: float = 1.0,
        advantage_clip: float | None = None,
        level: Literal["sequence", "token"] = "sequence",
        eos_id: int | None = None,
        pad_id: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        seed: int = 0,
    ) -> None:
        """Check the values; see the class docstring."""
        check_all(RULES, locals())
        check_models(model, ref_model)
        self.model = model
        self.ref_model = ref_model.requires_grad_(False).eval()
        self.reward_fn = reward_fn
        self.group_size = group_size
        self.kl_coef = kl_coef
        self.max_grad_norm = max_grad_norm
        self.advantage_clip = advantage_clip
        self.level = level
        self.eos_id = eos_id
        self.pad_id = pad_id
        self.seed = seed
        self.sampling = Sampling(temperature=temperature, max_output_tokens=max_new_tokens)
        self.optimizer = optimizer_of(model, optimizer, learning_rate)
        self.history: list[StepMetrics] = []

    def train(
        self,
        prompts: Tensor,
        n_epochs: int = 1,
        *,
        batch_size: int | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int | None = None,
        on_step: Callable[[StepMetrics], object] | None = None,
    ) -> dict[str, float]:
        """Train on prompts.

        Args:
            prompts: (P, T) int64, not padded.
            n_epochs: Passes over the prompts, >= 1.
            batch_size: Prompts per step; None takes all at once.
            checkpoint_dir: Write a checkpoint every `checkpoint_every` steps, None for none.
            checkpoint_every: Steps between checkpoints, >= 1; None is 100.
            on_step: Called with each step's metrics.

        Returns:
            The last step's values: mean_reward, kl, policy_loss, total_loss.

        Raises:
            ConfigError: A number is below 1, or `checkpoint_every` lacks a folder.
            ShapeError: The prompts are no matrix of ids, or the model returns no logits.
            RunFailedError: A loss or gradient is not finite.
        """
        for name, value in (
            ("n_epochs", n_epochs),
            ("batch_size", 1 if batch_size is None else batch_size),
            ("checkpoint_every", 1 if checkpoint_every is None else checkpoint_every),
        ):
            whole(1).check(name, value)
        if checkpoint_every is not None and checkpoint_dir is None:
            raise ConfigError(
                f"checkpoint_every={checkpoint_every}: has no effect without checkpoint_dir; pass "
                "that too"
            )
        every = checkpoint_every or 100
        check_prompts(prompts)
        size = batch_size or len(prompts)
        for _ in range(n_epochs):
            for start in range(0, len(prompts), size):
                metrics = self.step(prompts[start : start + size])
                if on_step is not None:
                    on_step(metrics)
                done = len(self.history)
                if checkpoint_dir is not None and done % every == 0:
                    self.save(Path(checkpoint_dir) / f"step_{done}")
        last = self.history[-1]
        return {
            "mean_reward": last.average_reward,
            "kl": last.kl,
            "policy_loss": last.policy_loss,
            "total_loss": last.total_loss,
        }

    def step(self, prompts: Tensor) -> StepMetrics:
        """Take one step on prompts (P, T): sample groups, score, update; see `train`."""
        check_prompts(prompts)
        number = len(self.history)
        device = next(self.model.parameters()).device
        rows = prompts.to(device).repeat_interleave(self.group_size, dim=0)
        completions, mask = self._sample(rows, number)
        rewards = rewards_of(self.reward_fn, completions, rows)
        advantages = group_advantages(rewards, self.group_size, scale="group")
        if self.advantage_clip is not None:
            advantages = advantages.clip(-self.advantage_clip, self.advantage_clip)
        weights = torch.as_tensor(advantages, dtype=torch.float32, device=device)
        ids = torch.cat([rows, completions], dim=1)
        logprobs = self._logprobs(self.model, ids, rows.shape[1])
        with torch.no_grad():
            reference = self._logprobs(self.ref_model, ids, rows.shape[1])
        valid = mask.float()
        scored = logprobs * valid * weights[:, None]
        per_row = scored.sum(-1) if self.level == "sequence" else scored.sum() / valid.sum()
        policy_loss = -per_row.mean()
        kl = ((logprobs - reference) * valid).sum() / valid.sum()
        loss = policy_loss + self.kl_coef * kl
        refuse_not_finite(number, "loss", loss.item())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        refuse_not_finite(number, "gradient", norm.item())
        self.optimizer.step()
        recent = [m.average_reward for m in self.history[-(ROLLING - 1) :]]
        average = float(rewards.mean())
        metrics = StepMetrics(
            step=number,
            average_reward=average,
            rolling_reward=float(np.mean([*recent, average])),
            policy_loss=policy_loss.item(),
            kl=kl.item(),
            total_loss=loss.item(),
            average_advantage=float(advantages.mean()),
        )
        self.history.append(metrics)
        return metrics

    @torch.no_grad()
    def generate(self, prompts: Tensor, seed: int = 0) -> Tensor:
        """Sample one completion (P, C) per prompt (P, T), padded with `pad_id` after the end."""
        completions, _ = self._sample(prompts, derive(self.seed, "generate", seed))
        return completions

    def save(self, path: str | Path) -> None:
        """Write the model's weights and the metrics so far: safetensors and JSON.

        Raises:
            CheckpointError: When there is a file in place of the folder.
        """
        folder = check_folder("save: path", path)
        folder.mkdir(parents=True, exist_ok=True)
        state = {k: v.detach().cpu().clone() for k, v in self.model.state_dict().items()}
        rows = "\n".join(_json_line(m) for m in self.history)
        save_file(state, folder / "model.safetensors")
        (folder / "history.jsonl").write_text(rows + "\n")

    def load(self, path: str | Path) -> None:
        """Read an earlier checkpoint's weights and metrics; the optimizer starts afresh.

        Raises:
            CheckpointError: When it is no checkpoint, or of another model.
        """
        folder = Path(path)
        file = folder / "model.safetensors"
        if not file.is_file():
            raise CheckpointError(
                f"checkpoint {folder}: expected model.safetensors, as save() writes"
            )
        # All is read and compared before the model is touched: torch copies what fits, then raises.
        try:
            state = load_file(file)
            lines = (folder / "history.jsonl").read_text().splitlines()
            history = [StepMetrics(**json.loads(line)) for line in lines if line]
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint {folder}: model.safetensors or history.jsonl is missing or damaged: "
                f"{error}"
            ) from error
        live = {k: v.shape for k, v in self.model.state_dict().items()}
        if {k: v.shape for k, v in state.items()} != live:
            unlike = sorted(
                k for k in {*live, *state} if k not in state or live.get(k) != state[k].shape
            )
            raise CheckpointError(f"checkpoint {folder}: of another model: {unlike[:3]} differ")
        self.model.load_state_dict(state)
        self.history = history
        self.optimizer.state.clear()

    @torch.no_grad()
    def _sample(self, prompts: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Completions (B, C) and their mask (B, C), the end token included."""
        count, steps = len(prompts), self.sampling.max_output_tokens
        keys = key_tensor(
            [derive(self.seed, "sample", number, i) for i in range(count)], prompts.device
        )
        ids, alive = prompts, torch.ones(count, dtype=torch.bool, device=prompts.device)
        masks: list[Tensor] = []
        rows: RowSampling | None = None
        for step in range(steps):
            logits = logits_of(self.model, ids)[:, -1].float()
            if rows is None:
                rows = RowSampling.build([self.sampling], [count], logits.shape[-1], logits.device)
            tokens, _ = sample_tokens(logits.clone(), uniform(keys, step, 1)[0], rows)
            tokens = torch.where(alive, tokens, self.pad_id)
            masks.append(alive)
            ids = torch.cat([ids, tokens[:, None]], dim=1)
            if self.eos_id is not None:
                alive = alive & (tokens != self.eos_id)
        return ids[:, prompts.shape[1] :], torch.stack(masks, dim=1)

    def _logprobs(self, model: nn.Module, ids: Tensor, start: int) -> Tensor:
        logits = logits_of(model, ids)[:, start - 1 : -1].float() / self.sampling.temperature
        return torch.log_softmax(logits, -1).gather(-1, ids[:, start:, None])[..., 0]


def _json_line(metrics: StepMetrics) -> str:
    return json.dumps(asdict(metrics))
