"""What is written anew from the rounds, leaderboard and Optuna's journal, against the rounds."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evo_grpo.errors import CheckpointError
from evo_grpo.record.leaderboard import from_records
from evo_grpo.record.names import JOURNAL, LEADERBOARD
from evo_grpo.record.plain import read_plain
from evo_grpo.record.records import RoundRecord
from evo_grpo.types import Member
from evo_grpo.verifying.findings import Findings
from evo_grpo.verifying.records import Records


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
    if records.config.record.optuna:
        found.read(lambda: _check_journal(records, found))


def _table(rounds: Sequence[RoundRecord]) -> bytes:
    return str(from_records(rounds).to_csv(index=False)).encode()


def _is_behind(records: Records) -> bool:
    """Return whether a stop may have left the leaderboard as it is."""
    there, (*earlier, last) = records.leaderboard, records.rounds
    # It is written after its round counts.
    if there == (_table(earlier) if earlier else None):
        return True
    if not records.extended_here or there is None:
        return False
    # The plan that the last round got says who of its agents leaves. Before, none or all did.
    stay = tuple(Member(one.member, one.agent) for one in last.agents)
    tables = [_table([*earlier, replace(last, members=members)]) for members in ((), stay)]
    lines = [table.splitlines() for table in (there, *tables)]
    return len(lines[0]) == len(lines[1]) and all(
        line in without for line, *without in zip(*lines, strict=True)
    )


def _check_journal(records: Records, found: Findings) -> None:
    """Compare the trials of a copy of the journal; a stop may leave the last of them unwritten."""
    from evo_grpo.record.lineage import Lineage  # Optuna takes a second to load

    file, rounds = records.folder / JOURNAL, records.rounds
    expected = [(agent.agent, agent.round) for record in rounds for agent in record.agents]
    with tempfile.TemporaryDirectory(prefix="evo-grpo-journal-") as folder:
        copy = Path(folder) / JOURNAL
        try:
            copy.write_bytes(read_plain(file))
        except FileNotFoundError:  # a resume removes it before it writes it anew
            there, wrong = set[tuple[object, object]](), list[tuple[int, int]]()
        else:
            space = records.config.agents().search_space()
            lineage = Lineage(copy, records.config.name, space)
            attributes = [trial.user_attrs for trial in lineage.trials()]
            there = {(one.get("agent"), one.get("round")) for one in attributes}
            wrong = [one for one in lineage.differing(rounds) if one in there]
    missing = [one for one in expected if one not in there]
    last = missing == expected[len(expected) - len(missing) :]
    if wrong or (missing and (records.finished or not last)):
        agent, number = [*wrong, *missing][0]
        raise CheckpointError(
            f"{file}: {len(wrong) + len(missing)} of its trials are missing or not as recorded, "
            f"the first of agent {agent} in round {number}; delete the file: a resume writes it "
            "anew"
        )
    if missing:
        found.notes.append(f"{file}: lacks {len(missing)} of {len(expected)} trials")
