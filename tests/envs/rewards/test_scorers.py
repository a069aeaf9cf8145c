"""Reward models and judges beside functions: in an environment, and in a run that is resumed."""

import json

import numpy as np
import pytest
from judge_server import by_digits, judging, says, score_of
from small_run import outcome, small, stopped_and_resumed

from evo_grpo import run
from evo_grpo.envs.rewards import judge_client
from evo_grpo.envs.rewards.scorers import RewardModel
from evo_grpo.envs.single_turn import ReasoningGym, judge_cost
from evo_grpo.errors import ConfigError, DataError, RewardError
from evo_grpo.record.run_dir import clear_run
from evo_grpo.record.summary import read_summary
from evo_grpo.record.view import view_of
from evo_grpo.settings import from_dict
from evo_grpo.settings.yaml import from_written, to_yaml
from evo_grpo.types import Completion, CompletionGroup

PROMPT = "{prompt}{completion} Answer with <score>0 to 10</score>"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(judge_client, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def judge(url, **settings):
    return {"kind": "judge", "url": url, "model": "m", "prompt": PROMPT, **settings}


def length(completion):
    return float(len(completion))


def gym(tokenizer, rewards, **options):
    rows = [{"question": f"{number}?", "answer": str(number)} for number in range(12)]
    return ReasoningGym(rows, rows, tokenizer, rewards, "{question}", **options)


def groups_of(env, texts, prompts=1):
    return [
        CompletionGroup(0, prompt, tuple(Completion((3,), text, None, True) for text in texts))
        for prompt in env.batch(0, prompts)
    ]


def test_a_judge_and_a_function_have_a_column_each_in_their_order(tokenizer):
    with judging(by_digits) as server:
        priced = judge(server.url, input_price=10.0)
        for rewards, at in (([priced, length], 0), ([length, priced], 1)):
            env = gym(tokenizer, rewards, reward_weights=[2.0, 3.0], reward_timeout=1e-3)
            groups = groups_of(env, ["1", "22x", "333333"])
            scores = env.score(groups)
            asked = groups[0].prompt.text + " Answer with <score>0 to 10</score>"
            expected = [score_of(asked + text) / 10 for text in ("1", "22x", "333333")]
            assert scores[:, at] == pytest.approx(expected)
            assert scores[:, 1 - at].tolist() == [1, 3, 6]
            assert [reward.name for reward in env.task.rewards][at] == "judge"
            assert judge_cost(env) == pytest.approx(3e-3)  # 100 tokens of each of 3 questions


@pytest.mark.parametrize("errors", ["stop", "set_aside"])
def test_nonsense_sets_a_group_aside_and_an_error_as_the_settings_say(errors, tokenizer):
    def answer(body, number):
        text = body["messages"][0]["content"]
        if "down" in text:
            return 400, b"no"
        return (200, says("who knows")) if "odd" in text else by_digits(body)

    with judging(answer) as server:
        env = gym(tokenizer, judge(server.url), reward_errors=errors, reward_failures=1.0)
        first, second = groups_of(env, ["1", "2"], prompts=2)
        odd = CompletionGroup(
            0, second.prompt, (*second.completions, *groups_of(env, ["odd"])[0].completions)
        )
        with pytest.warns(UserWarning, match="got 'who knows'.*its group is set aside"):
            rewards, aside, _ = env.judge([first, odd])
        assert aside == [False, True]
        assert np.isnan(rewards[:, 0]).tolist() == [False, False, True, True, True]
        down = groups_of(env, ["down"])
        if errors == "stop":
            with pytest.raises(RewardError, match="status 400"):
                env.judge(down)
        else:
            assert env.judge(down)[1] == [True]


def test_templates_need_their_columns_before_a_model_is_loaded(tokenizer):
    for reward in (
        judge("http://127.0.0.1:1/v1", prompt="{reference}{completion}<score>"),
        {"kind": "model", "name": "none", "text": "{reference}{completion}"},
    ):
        with pytest.raises(DataError, match="reference"):
            gym(tokenizer, reward)
    with pytest.raises(ConfigError, match="double"):
        gym(tokenizer, {"kind": "model", "name": "none", "text": "{completion}{"})


@pytest.mark.parametrize("chat", [False, True])
def test_a_reward_model_scores_what_its_templates_say(chat, tokenizer, monkeypatch):
    class Spy:
        max_tokens = 9

        def chat(self, messages):
            return "|".join(f"{m['role']}:{m['content']}" for m in messages)

        def encode(self, *texts, special_tokens=True):
            assert special_tokens == (not chat)
            self.texts, self.cut = texts, 1
            return self

        def scores(self, encoded, *, batch_size, probability):
            assert (batch_size, probability) == (5, True)
            return [float(len(text)) for text in encoded.texts[0]]

    monkeypatch.setattr(RewardModel, "prepare", lambda self, device: None)
    given = {"kind": "model", "name": "none", "batch_size": 5, "output": "probability"}
    if chat:
        contents = ["{question}", "{completion}"]
        given["conversation"] = [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), contents, strict=True)
        ]
    else:
        given["text_pair"] = "{answer}"
    env = gym(tokenizer, given)
    spy = env.task.rewards[0].fn._classifier = Spy()
    groups = groups_of(env, ["a", "bcd"])
    row = groups[0].prompt.columns
    with pytest.warns(UserWarning, match="1 of 2 texts are longer than the 9 tokens"):
        scores = env.score(groups)
    asked = groups[0].prompt.text
    texts = [asked + "a", asked + "bcd"]
    if chat:
        texts = [f"user:{row['question']}|assistant:{text}" for text in ("a", "bcd")]
    assert list(spy.texts[0]) == texts
    assert chat or list(spy.texts[1]) == [row["answer"]] * 2
    assert scores[:, 0].tolist() == [float(len(text)) for text in texts]


def config_of(url):
    return small(env__reward=[judge(url, input_price=10.0)], population__rounds=2)


@pytest.mark.slow
def test_a_run_that_was_stopped_pays_for_no_answer_twice_and_ends_as_it_would_have(tmp_path):
    with judging(by_digits) as server:
        stopped = stopped_and_resumed(config_of(server.url), tmp_path / "stopped", ("evaluate", 1))
        assert len(server.paid) == len(set(server.paid)) == server.requests
        paid = server.requests
        spent = read_summary(stopped)["judge"]
        straight = run(config_of(server.url), out=tmp_path / "straight")
    assert outcome(stopped) == outcome(straight)
    assert spent == {
        "answers": paid,
        "input_tokens": 100 * paid,
        "output_tokens": 10 * paid,
        "cost": pytest.approx(paid * 1e-3),
    }
    (sentence,) = [one.text for one in view_of(stopped).story if one.kind == "judge"]
    assert sentence.startswith(f"The judge gave {paid} answers, of {110 * paid:,} tokens, which")
    clear_run(stopped)
    assert not (stopped / "judge").exists()


def test_settings_survive_the_run_folder_and_name_what_is_wrong():
    given = [judge("http://h:1/v1"), "my:function", {"kind": "model", "name": "a/b"}]
    config = small(env__reward=given, env__reward_weights=[1.0, 2.0, 3.0])
    assert from_written(to_yaml(config), "x") == config
    data = json.loads(json.dumps({"model": "tiny-sums", "env": {"kind": "sums"}}))
    for reward, expected in (
        (judge("https://user:secret@h/v1"), r"url: expected a URL without user, password"),
        (judge("ftp://h"), r"url: expected https://HOST/v1"),
        (judge("http://h/v1", prompt="{completion}"), r"prompt: expected it to ask for <score>"),
        (judge("http://h/v1", prompt="<score>"), r"prompt: expected {completion} in it"),
        (judge("http://h/v1", range=[3, 3]), r"range: expected two numbers"),
        (judge("http://h/v1", answers={"Yes": 1.0, "yes": 0.0}), r"differ in more than case"),
        (judge("http://h/v1", timeuot=3), r"timeuot: unknown key; did you mean 'timeout'"),
        ({"kind": "modle", "name": "x"}, r"kind: .*did you mean 'model'"),
        (["my:f", {"name": "x"}], r"env.reward\[1\].kind: expected one of"),
        ({"kind": "model", "name": "x", "text": "{question}"}, r"text: expected {completion}"),
    ):
        with pytest.raises(ConfigError, match=expected) as caught:
            from_dict(data, [f"env.reward={json.dumps(reward)}"])
        assert "secret" not in str(caught.value)
