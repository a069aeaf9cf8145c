"""The page docs/quickstart.md, run: its model learns, its checkpoints and its plots are written."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def test_the_programs_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "__main__"}
    for program in PROGRAMS:
        exec(compile(program, str(PAGE), "exec"), space)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == [
        *(f"step {n}" for n in (20, 40, 60, 80)),
        "pizza",
        "after 20 steps",
    ]
    assert space["before"] < 0.3
    assert space["before"] < space["early"] <= space["after"]
    assert space["after"] > 0.9
    files = {p.name for p in (tmp_path / "pizza").iterdir()}
    assert files == {"metrics.html", *(f"step_{n}" for n in (20, 40, 60, 80))}
    panels = [a.text for a in space["figure"].layout.annotations]
    assert panels == [
        "average reward",
        "rolling reward",
        "policy loss",
        "kl",
        "total loss",
        "average advantage",
    ]
    table = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M)
    assert [name.replace("_", " ") for name in table] == panels
