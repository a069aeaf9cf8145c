"""What the model card says of a replay."""

from shown_replay import BETTER, replay, schedule
from shown_run import run_folder

from evo_grpo.analysis.export.export import export
from evo_grpo.record.replay import write_replay


def card(run, out):
    return (export(run, out, force=True) / "README.md").read_text()


def test_the_card_has_the_schedule_and_the_verdict_of_a_replay(tmp_path):
    folder = run_folder(tmp_path / "one", adapter=True)
    assert "|\n\n## Use" in card(folder, tmp_path / "out"), "a run without one has no section"
    found = replay({"schedule-run": BETTER}, schedule(member=2))
    write_replay(folder, found)
    text = card(folder, tmp_path / "out")
    section = text.partition("## Is it the schedule?\n")[2].partition("## Use")[0]
    assert "|\n\n## Is it" in text
    assert f"\n\n{found.verdict}\n\n{found.caveat()}\n\n" in section
    assert "Prompts per step of the winner's line by round: 4, 8, 13." in section
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")]
    assert [row[2].strip() for row in rows[1:]] == [
        *("0.7500 ± 0.0645", "0.5000 ± 0.1291", "0.5000 ± 0.1291")
    ]
    assert "from scratch with the schedule above, and" in section
    write_replay(folder, replay(made=schedule(kind="mean")))
    assert "with the schedule of the first of the two, and" in card(folder, tmp_path / "out")
