"""docs/architectures.md from the results of the sweep."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

HEAD = """# Architectures

<!-- Written by experiments/architectures/sweep.py --page; do not edit by hand. -->

Every causal language model of transformers either gives exact numbers in evo-grpo, or is refused
when it is built, with an error that names the model and a remedy. This page lists the result for
every architecture of `MODEL_FOR_CAUSAL_LM_MAPPING` in transformers {transformers}, at tiny size,
compared with plain transformers and PEFT, one agent and one row at a time.

{counts}

*Exact* means that the following agree in float32, with two agents of different rank in one batch:
log-probs and gradients of a learn pass, with and without gradient checkpointing; the log-probs
recorded while sampling; and greedy tokens, compared with `generate`. This is tested for prompts of
equal and of different lengths, for completions longer than a sliding window, for the default
adapters and for adapters of the attention alone. The bound is 1e-5, relative to the largest
log-prob or gradient if that is above 1. A larger difference that may be rounding is measured again
in float64 with a bound of 1e-6 (`results.jsonl` notes it). Every dropout in the base's
configuration is switched on, and must have no effect.

<!-- not run: it takes minutes; tests/experiments/test_architectures.py runs a sample -->
```sh
python experiments/architectures/sweep.py         # continues where it was interrupted
python experiments/architectures/sweep.py --page  # writes this page
```

## Architectures other than the Llama family

- **Prompts of different lengths** share one batch if the model accepts positions and a mask.
  evo-grpo tests this at construction with two short prompts. Other models decode the prompts of one
  length at a time (*by length* below), with the cache of their own `generate`. The draws, and so
  the completions, are the same. For such models, sampling is fastest if prompts have few different
  lengths.
- **Sliding windows**: rows within the window share one batch. Longer rows are decoded by length,
  past the window, as `generate` does.
- **Layers that flatten rows** have adapters like other layers. Experts that share one parameter
  have none: `all-linear` then means the existing linear layers, mostly those of the attention, and
  a warning lists them. `lora.target_modules` selects others.
- **Rotary frequencies that depend on the longest row** (`longrope`, `dynamic`) are fixed. By
  default, all rows use the frequencies of short rows, and the context ends at the length at which
  the model would switch. With a larger `algorithm.max_model_len`, all rows use those of long rows,
  as in vLLM.
- **Sparse attention by an index** (DeepSeek-V3.2 and its relatives, MiniMax-M3): once the index
  selects tokens, transformers selects others for a prefix than for the whole row. Therefore rows
  end where selection begins: at `index_topk` tokens, 2048 in real configurations. Longer rows are
  refused. Models without such a layer, or whose selection is the same for a prefix (Doge, Qwen4),
  have no such limit.
- **The base's own dropout** never acts, with or without `engine.gradient_checkpointing`.

## Exact

| architecture | model types | prompts of different lengths | linear layers with adapters |
|---|---|---|---|
"""
REFUSED = """
## Refused

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
            ("cannot build", "not tried, because no tiny one runs in plain transformers"),
        )
    )
    known = {row["model_type"] for row in rows}
    if missing := [name for name in model_types if name not in known]:
        counts += (
            f"\n- undecided: **{len(missing)}** model types ({', '.join(missing)}), which gave no "
            "answer, or an unexplained one above the bound: do not rely on them"
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
