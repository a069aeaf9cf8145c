"""Reward functions that were written for TRL run as TRL calls them."""

import math
from dataclasses import replace

import pytest
from small_run import small

from evo_grpo import DatasetEnv, run
from evo_grpo.envs.describing import environment_parts
from evo_grpo.envs.loading import as_rewards
from evo_grpo.envs.rewards.functions import RewardFunction
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import ConfigError
from evo_grpo.population.rollouts import starts_from
from evo_grpo.record.history import metric_rows
from evo_grpo.types import Completion, CompletionGroup

ROWS = [{"question": f"{n}+1=", "answer": str(n + 1), "level": n % 3} for n in range(12)]
CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "{question}"}]


def of_trl(prompts, completions, completion_ids, answer, log_metric, trainer_state, **kwargs):
    """As in TRL's pages: conversations, every column, and a metric of its own."""
    log_metric("right", sum(c[0]["content"] == a for c, a in zip(completions, answer, strict=True)))
    assert set(kwargs) == {"question", "level", "log_extra"}
    return [
        float(len(ids) + len(prompt) + trainer_state.global_step)
        for ids, prompt in zip(completion_ids, prompts, strict=True)
    ]


def lengths(completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]


class ByInstance:
    """TRL's own rewards are objects with a name."""

    __name__ = "by_instance"

    def __call__(self, completions, **kwargs):
        return [len(completion[0]["content"]) for completion in completions]


@pytest.fixture
def make(chat_tokenizer):
    def made(*functions, template=CHAT, **changes):
        given = {"reward_style": "trl", "batch_size": 2, **changes}
        return ReasoningGym(ROWS[:8], ROWS[8:], chat_tokenizer, list(functions), template, **given)

    return made


def answered(env, *texts, agent=0, step=0):
    (prompt, _) = env.batch(step)
    completions = [Completion((5,) * (n + 1), text, None, True) for n, text in enumerate(texts)]
    return CompletionGroup(agent, prompt, tuple(completions))


def test_a_function_of_trl_gets_what_trl_passes(make):
    env = make(of_trl, lengths, ByInstance())
    group = answered(env, "3", "12", step=1)
    # Two messages, and the second step of two prompts each.
    assert env.score([group]).tolist() == [[1 + 2 + 1, 1, 1], [2 + 2 + 1, 2, 2]]
    assert env.reward_names == ("of_trl", "lengths", "by_instance")


def test_prompts_of_a_raw_template_are_texts(make):
    seen = {}

    def reward(prompts, completions, **kwargs):
        seen.update(prompts=prompts, completions=completions)
        return [0.0] * len(completions)

    env = make(reward, template="{question}")
    group = answered(env, "a", "b")
    env.score([group])
    assert seen == {"prompts": [group.prompt.text] * 2, "completions": ["a", "b"]}


def test_the_messages_are_those_of_the_agents_own_prompt(make):
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(prompts)
        return [0.0] * len(completions)

    named = {"a": {"system_prompt": "Be short."}, "b": {"system_prompt": "Think."}}
    env = make(reward, template=CHAT[1:], prompts=named)
    (first, _) = env.under("b", env.batch(0))
    env.score([CompletionGroup(0, first, (Completion((1,), "x", None, True),))])
    question = {"role": "user", "content": first.columns["question"]}
    assert seen == [[{"role": "system", "content": "Think."}, question]]


def test_the_step_is_that_of_the_prompts_before_those_of_a_call(make):
    """However batches are cut, and 0 in an evaluation, which is the same measure in every round."""
    steps = []

    def reward(completions, trainer_state, **kwargs):
        steps.append(trainer_state.global_step)
        return [0.0] * len(completions)

    env = make(reward)
    taken = starts_from(env, 6, 3)
    env.batch(9)  # another part of the population is further on
    done = (Completion((1,), "x", None, True),)
    for prompts in (taken, env.prompts("validation"), env.batch(1, 4)):
        env.score([CompletionGroup(0, prompt, done) for prompt in prompts])
    assert steps == [3, 0, 2]


def test_a_function_with_a_weight_of_its_own_is_called_in_the_style_too(make):
    env = make(RewardFunction("by_instance", ByInstance(), 2.0))
    assert env.score([answered(env, "four")]).tolist() == [[4.0]]
    with pytest.raises(ConfigError, match=r"parameters that TRL passes, .* got prompt; leave"):
        make(lambda completions, prompt: [0.0] * len(completions))


def test_a_reward_model_beside_a_function_of_trl_is_called_as_ever():
    rewards = as_rewards([lengths, {"kind": "model", "name": "none"}], style="trl")
    assert [reward.style for reward in rewards] == ["trl", None]


def test_the_style_is_part_of_what_a_run_was_begun_with():
    kinds = [DatasetEnv(ROWS, lengths_of, reward_style=style) for style in (None, "trl")]
    plain, trl = (environment_parts(one, 0) for one in kinds)
    assert trl == {**plain, "env.reward_style": "trl"}


def lengths_of(completions, **kwargs):
    return [len(completion) for completion in completions]


def test_each_agent_has_a_call_and_metrics_of_its_own(make):
    calls = []

    def reward(completions, log_metric, **kwargs):
        calls.append(len(completions))
        log_metric("size", len(completions))
        log_metric("size", 0)
        log_metric("lost", math.nan)
        return [1.0] * len(completions)

    env = make(reward)
    starts = env.batch(0)
    play = env.begin([starts, starts[:1]], [2, 3])
    done = Completion((1,), "x", None, True)
    play.tell(
        [
            [CompletionGroup(agent, prompt, (done,) * size) for prompt in own]
            for agent, own, size in ((0, starts, 2), (1, starts[:1], 3))
        ]
    )
    first, second = play.experiences()
    assert calls == [4, 3]
    assert (first.metrics["logged/size"], second.metrics["logged/size"]) == (2.0, 1.5)
    assert "logged/lost" not in first.metrics


def test_without_the_style_the_error_names_it():
    def reward(prompts, completion_ids):
        return []

    with pytest.raises(ConfigError, match=r"so does env\.reward_style: trl"):
        RewardFunction("reward", reward)


def test_a_run_learns_from_it_in_its_own_process_and_records_what_it_logs(tmp_path, monkeypatch):
    (tmp_path / "trl_reward_of_a_person.py").write_text(
        "def reward(completions, answer, log_metric, trainer_state, **kwargs):\n"
        "    log_metric('step', trainer_state.global_step)\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = small(
        env={"kind": "sums", "reward": "trl_reward_of_a_person:reward", "reward_style": "trl"}
    )
    config = config.replace(env=config.env.replace(isolate="process"))
    folder = run(config, out=tmp_path / "run")
    steps = [row for row in metric_rows(folder) if row["agent"] == 0]
    assert [row["logged/step"] for row in steps] == [*range(len(steps))]
    plain = run(small(env="sums"), out=tmp_path / "plain")
    rewards = [[row["reward"] for row in metric_rows(one)] for one in (folder, plain)]
    assert rewards[0] == rewards[1]


def test_answers_without_tokens_are_scored_too(make):
    """As `try --answer` and a batch that was built by hand have them."""
    env = make(lengths)
    group = answered(env, "12")
    bare = replace(group, completions=(replace(group.completions[0], token_ids=()),))
    assert env.score([bare]).tolist() == [[0.0]]
