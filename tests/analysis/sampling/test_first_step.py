"""What `try` shows: the model before training, at the settings of the run, with every reward."""

import json
from itertools import product

import pytest
from small_run import small
from typer.testing import CliRunner

from evo_grpo import try_config
from evo_grpo.cli.commands.options import app
from evo_grpo.errors import ConfigError
from evo_grpo.model.base import SharedBase
from evo_grpo.training.assemble import prepare

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in product(range(5), range(6))]
REWARDS = """
def exact(completion, answer):
    return float(completion == answer)

def short(completion):
    return None if not completion else 1.0 / len(completion)

def nothing(completion):
    return 0.5

def silent(completion):
    return None

def sometimes(completion):
    return 1.0 if completion[:1] in "0123" else None
"""
GAME = """
class Game:
    def reset(self, seed=None):
        return "3+4=", {}

    def step(self, text):
        self.turns = getattr(self, "turns", 0) + 1
        return "again", float(len(text)), self.turns == 2, False, {}
"""


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Settings of a run on rows and rewards of a person."""
    (tmp_path / "tried_rewards.py").write_text(REWARDS)
    (tmp_path / "tried_game.py").write_text(GAME)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def settings(*rewards, **changes):
        env = {"kind": "dataset", "train": "rows.jsonl", "prompt": "{question}"}
        env["reward"] = [f"tried_rewards:{name}" for name in rewards]
        return small(env=env, **changes)

    return settings


def test_answers_have_the_value_of_each_reward_and_their_sum(dataset):
    config = dataset("exact", "short", env__reward_weights=[2.0, 0.5])
    tried = try_config(config, rows=[3, 17], samples=5)
    env = prepare(config).env
    assert tried.weights == {"exact": 2.0, "short": 0.5}
    for row, prompt in zip((3, 17), tried.prompts, strict=True):
        asked = env.row("train", row)
        assert prompt.tokens == len(asked.token_ids)
        assert prompt.prompt == env.tokenizer.decode(asked.token_ids)
        assert len(prompt.answers) == 5
        for answer in prompt.answers:
            exact = float(answer.text == asked.columns["answer"])
            short = None if not answer.text else 1.0 / len(answer.text)
            assert answer.rewards == {"exact": exact, "short": short}
            assert answer.reward == pytest.approx(2.0 * exact + 0.5 * (short or 0.0))
        assert prompt.signal is (len({one.reward for one in prompt.answers}) > 1)
    assert tried.signal == sum(one.signal for one in tried.prompts) / 2


def test_without_rows_the_first_prompts_of_the_run_are_tried(dataset):
    config = dataset("exact")
    tried = try_config(config)
    env = prepare(config).env
    assert [one.prompt for one in tried.prompts] == [
        env.tokenizer.decode(prompt.token_ids) for prompt in env.batch(0, 3)
    ]
    assert {len(one.answers) for one in tried.prompts} == {config.algorithm.group_size}


def test_a_given_answer_is_scored_without_a_model(dataset, monkeypatch):
    monkeypatch.setattr(SharedBase, "load", None)
    config = dataset("exact", "short")
    row = prepare_row(config, 4)
    tried = try_config(config, rows=4, answer=row)
    (prompt,) = tried.prompts
    (answer,) = prompt.answers
    assert answer.rewards == {"exact": 1.0, "short": 1.0 / len(row)}
    assert try_config(config, rows=4, answer="x").answers[0].rewards["exact"] == 0.0


def prepare_row(config, number):
    """The right answer of a row, as the split of the run has it."""
    from evo_grpo.training.strategies import task_of

    return task_of(config).splits["train"][number]["answer"]


@pytest.mark.filterwarnings("ignore:every reward function")
def test_answers_without_a_reward_give_no_signal(dataset):
    tried = try_config(dataset("sometimes"), samples=6)
    assert {one.reward for one in tried.answers} == {1.0, None}
    assert tried.signal == 0
    silent = try_config(dataset("silent"), samples=2)
    assert "reward silent: abstained on every answer" in silent.sentences()
    assert silent.sentences()[-1].startswith("every reward function abstained on every answer")


def test_an_answer_is_scored_for_the_rows_and_prompts_of_the_run(dataset):
    config = dataset("exact", env__too_long="truncate_left", env__prompt="1111{question}")
    config = config.replace(algorithm=config.algorithm.replace(max_model_len=8))
    asked = [one.prompt for one in try_config(config, samples=2).prompts]
    assert len(asked[0]) < 8
    assert [one.prompt for one in try_config(config, answer="").prompts] == asked


def test_episodes_are_shown_with_their_turns(dataset):
    config = small(env={"kind": "python:tried_game:Game", "max_turns": 3})
    tried = try_config(config, samples=2)
    assert {one.turns for one in tried.answers} == {2}
    assert all("[environment] again" in one.text for one in tried.answers)
    with pytest.raises(
        ConfigError, match="answer: expected a task of one turn, got python:tried_game:Game"
    ):
        try_config(config, answer="7")


def called(config, *arguments):
    import yaml

    with open("tried.yaml", "w") as file:
        yaml.safe_dump(config.model_dump(mode="json"), file)
    return CliRunner().invoke(app, ["try", "tried.yaml", *arguments])


def test_the_command_shows_them_and_exits_with_1_without_a_signal(dataset):
    done = called(dataset("exact", "short"), "--rows", "3,17", "--samples", "6")
    assert done.exit_code == 0, done.output
    assert "prompt of 4 tokens, as the model gets it:" in done.stdout
    assert "of 2 groups have a signal: " in done.stdout
    none = called(dataset("nothing"), "--samples", "3")
    assert none.exit_code == 1
    assert "[nothing 0.50]" in none.stdout
    assert "0 of 3 groups have a signal" in none.stdout
    assert "A run would learn nothing from these: " in none.stdout


def test_the_document_is_the_result(dataset):
    config = dataset("exact")
    done = called(config, "--rows", "3", "--samples", "2", "--json")
    found, expected = json.loads(done.stdout), try_config(config, rows=3, samples=2).to_json()
    for one in (found, expected):
        assert one.pop("sampling_seconds") > 0
        one.pop("reward_seconds")
    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "3,x"], "--rows: expected numbers such as 3,17, got 'x'"),
        (["--rows", "99"], "row: expected a number from 0 to 23, of 24 in train, got 99"),
        (["--samples", "1"], "Invalid value for '--samples'"),
    ],
)
def test_a_wrong_option_is_named(dataset, arguments, message):
    done = called(dataset("exact"), *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
