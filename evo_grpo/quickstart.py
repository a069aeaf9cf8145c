"""GRPO on any `nn.Module` that maps token ids to logits: no population, no LoRA, no tokenizer.

    trainer = GRPO(model=model, ref_model=ref_model, reward_fn=reward_fn, group_size=4)
    metrics = trainer.train(prompts=prompt_ids, n_epochs=3)

All weights of the model are trained. Names, defaults and the loss, except for its KL term, follow
the GRPO page of rlox. The loss is -mean(A * sum_t lp_t) + kl_coef * mean_t(k3), over the tokens up
to and including the end token; A is the advantage of a completion, and lp and ref are log-probs of
the model and of the reference. `level="token"` averages over tokens instead of summing per
sequence.

k3 is exp(ref - lp) - (ref - lp) - 1. In place of mean_t(k3), the page has mean_t(lp - ref), which
is also the metric `kl`. Its expectation is the KL divergence too, but its gradient has expectation
zero, and thus no effect on average.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from evo_grpo.errors import CheckpointError, ConfigError, RewardError, RunFailedError, ShapeError
from evo_grpo.learn.objective.advantages import as_floats, group_advantages
from evo_grpo.learn.objective.ratios import kl_term
from evo_grpo.rollout.sampling import RowSampling, Sampling, key_tensor, sample_tokens, uniform
from evo_grpo.schema import validation
from evo_grpo.seeding import derive

RewardFn = Callable[[Tensor, Tensor], Sequence[float]]

ROLLING = 20
"""Steps that `rolling_reward` averages over."""

RULES: dict[str, validation.Rule] = {
    "group_size": validation.whole(2, "a group of one has no advantage"),
    "kl_coef": validation.not_negative(),
    "learning_rate": validation.above_zero().or_none(),
    "max_new_tokens": validation.whole(1),
    "max_grad_norm": validation.number(lambda v: v > 0, "a number > 0", "math.inf never clips"),
    "temperature": validation.computable(validation.LEAST, validation.MOST),
    "advantage_clip": validation.above_zero().or_none(),
    "level": validation.Rule(lambda v: v in ("sequence", "token"), '"sequence" or "token"'),
    "eos_id": validation.whole(0, "give a token id, or None for a fixed length").or_none(),
    "pad_id": validation.whole(0, "give a token id"),
    "seed": validation.whole(),
    "n_epochs": validation.whole(1),
    "batch_size": validation.whole(1).or_none(),
    "checkpoint_every": validation.whole(1).or_none(),
}


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step.

    Attributes:
        step: Number of the step, from 0.
        average_reward: Mean reward of the step's completions.
        rolling_reward: Mean of `average_reward` over the last 20 steps.
        policy_loss: Loss without the KL term.
        kl: Mean over tokens of lp - ref (log-probs of model and reference), in nats.
        total_loss: policy_loss + kl_coef * mean over tokens of k3, exp(ref - lp) - (ref - lp) - 1.
        average_advantage: Mean advantage; about 0 unless advantages are clipped.
    """

    step: int
    average_reward: float
    rolling_reward: float
    policy_loss: float
    kl: float
    total_loss: float
    average_advantage: float


@final
class GRPO:
    """Group Relative Policy Optimization of a whole model (Shao et al. 2024, arXiv:2402.03300).

    Args:
        model: `forward(input_ids (B, T) int64) -> logits (B, T, V)`, or an output with `.logits`,
            as models of transformers return; trained in place.
        ref_model: The frozen reference of the KL term, with the same signature.
        reward_fn: `reward_fn(completions (B, C) int64, prompts (B, T) int64) -> B numbers`. After
            the end token a completion holds `pad_id`.
        group_size: Completions per prompt, >= 2.
        kl_coef: Weight of the KL term, >= 0.
        learning_rate: Learning rate of Adam, > 0; None means 1e-4.
        max_new_tokens: Tokens per completion, >= 1.
        max_grad_norm: Norm to which the gradient is clipped, > 0.
        temperature: Divides the logits, for sampling and for log-probs, > 0.
        advantage_clip: Clamp advantages to [-x, x]; None for no clamp.
        level: "sequence" sums log-probs per completion, "token" averages over all tokens.
        eos_id: Token id that ends a completion; None for a fixed length.
        pad_id: Token id that fills a completion after its end.
        optimizer: Replaces Adam and `learning_rate`.
        seed: Seed from which all random draws are derived.

    Raises:
        ConfigError: A value has the wrong type, is out of range, or has no effect.
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
        validation.check_all(RULES, locals())
        weights = {id(p) for p in model.parameters()}
        if any(id(p) in weights for p in ref_model.parameters()):
            raise ConfigError(
                "ref_model: expected a separate frozen model, got one that shares weights with "
                "model; pass copy.deepcopy(model)"
            )
        if optimizer is None:
            rate = 1e-4 if learning_rate is None else learning_rate
            optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        elif learning_rate is not None:
            raise ConfigError(
                f"learning_rate={learning_rate!r}: has no effect with optimizer=, which has its "
                "own; remove it"
            )
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        if not any(id(p) in trained for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                "optimizer: expected one over trainable weights of the model, got one that holds "
                "none of them; build it with model.requires_grad_(True).parameters()"
            )
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
        self.optimizer = optimizer
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
        """Train the model on prompts.

        Args:
            prompts: (P, T) int64, without padding.
            n_epochs: Passes over the prompts, >= 1.
            batch_size: Prompts per step; None for all at once.
            checkpoint_dir: Folder that gets a checkpoint every `checkpoint_every` steps; None for
                no checkpoints.
            checkpoint_every: Steps between checkpoints, >= 1; None means 100.
            on_step: Called with each step's metrics.

        Returns:
            mean_reward, kl, policy_loss and total_loss of the last step.

        Raises:
            ConfigError: A number is below 1, or `checkpoint_every` is given without a folder.
            ShapeError: The prompts are not a matrix of ids, or the model does not return logits.
            RewardError: The reward function does not return one finite number per completion.
            RunFailedError: The loss or the gradient is not finite.
        """
        validation.check_all(RULES, locals())
        if checkpoint_every is not None and checkpoint_dir is None:
            raise ConfigError(
                f"checkpoint_every={checkpoint_every}: has no effect without checkpoint_dir; pass "
                "it too"
            )
        every = checkpoint_every or 100
        _check_prompts(prompts)
        size = batch_size or len(prompts)
        for _ in range(n_epochs):
            for start in range(0, len(prompts), size):
                metrics = self.step(prompts[start : start + size])
                if on_step is not None:
                    on_step(metrics)
                steps = len(self.history)
                if checkpoint_dir is not None and steps % every == 0:
                    self.save(Path(checkpoint_dir) / f"step_{steps}")
        last = self.history[-1]
        return {
            "mean_reward": last.average_reward,
            "kl": last.kl,
            "policy_loss": last.policy_loss,
            "total_loss": last.total_loss,
        }

    def step(self, prompts: Tensor) -> StepMetrics:
        """Take one step on prompts (P, T): sample groups, score them, update; see `train`."""
        _check_prompts(prompts)
        step = len(self.history)
        device = next(self.model.parameters()).device
        rows = prompts.to(device).repeat_interleave(self.group_size, dim=0)
        completions, mask = self._sample(rows, step)
        rewards = self._rewards(completions, rows)
        advantages = group_advantages(rewards, self.group_size, scale="group")
        if self.advantage_clip is not None:
            advantages = advantages.clip(-self.advantage_clip, self.advantage_clip)
        weights = torch.as_tensor(advantages, dtype=torch.float32, device=device)
        ids = torch.cat([rows, completions], dim=1)
        logprobs = self._logprobs(self.model, ids, mask)
        with torch.no_grad():
            reference = self._logprobs(self.ref_model, ids, mask)
        valid = mask.float()
        scored = logprobs * valid * weights[:, None]
        per_row = scored.sum(-1) if self.level == "sequence" else scored.sum() / valid.sum()
        policy_loss = -per_row.mean()
        kl = ((logprobs.detach() - reference) * valid).sum() / valid.sum()
        k3 = kl_term(logprobs, reference, mask, self.kl_coef)
        penalty = 0.0 if k3 is None else self.kl_coef * k3.sum() / valid.sum()
        loss = policy_loss + penalty
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            raise RunFailedError(
                f"step {step}: expected a finite loss and gradient, got {loss.item()} and "
                f"{norm.item()}: logits of model or ref_model are not finite. The update was "
                "skipped; lower learning_rate, or load() an earlier checkpoint"
            )
        self.optimizer.step()
        recent = [m.average_reward for m in self.history[-(ROLLING - 1) :]]
        average = float(rewards.mean())
        metrics = StepMetrics(
            step=step,
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
        """Sample one completion per prompt.

        Args:
            prompts: (P, T) int64, without padding.
            seed: Selects the random draws.

        Returns:
            (P, C) int64, filled with `pad_id` after the end token.
        """
        completions, _ = self._sample(prompts, derive(self.seed, "generate", seed))
        return completions

    def save(self, path: str | Path) -> None:
        """Write weights (safetensors) and metrics (JSON lines) to a folder, created if missing.

        Raises:
            CheckpointError: The path, or a parent of it, is a file.
        """
        folder = validation.check_folder("save: path", path)
        folder.mkdir(parents=True, exist_ok=True)
        state = {k: v.detach().cpu().clone() for k, v in self.model.state_dict().items()}
        rows = "\n".join(json.dumps(asdict(m)) for m in self.history)
        save_file(state, folder / "model.safetensors")
        (folder / "history.jsonl").write_text(rows + "\n")

    def load(self, path: str | Path) -> None:
        """Read the weights and metrics that `save` wrote to a folder; reset the optimizer state.

        Raises:
            CheckpointError: The folder is not a checkpoint, or its weights are not of this model.
        """
        folder = Path(path)
        # Read and compare everything first: load_state_dict copies matching tensors, then raises.
        try:
            state = load_file(folder / "model.safetensors")
            lines = (folder / "history.jsonl").read_text().splitlines()
            history = [StepMetrics(**json.loads(line)) for line in lines if line]
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint {folder}: expected model.safetensors and history.jsonl as save() "
                f"wrote them: {error}; give another folder"
            ) from error
        live = self.model.state_dict()
        if unlike := sorted(
            k
            for k in {*live, *state}
            if k not in live or k not in state or live[k].shape != state[k].shape
        ):
            raise CheckpointError(
                f"checkpoint {folder}: expected the weights of this model, got those of another "
                f"model: {unlike[:3]} differ; build the model that was saved"
            )
        self.model.load_state_dict(state)
        self.history = history
        self.optimizer.state.clear()

    def _rewards(self, completions: Tensor, prompts: Tensor) -> np.ndarray:
        """Return the float64 rewards (B,) of completions (B, C)."""
        name = f"reward_fn {getattr(self.reward_fn, '__name__', self.reward_fn)!r}"
        returned = self.reward_fn(completions, prompts)
        rewards = as_floats(returned, name).reshape(-1)
        if len(rewards) != len(completions) or not np.isfinite(rewards).all():
            raise RewardError(
                f"{name}: expected {len(completions)} finite numbers, one per completion, got "
                f"{len(rewards)}: {returned!r:.60}"
            )
        return rewards

    @torch.no_grad()
    def _sample(self, prompts: Tensor, stream: int) -> tuple[Tensor, Tensor]:
        """Return completions (B, C) int64 and their mask (B, C) bool, true up to the end token."""
        count, steps = len(prompts), self.sampling.max_output_tokens
        keys = key_tensor(
            [derive(self.seed, "sample", stream, i) for i in range(count)], prompts.device
        )
        ids, alive = prompts, torch.ones(count, dtype=torch.bool, device=prompts.device)
        masks: list[Tensor] = []
        rows: RowSampling | None = None
        for step in range(steps):
            logits = _logits(self.model, ids)[:, -1].float()
            if rows is None:
                rows = RowSampling.build([self.sampling], [count], logits.shape[-1], logits.device)
            tokens, _ = sample_tokens(logits.clone(), uniform(keys, step, 1)[0], rows)
            tokens = torch.where(alive, tokens, self.pad_id)
            masks.append(alive)
            ids = torch.cat([ids, tokens[:, None]], dim=1)
            if self.eos_id is not None:
                alive = alive & (tokens != self.eos_id)
        return ids[:, prompts.shape[1] :], torch.stack(masks, dim=1)

    def _logprobs(self, model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the float32 log-probs (B, C) of the last C ids of each row of `ids` (B, T).

        Where `mask` (B, C) is false, the result is 0, even if the model gives the padding after the
        end token a log-prob of -inf.
        """
        start = ids.shape[1] - mask.shape[1]
        logits = _logits(model, ids)[:, start - 1 : -1].float() / self.sampling.temperature
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, start:, None])[..., 0]
        return torch.where(mask, logprobs, 0.0)


def _check_prompts(prompts: object) -> None:
    """Refuse prompts that are not a tensor (P, T) of token ids."""
    got = prompts
    if isinstance(prompts, Tensor):
        if prompts.ndim == 2 and prompts.numel() and not prompts.is_floating_point():
            return
        got = f"{tuple(prompts.shape)} {prompts.dtype}"
    raise ShapeError(
        "prompts: expected token ids as an int64 tensor (P, T) with P, T >= 1, got "
        f"{got!s:.80}; make one with torch.tensor([[1, 2, 3]])"
    )


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits (B, T, V) of a model, from a tensor or an output with `.logits`."""
    output: Any = model(ids)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ShapeError(
            f"model {type(model).__name__}: expected logits (B, T, V) = {(*ids.shape, 'V')}, or an "
            f"output with .logits, got {got}; wrap the model so that forward(ids) returns them"
        )
    return logits
