"""docs/tracking.md and docs/metrics.md: what they say beside their code."""

import json
import re
from pathlib import Path

import pytest
from small_run import small

from evo_grpo import run
from evo_grpo.readers import follow
from evo_grpo.readers.trackers import base
from evo_grpo.record import log
from evo_grpo.record.history import WHERE
from evo_grpo.record.vocabulary import metric
from evo_grpo.settings.trackers import KINDS
from evo_grpo.training import followers

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "tracking.md").read_text(encoding="utf-8")
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")
SENTENCES = " ".join(PAGE.split())


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def test_the_table_of_kinds_names_all_and_their_settings():
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", PAGE, re.MULTILINE))
    assert set(rows) == set(KINDS)
    for kind, text in rows.items():
        assert tuple(re.findall(r"`(\w+)`", text)) == KINDS[kind].takes


def test_the_readers_of_the_page_are_those_of_the_command():
    (names,) = re.findall(r"`--to` takes (.*?), separated", SENTENCES)
    assert set(re.findall(r"`(\w+)`", names)) == set(follow.NAMES)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (log.POLL_SECONDS, {0.5: "twice a second"}),
        (followers.SECONDS_TO_FINISH, {60: "waits up to 60 seconds until everything is read"}),
        (followers.SECONDS_TO_STOP, {4: "and 4 seconds after Ctrl-C"}),
        (follow.ATTEMPTS_AFTER_END, {3: "is tried three times"}),
        (follow.SECONDS_AFTER_END, {600: "nothing has been read for 10 minutes"}),
        (base.SECONDS_TO_FINISH, {60: "then up to 60 seconds, or 4 where it was"}),
        (base.SECONDS_TO_STOP, {4: "then up to 60 seconds, or 4 where it was"}),
        (base.WAITING, {256: "256 entries behind"}),
    ],
)
def test_the_numbers_of_the_page_are_those_of_the_code(value, text):
    assert text[value] in SENTENCES


def test_the_line_and_the_size_of_metrics_are_right(tmp_path):
    (line,) = blocks(METRICS, "json")
    assert all(metric(name) is not None for name in json.loads(line) if name not in WHERE)
    folder = run(small(), out=tmp_path / "runs/population-1")
    sizes = [
        len(line)
        for path in (folder / "metrics").iterdir()
        for line in path.read_text().splitlines()
    ]
    assert sum(sizes) / len(sizes) == pytest.approx(500, abs=100)
