"""Attacks with population.yaml of a run folder: aliases that multiply, and its size."""

from pathlib import Path

import pytest
import yaml
from small_run import SETTINGS, small

from evo_grpo import resume, run, settings
from evo_grpo.analysis.arms import compare, replay
from evo_grpo.analysis.export.export import export
from evo_grpo.analysis.sampling.answers import sample
from evo_grpo.analysis.sampling.evaluation import evaluate_adapter
from evo_grpo.analysis.verify import verify
from evo_grpo.errors import EvoGrpoError
from evo_grpo.readers.dashboard import StudyCopy
from evo_grpo.readers.follow import study_of
from evo_grpo.readers.report.compared_runs import compare_runs
from evo_grpo.readers.report.run_page import write_report
from evo_grpo.record.folder import read_config, read_settings
from evo_grpo.record.replay import read_schedule
from evo_grpo.record.steering import state_of
from evo_grpo.record.view import view_of

#: Ten lines that stand for 10**9 values.
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
READERS = {
    "report": write_report,
    "contents": view_of,
    "compare": lambda run: compare_runs([run, run.parent / "other"]),
    "export": lambda run: export(run, run.parent / "out"),
    "sample": lambda run: sample(run, "1+1="),
    "sample --row": lambda run: sample(run, rows=0),
    "evaluate": evaluate_adapter,
    "resume": lambda run: resume(run, rounds=3),
    "resume --compare": compare,
    "replay": replay,
    "schedule": read_schedule,
    "steer": state_of,
    "dashboard": StudyCopy,
    "study": study_of,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    for name in ("one", "other"):
        run(small(population__rounds=2), out=place / name)
    return place


@pytest.fixture
def folder(made):
    file = made / "one" / "population.yaml"
    text = file.read_text()
    yield made / "one"
    file.write_text(text)


@pytest.mark.parametrize(
    ("reader", "added"),
    [
        *((one, BOMB) for one in READERS),
        ("report", "x: &once 1\n"),
        ("steer", "# " + "x" * (1 << 20)),
    ],
)
def test_a_bomb_of_aliases_or_an_oversized_file_is_refused_by_every_command(folder, reader, added):
    file = folder / "population.yaml"
    file.write_text(file.read_text() + added)
    with pytest.raises(EvoGrpoError) as caught:
        READERS[reader](folder)
    assert str(file) in str(caught.value)
    assert "written out, as a run writes them, got &" in str(caught.value) or (
        "expected a file of at most 1,048,576 bytes, got 1,0" in str(caught.value)
    )


def test_verify_reports_a_bomb_of_aliases_as_damage(folder):
    file = folder / "population.yaml"
    file.write_text(file.read_text() + BOMB)
    assert any(f"{file}" in text and "got &a0" in text for text in verify(folder).damage)


def test_a_run_writes_its_copy_without_anchors(tmp_path):
    """The user's file may have some."""
    text = yaml.safe_dump({**SETTINGS, "evolve": {}, "population": {"size": 2, "rounds": 1}})
    ranges = "{lr: {min: 0.0001, max: &top 0.01}, beta: {min: 0.0, max: *top}}"
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace("evolve: {}", f"evolve: {{hyperparameters: {ranges}}}"))
    folder = Path(run(file, out=tmp_path / "run"))
    written = (folder / "population.yaml").read_text()
    assert "&" not in written
    assert "*" not in written
    assert read_config(folder) == settings.load(file).settled(8)
    assert read_settings(folder)["evolve"]["hyperparameters"]["beta"]["max"] == 0.01
