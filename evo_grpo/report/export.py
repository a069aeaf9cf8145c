"""The best agent of a run as a PEFT folder with a model card.

Reads the run folder alone: no torch, no base model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import yaml

from evo_grpo.errors import CheckpointError, RunDirError
from evo_grpo.printable import cut, printable
from evo_grpo.record.family import founder_of
from evo_grpo.record.files import sync_tree, writing
from evo_grpo.record.folder import config_text, expect_run, read_rounds
from evo_grpo.record.leaderboard import best_agent
from evo_grpo.record.names import CONFIG
from evo_grpo.record.plain import inside, read_plain
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.summary import read_summary
from evo_grpo.record.winner import finalist_name, other_finalists, winner_files, winning_lines
from evo_grpo.report.replay import replay_section

WEIGHTS = "adapter_model.safetensors"
"""PEFT's name for the file of an adapter's tensors."""
ADAPTER = "adapter_config.json"
"""And for that of its configuration."""
CARD = "README.md"
FILES = (WEIGHTS, CARD, ADAPTER)
"""Of an export. That without which PEFT loads nothing comes last."""
_ASIDE = re.compile(r"\.evo-grpo-export-\d+")
"""How the folder is called in which an export is written before it is whole."""
COLUMNS = (
    *("round", "member", "made by", "fitness"),
    *("lr", "beta", "clip_coef", "group_size", "temperature"),
)
"""Of the schedule."""
_MARKUP = re.compile(r"[\\`*<>\[\]|&~#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""What Markdown takes for more than a character in the middle of a line; not that in group_size."""


def export_best(run: str | Path, out: str | Path, *, force: bool = False) -> Path:
    """Copy the winner's adapter and write a model card: run, lineage, schedule.

    The winner of a finished run is that of its final comparison: the best agent of the last round,
    the best ever, or the mean of two survivors. Before the end it is the best of the last round.

    Args:
        run: Run folder with at least one finished round.
        out: Folder to write; new or empty.
        force: Replace the files of an earlier export.

    Returns:
        The folder, loadable by `PeftModel.from_pretrained(base_model, folder)`.

    Raises:
        CheckpointError: When no round is finished, no agent has a fitness, its checkpoint was
            deleted or changed, or another file of the run is damaged.
        RunDirError: When `out` is not empty and `force` is off, it holds a folder in the place of a
            file, another version of this library wrote the run, or a file to export lies behind a
            link.
        RunFailedError: When `out` cannot be written.
    """
    source = expect_run(run)
    rounds, summary = read_rounds(source), read_summary(source)
    best = _best(rounds) if summary is None else summary["best"]
    if best is None:
        raise CheckpointError(
            f"{source}: nothing to export, expected a finished round with a ranked agent; go on "
            f"with: evo-grpo resume {source}"
        )
    files = winner_files(rounds, best, {} if summary is None else summary["files"])
    adapter = _adapter(source, best["checkpoint"], files)
    with writing(Path(out), "export"):
        # A link is followed here, once; what lies behind it is written to by its own path.
        target = Path(os.path.realpath(out))
        _check_target(target, Path(out), force=force)
    config = _config(source)
    card = _card(source, config, rounds, best, summary, files[f"actor/{WEIGHTS}"])
    written = {**adapter, CARD: card.encode()}
    contents = {name: written[name] for name in FILES}
    with writing(Path(out), "export"):
        _write(target, contents)
    return Path(out)


def _adapter(source: Path, checkpoint: str | None, files: Mapping[str, str]) -> dict[str, bytes]:
    """Read the two files of the winner's adapter, which have to be those that were recorded.

    Raises:
        CheckpointError: One is missing or was changed.
        RunDirError: One is a link, or lies behind one.
    """
    read: dict[str, bytes] = {}
    for name in (WEIGHTS, ADAPTER):
        expected = files.get(f"actor/{name}")
        if checkpoint is None or expected is None:
            raise CheckpointError(
                f"{source}: its records name no {name} of the best agent, {checkpoint}; put "
                "rounds.jsonl and summary.json back as they were"
            )
        file = inside(source, f"{checkpoint}/actor/{name}")
        if not file.exists():
            raise CheckpointError(
                f"{file}: expected the best agent's adapter, got no file; it was deleted after the "
                "run: put it back, or repeat the run"
            )
        read[name] = read_plain(file)
        found = hashlib.sha256(read[name]).hexdigest()
        if found != expected:
            raise CheckpointError(
                f"{file}: it is not the one that the run recorded (expected sha256 {expected}, got "
                f"{found}); put it back as it was, or repeat the run"
            )
    return read


def _check_target(target: Path, out: Path, *, force: bool) -> None:
    """Refuse a place that holds something.

    Args:
        target: Where `out` is.
        out: As the caller called it.
        force: Whether other files may lie there.

    Raises:
        RunDirError: It is a file, a folder that is not empty while `force` is off, or one that
            holds a folder in the place of a file.
    """
    if not target.is_dir():
        if os.path.lexists(target):
            raise RunDirError(f"{out}: expected a folder, found a file; choose another OUT")
        return
    if not force and any(not _ASIDE.fullmatch(path.name) for path in target.iterdir()):
        raise RunDirError(f"{out}: is not empty; choose another OUT, or replace it with --force")
    for name in FILES:
        if (target / name).is_dir() and not (target / name).is_symlink():
            raise RunDirError(
                f"{out / name}: expected a file of an earlier export, found a folder; remove it, "
                "or choose another OUT"
            )


def _write(target: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder so that it is whole or no adapter at all, also after a kill or a full disk.

    Raises:
        OSError: It cannot be written; what was written is removed.
    """
    there = target.is_dir()
    if not there:
        target.parent.mkdir(parents=True, exist_ok=True)
    # Within a folder that is there: the one above it may be another disk, or not ours to write.
    above = target if there else target.parent
    for path in above.iterdir() if there else ():
        if _ASIDE.fullmatch(path.name):  # left by a kill
            _remove_aside(path)
    aside = above / f".evo-grpo-export-{os.getpid()}"
    aside.mkdir()
    try:
        for name, data in contents.items():
            (aside / name).write_bytes(data)
        sync_tree(aside)
        if there:
            _move_up(aside, target, list(contents))
        else:
            aside.rename(target)
    finally:
        _remove_aside(aside)


def _move_up(aside: Path, target: Path, names: Sequence[str]) -> None:
    """Move files into the folder above theirs, all of them or none; others may lie there."""
    for name in reversed(names):
        (target / name).unlink(missing_ok=True)
    moved: list[Path] = []
    try:
        for name in names:
            moved.append(target / name)
            (aside / name).rename(target / name)
    except BaseException:  # Ctrl-C too: no half of an export may stay
        for path in reversed(moved):
            with suppress(OSError):
                path.unlink()
        raise


def _remove_aside(aside: Path) -> None:
    """Remove a folder of files that were written aside, and nothing else that may lie in it."""
    if aside.is_symlink():
        return
    with suppress(OSError):
        for name in FILES:
            (aside / name).unlink(missing_ok=True)
        aside.rmdir()


def _config(source: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(config_text(source))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{source / CONFIG}: expected the run's settings as they were written, but they are no "
            f"YAML ({cut(str(error))}); put the file back as it was"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{source / CONFIG}: expected the run's settings, a mapping, got {found!r:.60}; put "
            "the file back as it was"
        )
    return cast("dict[str, Any]", found)


def _best(rounds: list[RoundRecord]) -> dict[str, Any] | None:
    """Return the best of the last round that is left, in the form of summary.json."""
    best = best_agent(_without_those_that_left(rounds[-1])) if rounds else None
    if best is None:
        return None
    return {
        "kind": "last",
        "agent": best.agent,
        "member": best.member,
        "checkpoint": best.checkpoint,
    }


def _without_those_that_left(record: RoundRecord) -> RoundRecord:
    """Return a round with the agents that go on: a collapsed one leaves, however good it was."""
    collapsed = {one.agent for one in record.decisions if one.kind == "collapsed"}
    # Its place may be taken: then there is a member of that number, and it is another one.
    left = {member.agent for member in record.members} - collapsed
    return replace(record, agents=tuple(one for one in record.agents if one.agent in left))


def _card(
    source: Path,
    config: dict[str, Any],
    rounds: list[RoundRecord],
    best: dict[str, Any],
    summary: dict[str, Any] | None,
    digest: str,
) -> str:
    lines = winning_lines(rounds, best)
    facts = [_who(rounds, best, lines)]
    if best["kind"] != "mean":
        score = lines[0][-1].score
        assert score is not None
        facts.append(f"validation fitness: {_mean(asdict(score))} ({score.n} prompts)")
    if summary is not None:
        facts += _compared(rounds, summary)
    facts.append(f"adapter sha256: `{digest}`")
    base, run = _name(config.get("model"), "name"), source.resolve().name
    return _CARD.format(
        front=_front(base),
        base=_code(base),
        quoted=json.dumps(base),
        task=_code(_name(config.get("env"), "kind")),
        run=_plain(run),
        code=_code(run),
        title=f"{finalist_name(rounds, best, counted_from=0)}, member {best['member']}",
        facts="\n".join(f"- {fact}" for fact in facts),
        schedules="\n\n".join(_table(line, alone=len(lines) == 1) for line in lines),
        replay=replay_section(source),
    )


def _front(base: str) -> str:
    """Return the header of the card, one line for each of its keys."""
    front = {"base_model": base, "library_name": "peft", "tags": ["grpo", "lora", "evo-grpo"]}
    return yaml.safe_dump(
        front,
        sort_keys=False,
        default_flow_style=None,
        default_style=None if base.isprintable() else '"',
        width=math.inf,
    )


def _plain(text: str) -> str:
    """Return a string from outside as Markdown that shows it and means nothing else."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def _code(text: str) -> str:
    """Return a string from outside as a code span, whatever backticks are in it."""
    text = printable(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest or not text else ""
    return f"{fence}{space}{text}{space}{fence}"


def _who(rounds: list[RoundRecord], best: dict[str, Any], lines: list[list[AgentRecord]]) -> str:
    if best["kind"] == "mean":
        first, second = (line[-1] for line in lines)
        founder = founder_of(rounds, first.member)
        return (
            f"kind: mean of the adapters of members {first.member} and {second.member} (agents "
            f"{first.agent} and {second.agent} of the last round), which both descend from member "
            f"{founder}"
        )
    if best["kind"] == "archive":
        return f"kind: the best agent of all rounds, as it was after round {lines[0][-1].round}"
    return "kind: the best agent of the last round"


def _compared(rounds: list[RoundRecord], summary: dict[str, Any]) -> list[str]:
    facts: list[str] = []
    compared = other_finalists(rounds, summary, counted_from=0)
    if compared is not None:
        own, others = compared
        facts.append(
            f"final comparison on {own['n']} validation prompts: {_mean(own)} against {others}"
        )
        if any(one["tie"] for one in summary["candidates"]):
            facts.append("tie: a paired test cannot tell it from those marked so")
    facts.append(
        f"test split, judged once: {_mean(summary['best'])} (base model {_mean(summary['base'])})"
    )
    return facts


def _table(line: list[AgentRecord], *, alone: bool) -> str:
    title = "" if alone else f"Of member {line[-1].member}:\n\n"
    header = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return title + "\n".join([*header, *_schedule(line)])


def _schedule(path: list[AgentRecord]) -> list[str]:
    rows: list[str] = []
    previous: int | None = None
    for record in path:
        h = record.hparams
        changed = record.mutation.changes.items()
        changes = ", ".join(f"{_plain(name)} {a:.3g} → {b:.3g}" for name, (a, b) in changed)
        made = _plain(record.mutation.op) + (f" ({changes})" if changes else "")
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


def _mean(part: Mapping[str, Any]) -> str:
    """Return a mean with its standard error, where there is one."""
    error = part["se"]
    known = error is not None and not math.isnan(error)
    return f"{part['mean']:.4f}" + (f" ± {error:.4f}" if known else "")


def _name(value: Any, key: str) -> str:  # noqa: ANN401 -- any YAML value
    return str(value.get(key) if isinstance(value, dict) else value)


_CARD = """---
{front}---

# {run}: {title}

A LoRA adapter over {base}, trained on {task} by the evo-grpo run {code} and selected from a
population.

{facts}

## Schedule and lineage

The hyperparameters that produced this adapter, round by round (counted from 0), along its line of
parents:

{schedules}
{replay}
## Use

```python
from peft import PeftModel

from evo_grpo.model.base import SharedBase

base = SharedBase.load({quoted})
model = PeftModel.from_pretrained(base.model, "PATH/OF/THIS/FOLDER")
```
"""
