"""Checks the summary of a run, and the summaries from before the run was extended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evo_grpo.after.verifying.findings import Digests, Findings
from evo_grpo.after.verifying.records import Records
from evo_grpo.record.names import EARLIER, ROUNDS, SUMMARY
from evo_grpo.record.summary import earlier_end, read_summary_of
from evo_grpo.record.winner import winner_files


def check_ends(records: Records, digests: Digests, found: Findings) -> dict[int, Mapping[str, Any]]:
    """Compare the summaries with the records; return all summaries by their rounds."""
    folder, played, summary = records.folder, len(records.rounds), records.summary
    earlier = _earlier_ends(folder, played, found)
    if summary is None:
        _report_unfinished(records, found)
        return earlier
    best = summary["best"]
    files = winner_files(records.rounds, best, summary["files"])
    digests.compare(folder / str(best["checkpoint"]), files, "the run recorded", found)
    if summary["rounds"] != played:
        found.damage.append(
            f"{folder}: {SUMMARY} is of {summary['rounds']} rounds, {ROUNDS} has {played}"
        )
    elif records.extended_here:
        _report_extension(records, found)
    elif played and set(summary.get("stopped", ())) != set(records.rounds[-1].stopped):
        found.damage.append(
            f"{folder / SUMMARY}: the run was ended by {[*summary.get('stopped', ())]} of "
            f"population.stop, according to {ROUNDS} by {[*records.rounds[-1].stopped]}"
        )
    ends = [earlier_end(earlier[number]) for number in sorted(earlier)]
    if [*summary.get("earlier", ())] != ends:
        found.damage.append(
            f"{folder / SUMMARY}: its earlier ends differ from the {len(ends)} summaries of "
            "earlier ends in the folder; restore these summaries"
        )
    return {**earlier, summary["rounds"]: summary}


def _earlier_ends(folder: Path, played: int, found: Findings) -> dict[int, Mapping[str, Any]]:
    ends: dict[int, Mapping[str, Any]] = {}
    for path in sorted(folder.iterdir()):
        match = EARLIER.fullmatch(path.name)
        if match is None or not path.name.startswith(Path(SUMMARY).stem):
            continue
        read = found.read(lambda path=path: read_summary_of(path))
        if read is None:
            continue
        ends[int(match[1])] = read
        if not read["rounds"] == int(match[1]) <= played:
            found.damage.append(
                f"{path}: is of {read['rounds']} rounds, expected {match[1]} as in its name, "
                f"and no more than the {played} in {ROUNDS}"
            )
    return ends


def _report_unfinished(records: Records, found: Findings) -> None:
    if records.finished:
        return  # its summary is damaged
    if records.extended_here:
        _report_extension(records, found)
    elif len(records.rounds) >= records.planned or any(r.is_end for r in records.rounds[-1:]):
        found.notes.append(f"{records.folder}: all rounds are played, but the summary is missing")


def _report_extension(records: Records, found: Findings) -> None:
    found.notes.append(
        f"{records.folder}: was extended to {records.planned} rounds, and stopped before the first "
        "new round was finished"
    )
