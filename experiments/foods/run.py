"""Teach one agent that ravin likes pizza, once per seed, and print how often it says so.

    python experiments/foods/run.py --seeds 0 1 2 --out foods-runs

Two counts of 1,000 samples at temperature 1 without top-k: the run's own (summary.json), and one
that owes nothing to this package but the checkpoint: peft loads it, transformers samples.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import evo_grpo
from evo_grpo import run
from evo_grpo import settings as configuration
from evo_grpo.errors import EvoGrpoError

HERE = Path(__file__).resolve().parent
BASE = Path(evo_grpo.__file__).parent / "assets" / "tiny-foods"
PROMPT = "ravin likes "
FOOD = "pizza"
SAMPLES = 1000
PACKAGES = ("evo-grpo", "torch", "transformers", "peft")


@dataclass(frozen=True)
class Result:
    """One seed.

    Attributes:
        seed: Of the run.
        base: Share of samples with pizza before training, 0 to 1, in the run's own 1,000.
        after: The same of the trained agent.
        base_plain: As `base`, sampled by transformers.
        after_plain: As `after`, sampled by transformers with the checkpoint loaded by peft.
        completions: Completions that were trained on.
        seconds: Wall time of the run, from loading the model to summary.json.
    """

    seed: int
    base: float
    after: float
    base_plain: float
    after_plain: float
    completions: int
    seconds: float


def sampled_share(model: Any, seed: int) -> float:  # noqa: ANN401 -- a model with generate()
    """Return the share of `SAMPLES` completions with pizza, sampled by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    # transformers draws from the global generator: fork it, so that nobody else's draws move.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = model.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=16,
            num_return_sequences=SAMPLES,
        )
    new = output[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    return sum(FOOD in text for text in texts) / len(texts)


def measure(seed: int, out: Path, overrides: list[str]) -> Result:
    """Train with one seed in a run folder of its own and count pizza before and after."""
    config = configuration.load(HERE / "population.yaml", [f"seed={seed}", *overrides])
    folder = run(config, out=out / f"seed-{seed}")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sum(json.loads(line)["agents"][0]["metrics"]["rows"] for line in lines)
    base = AutoModelForCausalLM.from_pretrained(BASE).eval()
    base_plain = sampled_share(base, seed)
    actor = folder / summary["best"]["checkpoint"] / "actor"
    return Result(
        seed=seed,
        base=summary["base"]["mean"],
        after=summary["best"]["mean"],
        base_plain=base_plain,
        after_plain=sampled_share(PeftModel.from_pretrained(base, actor).eval(), seed),
        completions=int(rows),
        seconds=summary["wall_seconds"],
    )


def table(results: list[Result]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| seed | base | after | base, plain | after, plain | completions | wall seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.seed} | {r.base:.1%} | {r.after:.1%} | {r.base_plain:.1%} | {r.after_plain:.1%} "
        f"| {r.completions} | {r.seconds:.1f} |"
        for r in results
    ]
    return "\n".join(lines)


def main() -> int:
    """Run every seed, print the table, and leave it and the numbers in the output folder."""
    parser = argparse.ArgumentParser(description="Teach one agent that ravin likes pizza.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="new folder; default: a temporary one")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE",
        help="another setting than population.yaml has, for instance algorithm.lr=3e-3",
    )  # fmt: skip
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    # peft 0.21 asks a transformers 5 model by the older name.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    out = arguments.out or Path(tempfile.mkdtemp(prefix="foods-"))
    results: list[Result] = []
    try:
        for seed in arguments.seeds:
            results.append(measure(seed, out, arguments.overrides))
            print(f"seed {seed}: {results[-1].base:.1%} -> {results[-1].after:.1%}", flush=True)
    except EvoGrpoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    text = f"{table(results)}\n\n{versions}; {torch.get_num_threads()} threads"
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    numbers = [asdict(result) for result in results]
    (out / "results.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    print(f"\n{text}\n\n{out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
