import json

import pytest
from env_contract import EnvContract

from evo_grpo.envs.registry import build_multi_turn, check_multi_turn
from evo_grpo.errors import ConfigError, DataError, RewardError
from evo_grpo.settings import EnvConfig

# As the class of TRL's own pages: tools with type hints and Google docstrings, no step.
COUNTER = '''
import random


class Counter:
    def __init__(self, start=0):
        self.start = start

    def reset(self, **row):
        self.count = self.start
        self.wanted = row.get("wanted") or random.randint(1, 9)
        return f" Count to {self.wanted}."

    def increment(self, step: int) -> str:
        """Add to the counter.

        Args:
            step: How much.

        Returns:
            The counter.
        """
        self.count += step
        return f"counter: {self.count}"

    async def roll(self) -> int:
        """Roll a die.

        Returns:
            What it shows.
        """
        return random.randint(1, 6)

    def get_reward(self):
        return 1.0 - abs(self.wanted - self.count) / 10

    def _hidden(self):
        raise AssertionError

    @property
    def trap(self):
        raise AssertionError("a property is no tool and is not read")


class Judged(Counter):
    async def get_reward(self):
        return 0.25


class Broken(Counter):
    def get_reward(self):
        return "much"


class Undescribed(Counter):
    def other(self, x):
        return x


class NoReward:
    def reset(self):
        return ""


class Blocks(Counter):
    def reset(self, **row):
        super().reset(**row)
        return [{"type": "text", "text": "See"}, {"type": "text", "text": " this."}]
'''
ROWS = [
    {"prompt": [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "Go."}]},
    {"prompt": "Go.", "wanted": 3},
]


def call(name, **arguments):
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def build(name="Counter", train=None, seed=0, **args):
    env = EnvConfig(kind=f"trl:counter:{name}", args=args, train=train)
    return build_multi_turn(env, seed)


@pytest.fixture(autouse=True)
def folder(write_module, tmp_path):
    write_module("counter", COUNTER)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))


class TestTrlStyle(EnvContract):
    @pytest.fixture
    def make(self):
        return build()

    def act(self, seen, draw):
        return draw.choice(
            [call("increment", step=2), call("roll"), call("none"), "<tool_call>{", "Done."]
        )


def test_a_prompt_with_parts_that_are_no_text_is_refused_by_its_row(tmp_path):
    picture = {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}
    path = tmp_path / "more.jsonl"
    path.write_text("\n".join(map(json.dumps, [*ROWS, picture])))
    for make in (build_multi_turn, check_multi_turn):
        with pytest.raises(DataError, match=r"line 3: the prompt, message 0: expected content"):
            make(EnvConfig(kind="trl:counter:Counter", train=str(path)), 0)


def test_tools_are_described_and_answered():
    env = build()()
    text, info = env.reset(seed=0)
    listed = [json.loads(line)["function"] for line in text.splitlines() if line.startswith('{"t')]
    assert [tool["name"] for tool in listed] == ["increment", "roll"]
    assert listed[0]["parameters"]["properties"]["step"]["type"] == "integer"
    assert "Count to" in text
    assert info == {"row": {}}
    text, reward, terminated, truncated, info = env.step(
        f"Let me see. {call('increment', step=2)} {call('increment', step=1)}"
    )
    assert text == (
        "<tool_response>\ncounter: 2\n</tool_response>\n"
        "<tool_response>\ncounter: 3\n</tool_response>"
    )
    assert (reward, terminated, truncated, info) == (0.0, False, False, {"calls": 2})


def test_an_answer_without_a_call_ends_the_episode_and_is_scored_once():
    env = build(train="rows.jsonl", start=1)()
    text, info = env.reset(seed=1)
    assert text.endswith("\nGo. Count to 3.")
    assert info["row"] == ROWS[1]
    env.step(call("increment", step=1))
    assert env.step("There.") == ("", 0.9, True, False, {"calls": 0})


def test_texts_and_messages_are_joined_and_a_reward_is_awaited_and_a_number():
    text, _ = build(train="rows.jsonl")().reset(seed=2)
    assert "\nUse tools.\n\nGo. Count to " in text
    assert build("Blocks")().reset(seed=0)[0].endswith("\nSee this.")
    env, broken = build("Judged")(), build("Broken")()
    env.reset(seed=0)
    assert env.step("Done.")[1] == 0.25
    broken.reset(seed=0)
    with pytest.raises(RewardError, match=r'"trl:counter:Broken": expected a finite.*\'much\''):
        broken.step("Done.")


def test_a_call_that_fails_is_answered_by_its_error_as_in_trl():
    env = build()()
    env.reset(seed=0)
    answers = {
        call("fly"): "{'error': 'Tool fly not found.'}",
        call("get_reward"): "Tool get_reward not found.",
        call("_hidden"): "Tool _hidden not found.",
        call("increment", by=2): "unexpected keyword argument 'by'",
        "<tool_call>not json</tool_call>": "Expecting value",
        '<tool_call>{"name": "roll", "arguments': "Unterminated string",
    }
    for action, answer in answers.items():
        text, reward, terminated, *_ = env.step(action)
        assert answer in text
        assert (reward, terminated) == (0.0, False)


def test_max_turns_truncates_and_still_scores():
    env = build(max_turns=2, train="rows.jsonl")()
    env.reset(seed=1)
    assert env.step(call("increment", step=2))[1:4] == (0.0, False, False)
    assert env.step(call("increment", step=1))[1:4] == (1.0, False, True)


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("NoReward", {}, ConfigError, "expected a TRL-style class.*NoReward without get_reward"),
        ("Undescribed", {}, ConfigError, "a tool cannot be described to the model"),
        ("Counter", {"strt": 1}, ConfigError, '"trl:counter:Counter" is not called with.*"start"'),
        ("Counter", {"train": "none.jsonl"}, DataError, "train: no file 'none.jsonl'"),
    ],
)
def test_what_does_not_fit_is_named(name, given, error, message):
    with pytest.raises(error, match=message):
        build(name, **given)
