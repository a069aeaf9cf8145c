"""What is written anew from the rounds, leaderboard and Optuna's trials, against the rounds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from evo_grpo.errors import CheckpointError
from evo_grpo.record.leaderboard import from_records
from evo_grpo.record.names import JOURNAL, LEADERBOARD, STUDY, STUDY_ASIDES
from evo_grpo.record.plain import read_plain
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.study import study_name
from evo_grpo.settings.storage import is_url
from evo_grpo.types import Member
from evo_grpo.verifying.findings import Findings
from evo_grpo.verifying.records import Records

if TYPE_CHECKING:
    from evo_grpo.record.lineage import Lineage


def check_derived(records: Records, found: Findings) -> None:
    """Compare what is made from the rounds with them: a resume brings it up to them.

    Args:
        records: What the folder says of its run.
        found: Gets what is wrong.
    """
    if not records.rounds:
        return
    if records.leaderboard != _table(records.rounds):
        found.tell(
            f"{records.folder / LEADERBOARD}: is not the leaderboard of the recorded rounds",
            mended=not records.finished and _is_behind(records),
        )
    # What is in a database elsewhere belongs to no folder.
    if records.config.record.optuna and not is_url(records.config.record.storage):
        found.read(lambda: _check_trials(records, found))


def _table(rounds: Sequence[RoundRecord]) -> bytes:
    return str(from_records(rounds).to_csv(index=False)).encode()


def _is_behind(records: Records) -> bool:
    """Return whether a stop may have left the leaderboard as it is."""
    there, (*earlier, last) = records.leaderboard, records.rounds
    # It is written after its round counts.
    if there == (_table(earlier) if earlier else None):
        return True
    if there is None or not (records.extended_here or last.steering):
        return False
    # Who of the last round's agents leaves, its record says only since the run was given more
    # rounds, where before none or all did; or since a person stopped some of them.
    stay = tuple(Member(one.member, one.agent) for one in last.agents)
    plans = [last.members, stay, *([()] if records.extended_here else [])]
    tables = [_table([*earlier, replace(last, members=members)]) for members in plans]
    lines = [table.splitlines() for table in (there, *tables)]
    return len(lines[0]) == len(lines[1]) and all(
        line in without for line, *without in zip(*lines, strict=True)
    )


def _check_trials(records: Records, found: Findings) -> None:
    """Compare the trials of a copy of the study; a stop may leave the last of them unwritten."""
    in_journal = records.config.record.storage is None
    file, rounds = records.folder / (JOURNAL if in_journal else STUDY), records.rounds
    if not in_journal and any(os.path.lexists(records.folder / name) for name in STUDY_ASIDES):
        # Not for SQLite to take up: see `open_file`.
        text = f"{file}: a trial was being written to it; a resume writes it anew"
        found.tell(text, mended=not records.finished)
        return
    expected = [(agent.agent, agent.round) for record in rounds for agent in record.agents]
    with tempfile.TemporaryDirectory(prefix="evo-grpo-study-") as folder:
        copy = Path(folder) / file.name
        try:
            copy.write_bytes(read_plain(file))
        except FileNotFoundError:  # a resume removes it before it writes it anew
            there, wrong = set[tuple[object, object]](), list[tuple[int, int]]()
        else:
            try:
                with closing(_opened(copy, records)) as lineage:
                    attributes = [trial.user_attrs for trial in lineage.trials()]
                    there = {(one.get("agent"), one.get("round")) for one in attributes}
                    wrong = [one for one in lineage.differing(rounds) if one in there]
            except CheckpointError as error:  # which names the copy
                raise CheckpointError(str(error).replace(str(copy), str(file))) from error
    missing = [one for one in expected if one not in there]
    last = missing == expected[len(expected) - len(missing) :]
    if wrong or (missing and (records.finished or not last)):
        agent, number = [*wrong, *missing][0]
        raise CheckpointError(
            f"{file}: {len(wrong) + len(missing)} of its trials are missing or not as recorded, "
            f"the first of agent {agent} in round {number + 1}; delete the file: a resume writes "
            "it anew"
        )
    if missing:
        found.notes.append(f"{file}: lacks {len(missing)} of {len(expected)} trials")


def _opened(copy: Path, records: Records) -> Lineage:
    """Open a copy of the study; Optuna takes a second to load."""
    from evo_grpo.record.lineage import Lineage

    config, space = records.config, records.config.agents().search_space()
    if config.record.storage is None:
        return Lineage(copy, config.name, space)
    from evo_grpo.record.database import open_file

    id = "" if records.inputs is None else records.inputs.id
    return Lineage(open_file(copy, study_name(config, id), {}), hp_config=space)
