"""The best agent of a run as a PEFT folder with a model card. Reads the run folder alone: no torch, no base model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.record.family import ancestry
from evo_grpo.record.folder import expect_run, read_rounds, read_summary
from evo_grpo.record.leaderboard import from_records
from evo_grpo.records import AgentRecord


def export_best(run: str | Path, out: str | Path, *, force: bool = False) -> Path:
    """Copy the best agent's adapter and write a card that names the run, the lineage and the schedule.

    Args:
        run: Run folder with at least one finished round.
        out: Folder to write; must not exist or be empty.
        force: Replace the files of an earlier export.

    Returns:
        The folder, loadable by `PeftModel.from_pretrained(base_model, folder)`.

    Raises:
        CheckpointError: When no round is finished, no agent has a fitness, or its checkpoint is
            gone.
        RunDirError: When `out` holds something and `force` is off.
    """
    source, target = expect_run(run), Path(out)
    rounds = read_rounds(source)
    table = from_records(rounds)
    ranked = table[table["fitness"].notna()] if len(table) else table
    if ranked.empty:
        raise CheckpointError(
            f"{source}: nothing to export, expected a finished round with a ranked agent; go on with: "
            f"evo-grpo resume {source}"
        )
    best = ranked.iloc[0]
    actor = source / str(best["checkpoint"]) / "actor"
    if not actor.is_dir():
        raise CheckpointError(
            f"{actor}: the best agent's adapter is not there; it was deleted after the run"
        )
    if target.exists() and not target.is_dir():
        raise RunDirError(f"{target}: expected a folder, found a file; choose another OUT")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise RunDirError(f"{target}: is not empty; choose another OUT, or replace it with --force")
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(actor.iterdir()):
        shutil.copyfile(file, target / file.name)
    config = yaml.safe_load((source / "population.yaml").read_text(encoding="utf-8")) or {}
    card = _card(source, config, read_summary(source), ancestry(rounds, int(best["member"])))
    (target / "README.md").write_text(card, encoding="utf-8")
    return target


def _card(
    run: Path, config: dict[str, Any], summary: dict[str, Any] | None, path: list[AgentRecord]
) -> str:
    base, task = _name(config.get("model"), "name"), _name(config.get("env"), "kind")
    best = path[-1]
    assert best.score is not None
    lines = [
        "---",
        f"base_model: {base}",
        "library_name: peft",
        "tags: [grpo, lora, evo-grpo]",
        "---",
        "",
        f"# {run.resolve().name}: agent {best.agent}, member {best.member}",
        "",
        f"A LoRA adapter over `{base}`, trained on `{task}` by the evo-grpo run `{run.resolve().name}` and selected from a "
        "population.",
        "",
        f"- validation fitness: {best.score.mean:.4f} ± {best.score.se:.4f} ({best.score.n} prompts)",
    ]
    if summary:
        judged, start = summary["best"], summary["base"]
        lines.append(
            f"- test split, judged once: {judged['mean']:.4f} ± {judged['se']:.4f} "
            f"(base model {start['mean']:.4f} ± {start['se']:.4f})"
        )
    lines += [
        f"- adapter sha256: `{best.adapter_sha256}`",
        "",
        "## Schedule and lineage",
        "",
        "The hyperparameters that produced this adapter, round by round, along its line of parents:",
        "",
        "| round | member | made by | fitness | lr | beta | clip_coef | group_size | temperature |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    previous: int | None = None
    for record in path:
        h = record.hparams
        changes = ", ".join(
            f"{n} {a:.3g} → {b:.3g}" for n, (a, b) in record.mutation.changes.items()
        )
        made = record.mutation.op + (f" ({changes})" if changes else "")
        if record.member == previous:
            made = "continues"
        previous = record.member
        fitness = f"{record.score.mean:.4f}" if record.score else "failed"
        clip = (
            ":".join(f"{v:.3g}" for v in h.clip_coef)
            if isinstance(h.clip_coef, tuple)
            else f"{h.clip_coef:.3g}"
        )
        lines.append(
            f"| {record.round} | {record.member} | {made} | {fitness} | {h.lr:.3g} | {h.beta:.3g} | {clip} | "
            f"{h.group_size} | {h.temperature:.3g} |"
        )
    lines += [
        "",
        "## Use",
        "",
        "```python",
        "from peft import PeftModel",
        "",
        "from evo_grpo.model.base import SharedBase",
        "",
        f'base = SharedBase.load("{base}")',
        'model = PeftModel.from_pretrained(base.model, "PATH/OF/THIS/FOLDER")',
        "```",
        "",
    ]
    return "\n".join(lines)


def _name(value: Any, key: str) -> str:  # noqa: ANN401 -- what a YAML file holds
    return str(value.get(key) if isinstance(value, dict) else value)
