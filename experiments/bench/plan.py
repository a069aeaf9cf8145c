"""The memory plan compared with meta parameters, saved tensors and measured peaks.

    python experiments/bench/plan.py [--quick] [--cases NAME ...] [--out FILE]

- Parameters: each released model is made on the meta device, with PEFT's adapters; the counts of
  the plan must be equal.
- Saved tensors: `torch.autograd.graph.saved_tensors_hooks` collects what a learn pass keeps for its
  backward, without the weights.
- Peaks: N agents sample and learn in a fresh process on one thread, whose allocator returns freed
  memory at once; the peak resident memory is compared with the prediction of
  `evo_grpo.training.sizing.memory`.

Models that do not fit here have fewer layers and a smaller vocabulary; the widths are their own.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import Report, child, memory, parser, quiet, reset_peak, tell
from shapes import RELEASED

SCRIPT = Path(__file__)
#: Agents, completions of each prompt, prompts, tokens of a prompt and of a completion, LoRA rank;
#: fewer layers or words than the model has; other settings.
CASES: dict[str, dict[str, Any]] = {
    "embedded": {"agents": 8, "groups": 8, "prompts": 8, "prompt": 6, "tokens": 16, "rank": 8},
    "135M": {"agents": 8, "groups": 8, "prompts": 1, "prompt": 6, "tokens": 24, "rank": 16},
    "135M, modules": {
        "agents": 4, "groups": 4, "prompts": 1, "prompt": 6, "tokens": 24, "rank": 16,
    },
    "Qwen3-4B": {
        "agents": 2, "groups": 4, "prompts": 1, "prompt": 32, "tokens": 32, "rank": 16,
        "layers": 2, "vocabulary": 8192,
    },
    "Qwen3-4B, bfloat16": {
        "agents": 2, "groups": 2, "prompts": 1, "prompt": 16, "tokens": 16, "rank": 16,
        "layers": 1, "vocabulary": 8192, "dtype": "bfloat16", "only_saved": True,
    },
    "Llama-3.1-8B": {
        "agents": 2, "groups": 4, "prompts": 1, "prompt": 32, "tokens": 48, "rank": 16,
        "layers": 2, "vocabulary": 8192,
    },
    "Llama-3.1-8B, checkpointing": {
        "agents": 2, "groups": 4, "prompts": 1, "prompt": 32, "tokens": 48, "rank": 16,
        "layers": 2, "vocabulary": 8192, "engine": {"gradient_checkpointing": True},
    },
    "Qwen2.5-0.5B": {
        "agents": 2, "groups": 4, "prompts": 1, "prompt": 16, "tokens": 32, "rank": 8,
    },
}  # fmt: skip
#: Largest relative error.
ALLOWED = 0.06


def parameters(name: str, rank: int) -> dict[str, int]:
    """Count the parameters of a released model and of an adapter, made and planned."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from evo_grpo.settings import LoraSettings
    from evo_grpo.training.sizing.model_size import from_config, lora_parameters

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**RELEASED[name]))
        base = sum(p.numel() for p in model.parameters())
        peft = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
        adapter = sum(p.numel() for n, p in peft.named_parameters() if "lora_" in n)
    size = from_config(name, RELEASED[name])
    planned = lora_parameters(size, LoraSettings(r=rank))
    assert size.parameters is not None
    assert planned is not None
    return {
        "made": base, "planned": size.parameters,
        "made adapter": adapter, "planned adapter": planned,
    }  # fmt: skip


def make_base(job: Mapping[str, Any]) -> Any:  # noqa: ANN401 -- torch is imported in children only
    """Make the base of a case, with random weights."""
    import torch
    from jobs import EMBEDDED, load_base
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from evo_grpo.model.base import SharedBase

    name, _, variant = job["case"].partition(", ")
    if name not in RELEASED:
        base = load_base(name)
        base.specialized = variant != "modules"
        return base
    shape = dict(RELEASED[name])
    shape["num_hidden_layers"] = job.get("layers", shape["num_hidden_layers"])
    shape["vocab_size"] = job.get("vocabulary", shape["vocab_size"])
    shape |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape)
    model = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, job.get("dtype", "float32"))
    )
    return SharedBase(model.eval(), AutoTokenizer.from_pretrained(EMBEDDED), name)


def run(job: Mapping[str, Any]) -> dict[str, float]:
    """Child: one population; tell the measured memory and the prediction, in MiB.

    Saved tensors and peaks take a process each, since freed memory stays with a process.
    """
    quiet()
    from jobs import Job, Work, population

    process = memory("VmRSS")
    base = make_base(job)
    reset_peak()
    loaded = memory("VmRSS")
    work = Work(job["prompts"], job["groups"], job["tokens"], job["prompt"])
    engine = {"max_tokens_per_microbatch": 1 << 20, **job.get("engine", {})}
    cohort, slots = population(base, job["agents"], work, rank=job["rank"], beta=0.0, **engine)
    one = Job(cohort, slots, work)
    if job["part"] == "saved":
        return saved(job, base, cohort, one)
    reset_peak()
    one.generate()
    sampling = memory("VmHWM")
    one.learn()
    own = memory("VmRSS")  # with the moments of AdamW, which come with the first step
    reset_peak()
    one.learn()
    learning = memory("VmHWM")
    planned = plan_of(job, base, cohort)
    held = sum(part.bytes for part in planned.held if part.name != "checkpoints being written")
    names = {part.name: part.bytes for part in planned.held}
    mib = 1 / 2**20
    # The agents have neither gradients nor moments before the first step.
    later = 12 * sum(
        p.numel()
        for agent in cohort.agents.values()
        for p in cohort.slots.parameters(agent.adapter)
    )
    sampled, learned = (sum(one.bytes for one in p) for p in (planned.sampling, planned.learning))
    return {
        "process": process, "base": loaded - process, "agents": own - loaded,
        "sampling peak": sampling, "learning peak": learning,
        "planned base": names["base"] * mib, "planned agents": names["agents"] * mib,
        "planned sampling peak": (held + sampled - later) * mib,
        "planned learning peak": (held + learned) * mib,
    }  # fmt: skip


def plan_of(job: Mapping[str, Any], base: Any, cohort: Any) -> Any:  # noqa: ANN401 -- as above
    """Return the plan of a case."""
    from evo_grpo.settings import EngineConfig
    from evo_grpo.training.sizing.memory import predict
    from evo_grpo.training.sizing.model_size import from_config

    config = base.model.config.to_dict()
    engine = {"max_tokens_per_microbatch": 1 << 20, **job.get("engine", {})}
    plan = predict(
        from_config(job["case"], config), work_of(job, base, cohort),
        EngineConfig(max_decode_rows=4096, **engine), dtype=job.get("dtype", "float32"),
        device="cpu",
    )  # fmt: skip
    assert plan is not None
    return plan


def work_of(job: Mapping[str, Any], base: Any, cohort: Any) -> Any:  # noqa: ANN401 -- as above
    """Return what the plan needs to know of a case."""
    from evo_grpo.training.sizing.memory import Work

    first = next(iter(cohort.agents.values()))
    kind = base.model.config.model_type
    return Work(
        agents=job["agents"], archive=False, references=False,
        parameters=sum(p.numel() for p in cohort.slots.parameters(first.adapter)),
        rank=job["rank"], rows=job["agents"] * job["groups"] * job["prompts"], evaluation_rows=0,
        prompt_tokens=job["prompt"], output_tokens=job["tokens"],
        specialised=base.specialized, group=job["groups"],
        head_norms=kind == "qwen3",
    )  # fmt: skip


def saved(job: Mapping[str, Any], base: Any, cohort: Any, one: Any) -> dict[str, float]:  # noqa: ANN401 -- as above
    """Return the MiB that a learn pass keeps for its backward, measured and planned."""
    import torch

    from evo_grpo.training.sizing.memory import DTYPE_BYTES, learn_batch, saved_bytes
    from evo_grpo.training.sizing.model_size import from_config

    if job.get("engine", {}).get("gradient_checkpointing"):
        one.learn()
        return {}  # the recomputed layers are saved one at a time
    weights = [*base.model.parameters(), *base.model.buffers()]
    own = {tensor.untyped_storage().data_ptr() for tensor in weights}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:  # noqa: ANN401 -- any tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # kept alive, so that no address occurs twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        one.learn()
    work, shape = work_of(job, base, cohort), from_config("", base.model.config.to_dict()).shape
    assert shape is not None
    batch, each = learn_batch(work, 1 << 20, None), DTYPE_BYTES[job.get("dtype", "float32")]
    planned = shape.layers * saved_bytes(shape, work, batch, each, "cpu")
    planned += 3 * batch.tokens * shape.hidden * each
    planned += work.agents * work.parameters * each  # the adapters of a layer, stacked
    mib = 1 / 2**20
    return {
        "saved": sum(storage.nbytes() for storage in kept.values()) * mib,
        "planned saved": planned * mib,
    }


def main() -> int:
    """Measure every case in a process of its own, or tell one's numbers."""
    given = parser(__doc__.partition("\n")[0])
    given.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = given.parse_args()
    if arguments.child is not None:
        job = arguments.child
        tell(parameters(job["count"], 16) if "count" in job else run(job))
        return 0
    del arguments.child
    report = Report("plan", arguments)
    for name in RELEASED:
        counts = child(SCRIPT, {"count": name})
        report.add("Parameters, on the meta device and planned", model=name, **counts)
        off = abs(counts["planned"] - counts["made"])
        off += abs(counts["planned adapter"] - counts["made adapter"])
        report.at_most(f"wrong parameters, {name}", off, 0)
    # Peaks are of memory in use: by default glibc keeps freed memory, in gaps.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    repeats = arguments.repeats or (1 if arguments.quick else 3)
    for case in arguments.cases:
        found: dict[str, float] = {}
        for part in ("saved",) if CASES[case].get("only_saved") else ("saved", "peaks"):
            job = {"case": case, "part": part, **CASES[case]}
            told = [child(SCRIPT, job) for _ in range(repeats if part == "peaks" else 1)]
            found |= {name: statistics.median(one[name] for one in told) for name in told[0]}
        report.add("Measured and planned (MiB)", case=case, **found)
        print(json.dumps({"case": case, **found}), flush=True)
        for name in ("saved", "sampling peak", "learning peak"):
            if name in found:
                off = found[f"planned {name}"] / found[name] - 1
                report.add("Errors", case=case, what=name, error=off)
                report.at_most(f"error of {name}, {case}", abs(off), ALLOWED)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
