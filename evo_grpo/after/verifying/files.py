"""Checks the files of rounds against the digests that the rounds recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from evo_grpo.after.verifying.findings import Digests, Findings
from evo_grpo.after.verifying.records import Records
from evo_grpo.envs.rewards.judge_answers import answer_files, read_answers
from evo_grpo.record.family import best_ever
from evo_grpo.record.files import is_temporary
from evo_grpo.record.folder import round_entries
from evo_grpo.record.names import (
    ASIDES,
    BEST,
    COMPLETIONS,
    JUDGED,
    METRICS,
    OF_ROUNDS,
    STEERING,
    SUMMARY,
    WRITTEN_IN,
)
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.requests import read_requests
from evo_grpo.record.retention import kept_throughout
from evo_grpo.record.wording import count

_STAY = (f"{COMPLETIONS}/", f"{METRICS}/")
"""Prefixes of the names of files that no retention policy removes."""


def check_files(records: Records, digests: Digests, found: Findings) -> None:
    """Compare the files of rounds with the records, without those that retention removed."""
    folder, rounds = records.folder, records.rounds
    kept = kept_throughout(rounds, records.policies)
    for record in rounds:
        expected = {
            name: digest
            for name, digest in record.files.items()
            if name.startswith(_STAY) or _checkpoint_of(name, kept) is not None
        }
        digests.compare(folder, expected, f"round {record.round + 1} recorded", found)
    _check_best(records, digests, found)
    _check_answers(records, found)
    _check_leftovers(records, found)


def _checkpoint_of(name: str, kept: set[str]) -> str | None:
    parts = name.split("/")
    return next((p for n in range(len(parts)) if (p := "/".join(parts[:n])) in kept), None)


def _check_best(records: Records, digests: Digests, found: Findings) -> None:
    folder, rounds = records.folder, records.rounds
    apart = records.config.record.keeps_best_apart(archive=records.config.evolve.keeps_archive)
    best = best_ever(rounds)
    if not apart or best is None or best.checkpoint is None:
        return
    expected = rounds[best.round].files_of(best.checkpoint)
    # The copy is made after its round is recorded, and before its source may be removed.
    if (
        not records.finished
        and not digests.same(folder / BEST, expected)
        and digests.same(folder / best.checkpoint, expected)
        and _is_earlier_best(records, digests)
    ):
        found.notes.append(f"{folder / BEST}: is behind the best agent of the recorded rounds")
        return
    digests.compare(folder / BEST, expected, f"round {best.round + 1} recorded", found)


def _is_earlier_best(records: Records, digests: Digests) -> bool:
    """Return whether checkpoints/best is missing, or is the intact best of earlier rounds."""
    place = records.folder / BEST
    if not place.exists():
        return True
    files = (
        records.rounds[best.round].files_of(best.checkpoint)
        for best in _bests(records.rounds)
        if best.checkpoint is not None
    )
    return any(one and digests.same(place, one) for one in files)


def _bests(rounds: Sequence[RoundRecord]) -> Iterator[AgentRecord]:
    """Yield every agent that was the best of all rounds so far after some round."""
    last: AgentRecord | None = None
    for record in rounds:
        # The best so far comes first: of equal agents, the first is the best.
        so_far = best_ever([*([] if last is None else [rounds[last.round]]), record])
        if so_far is not None and so_far is not last:
            last = so_far
            yield so_far


def _check_answers(records: Records, found: Findings) -> None:
    """Check the answers of judges: each line has a seal, and the summary their number."""
    number = 0
    for file in answer_files(records.folder / JUDGED):
        read = found.read(partial(read_answers, file))
        if read is None:
            return
        number += len(read.answers)
        if read.damaged:
            found.damage.append(f"{file}: {count(read.damaged, 'answer')} of the judge changed")
        if read.cut_off:
            found.report(
                f"{file}: ends in {read.cut_off} bytes of an incomplete line",
                repaired=not records.finished,
            )
    expected = int(((records.summary or {}).get("judge") or {}).get("answers", 0))
    if number < expected:
        found.damage.append(
            f"{records.folder / JUDGED}: expected the {expected} answers of the judge that "
            f"{SUMMARY} counts, got {number}"
        )


def _check_leftovers(records: Records, found: Findings) -> None:
    """Report files that a stop left, and files of rounds that are not recorded."""
    folder, played = records.folder, len(records.rounds)
    for part in OF_ROUNDS:
        for number, path in round_entries(folder / part):
            if number >= played:
                found.report(
                    f"{path}: belongs to a round that is not recorded",
                    repaired=number == played and not records.finished,
                )
    written = (folder, *(folder / name for name in WRITTEN_IN))
    left = [path for place in written for path in _entries(place) if is_temporary(path)]
    left += [path for name in ASIDES if (path := folder / name).exists()]
    found.notes += [f"{path}: left by a stop" for path in left]
    asked = read_requests(folder)
    over = {one.request.id for record in records.rounds for one in record.steering}
    waiting = [str(one) for one in asked.requests if one.id not in over]
    found.notes += [f"{folder / STEERING}: {one}: requested and not carried out" for one in waiting]
    found.notes += asked.unread.values()


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
