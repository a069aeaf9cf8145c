"""Checks the comparisons and replays of a finished run, and those of its earlier ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_grpo.after.verifying.findings import Digests, Findings
from evo_grpo.after.verifying.records import Records
from evo_grpo.errors import EvoGrpoError
from evo_grpo.record.arms import EVOLVED, comparison, read_comparison, tokens_to_train
from evo_grpo.record.folder import config_text, is_run, read_rounds
from evo_grpo.record.names import (
    BASELINE,
    COMPARE,
    COMPARED,
    COMPARISON,
    CONFIG,
    EARLIER,
    REPLAY,
    REPLAY_RESULT,
    REPLAYED,
)
from evo_grpo.record.records import RoundRecord
from evo_grpo.record.replay import read_replay
from evo_grpo.record.schedule import winner_schedule
from evo_grpo.record.summary import read_summary


@dataclass(frozen=True)
class _Place:
    """The folder of a comparison or replay made after the current or an earlier end of the run.

    `summary` is the summary of that end, None if it is missing or damaged.
    """

    path: Path
    run: Path
    rounds: Sequence[RoundRecord]
    summary: Mapping[str, Any] | None
    current: bool


def check_added(
    records: Records,
    ends: Mapping[int, Mapping[str, Any]],
    digests: Digests,
    look: Callable[[Path], Findings],
    found: Findings,
) -> None:
    """Check comparisons and replays of the run's current end and of its earlier ends.

    `ends` are the summaries of all ends by their number of rounds. `look` checks a run folder, as
    each arm of a comparison is one.
    """
    for place in _places(records, ends, COMPARE):
        _check_comparison(place, records.config.population.size, look, found)
    for place in _places(records, ends, REPLAY):
        _check_replay(place, records.config.population.steps_per_round, digests, found)


def _places(records: Records, ends: Mapping[int, Mapping[str, Any]], name: str) -> Iterator[_Place]:
    for path in sorted(records.folder.iterdir()):
        match = EARLIER.fullmatch(path.name)
        if not path.is_dir() or not (path.name == name or (match and path.stem == name)):
            continue
        number = len(records.rounds) if match is None else int(match[1])
        yield _Place(
            path, records.folder, records.rounds[:number], ends.get(number), current=match is None
        )


def _check_comparison(
    place: _Place, agents: int, look: Callable[[Path], Findings], found: Findings
) -> None:
    file = place.path / Path(COMPARISON).name
    result = found.read(lambda: read_comparison(place.run, file))
    arms = {name: place.path / name for name in COMPARED if is_run(place.path / name)}
    for arm in arms.values():
        found.add(look(arm))
        _check_baseline(arm, place, found)
    if result is None:
        if arms and place.current and not file.exists():
            found.notes.append(
                f"{place.path}: the comparison is not finished; continue it with: evo-grpo resume "
                f"{place.run} --compare"
            )
        return
    named = [arm["name"] for arm in result["arms"]]
    if named not in ([COMPARED[0], EVOLVED], [*COMPARED, EVOLVED]):
        found.damage.append(f"{file}: expected {', '.join(COMPARED)} and {EVOLVED}, got {named}")
    if place.summary is None:
        return
    whole = {name: end for name, arm in arms.items() if (end := _end(arm)) is not None}
    expected = comparison(agents, {**whole, EVOLVED: (place.rounds, place.summary)})
    if result.get("differences", expected["differences"]) != expected["differences"]:
        found.damage.append(f"{file}: its differences do not follow from the tests of its arms")
    by_name = {arm["name"]: arm for arm in expected["arms"]}
    for arm in result["arms"]:
        if arm != by_name.get(arm["name"]):
            name = arm["name"]
            found.damage.append(
                f"{file}: its arm {name} is not as {arms.get(name, place.run)} records it"
            )


def _end(arm: Path) -> tuple[Sequence[RoundRecord], Mapping[str, Any]] | None:
    """Return rounds and summary of an arm, None if it is unfinished or damaged."""
    try:
        rounds, summary = read_rounds(arm), read_summary(arm)
    except EvoGrpoError:  # reported by the check of the arm
        return None
    return None if summary is None else (rounds, summary)


def _check_baseline(arm: Path, place: _Place, found: Findings) -> None:
    """Check the number of tokens in the first line of an arm's settings."""
    text = found.read(lambda: config_text(arm))
    if text is None or place.summary is None or not place.rounds:
        return
    first = f"{BASELINE}{tokens_to_train(place.rounds, place.summary)}"
    if text.partition("\n")[0] != first:
        found.damage.append(
            f"{arm / CONFIG}: expected {first!r} in its first line, got "
            f"{text.partition(chr(10))[0]!r:.100}"
        )


def _check_replay(place: _Place, steps: int, digests: Digests, found: Findings) -> None:
    file = place.path / Path(REPLAY_RESULT).name
    replay = found.read(lambda: read_replay(place.run, file))
    if replay is None:
        left = any((place.path / name).is_dir() for name in REPLAYED)
        if left and place.current and not file.exists():
            found.notes.append(
                f"{place.path}: the replay was stopped before its result was written; start it "
                f"again with: evo-grpo replay {place.run}"
            )
        return
    if missing := {one.name for one in replay.trained} - {n.split("/")[0] for n in replay.files}:
        names = ", ".join(sorted(missing))
        found.damage.append(f"{file}: expected the digests of {names}; replay again with --force")
    digests.compare(place.path, replay.files, f"{file.name} recorded", found)
    best = None if place.summary is None else place.summary["best"]
    if best is None:
        return
    schedule = found.read(lambda: winner_schedule(place.rounds, best, steps))
    if schedule is not None and schedule != replay.schedule:
        found.damage.append(f"{file}: its schedule is not that of the run's winner")
