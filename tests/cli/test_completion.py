"""What the Tab key completes."""

from pathlib import Path

from shown_run import run_folder
from typer.testing import CliRunner

from evo_grpo.cli.commands.options import app, complete_run, complete_setting
from evo_grpo.settings import from_dict


def completed(words):
    """What bash is told for a line that ends where the cursor stands."""
    line = f"evo-grpo {words}"
    environment = {
        "_EVO_GRPO_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    result = CliRunner().invoke(app, [], prog_name="evo-grpo", env=environment)
    return result.stdout.split()


def test_commands_and_options_are_completed():
    assert completed("lea") == ["leaderboard"]
    assert completed("run --com") == ["--compare"]


def test_run_folders_are_completed_below_runs_and_where_one_looks():
    for name in ("runs/one", "runs/other", "elsewhere/three"):
        run_folder(name)
    Path("runs/no-run").mkdir()
    run_folder("runs/\x1b[31m")
    assert complete_run("") == ["runs/one", "runs/other"]
    assert complete_run("runs/oth") == ["runs/other"]
    assert complete_run("elsewhere/") == ["elsewhere/three"]
    assert complete_run("nowhere/x") == []
    assert completed("lineage runs/on") == ["runs/one"]


def test_settings_are_completed_with_their_whole_path():
    assert completed("check --set algorithm.lr_schedule.s") == ["algorithm.lr_schedule.steps"]
    found = complete_setting("")
    assert {"seed", "evolve.hyperparameters", "engine.vllm.python", "record.storage"} <= set(found)
    assert not {"algorithm", "evolve.selection"} & set(found)  # groups, which have values below
    assert complete_setting("evolve.selection.s") == [
        "evolve.selection.share",
        "evolve.selection.size",
    ]


def test_a_completed_setting_is_one_that_a_file_takes():
    base = {"model": "tiny-sums", "env": "sums"}
    for name in ("population.rounds", "population.size", "algorithm.group_size"):
        assert name in complete_setting(name[:-1])
        from_dict(base, [f"{name}=4"])
