"""docs/results.md: its table lists every kind of decision, and its example runs."""

import re
from pathlib import Path

from small_run import small

from evo_grpo.record.leaderboard import TIE_LEVEL
from evo_grpo.settings import to_yaml
from evo_grpo.types import Decision

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "results.md").read_text(encoding="utf-8")


def test_every_kind_of_decision_is_explained():
    explained = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    declared = Decision.__doc__.partition("kind: ")[2].partition("agent: ")[0]
    assert sorted(explained) == sorted(re.findall(r'"(\w+)"', declared))
    assert f"at {TIE_LEVEL:g}, cannot" in " ".join(PAGE.split())


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("population.yaml").write_text(to_yaml(small(population__rounds=1)))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "results.md", "exec"), {})
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["guess", "random", "evolved"]
