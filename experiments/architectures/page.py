"""docs/architectures.md from the results of the sweep."""

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
BENCH = Path(__file__).resolve().parents[1] / "bench" / "results"
#: What `round.py --parts families` found, a file for each shape.
SPEEDS = ("families-10M.json", "families-1M.json")

HEAD = """# Architectures

<!-- Written by experiments/architectures/sweep.py --page; do not edit by hand. -->

Every causal language model of transformers either gives exact numbers in evo-grpo, or is refused
when it is built, with an error that names the model and a remedy. This page lists the result for
every architecture of `MODEL_FOR_CAUSAL_LM_MAPPING` in transformers {transformers}, at tiny size.
The reference is plain transformers and PEFT, which compute one agent and one row at a time.

{counts}

*Exact* means that the following agree in float32, with two agents of different rank in one batch:
log-probs and gradients of a learn pass, with and without gradient checkpointing; the log-probs
recorded while sampling; and greedy tokens, compared with `generate`. This is tested for prompts of
equal and of different lengths, for completions longer than a sliding window, for the default
adapters and for adapters of the attention alone. The bound is 1e-5, relative to the largest
log-prob or gradient if that is above 1. A larger difference that may be rounding is measured again
in float64 with a bound of 1e-6 (`results.jsonl` notes it). In these tests, every dropout
probability in the base's configuration is above 0 (except in diffllama). These dropouts must have
no effect, because the base never drops out.

<!-- not run: it takes minutes; tests/experiments/test_architectures.py runs a sample -->
```sh
python experiments/architectures/sweep.py         # continues where it was interrupted
python experiments/architectures/sweep.py --page  # writes this page
```

## The Llama family

evo-grpo runs these model types by layers of its own. These layers compute the same as the model's
modules, with fewer passes over memory, and compute the prompt of a group only once;
[Architecture](architecture.md#the-shared-forward-pass) says how. A model of such a type whose
layers differ runs by its own modules, as all other models do. Sliding windows act in rows of any
length, and prompts of different lengths share a batch.

{families}

## Architectures other than the Llama family

- **Prompts of different lengths** share one batch if the model accepts positions and a mask.
  evo-grpo tests this at construction with two short prompts. Other models decode the prompts of one
  length at a time (*by length* below), with the cache of their own `generate`. The draws, and so
  the completions, are the same as in one batch. For such models, sampling is fastest if prompts
  have few different lengths.
- **Sliding windows**: rows within the window share one batch. Longer rows are decoded by length,
  as `generate` decodes them.
- **Layers that flatten rows** have adapters like other layers. Experts that share one parameter
  have none: `all-linear` then means the existing linear layers, mostly those of the attention, and
  a warning lists them. `lora.target_modules` selects other layers.
- **Rotary frequencies that depend on the longest row** (`longrope`, `dynamic`) are fixed. By
  default, all rows use the frequencies of short rows, and the context ends at the length at which
  the model would switch. With a larger `algorithm.max_model_len`, all rows use the frequencies of
  long rows, as in vLLM.
- **Sparse attention by an index** (DeepSeek-V3.2 and its relatives, MiniMax-M3): once the index
  selects tokens, transformers selects different tokens for a prefix and for the whole row.
  Therefore rows end where selection begins: at `index_topk` tokens, 2048 in real configurations.
  Longer rows are refused. Models without such a layer, or whose selection is the same for a prefix
  (Doge, Qwen4), have no such limit.
- **The base's own dropout** never acts, with or without `engine.gradient_checkpointing`.

## Exact

| architecture | model types | prompts of different lengths | linear layers with adapters |
|---|---|---|---|
"""
REFUSED = """
## Refused

The last column has the error message, cut after 300 characters.

| architecture | model types | why |
|---|---|---|
"""
NOT_BUILT = """
## Not tried

No tiny configuration of these models runs in plain transformers on token ids alone.

| architecture | model types | why |
|---|---|---|
"""
BAD = """
## {title}

| architecture | model types | what |
|---|---|---|
"""
NAMES = {"any lengths": "in one batch", "equal lengths": "by length"}


def page(rows: Iterable[Row], model_types: Sequence[str]) -> str:
    """Return the page.

    Args:
        rows: The results.
        model_types: All there are.
    """
    rows = list(rows)
    by = {v: _merged(r for r in rows if r["verdict"] == v) for v in Counter(_verdicts(rows))}
    counts = "\n".join(
        f"- {what}: **{sum(r['verdict'] == verdict for r in rows)}** model types"
        for verdict, what in (
            ("exact", "exact"),
            ("refused", "refused at construction"),
            ("wrong", "wrong"),
            ("late", "failing later"),
            ("cannot build", "not tried, because no tiny model runs in plain transformers"),
        )
    )
    known = {row["model_type"] for row in rows}
    if missing := [name for name in model_types if name not in known]:
        counts += (
            f"\n- undecided: **{len(missing)}** model types ({', '.join(missing)}), which gave no "
            "answer, or an unexplained one above the bound: do not rely on them"
        )
    releases = " and ".join(sorted({row["transformers"] for row in rows}))
    out = HEAD.format(transformers=releases, counts=counts, families=_families(rows))
    for name, types, row in by.get("exact", ()):
        prompts = NAMES.get(row.get("prompts", ""), "")
        out += f"| {name} | {types} | {prompts} | {row.get('targets', '')} |\n"
    for verdict, head in (
        ("refused", REFUSED),
        ("cannot build", NOT_BUILT),
        ("wrong", BAD.format(title="Wrong")),
        ("late", BAD.format(title="Late")),
    ):
        if verdict in by:
            out += head
            for name, types, row in by[verdict]:
                out += f"| {name} | {types} | {_cell(row['sentence'])} |\n"
    return out


def _families(rows: Sequence[Row]) -> str:
    """Return the table of the Llama family: exactness by the sweep, speed by the benchmark."""
    found = [json.loads((BENCH / name).read_text(encoding="utf-8")) for name in SPEEDS]
    lines = [line for one in found for line in next(iter(one["rows"].values()))]
    prompts = sorted({line["prompt"] for line in lines})
    errors = {row["model_type"]: max(row["errors"].values()) for row in rows if row.get("errors")}
    shapes = list(dict.fromkeys(line["shape"] for line in lines))
    columns = [f"{phase}, {shape}" for shape in shapes for phase in ("generate", "learn")]
    out = [f"| model type | greatest error | {' | '.join(columns)} |", "|---" * 6 + "|"]
    for name in dict.fromkeys(line["family"] for line in lines):
        own = {(line["shape"], line["prompt"]): line for line in lines if line["family"] == name}
        cells = [
            " / ".join(f"{own[shape, tokens][f'{phase}_faster']:.2f}" for tokens in prompts)
            for shape in shapes
            for phase in ("generate", "learn")
        ]
        kind, _, more = name.partition(", ")
        shown = f"`{kind}`" + (f", {more}" if more else "")
        out.append(f"| {shown} | {errors[kind]:.1e} | {' | '.join(cells)} |")
    versions = found[0]["versions"]
    about = (
        "The error is the greatest one in the tests of the sweep. The other columns have the "
        "processor time of the model's own modules divided by that of evo-grpo's layers, for 8 "
        "agents of rank 8, 8 completions of 32 tokens a prompt, and one prompt (10M parameters) or "
        "four (1M) an agent. The figures of a cell are for prompts of "
        f"{' / '.join(map(str, prompts))} tokens. Windows have 16 tokens. With a "
        "window, the modules decode prompts of one length without a mask and read as few columns "
        "as evo-grpo's layers, so generating gains little or loses up to a tenth. "
        "Learning gains most from computing the prompt of a group once; most of the remaining time "
        "is matrix products, which both sides need. "
        f"Measured {found[0]['date'][:10]} on a busy machine with two cores (torch "
        f"{versions['torch']}, transformers {versions['transformers']}) by `OMP_NUM_THREADS=1 "
        "python experiments/bench/round.py --parts families --shapes SHAPE --repeats "
        f"{found[0]['arguments']['repeats']}`."
    )
    return "\n".join(out) + "\n\n" + textwrap.fill(about, 100, break_on_hyphens=False)


def _verdicts(rows: Iterable[Row]) -> list[str]:
    return [row["verdict"] for row in rows]


def _merged(rows: Iterable[Row]) -> list[tuple[str, str, Row]]:
    """Return (architecture, its model types, one of its rows), in alphabetical order."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        what = row["sentence"], row.get("prompts", "") + row.get("targets", "")
        found.setdefault((row["architecture"], *what), []).append(row)
    out = [
        (name, ", ".join(f"`{r['model_type']}`" for r in same), same[0])
        for (name, *_), same in found.items()
    ]
    return sorted(out, key=lambda entry: entry[:2])


def _cell(text: str) -> str:
    cut = text if len(text) <= 300 else text[:297] + "..."
    return cut.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
