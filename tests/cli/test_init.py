"""`evo-grpo init`: every template is complete, valid, and a run."""

import csv
import json
import re
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from commands import evo

from evo_grpo import run
from evo_grpo.record.folder import read_rounds
from evo_grpo.record.summary import read_summary
from evo_grpo.settings import load
from evo_grpo.settings.templates import TEMPLATES, companions

# What the embedded model stands in for, in a test that has neither network nor GPU.
ELSEWHERE = {
    "reasoning-gym": ["model=tiny-sums"],
    "smollm2": ["model=tiny-sums"],
    "vllm": ["model=tiny-sums", "engine={device: cpu, threads: 1}"],
    "slurm": ["model=tiny-sums", "engine={device: cpu, threads: 1}"],
}
TINY = (
    "population={size: 2, rounds: 2, steps_per_round: 1}",
    "algorithm.group_size=8",
    "algorithm.prompts_per_step=2",
    "algorithm.max_output_tokens=4",
    "algorithm.max_model_len=null",
    "evolve.fitness={prompts: 4, test_prompts: 4, final_samples: 1}",
)


@pytest.fixture(autouse=True)
def _no_model_and_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("my_game", "my_rewards"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("evo_grpo.training.sizing.machine.cuda_devices", list)


def written() -> set[str]:
    return {path.name for path in Path().iterdir()}


def test_the_list_says_what_each_is_for():
    lines = evo("init", "--list").stdout.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [list(item) for item in TEMPLATES.items()]
    assert written() == set()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_passes_check(name: str):
    result = evo("init", "--template", name)
    files = {"population.yaml", *companions(name)}
    assert written() == files | {"population.schema.json"}
    assert all(file in result.stdout for file in files)
    text = Path("population.yaml").read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=population.schema.json\n# ")
    jsonschema.validate(
        yaml.safe_load(text), json.loads(Path("population.schema.json").read_text())
    )
    assert text.count("#") > 12
    # The model of one is fetched, which a test does not do.
    settings = ("--set", "model=tiny-sums") if name == "smollm2" else ()
    checked = evo("check", "--offline", *settings)
    assert checked.exit_code == 0, checked.stderr
    warnings = [line for line in checked.stdout.splitlines() if line.startswith("warning:")]
    assert len(warnings) == (name == "vllm")
    assert all("engine.vllm.python:" in line for line in warnings)


# Where the embedded model stands in for one that can read the questions, nobody earns anything.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:round 1 had nothing to learn from")
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_a_run(name: str):
    evo("init", "--template", name)
    config = load("population.yaml", [*ELSEWHERE.get(name, ()), *TINY])
    folder = run(config, out="run")
    assert len(read_rounds(folder)) == 2
    assert read_summary(folder) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["foods", "multi-turn"])
def test_what_runs_as_it_is_learns_in_half_of_its_rounds(name: str):
    evo("init", "--template", name)
    rounds = load("population.yaml").population.rounds
    config = load("population.yaml", [f"population.rounds={rounds // 2}"])
    summary = read_summary(run(config, out="run"))
    assert summary["gain"] > 4 * summary["gain_se"]


def test_the_rows_of_the_data_set_are_right_and_differ():
    rows = list(csv.DictReader(companions("dataset")["questions.csv"].splitlines()))
    assert len({row["question"] for row in rows}) == len(rows) == 200
    for row in rows:
        first, second = row["question"].rstrip("=").split("+")
        assert row["answer"] == f"{int(first) + int(second):03d}"


def test_the_ranks_of_a_job_are_those_that_its_population_has_agents_for():
    assert evo("init", "my run.yaml", "--template", "slurm").exit_code == 0
    job = Path("job.sbatch").read_text()
    assert "config='my run.yaml'\n" in job
    numbers = [
        int(re.search(rf"{option}[ =](\d+)", job)[1])
        for option in ("--nodes", "--gpus-per-node", "--nproc-per-node")
    ]
    assert numbers[1] == numbers[2]
    config = load("my run.yaml")
    assert config.engine.shards == numbers[0] * numbers[1]
    assert min(config.population.sizes) >= config.engine.shards
    assert config.population.sizes[0] == config.population.size


def test_no_file_is_replaced_unasked():
    Path("my_rewards.py").write_text("mine = 1\n")
    result = evo("init", "--template", "dataset")
    assert result.exit_code == 2
    assert "error: my_rewards.py: already exists; choose another name or folder" in result.stderr
    assert written() == {"my_rewards.py"}
    assert evo("init", "--template", "dataset", "--force").exit_code == 0
    assert Path("my_rewards.py").read_text() == companions("dataset")["my_rewards.py"]
    schema = Path("population.schema.json")
    assert schema.read_text() == evo("schema").stdout
    schema.write_text("mine")
    evo("init", "other.yaml")
    assert schema.read_text() == "mine"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_in_another_folder_calls_its_file_by_its_name(name: str):
    Path("there").mkdir()
    said = evo("init", "there/mine.yaml", "--template", name).stdout
    assert said.endswith(
        "next: evo-grpo check there/mine.yaml, then evo-grpo run there/mine.yaml\n"
    )
    text = Path("there/mine.yaml").read_text(encoding="utf-8")
    assert "#   evo-grpo check mine.yaml" in text
    assert "evo-grpo run mine.yaml" in text
    assert "population.yaml" not in text
    assert all(Path("there", file).is_file() for file in companions(name))
