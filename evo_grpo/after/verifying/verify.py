"""verify(run): check a run folder against its own records, also while the run is in progress.

Nothing is changed, and no model is loaded. A file is damaged where it is missing, has another
digest than recorded, or contradicts the records. Leftovers of a stop, which the stopped command
repairs when it is repeated, are notes. The leaderboard and the Optuna study are not checked: they
are derived from the rounds, and a resume writes them again.
"""

from __future__ import annotations

from pathlib import Path

from evo_grpo.after.verifying.added import check_added
from evo_grpo.after.verifying.ends import check_ends
from evo_grpo.after.verifying.files import check_files
from evo_grpo.after.verifying.findings import Digests, Findings
from evo_grpo.after.verifying.records import read_records
from evo_grpo.record.folder import expect_run, refuse_links_in_run
from evo_grpo.record.names import CHECKPOINTS, COMPARE, CONFIG, INPUTS, REPLAY, ROUNDS, SUMMARY
from evo_grpo.record.plain import stamp_of

LOOKS = 5
"""Most checks of a folder that has damage and that changes during the check."""


def verify(run: str | Path) -> Findings:
    """Compare a run folder with its own records, also while the run is in progress.

    Args:
        run: The run folder.

    Raises:
        RunNotFoundError: `run` is no run folder.
    """
    return _verify(expect_run(run), Digests())


def _verify(folder: Path, digests: Digests) -> Findings:
    found, lasting = Findings(), list[str]()
    for number in range(LOOKS):
        before = _stamps(folder)
        found = _look(folder, digests)
        if not found.damage or _stamps(folder) == before:
            return found
        # The run has written or removed files during the check.
        lasting = [text for text in found.damage if number == 0 or text in lasting]
    found.damage = lasting
    found.notes.append(
        f"{folder}: the run changed the folder during each of {LOOKS} checks, so only damage that "
        "all of them found is reported; verify it again once the run has stopped"
    )
    return found


def _look(folder: Path, digests: Digests) -> Findings:
    found = Findings()
    found.read(lambda: refuse_links_in_run(folder))
    if found.damage:
        return found  # files behind a link are not read
    records = read_records(folder, found)
    if records is None:
        return found
    check_files(records, digests, found)
    ends = check_ends(records, digests, found)
    check_added(records, ends, digests, lambda arm: _verify(arm, digests), found)
    return found


def _stamps(folder: Path) -> list[tuple[int, ...] | None]:
    names = (CONFIG, INPUTS, ROUNDS, SUMMARY, CHECKPOINTS, COMPARE, REPLAY)
    return [stamp_of(folder / name) for name in names]
