"""Whether a run folder is as it was written: every file against what the run recorded of it.

Nothing is changed, and no model is loaded. A file is damaged when it is missing, has another digest
than its round recorded, or does not say what the records do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evo_grpo import settings as configuration
from evo_grpo.errors import CheckpointError, EvoGrpoError
from evo_grpo.inputs import Inputs, inputs_of, read_inputs_of
from evo_grpo.record.digests import damaged
from evo_grpo.record.family import best_ever
from evo_grpo.record.files import is_temporary
from evo_grpo.record.folder import expect_run, parse_rounds, refuse_planted, round_entries
from evo_grpo.record.leaderboard import from_records
from evo_grpo.record.names import (
    BEST,
    CHECKPOINTS,
    COMPLETIONS,
    CONFIG,
    INPUTS,
    JOURNAL,
    LEADERBOARD,
    RECORDED_IN_PYTHON,
    REPLAY_RESULT,
    ROUNDS,
    SUMMARY,
)
from evo_grpo.record.plain import is_plain, read_plain
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.replay import read_replay
from evo_grpo.record.retention import kept_checkpoints
from evo_grpo.record.summary import read_summary
from evo_grpo.record.winner import winner_files
from evo_grpo.settings import RunConfig


@dataclass
class Findings:
    """What a look through a run folder found.

    Attributes:
        rounds: Finished rounds.
        files: Files that were looked at.
        damage: A sentence for each thing that is not as it was written.
        notes: A sentence for what a stop leaves behind, which a resume makes good.
    """

    rounds: int = 0
    files: int = 0
    damage: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])


def verify(run: str | Path) -> Findings:
    """Compare a run folder with its own records; the folder may belong to a run that goes on.

    Args:
        run: The run folder.

    Raises:
        RunNotFoundError: It is no run folder.
    """
    folder = expect_run(run)
    found = Findings()
    if not _looked(found, lambda: refuse_planted(folder)):
        return found  # what lies behind a link is not looked at
    config = _config(folder, found)
    rounds = _rounds(folder, found)
    if config is None or rounds is None:
        return found
    _files(folder, config, rounds, found)
    _end(folder, config, rounds, found)
    _made_from_records(folder, config, rounds, found)
    return found


def _looked(found: Findings, look: Callable[[], object]) -> bool:
    """Add the error of a look to the damage; returns whether there was none."""
    found.files += 1
    try:
        look()
    except EvoGrpoError as error:
        found.damage.append(str(error))
        return False
    return True


def _config(folder: Path, found: Findings) -> RunConfig | None:
    read: list[RunConfig] = []
    recorded: list[Inputs] = []
    sound = _looked(found, lambda: read.append(configuration.load(folder / CONFIG)))
    sound &= _looked(found, lambda: recorded.append(read_inputs_of(folder)))
    if not sound:
        return None
    text = read_plain(folder / CONFIG).decode("utf-8", errors="replace")
    if not text.startswith(RECORDED_IN_PYTHON):
        then, now = recorded[0].settings, inputs_of(read[0]).settings
        changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        if changed:
            found.damage.append(
                f"{folder / CONFIG}: expected the settings that {INPUTS} records, got others for "
                f"{', '.join(sorted(changed)[:3])}"
            )
    return read[0]


def _rounds(folder: Path, found: Findings) -> Sequence[RoundRecord] | None:
    read: list[tuple[list[RoundRecord], int]] = []
    if not _looked(found, lambda: read.append(parse_rounds(folder / ROUNDS))):
        return None
    ((rounds, length),) = read
    found.rounds = len(rounds)
    torn = (folder / ROUNDS).stat().st_size - length
    if torn:
        found.notes.append(f"{folder / ROUNDS}: ends in {torn} bytes of a line that was torn")
    return rounds


def _files(folder: Path, config: RunConfig, rounds: Sequence[RoundRecord], found: Findings) -> None:
    """Compare what rounds wrote with its digests; what the policy dropped need not be there."""
    kept = kept_checkpoints(rounds, config.record.checkpoints)
    for record in rounds:
        expected = {
            name: digest
            for name, digest in record.files.items()
            if name.startswith(f"{COMPLETIONS}/") or _checkpoint_of(name, kept) is not None
        }
        found.files += len(expected)
        _compare(folder, expected, f"round {record.round} recorded", found)
    best = best_ever(rounds)
    apart = config.record.keeps_best_apart(archive=config.evolve.archive)
    if apart and best is not None and best.checkpoint is not None:
        expected = rounds[best.round].files_of(best.checkpoint)
        found.files += len(expected)
        _compare(folder / BEST, expected, f"round {best.round} recorded of the best", found)
    for part in (COMPLETIONS, CHECKPOINTS):
        for number, path in round_entries(folder / part):
            if number > len(rounds) or (number == len(rounds) and part == CHECKPOINTS):
                text = f"{path}: of a round that is not recorded"
                (found.notes if number == len(rounds) else found.damage).append(text)
    found.notes += [f"{path}: left by a stop" for path in folder.iterdir() if is_temporary(path)]


def _checkpoint_of(name: str, kept: set[str]) -> str | None:
    parts = name.split("/")
    return next((p for n in range(len(parts)) if (p := "/".join(parts[:n])) in kept), None)


def _compare(folder: Path, expected: dict[str, str], recorded: str, found: Findings) -> None:
    for file, digest in damaged(folder, expected):
        what = "is missing" if digest is None else "has changed"
        found.damage.append(f"{file}: {what}; it is not what {recorded}")


def _end(folder: Path, config: RunConfig, rounds: Sequence[RoundRecord], found: Findings) -> None:
    """Compare the summary with the records, and read what was added to a finished run."""
    ends: list[dict[str, object]] = []

    def look() -> None:
        summary = read_summary(folder)
        if summary is not None:
            ends.append(summary)
            files = winner_files(rounds, summary["best"], summary["files"])
            _compare(folder / str(summary["best"]["checkpoint"]), files, "the run recorded", found)
            found.files += len(files)

    if _looked(found, look) and ends and ends[0]["rounds"] != len(rounds):
        found.damage.append(
            f"{folder}: summary.json speaks of {ends[0]['rounds']} rounds, {ROUNDS} holds "
            f"{len(rounds)}"
        )
    if not ends and len(rounds) >= config.population.rounds:
        found.notes.append(f"{folder}: all rounds are played, the end is missing")
    if (folder / REPLAY_RESULT).exists():
        _looked(found, lambda: read_replay(folder))


def _made_from_records(
    folder: Path, config: RunConfig, rounds: Sequence[RoundRecord], found: Findings
) -> None:
    """Compare what is written anew from the records: a resume brings it up to them."""
    if not rounds:
        return
    found.files += 1
    file = folder / LEADERBOARD
    there = read_plain(file) if is_plain(file) else None
    if there != _table(rounds):
        # Written after a round counts, so that a stop may leave it one behind.
        behind = there == (_table(rounds[:-1]) if rounds[1:] else None)
        told = found.notes if behind and not (folder / SUMMARY).exists() else found.damage
        told.append(f"{file}: is not the leaderboard of the recorded rounds")
    if config.record.optuna:
        _looked(found, lambda: _journal(folder, config, rounds))


def _table(rounds: Sequence[RoundRecord]) -> bytes:
    return str(from_records(rounds).to_csv(index=False)).encode()


def _journal(folder: Path, config: RunConfig, rounds: Sequence[RoundRecord]) -> None:
    from evo_grpo.record.lineage import differing_trials  # Optuna takes a second to load

    space = config.agents().search_space()
    differing = differing_trials(folder / JOURNAL, config.name, space, rounds)
    if differing:
        agent, number = differing[0]
        raise CheckpointError(
            f"{folder / JOURNAL}: {len(differing)} of its trials are missing or not as recorded, "
            f"the first of agent {agent} in round {number}; delete the file: a resume writes it "
            "anew"
        )
