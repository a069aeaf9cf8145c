"""What an agent answers: through the template of its task, with its stops, beside its base."""

import io
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from small_run import small

from evo_grpo import run
from evo_grpo.analysis.sampling.answers import Sampled, sample, show_sampled
from evo_grpo.envs.registry import build_task
from evo_grpo.errors import (
    ConfigError,
    DataError,
    PromptTooLongError,
    RunDirError,
    RunFailedError,
)
from evo_grpo.population.checkpoints.read import load_agent
from evo_grpo.population.cohort.sampler import PopulationSampler
from evo_grpo.record.choice import choose_of
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import load
from evo_grpo.training.assemble import prepare


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = small(algorithm__lr=3e-2, evolve__hyperparameters={"lr": {"min": 1e-2, "max": 5e-2}})
    return run(config, out=tmp_path_factory.mktemp("runs") / "sums-1")


def test_agent_and_base_answer_a_prompt(finished):
    own, base = sample(finished, "12+07=", n=3)
    assert own.prompt == base.prompt == "12+07="
    assert own.who == choose_of(finished).title
    assert base.who == "base"
    for one in (own, base):
        assert len(one.texts) == len(one.ended) == 3
        assert one.rewards == (None,) * 3


def test_it_is_the_agents_own_distribution_as_its_round_had_it(finished):
    """Greedily, an agent loaded into a whole population answers the same."""
    config, choice = load(finished / "population.yaml"), choose_of(finished)
    prepared = prepare(config)
    load_agent(prepared.cohort, 1, finished / choice.checkpoint)
    prompts = prepared.env.prompts("validation", 5)
    sampling = Sampling(temperature=1e-4, max_output_tokens=4)
    (groups,) = prepared.cohort.generate([1], prompts, stream=("x",), samples=1, sampling=sampling)
    expected = [group.completions[0].text for group in groups]
    rows = [prompt.index for prompt in prompts]
    found = sample(finished, rows=rows, temperature=0, base=False)
    assert [one.texts for one in found] == [(text,) for text in expected]
    assert [one.prompt for one in found] == [prompt.text for prompt in prompts]


def test_rows_have_rewards(finished):
    config = load(finished / "population.yaml")
    row = build_task(config.env, config.seed).splits["test"][2]
    for one in sample(finished, rows=2, split="test", n=8):
        assert one.prompt == row["question"]
        assert one.rewards == tuple(float(text == row["answer"]) for text in one.texts)


def test_the_same_seed_draws_the_same_and_another_one_others(finished):
    def drawn(**given):
        return sample(finished, "12+07=", n=16, temperature=2.0, **given)[0]

    assert drawn() == drawn(seed=0)
    assert drawn() != drawn(seed=1)
    # Agent and base share their draws: without it, the agent's answers are the same.
    assert drawn(base=False) == drawn()


def test_it_stops_where_training_did(finished):
    """Three digits and the end token are the hint of sums."""
    (answers,) = sample(finished, "12+07=", n=32, temperature=5.0, base=False)
    assert not all(answers.ended)
    assert max(len(text) for text in answers.texts) == 4


@pytest.fixture
def own_data(tmp_path, monkeypatch):
    """A run on rows of the user's own with a template of two columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("sampled_reward.py").write_text(
        "def score(completion, answer):\n    return float(answer in completion)\n"
    )
    rows = [{"a": n, "b": n, "answer": str(2 * n)} for n in range(30)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small(
        population={"size": 2, "rounds": 1, "steps_per_round": 1},
        env={
            "kind": "dataset",
            "train": "rows.jsonl",
            "reward": "sampled_reward:score",
            "conversation": [{"role": "user", "content": "{a}+{b}="}],
        },
    )
    return run(config, out=tmp_path / "run")


@pytest.mark.slow
def test_several_columns_are_a_json_object(own_data):
    for name in ("rows.jsonl", "sampled_reward.py"):
        Path(name).unlink()  # neither is needed to ask
    (found, _) = sample(own_data, '{"a": 4, "b": 5}', n=2)
    assert found.prompt == "4+5="
    for wrong in ("4+5=", '{"a": 4}', "[1]"):
        with pytest.raises(
            ConfigError, match=r"""names 2 columns; expected .*'{"a": "...", "b": "..."}', got"""
        ):
            sample(own_data, wrong)
    (found, _) = sample(own_data, "4+5={", n=2, raw=True)
    assert found.prompt == "4+5={"


def test_a_row_goes_through_the_users_reward(own_data):
    (found,) = sample(own_data, rows=1, split="train", n=6, base=False)
    assert "+" in found.prompt
    assert set(found.rewards) <= {0.0, 1.0}


@pytest.mark.slow
def test_a_template_without_a_column(tmp_path):
    config = small(
        population={"size": 2, "rounds": 1, "steps_per_round": 1},
        env={"kind": "sums", "prompt": "12+07="},
    )
    with pytest.warns(UserWarning, match="nothing to learn from"):
        folder = run(config, out=tmp_path / "run")
    with pytest.raises(DataError, match=r"names no column.*--row.*--raw"):
        sample(folder, "1+1=")
    assert sample(folder, rows=0, n=1)[0].prompt == "12+07="


class Guess:
    """Two turns: says more after the first."""

    def reset(self, seed=None):
        self.turns = 0
        return f"begin {seed % 10}", {}

    def step(self, action):
        self.turns += 1
        return "more", float(len(action)), self.turns == 2, False, {}


def test_an_episode_is_a_row_of_a_task_of_several_turns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small(
        population={"size": 2, "rounds": 1, "steps_per_round": 1},
        env={"kind": f"python:{__name__}:Guess", "max_turns": 3},
    )
    monkeypatch.setitem(sys.modules, "sampled_game", sys.modules[__name__])
    config = config.replace(env=config.env.replace(kind="python:sampled_game:Guess"))
    folder = run(config, out=tmp_path / "run")
    for one in sample(folder, rows=3, n=2):
        assert all("[environment] more" in text for text in one.texts)
        assert all(reward >= 0 for reward in one.rewards)
    (found, _) = sample(folder, "begin", n=1)
    assert found.prompt == "begin"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 0}, r"^n: expected an integer >= 1, got 0"),
        ({"temperature": -1}, r"^temperature: expected a number >= 0, got -1"),
        ({"temperature": 1e-40}, r"^temperature: .* from 1e-06 .*float32 .*1e-40"),
        ({"temperature": math.nan}, r"^temperature: "),
        ({"rows": 99}, r"^row: expected a number from 0 to 21, of 22 in validation, got 99"),
        ({"rows": -1}, r"^row: "),
        ({"agent": 7}, r"^agent: expected one of 0, 1, 2, got 7"),
    ],
)
def test_numbers_out_of_range(finished, given, message):
    with pytest.raises(ConfigError, match=message):
        sample(finished, "1+1=" if "rows" not in given else (), **given)


def test_a_prompt_that_fills_the_context(finished):
    with pytest.raises(PromptTooLongError, match=r"prompt: expected at most 511 tokens"):
        sample(finished, "1" * 600)


def test_a_run_with_objects_is_not_known_here(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    text = (folder / "population.yaml").read_text()
    first = "# Recorded by Population.train with objects that no file can name: model\n"
    (folder / "population.yaml").write_text(first + text)
    with pytest.raises(RunDirError, match=r"no file can name, so its base cannot.*get_act"):
        sample(folder, "1+1=")
    assert yaml.safe_load(text)


@pytest.mark.parametrize("asked", [{"prompts": "12+07="}, {"rows": 0}])
def test_an_agent_that_is_not_finite_answers_nothing(finished, asked, monkeypatch):
    logprobs = PopulationSampler.sample

    def broken(self, ask):
        groups = logprobs(self, ask)
        (own,), *others = groups
        nan = [replace(one, logprobs=(math.nan,) * len(one.logprobs)) for one in own.completions]
        return [[replace(own, completions=tuple(nan))], *others]

    monkeypatch.setattr(PopulationSampler, "sample", broken)
    with pytest.raises(RunFailedError, match=r"agent \d.*: expected finite log-probabilities, got"):
        sample(finished, **asked, n=2)


def test_a_prompt_with_its_answers():
    prompt, texts = "first\nsecond", ("a\nb", "\x1b[31m[red]")
    own = Sampled(prompt, "agent 1, member 4", texts, (1.0, None), (True, False))
    base = Sampled(prompt, "base", ("c",), (0.5,), (True,))
    console = Console(file=io.StringIO(), width=80)
    show_sampled(console, [own, base])
    assert console.file.getvalue().splitlines() == [
        "> first",
        "> second",
        "agent 1, member 4:",
        "  - a",
        "    b  [reward 1.00]",
        r"  - \x1b[31m[red] ...",
        "base:",
        "  - c  [reward 0.50]",
        "",
    ]
