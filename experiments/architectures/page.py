"""docs/architectures.md from the results of the sweep."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

HEAD = """# Architectures

<!-- Written by experiments/architectures/sweep.py --page; do not edit by hand. -->

Any causal language model of transformers either computes the right numbers here, or is refused when
it is built, with a sentence that names the model and what to do. This page is the proof: every
architecture of `MODEL_FOR_CAUSAL_LM_MAPPING` in transformers {transformers}, at tiny size, against
plain transformers and PEFT, one agent and one row at a time.

{counts}

*Exact* means, in float32 with two agents of different rank in one batch: log-probs and gradients of
a learn pass, with and without gradient checkpointing; the log-probs recorded while sampling; greedy
tokens against `generate`, which all holds for prompts of one length and of several, for completions
that outgrow a sliding window, for default adapters and for those of the attention alone. The bound
is 1e-5, of the largest log-prob or gradient where that is above 1; what rounding alone puts above
it is measured again in float64, where 1e-6 decides (`results.jsonl` notes it). Every dropout of the
base's configuration is on, and must do nothing.

<!-- not run: it takes minutes; tests/experiments/test_architectures.py runs a sample -->
```sh
python experiments/architectures/sweep.py         # goes on where it was stopped
python experiments/architectures/sweep.py --page  # writes this page
```

## How others than the Llama family run

- **Prompts of several lengths** share one batch where the model takes positions and a mask from
  outside. That is found out at construction with two short prompts. Other models are decoded one
  length of prompts at a time (*by length* below), with the cache of their own `generate`; the
  draws, and so the completions, do not depend on it. Prompts of one length, or of few, then sample
  fastest.
- **Sliding windows**: rows within the window share one batch. Longer ones are decoded by length,
  past the window, as `generate` does.
- **Layers that flatten rows** carry adapters as others do. Experts that share one parameter carry
  none: `all-linear` then means the linear layers there are, mostly those of the attention, and a
  warning says which. `lora.target_modules` names others.
- **Rotary frequencies that follow the longest row** (`longrope`, `dynamic`) are held: those of
  short rows up to the length at which the model would switch, which is then the context; or with a
  larger `algorithm.max_model_len` those of long rows for all, as vLLM does.
- **Sparse attention by an index** (DeepSeek-V3.2 and its kin, MiniMax-M3) chooses the tokens of a
  prefix otherwise than those of the whole row in transformers, once it chooses at all. Rows end
  where it begins to: `index_topk` tokens, of which real configurations have 2048. Longer ones are
  refused. A model without a layer of this kind, or with a choice that a prefix shares (Doge,
  Qwen4), has no such bound.
- **The base's own dropout** never acts, with or without `engine.gradient_checkpointing`.

## Exact

| architecture | model types | prompts of several lengths | linear layers with adapters |
|---|---|---|---|
"""
REFUSED = """
## Refused

| architecture | model types | why |
|---|---|---|
"""
NOT_BUILT = """
## Not tried

No tiny configuration of these runs in plain transformers on token ids alone.

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
            ("cannot build", "not tried, since no tiny one runs in plain transformers"),
        )
    )
    known = {row["model_type"] for row in rows}
    if missing := [name for name in model_types if name not in known]:
        counts += (
            f"\n- not settled: **{len(missing)}** model types ({', '.join(missing)}), which gave "
            "no answer, or one above the bound that is not explained yet: do not rely on them"
        )
    releases = " and ".join(sorted({row["transformers"] for row in rows}))
    out = HEAD.format(transformers=releases, counts=counts)
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
