"""Defines verify(run), which checks the seals and digests of the files of a run.

A record contains the digests of its files, and a seal, which is the digest of the record's bytes. A
file that is missing or has another digest is damaged. The run may train meanwhile. Nothing is
changed, and no model is loaded. Leaderboard and Optuna study are not checked, because a resume
derives them from the rounds.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from evo_grpo.envs.rewards.judge_client import answer_files, read_answers
from evo_grpo.errors import EvoGrpoError
from evo_grpo.record import family, names, plain, wording
from evo_grpo.record import folder as run_folder
from evo_grpo.record.arms import EVOLVED, read_comparison
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.replay import read_replay
from evo_grpo.record.run_dir import Retention, kept_throughout, refuse_lost_lines
from evo_grpo.record.summary import read_summary
from evo_grpo.settings import RunConfig
from evo_grpo.training.recorded_inputs import ROUNDS as PLANNED
from evo_grpo.training.recorded_inputs import Inputs, read_inputs_of, settings_of
from evo_grpo.training.resume_check import changed_settings, check_whole, may_change

T = TypeVar("T")

_RETENTION = "record.checkpoints"


@dataclass
class Findings:
    """The findings of a check of a run folder.

    Attributes:
        damage: A sentence for each damaged file.
        notes: A sentence for each interrupted command, with the command that continues it.
    """

    rounds: int = 0
    files: int = 0
    damage: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def read(self, read: Callable[[], T], files: int = 1) -> T | None:
        """Return the result of `read`; None if it raises an error, which counts as damage."""
        self.files += files
        try:
            return read()
        except EvoGrpoError as error:
            self.damage.append(str(error))
        except OSError as error:
            self.damage.append(f"{error.filename}: cannot be read ({error.strerror})")
        return None

    def compare(self, folder: Path, files: Mapping[str, str], recorded: str) -> None:
        """Report as damage each file that is missing or has another digest than in `files`.

        `recorded` completes the messages, such as "round 1 recorded".
        """
        differing = self.read(lambda: list(plain.damaged(folder, files)), len(files))
        for name, digest in differing or ():
            fault = "is missing, but" if digest is None else "has changed since"
            self.damage.append(f"{folder / name}: {fault} {recorded} it")


def verify(run: str | Path) -> Findings:
    """Compare the files of a run folder with their recorded digests, even while the run trains.

    Raises:
        RunNotFoundError: `run` is no run folder.
    """
    folder = run_folder.expect_run(run)
    findings = _check_folder(folder)
    if findings.damage:
        # A run in progress writes and removes files meanwhile: report damage only if found twice.
        first_findings, findings = findings, _check_folder(folder)
        findings.damage = [text for text in findings.damage if text in first_findings.damage]
    return findings


@dataclass(frozen=True)
class _Records:
    """The records of a run folder.

    `inputs` is None if the run was stopped before it recorded them. `finished` is true if there is
    a summary, even a damaged one.
    """

    folder: Path
    config: RunConfig
    inputs: Inputs | None
    rounds: Sequence[RoundRecord]
    summary: Mapping[str, Any] | None
    finished: bool

    def policies(self) -> list[tuple[int, Retention]]:
        """Return each value of `record.checkpoints`, as (rounds up to which it applied, value)."""
        if self.inputs is None:
            return []
        # None if the run began with a version that kept every checkpoint.
        earlier = [
            (change["round"], change["from"])
            for change in self.inputs.changes
            if change["name"] == _RETENTION and change["from"] is not None
        ]
        # population.yaml may have been changed for the next resume.
        present = self.inputs.settings.get(_RETENTION, self.config.record.checkpoints)
        return [*earlier, (len(self.rounds), present)]


def _check_folder(folder: Path) -> Findings:
    findings = Findings()
    findings.read(lambda: run_folder.refuse_links_in_run(folder))
    if findings.damage:
        return findings  # files behind a link are not read
    records = _read_records(folder, findings)
    if records is not None:
        _check_settings(records, findings)
        _check_end(records, findings)
        _check_checkpoints(records, findings)
        _check_answers(records, findings)
        _check_results(folder, findings)
    return findings


def _read_records(folder: Path, findings: Findings) -> _Records | None:
    """Read the records of a run folder; None if they are too damaged for further checks."""
    finished = os.path.lexists(folder / names.SUMMARY)
    summary = findings.read(lambda: read_summary(folder))
    config = findings.read(lambda: run_folder.read_config(folder))
    file, inputs = folder / names.ROUNDS, None
    parsed = findings.read(lambda: (run_folder.parse_rounds(file), file.stat().st_size))
    if parsed is None:
        return None
    (rounds, length, _), size = parsed
    findings.rounds = len(rounds)
    if finished and size > length:  # before the end, a stop may leave one
        findings.damage.append(f"{file}: ends in {size - length} bytes of an incomplete line")
    if rounds or finished or os.path.lexists(folder / names.INPUTS):
        inputs = findings.read(lambda: read_inputs_of(folder))
        if inputs is None:
            return None
    return None if config is None else _Records(folder, config, inputs, rounds, summary, finished)


def _check_settings(records: _Records, findings: Findings) -> None:
    """Compare population.yaml with the settings in inputs.json."""
    folder, inputs = records.folder, records.inputs
    if inputs is None or run_folder.config_text(folder).startswith(names.RECORDED_IN_PYTHON):
        return
    findings.read(lambda: check_whole(folder, inputs))
    changed = {name for name, _, _ in changed_settings(inputs, settings_of(records.config))}
    if inputs.changes_of_rounds(len(records.rounds)):  # stopped before it wrote population.yaml
        changed.discard(PLANNED)
    refused = sorted(name for name in changed if records.finished or not may_change(name))
    if refused:
        findings.damage.append(
            f"{folder / names.CONFIG}: expected the settings that {names.INPUTS} records, got "
            f"others for {', '.join(refused[:3])}; put the file back as it was"
        )


def _check_end(records: _Records, findings: Findings) -> None:
    """Check that no round is missing and, if the run is finished, the files of its summary."""
    folder, rounds, summary = records.folder, records.rounds, records.summary
    if not records.finished:
        findings.read(lambda: refuse_lost_lines(folder, rounds))
        for part in (names.COMPLETIONS, names.METRICS):
            later = [path for n, path in run_folder.round_entries(folder / part) if n > len(rounds)]
            findings.damage += [
                f"{path}: is there, but {names.ROUNDS} has no line of it" for path in later
            ]
    if not records.finished or (records.inputs and records.inputs.changes_of_rounds(len(rounds))):
        played = wording.count(len(rounds), "round")
        findings.notes.append(
            f"{folder}: is not finished after {played}; unless it trains now, go on with: "
            f"{run_folder.continuing(folder)}"
        )
    for path in sorted(folder.glob("summary.rounds-*.json")):
        findings.read(partial(read_summary, folder, path.name))
    if summary is None:
        return
    if summary["rounds"] != len(rounds):
        findings.damage.append(
            f"{folder}: {names.SUMMARY} is of {summary['rounds']} rounds, "
            f"{names.ROUNDS} has {len(rounds)}"
        )
    findings.compare(folder, summary.get("files", {}), f"{names.SUMMARY} recorded")


def _check_checkpoints(records: _Records, findings: Findings) -> None:
    """Compare the files of rounds with their digests, except checkpoints that the run deleted."""
    folder, rounds = records.folder, records.rounds
    kept = kept_throughout(rounds, records.policies())
    for record in rounds:
        expected = {
            name: digest
            for name, digest in record.files.items()
            if not name.startswith(f"{names.CHECKPOINTS}/")
            or not kept.isdisjoint(map(str, PurePosixPath(name).parents))
        }
        findings.compare(folder, expected, f"round {record.round + 1} recorded")
    best = family.best_ever(rounds)
    apart = records.config.record.keeps_best_apart(archive=records.config.evolve.keeps_archive)
    if not apart or best is None or best.checkpoint is None:
        return
    files = rounds[best.round].files_of(best.checkpoint)
    # A stop may leave it missing or of an earlier round: a resume then copies it again.
    if records.finished or not _is_same(folder / best.checkpoint, files) or not _is_behind(records):
        findings.compare(folder / names.BEST, files, f"round {best.round + 1} recorded")


def _is_behind(records: _Records) -> bool:
    """Return whether checkpoints/best is missing or has the best agent of earlier rounds."""
    place, rounds = records.folder / names.BEST, records.rounds
    bests = filter(None, (family.best_ever(rounds[:number]) for number in range(len(rounds))))
    earlier = (rounds[best.round].files_of(str(best.checkpoint)) for best in bests)
    return not place.exists() or any(_is_same(place, files) for files in earlier)


def _is_same(folder: Path, files: Mapping[str, str]) -> bool:
    """Return whether a folder has these files with their digests."""
    findings = Findings()
    findings.compare(folder, files, "")
    return bool(files) and not findings.damage


def _check_answers(records: _Records, findings: Findings) -> None:
    """Check the digests of a judge's answers, and that none counted in summary.json is missing."""
    number = 0
    for file in answer_files(records.folder / names.JUDGED):
        contents = findings.read(partial(read_answers, file))
        if contents is None:
            return
        number += len(contents.answers)
        # Before the end, a stop may cut off the last answer.
        if contents.damaged or (records.finished and contents.cut_off):
            broken = contents.damaged + bool(contents.cut_off)
            findings.damage.append(
                f"{file}: {wording.count(broken, 'answer')} of the judge changed"
            )
    expected = int(((records.summary or {}).get("judge") or {}).get("answers", 0))
    if number < expected:
        findings.damage.append(
            f"{records.folder / names.JUDGED}: expected the {expected} answers of the judge that "
            f"{names.SUMMARY} counts, got {number}"
        )


def _check_results(run: Path, findings: Findings) -> None:
    """Check comparisons and replays, including those from before an extension of the run."""
    commands = {names.COMPARE: f"resume {run} --compare", names.REPLAY: f"replay {run}"}
    for path in sorted(run.iterdir()):
        kind = path.name.partition(".rounds-")[0]
        if kind not in commands or not path.is_dir():
            continue
        file = path / f"{kind}.json"
        if kind == names.COMPARE:
            _check_arms(path, findings.read(partial(read_comparison, run, file)), findings)
        elif (replay := findings.read(partial(read_replay, run, file))) is not None:
            findings.compare(path, replay.files, f"{file.name} recorded")
        if path.name == kind and not os.path.lexists(file):
            findings.notes.append(f"{path}: is not finished; go on with: evo-grpo {commands[kind]}")


def _check_arms(path: Path, result: Mapping[str, Any] | None, findings: Findings) -> None:
    """Check the populations of a comparison; those that the result names must be finished."""
    for arm in (path / name for name in names.COMPARED if run_folder.is_run(path / name)):
        arm_findings = _check_folder(arm)
        findings.files += arm_findings.files
        findings.damage += arm_findings.damage
    arms = [] if result is None else [arm["name"] for arm in result["arms"]]
    for file in (path / name / names.SUMMARY for name in arms if name != EVOLVED):
        if not os.path.lexists(file):
            findings.damage.append(f"{file}: is missing, but the result of the comparison names it")
