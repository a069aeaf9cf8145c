"""A run that `Population.train` recorded with Python objects goes on from Python, to the bit."""

import json
import shutil

import pytest
from peft import LoraConfig
from small_run import Told, outcome
from tiny_cohort import assert_same_agents

from evo_grpo import GRPO, DatasetEnv, Population, evaluate_adapter, resume, sample, write_report
from evo_grpo.analysis.verify import verify
from evo_grpo.errors import ConfigError, EvoGrpoError, RunDirError
from evo_grpo.evolve.protocols import Offspring, rank
from evo_grpo.record.names import RECORDED_IN_PYTHON
from evo_grpo.settings import EnvConfig
from evo_grpo.training.from_python import FromPython

ROWS = [
    {"question": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"} for a in range(10) for b in range(4)
]
AGENTS = {
    "model": "tiny-sums",
    "lora": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "group_size": 4,
    "prompts_per_step": 2,
    "lr": 1e-2,
    "seed": 5,
    "device": "cpu",
    "hyperparameters": {"lr": {"min": 1e-4, "max": 1e-1}},
}
ROUND = {
    "rounds": 3,
    "steps_per_round": 1,
    "fitness": {"prompts": 4, "test_prompts": 4, "test_samples": 1, "final_samples": 0},
    "sizes": "constant",
    "significance": None,
    "progress": False,
}


def right(completion, answer):
    return float(completion == answer)


def half(completion, answer):
    return 0.5 * (completion[:1] == answer[:1])


class BestOfAll:
    """A selection of the user's own: copies the best agent over the worst."""

    def plan(self, histories, places, rng):
        order = rank(histories)
        best, worst = order[0], order[-1]
        return tuple(
            Offspring(place, best if place == worst else place, elite=place == best)
            for place in range(len(order))
        )


def make(**given):
    return GRPO.population(size=3, **{**AGENTS, **given})


def env(rows=ROWS, reward=right, **given):
    return DatasetEnv(rows, reward, prompt="{question}", **given)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    population = make()
    population.train(env(), out=out, selection=BestOfAll(), **ROUND)
    return population, out


def stopped(out, stop, **given):
    with pytest.raises(KeyboardInterrupt):
        make().train(
            env(), out=out, selection=BestOfAll(), observer=Told(stop), **{**ROUND, **given}
        )


@pytest.mark.parametrize("stop", [("learn", 0), ("evaluate", 2), ("test", 2)])
def test_it_ends_as_the_run_that_was_not_stopped(stop, uninterrupted, tmp_path):
    stopped(tmp_path / "run", stop)
    # The LoraConfig is in the checkpoints of a finished round.
    lora = {"lora": AGENTS["lora"]} if stop[1] == 0 else {}
    population = Population.resume(
        tmp_path / "run", env(), selection=BestOfAll(), progress=False, **lora
    )
    assert_same_agents(population, uninterrupted[0])
    assert outcome(tmp_path / "run") == outcome(uninterrupted[1])
    assert population.summary is not None
    assert [record.round for record in population.rounds] == [0, 1, 2]


def test_a_finished_run_is_loaded_and_extended(uninterrupted, tmp_path):
    out = tmp_path / "run"
    make().train(env(), out=out, selection=BestOfAll(), **{**ROUND, "rounds": 2})
    loaded = Population.resume(out, env(), selection=BestOfAll(), progress=False)
    assert len(loaded.rounds) == 2
    extended = Population.resume(out, env(), selection=BestOfAll(), rounds=3, progress=False)
    assert_same_agents(extended, uninterrupted[0])
    # In memory too, with the selection that the last round has left out.
    loaded.train(env(), selection=BestOfAll(), **{**ROUND, "rounds": 1})
    assert_same_agents(loaded, uninterrupted[0])


def test_what_looks_at_runs_takes_it(uninterrupted, tmp_path):
    _, out = uninterrupted
    assert verify(out).damage == []
    assert write_report(out).is_file()
    summary = json.loads((out / "summary.json").read_text())
    judged = evaluate_adapter(out, env=env())
    assert judged.own.mean == summary["best"]["mean"]
    assert judged.base.mean == summary["base"]["mean"]
    own, _ = sample(out, rows=0, n=2, env=env())
    assert all(reward in (0.0, 1.0) for reward in own.rewards)
    # The template is recorded, so a prompt needs no environment.
    (prompt,) = sample(out, "01+02=", n=1, base=False)
    assert prompt.prompt == "01+02="


@pytest.mark.slow
def test_agents_that_had_trained_before_go_on(tmp_path):
    folders = [tmp_path / "whole", tmp_path / "stopped"]
    found = []
    for out in folders:
        population = make(beta=0.05)
        population.train(env(), **{**ROUND, "rounds": 1})
        population.cohort.freeze_reference(population[1].slot)
        part = Population(population.cohort, population[1:])
        observer = Told(("evaluate", 1)) if out == folders[1] else None
        given = {**ROUND, "rounds": 2, "sizes": "constant", "observer": observer}
        if observer is None:
            part.train(env(), out=out, **given)
        else:
            with pytest.raises(KeyboardInterrupt):
                part.train(env(), out=out, **given)
            part = Population.resume(out, env(), progress=False)
        found.append(part)
    assert_same_agents(*found)
    assert outcome(folders[0])["leaderboard"] == outcome(folders[1])["leaderboard"]


def test_another_environment_is_named_with_the_way_out(uninterrupted, tmp_path):
    out = tmp_path / "run"
    stopped(out, ("evaluate", 1))

    def again(other, **given):
        return Population.resume(
            out, other, **{"selection": BestOfAll(), "progress": False, **given}
        )

    with pytest.raises(ConfigError, match=r"env.train has changed; .*allow=\['env.train'"):
        again(env(ROWS[:-1]))
    with pytest.raises(ConfigError, match=r"env.reward was 'right' and is 'half'"):
        again(env(reward=half))
    with pytest.raises(ConfigError, match="the task 'sums'; give that environment, or start"):
        again("sums")
    with pytest.raises(ConfigError, match=r"env \(DatasetEnv\), which no file can name, got none"):
        again(None)
    with pytest.raises(ConfigError, match="expected selection= as at the begin"):
        again(env(), selection=None)
    with pytest.raises(ConfigError, match="selection was 'BestOfAll' and is"):
        again(env(), selection=Told())
    with pytest.raises(ConfigError, match="tokenizer: expected none, since pop"):
        again(env(), tokenizer=object())
    with pytest.raises(ConfigError, match=r"give it in Python: evo_grpo.sample\('"):
        sample(out, rows=0)
    with pytest.raises(RunDirError, match=r"Population.resume\('.*run', env=...\)"):
        resume(out)

    def right(completion, answer):
        return float(completion.strip() == answer)

    with pytest.raises(ConfigError, match="right has changed") as caught:
        again(env(reward=right))
    assert "allow=['env.reward: right']" in str(caught.value)
    population = again(env(reward=right), allow=["env.reward: right"])
    assert len(population.rounds) == 3
    changes = json.loads((out / "inputs.json").read_text())["changes"]
    assert [one["name"] for one in changes] == ["env.reward: right"]


@pytest.mark.slow
def test_a_run_of_names_needs_no_objects(tmp_path):
    out = tmp_path / "run"
    population = make(lora={"r": 2})
    with pytest.raises(KeyboardInterrupt):
        population.train("sums", out=out, observer=Told(("evaluate", 1)), **ROUND)
    with pytest.raises(ConfigError, match="env: expected the task that the run was begun with, 's"):
        Population.resume(out, env(), progress=False)
    assert len(Population.resume(out, "sums", progress=False).rounds) == 3


@pytest.mark.slow
def test_rows_and_modules_of_the_run_are_found_in_the_folder_of_code(tmp_path, monkeypatch):
    code, out = tmp_path / "code", tmp_path / "run"
    code.mkdir()
    rows = "".join(f"{a:02d}+{b:02d}=,{a + b}\n" for a in range(9) for b in range(6))
    (code / "sums_here.csv").write_text(f"question,answer\n{rows}")
    (code / "rewards_here.py").write_text(
        "def same(completion, answer):\n    return float(completion[-1:] == str(answer)[-1])\n"
    )
    task = {"kind": "dataset", "train": "sums_here.csv", "prompt": "{question}",
            "reward": "rewards_here:same"}  # fmt: skip
    monkeypatch.chdir(code)
    with pytest.raises(KeyboardInterrupt):
        make(lora={"r": 2}).train(task, out=out, observer=Told(("evaluate", 1)), **ROUND)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EvoGrpoError, match="sums_here"):
        Population.resume(out, progress=False)
    assert len(Population.resume(out, code=code, progress=False).rounds) == 3


def test_settings_with_rows_take_the_place_of_their_description(uninterrupted, tmp_path):
    """Rows and functions inside the settings of a task, of which the folder has a description."""
    out = shutil.copytree(uninterrupted[1], tmp_path / "run")
    text = (out / "population.yaml").read_text().partition("\n")[2]
    first = f"{RECORDED_IN_PYTHON}env.train (list of 2 rows)\n"
    (out / "population.yaml").write_text(first + text)
    task = {"kind": "sums", "args": {"high": 20}}
    config = FromPython(task).config_of(out, "resume(...)", played=True)
    assert config.env == EnvConfig(**task)
    with pytest.raises(ConfigError, match=r"env.train \(list of 2 rows\), got DatasetEnv; give"):
        FromPython(env()).config_of(out, "resume(...)", played=True)
    with pytest.raises(ConfigError, match=r"which no file can name, got none; give it .*resume\("):
        FromPython().config_of(out, "resume(...)", played=True)
