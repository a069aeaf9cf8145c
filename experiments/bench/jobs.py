"""Models of the benchmarked shapes, populations over them, and the work they are timed on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from shapes import BETA, COMMON, EMBEDDED, FAMILIES, LARGE, LORA, LR, QWEN2, SHAPES, question
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from evo_grpo.learn.objective.advantages import group_advantages
from evo_grpo.learn.rows import AgentBatch, Row
from evo_grpo.model.base import SharedBase
from evo_grpo.population.cohort.cohort import Cohort
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.schema.hparams import Hparams
from evo_grpo.settings import AgentSettings
from evo_grpo.training.sizing.cards import CARDS
from evo_grpo.training.sizing.duration import Counted
from evo_grpo.training.sizing.model_size import from_config
from evo_grpo.types import CompletionGroup, Prompt

#: What all agents train with: a small step, a KL term, one epoch, plain sampling.
HPARAMS = Hparams(
    lr=LR, beta=BETA, clip_coef=0.2, group_size=8, temperature=1.0, top_p=1.0, top_k=0,
    max_grad_norm=1.0, update_epochs=1, batch_size=None,
)  # fmt: skip


#: Cards for which costs are counted, by the table of `evo_grpo.training.sizing.cards`.
EXPECTED = ("h200", "a100-80gb", "rtx-4090", "l4")


@dataclass(frozen=True)
class Work:
    """What one generate + learn does.

    Attributes:
        prompts: P prompts per agent.
        groups: G completions per prompt, one number for all agents or one each.
        tokens: T tokens per completion, exactly.
        prompt_tokens: Tokens of a prompt.
    """

    prompts: int
    groups: int | tuple[int, ...]
    tokens: int
    prompt_tokens: int = 6


def random_model(shape: str, **changes: Any) -> LlamaForCausalLM | Qwen2ForCausalLM:
    """Make a model of a shape with random weights, seeded, fp32 on the CPU."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        if shape in LARGE:
            return Qwen2ForCausalLM(Qwen2Config(**{**COMMON, **LARGE[shape], **changes})).eval()
        return LlamaForCausalLM(LlamaConfig(**{**COMMON, **SHAPES[shape], **changes})).eval()


def family_base(family: str, shape: str) -> SharedBase:
    """Return a base of a family of architectures and a shape, with random weights, fp32."""
    sizes = SHAPES[shape]
    size = sizes["hidden_size"] // sizes["num_attention_heads"]
    own = {"head_dim": size, "query_pre_attn_scalar": size, **FAMILIES[family]}
    config = AutoConfig.for_model(**{**COMMON, **sizes, **own})
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    return SharedBase(model, AutoTokenizer.from_pretrained(EMBEDDED), f"{family} {shape}")


def counted(shape: str, card: str, agents: int = 8, rank: int = 8) -> Counted:
    """Return what counts the seconds of agents of a Qwen2 shape on a card."""
    size = from_config(shape, {"model_type": "qwen2", **QWEN2[shape]})
    assert size.shape is not None
    return Counted(size.shape, CARDS[card], agents, rank)


def too_large(shape: str, copies: int) -> str | None:
    """Return why a shape cannot be measured here, or None.

    Args:
        shape: One of SHAPES or LARGE.
        copies: Models of it that the benchmark holds at once, fp32; as much as one more is left
            for the rest.
    """
    with torch.device("meta"):
        parameters = sum(p.numel() for p in random_model(shape).parameters())
    needed = 4 * parameters * (copies + 1) / 2**30
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable:")) / 2**20
    if needed <= free:
        return None
    return f"needs about {needed:.0f} GiB of memory, {free:.0f} GiB are free"


def load_base(shape: str, **changes: Any) -> SharedBase:
    """Return a base of a shape; "embedded" is the model in the package.

    All have the embedded model's tokenizer: what it decodes is thrown away, the time it takes is
    not.
    """
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    if shape == "embedded":
        model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    else:
        model = random_model(shape, **changes)
    return SharedBase(model, tokenizer, shape)


def lora(rank: int = 8) -> LoraConfig:
    """Return the adapters of all agents: all linear layers."""
    return LoraConfig(**{**LORA, "r": rank, "lora_alpha": 2 * rank})


def population(
    base: SharedBase,
    size: int,
    work: Work,
    *,
    rank: int | Sequence[int] = 8,
    beta: float = BETA,
    **engine: Any,
) -> tuple[Cohort, list[int]]:
    """Return agents over a base whose adapters do something, and their slots.

    Args:
        base: The base.
        size: N.
        work: Its group sizes and completion length.
        rank: LoRA rank of all agents, or of each.
        beta: KL coefficient; 0 leaves out the reference's forward pass.
        **engine: Other settings of the group `engine`.
    """
    settings = AgentSettings(
        algorithm={"max_output_tokens": work.tokens, "min_output_tokens": work.tokens},
        engine={"max_decode_rows": 4096, **engine},
        hyperparameters={},
    )
    own = None if isinstance(rank, int) else list(rank)
    cohort = Cohort(base, lora(rank if isinstance(rank, int) else max(rank)), settings)
    sizes = work.groups if isinstance(work.groups, tuple) else (work.groups,) * size
    slots = [
        cohort.add(HPARAMS.replace(group_size=group, beta=beta, lora_r=own and own[index])).slot
        for index, group in enumerate(sizes)
    ]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for slot in slots:
            for parameter in cohort.slots.parameters(cohort.agents[slot].adapter):
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.add_((0.01 * draw).to(parameter.device))
    return cohort, slots


def make_prompts(count: int, tokens: int, vocabulary: int) -> list[Prompt]:
    """Return prompts of random ids, all of one length, without special tokens."""
    draws = np.random.default_rng(0).integers(8, min(vocabulary, 100), (count, tokens))
    return [Prompt(i, "", tuple(int(t) for t in row)) for i, row in enumerate(draws)]


def questions(count: int, tokens: int = 6) -> list[Prompt]:
    """Return the prompts that the peers get."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    asked = [question(i, tokens) for i in range(count)]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in asked]
    return [Prompt(i, asked[i], tuple(row)) for i, row in enumerate(ids)]


def rows_of(groups: Sequence[CompletionGroup], advantages: np.ndarray) -> list[Row]:
    """Return the rows of one agent's groups: less of Python than by way of an environment."""
    rows: list[Row] = []
    for group in groups:
        prompt = group.prompt.token_ids
        for completion in group.completions:
            mask = np.zeros(len(prompt) + len(completion.token_ids), dtype=bool)
            mask[len(prompt) :] = True
            rows.append(
                Row(
                    token_ids=np.asarray(prompt + completion.token_ids, dtype=np.int64),
                    mask=mask,
                    advantage=float(advantages[len(rows)]),
                    sampler_logprobs=np.asarray(completion.logprobs, dtype=np.float32),
                )
            )
    return rows


def sampling(tokens: int) -> Sampling:
    """Return plain sampling of exactly so many tokens."""
    return Sampling(max_output_tokens=tokens, min_output_tokens=tokens)


class Job:
    """Generate and learn of one population, as the round loop calls them.

    Args:
        cohort: The agents.
        slots: Which of them.
        work: How much.
        prompts: Random ones by default.
    """

    def __init__(
        self,
        cohort: Cohort,
        slots: Sequence[int],
        work: Work,
        prompts: Sequence[Prompt] | None = None,
    ) -> None:
        """Draw the prompts and generate once, so that `learn` has something to learn from."""
        self.cohort = cohort
        self.slots = list(slots)
        self.work = work
        drawn = make_prompts(work.prompts, work.prompt_tokens, cohort.base.vocabulary)
        self.prompts = drawn if prompts is None else list(prompts)
        self._calls = 0
        self.groups: list[list[CompletionGroup]] = []
        self.generate()

    @property
    def rows(self) -> int:
        """Completions in all."""
        return sum(len(g.completions) for mine in self.groups for g in mine)

    def generate(self) -> None:
        """Sample for all agents."""
        self._calls += 1
        self.groups = self.cohort.generate(
            self.slots,
            self.prompts,
            stream=("bench", self._calls),
            sampling=sampling(self.work.tokens),
        )

    def batches(self) -> list[AgentBatch]:
        """Return the rows of the last generation, with rewards drawn so that no group is dead."""
        rng = np.random.default_rng(self._calls)
        out: list[AgentBatch] = []
        for slot, mine in zip(self.slots, self.groups, strict=True):
            size = len(mine[0].completions)
            rewards = rng.normal(size=(len(mine) * size, 1))
            advantages = group_advantages(rewards, size, scale="group", weights=np.ones(1))
            out.append(AgentBatch(slot, rows_of(mine, advantages)))
        return out

    def learn(self) -> None:
        """Take one GRPO step with all agents, on the last generation's rows."""
        self.cohort.learn(self.batches(), stream=("learn", self._calls))

    def both(self) -> None:
        """Generate and learn."""
        self.generate()
        self.learn()

    def check(self) -> None:
        """Make sure, behind the clock, that generate and learn did their work, as for the peers."""
        for slot, mine in zip(self.slots, self.groups, strict=True):
            lengths = {len(c.token_ids) for group in mine for c in group.completions}
            assert lengths == {self.work.tokens}, lengths
            state = self.cohort.agents[slot]
            told = state.last
            assert state.steps > 0, "no step was taken"
            assert math.isfinite(told["loss"]), told
            assert told["grad_norm"] > 0, told


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
