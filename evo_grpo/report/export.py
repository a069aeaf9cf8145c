"""The best agent of a run as a PEFT folder with a model card.

Reads the run folder alone: no torch, no base model.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.record.family import ancestry
from evo_grpo.record.folder import expect_run, read_rounds, read_summary
from evo_grpo.record.leaderboard import best_agent
from evo_grpo.record.records import AgentRecord


def export_best(run: str | Path, out: str | Path, *, force: bool = False) -> Path:
    """Copy the best agent's adapter and write a model card: run, lineage, schedule.

    Args:
        run: Run folder with at least one finished round.
        out: Folder to write; new or empty.
        force: Replace the files of an earlier export.

    Returns:
        The folder, loadable by `PeftModel.from_pretrained(base_model, folder)`.

    Raises:
        CheckpointError: When no round is finished, no agent has a fitness, or its checkpoint was
            deleted.
        RunDirError: When `out` is not empty and `force` is off, or another version of this library
            wrote the run.
    """
    source, target = expect_run(run), Path(out)
    rounds = read_rounds(source)
    best = best_agent(rounds[-1]) if rounds else None
    if best is None:
        raise CheckpointError(
            f"{source}: nothing to export, expected a finished round with a ranked agent; go on "
            f"with: evo-grpo resume {source}"
        )
    actor = source / str(best.checkpoint) / "actor"
    if not actor.is_dir():
        raise CheckpointError(
            f"{actor}: expected the best agent's adapter, got no folder; it was deleted "
            "after the run: put it back, or repeat the run"
        )
    if target.exists() and not target.is_dir():
        raise RunDirError(f"{target}: expected a folder, found a file; choose another OUT")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise RunDirError(f"{target}: is not empty; choose another OUT, or replace it with --force")
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(actor.iterdir()):
        shutil.copyfile(file, target / file.name)
    config = yaml.safe_load((source / "population.yaml").read_text(encoding="utf-8")) or {}
    card = _card(source, config, read_summary(source), ancestry(rounds, best.member))
    (target / "README.md").write_text(card, encoding="utf-8")
    return target


def _card(
    run: Path, config: dict[str, Any], summary: dict[str, Any] | None, path: list[AgentRecord]
) -> str:
    base, task = _name(config.get("model"), "name"), _name(config.get("env"), "kind")
    name, best = run.resolve().name, path[-1]
    assert best.score is not None
    judged = ""
    if summary:
        judged = (
            f"- test split, judged once: {_mean(summary['best'])} "
            f"(base model {_mean(summary['base'])})\n"
        )
    return _CARD.format(
        base=base,
        task=task,
        run=name,
        agent=best.agent,
        member=best.member,
        fitness=f"{_mean(asdict(best.score))} ({best.score.n} prompts)",
        judged=judged,
        digest=best.adapter_sha256,
        rows="\n".join(_schedule(path)),
    )


def _schedule(path: list[AgentRecord]) -> list[str]:
    rows: list[str] = []
    previous: int | None = None
    for record in path:
        h = record.hparams
        changed = record.mutation.changes.items()
        changes = ", ".join(f"{name} {a:.3g} → {b:.3g}" for name, (a, b) in changed)
        made = record.mutation.op + (f" ({changes})" if changes else "")
        fitness = f"{record.score.mean:.4f}" if record.score else "failed"
        pair = h.clip_coef if isinstance(h.clip_coef, tuple) else (h.clip_coef,)
        cells = [
            str(record.round),
            str(record.member),
            "continues" if record.member == previous else made,
            fitness,
            f"{h.lr:.3g}",
            f"{h.beta:.3g}",
            ":".join(f"{value:.3g}" for value in pair),
            str(h.group_size),
            f"{h.temperature:.3g}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
        previous = record.member
    return rows


def _mean(part: dict[str, Any]) -> str:
    """Return a mean with its standard error, where there is one."""
    error = part["se"]
    known = error is not None and not math.isnan(error)
    return f"{part['mean']:.4f}" + (f" ± {error:.4f}" if known else "")


def _name(value: Any, key: str) -> str:  # noqa: ANN401 -- any YAML value
    return str(value.get(key) if isinstance(value, dict) else value)


_CARD = """---
base_model: {base}
library_name: peft
tags: [grpo, lora, evo-grpo]
---

# {run}: agent {agent}, member {member}

A LoRA adapter over `{base}`, trained on `{task}` by the evo-grpo run `{run}` and selected from a
population.

- validation fitness: {fitness}
{judged}- adapter sha256: `{digest}`

## Schedule and lineage

The hyperparameters that produced this adapter, round by round, along its line of parents:

| round | member | made by | fitness | lr | beta | clip_coef | group_size | temperature |
|---|---|---|---|---|---|---|---|---|
{rows}

## Use

```python
from peft import PeftModel

from evo_grpo.model.base import SharedBase

base = SharedBase.load("{base}")
model = PeftModel.from_pretrained(base.model, "PATH/OF/THIS/FOLDER")
```
"""
