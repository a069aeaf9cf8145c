"""Tokens per second of the decode loop, its distance to bare matmuls, and shared prefill.

    python experiments/bench/decode.py [--quick] [--shapes 1M 10M 135M] [--out FILE]

For each shape, 8 adapters, the same prompts and sampling, exactly T tokens each:
ours                 one fused batch
HF, no LoRA          transformers' generate on the plain base: the bar
PEFT adapter_names   the same under PEFT's mixed batches
one by one           PEFT, one generate call per adapter
vLLM                 one LoRARequest per row, where its environment is installed or --vllm is given
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import HERE, Report, interleaved, median, parser, quiet, ratio
from peers import Peer, PeerError

THREADS = quiet()

import torch  # noqa: E402 -- after the threads are fixed, as what follows
from jobs import (  # noqa: E402
    SHAPES,
    Job,
    Work,
    load_base,
    make_prompts,
    population,
    random_model,
    sampling,
    too_large,
)
from shapes import LARGE  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from evo_grpo.population.cohort.cohort import Cohort  # noqa: E402
from evo_grpo.rollout.engine import RolloutRequest  # noqa: E402

ADAPTERS = 8
TARGETS = {"1M": 1.0, "10M": 0.95, "135M": 0.9}


def hf_generate(model: Any, ids: Tensor, tokens: int, **extra: Any) -> None:  # noqa: ANN401
    """Sample with transformers: temperature 1, no filters, exactly so many tokens."""
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens,
        min_new_tokens=tokens, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    with torch.no_grad(), torch.random.fork_rng([]):
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            **extra,
        )
    assert out.shape[1] == ids.shape[1] + tokens


def throughput(
    report: Report, shape: str, each: int, tokens: int, repeats: int, *, vllm: bool
) -> None:
    """Compare ours with the others on the same batch of 8 adapters × `each` rows."""
    work = Work(1, each, tokens, prompt_tokens=16)
    cohort, slots = population(load_base(shape), ADAPTERS, work)
    ours = Job(cohort, slots, work)
    plain = random_model(shape)
    rows = ADAPTERS * each
    ids = torch.tensor([ours.prompts[0].token_ids] * rows)
    names = [cohort.agents[slot].adapter for slot in slots for _ in range(each)]
    peft = cohort.slots.peft

    def one_by_one() -> None:
        for slot in slots:
            cohort.slots.activate(cohort.agents[slot].adapter)
            hf_generate(peft, ids[:each], tokens)

    sides: dict[str, Callable[[], object]] = {
        "ours": ours.generate,
        "HF, no LoRA": lambda: hf_generate(plain, ids, tokens),
        "PEFT adapter_names": lambda: hf_generate(peft, ids, tokens, adapter_names=names),
        "one by one": one_by_one,
    }
    peft.eval()
    with ExitStack() as stack:
        if vllm:
            sides |= vllm_side(ours, [tokens] * rows, stack)
        samples = interleaved(sides, repeats)
    for name in sides:
        report.add(
            "Decode: 8 adapters",
            model=shape, rows=rows, tokens=tokens, side=name, seconds=median(samples, name),
            tokens_per_second=rows * tokens / median(samples, name),
            ours_is_faster=ratio(samples, name, "ours"),
        )  # fmt: skip
    if shape in TARGETS:
        report.at_least(
            f"decode tokens/s over HF without LoRA, {shape}, {rows} rows",
            ratio(samples, "HF, no LoRA", "ours"),
            TARGETS[shape],
        )


def vllm_side(
    job: Job, lengths: Sequence[int], stack: ExitStack, rows: int | None = None
) -> dict[str, Callable[[], object]]:
    """Return vLLM as a side of `interleaved`, if it starts; the arguments are of `vllm_peer`."""
    try:
        peer = stack.enter_context(vllm_peer(job, lengths, stack, rows=rows))
    except PeerError as error:
        print(f"vLLM, {job.cohort.base.name}: not measured: {error}", file=sys.stderr)
        return {}
    return {"vLLM": lambda: float(peer.ask("generate")["seconds"])}


def vllm_peer(
    job: Job,
    lengths: Sequence[int],
    stack: ExitStack,
    *,
    rows: int | None = None,
    eager: bool = True,
    python: Path | None = None,
) -> Peer:
    """Write the base and its adapters into a temporary folder and start vLLM over them.

    Args:
        job: Its agents, and the first of its prompts.
        lengths: Tokens of each row; all agents have equally many rows.
        stack: Ends the process and removes the folder.
        rows: Most rows at once; None for all.
        eager: Whether to leave out graphs.
        python: An interpreter that has vLLM; None for that of its environment.
    """
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-vllm-")))
    job.cohort.base.save(folder / "base")
    adapters = [job.cohort.agents[slot].adapter for slot in job.slots]
    for name in adapters:
        (folder / name).mkdir()
        job.cohort.slots.snapshot(name).write(folder / name)
    return Peer(
        "vllm",
        {
            "model": str(folder / "base"),
            "adapters": [str(folder / name) for name in adapters],
            "ids": list(job.prompts[0].token_ids),
            "lengths": list(lengths),
            "rows": rows or len(lengths),
            "dtype": str(job.cohort.base.dtype).removeprefix("torch."),
            "eager": eager,
        },
        python,
    )


def bare_matmuls(cohort: Cohort, rows: int, columns: int) -> dict[str, Callable[[], None]]:
    """Return one decode step's matmuls and nothing else, each on tensors of its own.

    Args:
        cohort: 8 agents.
        rows: Rows in all.
        columns: Keys a row attends to.

    Returns:
        By name: all of them, the model's own linear layers, the head, each layer's pair of LoRA
        matmuls, and the two of its attention, each at its own shape; those without the attention's;
        and all with q, k, v and gate, up side by side.
    """
    config = cohort.base.model.config
    generator = torch.Generator().manual_seed(0)
    each = rows // ADAPTERS
    size, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or size // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    q, kv = heads * head_dim, kv_heads * head_dim

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def build(layers: list[tuple[int, int, int]], *, attention: bool) -> Callable[[], None]:
        """Take (in, out, rank) of a layer's linear modules: base, then down and up of all."""
        calls = [
            (noise(rows, i), noise(o, i), noise(ADAPTERS, i, r), noise(ADAPTERS, r, o))
            for _ in range(config.num_hidden_layers)
            for i, o, r in layers
        ]
        attended = [
            (
                noise(rows * kv_heads, heads // kv_heads, head_dim),
                noise(rows * kv_heads, head_dim, columns),
                noise(rows * kv_heads, columns, head_dim),
            )
            for _ in range(config.num_hidden_layers if attention else 0)
        ]
        x, head = noise(rows, size), cohort.base.head.weight

        @torch.no_grad()
        def run() -> None:
            for x_in, weight, a, b in calls:
                nn.functional.linear(x_in, weight)
                torch.bmm(torch.bmm(x_in.view(ADAPTERS, each, -1), a), b)
            for query, keys, values in attended:
                torch.bmm(torch.bmm(query, keys), values)
            nn.functional.linear(x, head)

        return run

    own = [(size, q), (size, kv), (size, kv), (q, size), (size, inner), (size, inner)]
    single = [(i, o, 8) for i, o in [*own, (inner, size)]]
    joined = [(size, q + 2 * kv, 24), (q, size, 8), (size, 2 * inner, 16), (inner, size, 8)]
    return {
        "all its matmuls": build(single, attention=True),
        "without the attention's": build(single, attention=False),
        "all, q k v and gate up side by side": build(joined, attention=True),
    }


def step_time(report: Report, tokens: int, repeats: int) -> None:
    """Compare the milliseconds of a step for 256 rows with those of its matmuls."""
    rows = 256
    long, short = (Work(1, rows // ADAPTERS, t) for t in (tokens, 1))
    cohort, slots = population(load_base("embedded"), ADAPTERS, long)
    job = Job(cohort, slots, long)
    steps = tokens - 1
    mean_columns = long.prompt_tokens + (tokens + 1) // 2

    def once(work: Work) -> Callable[[], object]:
        return lambda: cohort.generate(
            slots, job.prompts, stream=("step",), sampling=sampling(work.tokens)
        )

    def repeated(call: Callable[[], None]) -> Callable[[], object]:
        return lambda: [call() for _ in range(steps)]

    bare = bare_matmuls(cohort, rows, mean_columns)
    samples = interleaved(
        {
            "long": once(long),
            "prefill and one token": once(short),
            **{name: repeated(call) for name, call in bare.items()},
        },
        repeats,
        warmup=2,
    )
    samples["a decode step"] = [
        a - b for a, b in zip(samples["long"], samples["prefill and one token"], strict=True)
    ]
    for name in ("a decode step", *bare):
        report.add(
            "One step, embedded model, 256 rows of 8 adapters",
            what=name, milliseconds=1000 * median(samples, name) / steps,
            step_over_it=ratio(samples, "a decode step", name),
        )  # fmt: skip
    linear = ratio(samples, "a decode step", "without the attention's")
    report.at_most(
        "decode step over its bare matmuls, 256 rows",
        ratio(samples, "a decode step", "all its matmuls"), 2.5,
        f"{linear:.2f} over those of the linear layers alone, without the attention's",
    )  # fmt: skip


def shared_prefill(report: Report, shape: str, repeats: int, *, prompt: int) -> float:
    """Compare one prefill per (agent, prompt) with one per row; return how much faster it is."""
    group, tokens = 8, 16
    work = Work(1, group, tokens, prompt_tokens=prompt)
    cohort, slots = population(load_base(shape), ADAPTERS, work)
    prompts = make_prompts(1, prompt, cohort.base.vocabulary)

    def rollout(copies: int, samples: int) -> None:
        cohort.engine.rollout(
            [
                RolloutRequest(
                    slot, cohort.agents[slot].adapter, prompts * copies, samples,
                    sampling(tokens), slot,
                )
                for slot in slots
            ]
        )  # fmt: skip

    samples = interleaved(
        {"shared": lambda: rollout(1, group), "every row": lambda: rollout(group, 1)}, repeats
    )
    faster = ratio(samples, "every row", "shared")
    report.add(
        "Shared prefill: 8 adapters, G=8, T=16",
        model=shape, prompt_tokens=prompt, shared=median(samples, "shared"),
        every_row=median(samples, "every row"), faster=faster,
    )  # fmt: skip
    return faster


def arguments() -> argparse.Namespace:
    """Read the command line."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument(
        "--shapes", nargs="+", choices=[*SHAPES, *LARGE], default=list(SHAPES),
        help="default: 1M 10M 135M; 0.5B and 3B are Qwen2.5's and have no target",
    )  # fmt: skip
    given.add_argument("--rows-per-adapter", type=int, default=4)
    given.add_argument("--vllm", action="store_true", help="install vLLM when it is not there")
    return given.parse_args()


def main() -> int:
    """Run all comparisons."""
    given = arguments()
    quick = given.quick
    report = Report("decode", given)
    repeats = given.repeats or (1 if quick else 7)
    vllm = given.vllm or (HERE / ".venvs" / "vllm").is_dir()
    for shape in ("1M",) if quick else given.shapes:
        slow = shape not in ("1M", "10M")
        if (why := too_large(shape, copies=2)) is not None:
            report.add("Decode: 8 adapters", model=shape, side=f"not measured: {why}")
            continue
        tokens = 4 if quick else 16 if slow else 32
        turns = given.repeats or (3 if slow else repeats)
        throughput(report, shape, given.rows_per_adapter, tokens, turns, vllm=vllm)
    if not vllm:
        report.add("vLLM", tokens_per_second="not measured: no .venvs/vllm; --vllm installs it")
    step_time(report, 8 if quick else 32, repeats)
    faster = shared_prefill(report, "embedded", repeats, prompt=256)
    if not quick:
        shared_prefill(report, "10M", max(1, repeats // 2), prompt=256)
    report.at_least("shared prefill over prefilling every row, embedded model", faster, 2.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
