"""What half precision of the base costs in exactness: log-probs, gradients and the ratio's drift.

    OMP_NUM_THREADS=2 python experiments/bench/half.py [--quick] [--out FILE] [--model FILE.gguf]

Weights are rounded first, so that both bases are the same model. "Drift" compares the log-probs of
the sampler with the learner's, both in half precision, as `sampler_gap` reports it.
"""

import sys
from pathlib import Path

from common import Report, parser, quiet

THREADS = quiet()

import torch  # noqa: E402 -- after the threads are fixed, as what follows
from jobs import EMBEDDED, lora, make_prompts, rows_of  # noqa: E402
from shapes import RELEASED  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from evo_grpo.learn.packing import MicroBatch, collate  # noqa: E402
from evo_grpo.model.base import SharedBase  # noqa: E402
from evo_grpo.model.forward.choice import open_forward  # noqa: E402
from evo_grpo.model.forward.stacks import RowLayout  # noqa: E402
from evo_grpo.model.lora.slots import AdapterSlots  # noqa: E402
from evo_grpo.rollout.engine import RolloutRequest  # noqa: E402
from evo_grpo.rollout.native.native_engine import NativeEngine  # noqa: E402
from evo_grpo.rollout.sampling import Sampling  # noqa: E402

#: Released shapes with few layers and words: the width decides how sums are rounded. Weights are
#: drawn so that a token has a few likely successors, as in a trained model.
SHAPES = {name: RELEASED[name] for name in ("Qwen2.5-0.5B", "Qwen3-4B", "Llama-3.1-8B")}
LAYERS, WORDS, SPREAD = 4, 8192, 0.04
AGENTS = ("a0", "a1")


def model_of(name: str, file: Path | None) -> nn.Module:
    """Return a model in float32 whose weights bfloat16 holds exactly."""
    if file is not None:
        model = SharedBase.load(str(file), device="cpu", dtype="float32").model
    else:
        sizes = {**SHAPES[name], "num_hidden_layers": LAYERS, "vocab_size": WORDS}
        config = AutoConfig.for_model(
            **sizes, initializer_range=SPREAD, pad_token_id=0, eos_token_id=1, bos_token_id=2
        )
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def slots_of(model: nn.Module, dtype: torch.dtype, name: str) -> AdapterSlots:
    """Return two agents with the same adapters over a base in a dtype."""
    base = SharedBase(nn.Module.to(model, dtype), AutoTokenizer.from_pretrained(EMBEDDED), name)
    slots = AdapterSlots(base, lora(8))
    generator = torch.Generator().manual_seed(1)
    for agent in AGENTS:
        slots.add(agent, lora(8))
        with torch.no_grad():
            for parameter in slots.parameters(agent):
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.02 * draw)
    return slots


def learned(slots: AdapterSlots, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the log-probs (M,) of a micro-batch, and the adapters' gradient as one vector."""
    forward = open_forward(slots, AGENTS)
    with forward.rows(RowLayout(AGENTS, batch.counts)):
        hidden = forward.hidden_at(batch.input_ids, batch.where, batch.prefix)
        values, _ = slots.base.token_logprobs(hidden, batch.targets, torch.ones(len(hidden)))
        advantages = torch.tensor([row.advantage for row in batch.rows])
        weights = advantages.repeat_interleave(batch.mask.sum(-1))
        slots.base.backward(-(values * weights).mean())
    forward.collect_gradients()
    found = [p.grad for name in AGENTS for p in slots.parameters(name) if p.grad is not None]
    return values.detach(), torch.cat([g.flatten().double() for g in found])


def compare(report: Report, name: str, file: Path | None, dtype: torch.dtype, rows: int) -> None:
    """Sample in half precision; compare its log-probs and gradients with float32."""
    slots = slots_of(model_of(name, file), dtype, name)
    prompts = make_prompts(4, 12, slots.base.vocabulary)
    sampling = Sampling(max_output_tokens=32, min_output_tokens=32)
    asked = [RolloutRequest(i, a, prompts, rows // 8, sampling, i) for i, a in enumerate(AGENTS)]
    groups = NativeEngine(slots).rollout(asked)
    advantages = torch.randn(rows, generator=torch.Generator().manual_seed(2)).numpy()
    half = rows // 2
    bucket = [
        (agent, row)
        for agent, mine in enumerate(groups)
        for row in rows_of(mine, advantages[agent * half : agent * half + half])
    ]
    batch = collate(bucket, slots.base.pad_id, slots.base.device)
    values, gradient = learned(slots, batch)
    sampled = torch.cat([torch.from_numpy(row.sampler_logprobs) for _, row in bucket])
    del slots
    exact, whole = learned(slots_of(model_of(name, file), torch.float32, name), batch)
    apart, drift = (values - exact).abs(), (sampled - values).abs()
    report.add(
        "Half precision over float32 (nats per token)",
        model=name, dtype=str(dtype).removeprefix("torch."), tokens=len(values),
        logprob=float(exact.mean()), error_mean=float(apart.mean()),
        error_99=float(apart.quantile(0.99)), error_max=float(apart.max()),
        drift_mean=float(drift.mean()), drift_99=float(drift.quantile(0.99)),
        drift_max=float(drift.max()),
        gradient=float((gradient - whole).norm() / whole.norm()),
        cosine=float(torch.cosine_similarity(gradient, whole, dim=0)),
    )  # fmt: skip


def main() -> int:
    """Compare each shape, and a real model if one is given."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument("--shapes", nargs="+", choices=SHAPES, help="released widths")
    given.add_argument("--model", type=Path, help="a real model: a .gguf file")
    arguments = given.parse_args()
    report = Report("half", arguments)
    names = arguments.shapes or ([*SHAPES][:1] if arguments.quick else [*SHAPES])
    cases = [(name, None) for name in names]
    cases += [(arguments.model.stem, arguments.model)] if arguments.model else []
    for name, file in cases:
        for dtype in (torch.bfloat16,) if arguments.quick else (torch.bfloat16, torch.float16):
            compare(report, name, file, dtype, 16 if arguments.quick else 64)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
