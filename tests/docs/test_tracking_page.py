"""docs/tracking.md and docs/metrics.md: what they say beside their code."""

import json
import re
from pathlib import Path

import pytest
from small_run import small

from evo_grpo.record.step_metrics import WHERE
from evo_grpo.record.vocabulary import metric
from evo_grpo.settings.trackers import MODULES, TAKES
from evo_grpo.trackers import channel, tracker
from evo_grpo.training import run

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "tracking.md").read_text(encoding="utf-8")
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def test_the_table_of_kinds_names_all_and_their_settings():
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", PAGE, re.MULTILINE))
    assert set(rows) == set(MODULES)
    for kind, text in rows.items():
        assert tuple(re.findall(r"`(\w+)`", text)) == TAKES[kind]


def test_the_numbers_of_the_page_are_those_of_the_code():
    assert (channel.WAITING, channel.SECONDS_TO_GATHER) == (256, 1)
    assert (tracker.SECONDS_TO_FINISH, tracker.SECONDS_TO_STOP) == (60, 4)
    assert tracker.PATIENCE == 600
    for text in ("256 entries behind", "told a second late at most", "a minute at most",
                 "four seconds", "ten minutes at most"):  # fmt: skip
        assert text in PAGE


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
