"""Who hears of a run that Python calls: nobody in a pipe unless asked, and its trackers."""

import subprocess
import sys

import pandas as pd
import pytest
from small_run import Told, small

from evo_grpo import GRPO, resume, run
from evo_grpo.errors import ConfigError, RunDirError
from evo_grpo.record.folder import read_rounds
from evo_grpo.settings import to_yaml
from evo_grpo.training.recorded_inputs import read_inputs_of

CONFIG = small(population__rounds=1)


def test_a_run_in_a_pipe_is_silent_unless_it_is_asked_to_speak(tmp_path, capfd):
    run(CONFIG, out=tmp_path / "silent")
    run(CONFIG, out=tmp_path / "never", progress=False)
    assert capfd.readouterr() == ("", "")
    told, steps = Told(), []
    told.step_done = lambda round, step, metrics: steps.append((round, step))
    folder = run(CONFIG, out=tmp_path / "asked", progress=True, observer=told)
    out, errors = capfd.readouterr()
    lines = out.splitlines()
    assert errors == ""  # no progress bar of transformers' either
    assert lines[0] == "loading tiny-sums …"
    assert lines[1].endswith("asked: tiny-sums on sums, 3 agents, 1 round of 1 step")
    assert lines[2].startswith("round 1/1")
    assert lines[-1].startswith("Next: evo-grpo report")
    assert any(line.startswith("Base 0.") for line in lines)
    assert told.calls  # the observer is told as well
    assert steps == [(0, 0)]
    resume(folder)
    assert capfd.readouterr().out == ""
    resume(folder, progress=True)
    assert capfd.readouterr().out.startswith(f"loading {folder} …\n")


def test_an_observer_takes_the_place_of_the_progress_on_a_terminal(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the pipe for a terminal
    run(CONFIG, out=tmp_path / "observed", observer=Told())
    assert capfd.readouterr().out == ""
    run(CONFIG, out=tmp_path / "shown")
    assert "Next:" in capfd.readouterr().out


def test_a_run_without_progress_loads_no_reader(tmp_path):
    script = (
        "import sys, evo_grpo; evo_grpo.run(sys.argv[1], out=sys.argv[2], progress=False); "
        "print(*(name for name in sys.modules if name.startswith('evo_grpo.readers')))"
    )
    (tmp_path / "small.yaml").write_text(to_yaml(CONFIG))
    command = [sys.executable, "-c", script, str(tmp_path / "small.yaml"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    assert done.stderr == ""  # nor a warning of a library that is imported first here
    assert (tmp_path / "run" / "journal.log").is_file()


def test_what_cannot_follow_is_refused_before_anything_is_shown(tmp_path, capfd):
    with pytest.raises(ConfigError, match="observer: expected"):
        run(CONFIG, out=tmp_path / "a", progress=True, observer=object())
    assert capfd.readouterr() == ("", "")


def test_other_ranks_show_nothing(tmp_path, capfd, monkeypatch):
    from evo_grpo.readers.terminal.live import progress

    monkeypatch.setenv("RANK", "1")
    assert progress(anywhere=True).console.quiet
    monkeypatch.setenv("RANK", "0")
    assert not progress(anywhere=True).console.quiet


def test_train_speaks_where_it_is_asked_to(capfd):
    population = GRPO.population(
        size=2,
        model="tiny-sums",
        device="cpu",
        lr=1e-3,
        group_size=2,
        prompts_per_step=2,
        hyperparameters={"lr": {"min": 1e-4, "max": 1e-2}},
    )
    keywords = {"rounds": 1, "steps_per_round": 1, "fitness": {"prompts": 2}}
    population.train("sums", **keywords)
    assert capfd.readouterr() == ("", "")
    population.train("sums", **keywords, progress=True)
    out = capfd.readouterr().out
    assert out.startswith("tiny-sums on sums, 2 agents")
    assert "is the best: 1.00 ± 0.00 on" in out


def test_rows_and_a_reward_from_python_train_as_those_of_files_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    rows = [{"q": f"{n:02d}+01=", "total": f"{n + 1:03d}"} for n in range(30)]
    pd.DataFrame(rows).to_csv("rows.csv")
    (tmp_path / "given_rewards.py").write_text(
        "def exact(completion, total):\n    return float(completion == total)\n"
    )
    sys.path.append(str(tmp_path))
    from given_rewards import exact

    config = {
        "model": "tiny-sums",
        "env": {"kind": "dataset", "train": "rows.csv", "prompt": "{q}"},
        "population": {"size": 2, "rounds": 1, "steps_per_round": 1},
        "algorithm": {"max_output_tokens": 4, "group_size": 2},
        "evolve": {"fitness": {"prompts": 3, "test_prompts": 2}},
        "record": {"optuna": False},
    }
    found = []
    for name, changes in {
        "file": {"reward": "given_rewards:exact"},
        "list": {"train": rows, "reward": exact},
        "frame": {"train": pd.DataFrame(rows), "reward": exact},
    }.items():
        folder = run({**config, "env": config["env"] | changes}, out=name, progress=False)
        (played,) = read_rounds(folder)
        found.append([agent.score for agent in played.agents])
    assert found[0] == found[1] == found[2]
    assert read_inputs_of(tmp_path / "list").files == read_inputs_of(tmp_path / "frame").files
    with pytest.raises(RunDirError, match=r"env.train \(list of 30 rows\), env.reward \(exact\)"):
        resume("list", rounds=2)
