"""What surrounds a question: system prompt, examples, template keywords; and thinking tags."""

import warnings

import numpy as np
import pytest

from evo_grpo import DatasetEnv
from evo_grpo.envs.asking import asking
from evo_grpo.envs.describing import environment_parts
from evo_grpo.envs.prompts import Template
from evo_grpo.envs.registry import build_multi_turn, build_task
from evo_grpo.envs.resolve import environment_of
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.settings import EnvConfig
from evo_grpo.types import Completion, CompletionGroup

ROWS = [{"question": f"{n}+1={{}}", "answer": str(n + 1)} for n in range(20)]
#: As Qwen3's: a keyword that is set to its default where it is missing, and transformers' own tag.
THINKS = (
    "{% set enable_thinking = enable_thinking if enable_thinking is defined else true %}"
    "{% for m in messages %}[{{ m.role }}]{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
CHAT = {"conversation": [{"role": "user", "content": "{question}"}]}


def exact(completion, answer):
    return float(completion == answer)


def settings(**changes):
    return EnvConfig(**{"kind": "dataset", "train": ROWS, "reward": exact, **changes})


def test_examples_are_rows_that_are_asked_no_more_and_their_text_is_that_of_a_prompt():
    shots = {"rows": 2, "answer": "{answer}"}
    task = build_task(settings(prompt="Q: {question}\nA: ", few_shot=shots), 0)
    first, second, asked = task.template.plain(ROWS[3]).split("\n\n")
    assert asked == "Q: 3+1={}\nA: "
    examples = [
        row for row in ROWS if f"Q: {row['question']}\nA: {row['answer']}" in (first, second)
    ]
    left = [row for split in task.splits.values() for row in split]
    assert len(examples) == 2
    assert sorted(left + examples, key=ROWS.index) == ROWS
    # Examples of a conversation are turns, after the system prompt and before the question.
    chat = settings(**CHAT, few_shot=shots, system_prompt="Add {question}")
    made = build_task(chat, 0).template
    roles = [message["role"] for message in made.conversation]
    assert roles == ["system", *("user", "assistant") * 2, "user"]
    assert made.conversation[1]["content"].format() == examples[0]["question"]
    assert asking(chat, 0).template == made
    assert (
        asking(settings(**CHAT, few_shot={**shots, "rows": ROWS[:1]}), 0).template.plain(ROWS[3])
        == "0+1={}\n1\n3+1={}"
    )


def test_an_assistants_beginning_begins_the_answer_of_each_example_too(tokenizer):
    conversation = [*CHAT["conversation"], {"role": "assistant", "content": "It is "}]
    given = {"conversation": conversation, "few_shot": {"rows": ROWS[:1], "answer": "{answer}."}}
    text, _ = build_task(settings(**given), 0).template.render(ROWS[3], tokenizer)
    assert text == "[user]0+1={}[assistant]It is 1.[user]3+1={}[assistant]It is "


def test_the_prompts_by_name_are_part_of_what_a_run_was_begun_with():
    prompts = {"a": {"prompt": "{question}"}, "b": {"prompt": "Q {question}"}}
    parts = environment_parts(DatasetEnv(ROWS, exact, prompt="{question}", prompts=prompts), 0)
    assert parts["env.prompts"] == '{"a": "{question}", "b": "Q {question}"}'


def test_keywords_reach_the_chat_template_of_rows_and_episodes(make_tokenizer, write_module):
    tokenizer = make_tokenizer(chat_template=THINKS)
    for keywords, end in (({}, "[assistant]"), ({"enable_thinking": False}, "<think></think>")):
        config = settings(**CHAT, chat_template_kwargs=keywords)
        env = environment_of(config, 0, 4, 8)(tokenizer)
        assert env.batch(0)[0].text.endswith(end)
    write_module(
        "game",
        "class Game:\n    def reset(self, seed=None): return 'hello', {}\n"
        "    def step(self, action): return 'more', 0.0, False, False, {}\n",
    )
    config = EnvConfig(
        kind="python:game:Game",
        system_prompt="Play.",
        chat_template_kwargs={"enable_thinking": False},
    )
    episode = environment_of(config, 0, 1, 4)(tokenizer)._idle[0]
    episode.reset(seed=0)
    text = tokenizer.decode(episode.token_ids)
    assert text == "[system]Play.[user]hello[assistant]<think></think>"
    assert build_multi_turn(config, 0)().reset(seed=0)[0] == "hello"


def test_keywords_that_the_template_ignores_are_said_once(make_tokenizer):
    config = settings(**CHAT, chat_template_kwargs={"enable_thinking": False, "thinking": 1})
    with pytest.warns(UserWarning, match="chat template does not read thinking, so that") as said:
        environment_of(config, 0, 4, 8)(make_tokenizer(chat_template=THINKS))
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = settings(**CHAT, chat_template_kwargs={"enable_thinking": False})
        environment_of(config, 0, 4, 8)(make_tokenizer(chat_template=THINKS))


@pytest.mark.parametrize(
    ("completion", "prompt", "thought", "answer"),
    [
        ("<think>\n1+1\n</think>\n\n2\n", "?", "1+1", "2"),
        ("1+1</think>2", "?<think>\n", "1+1", "2"),  # the template has written the start tag
        ("<think>1+1</think>2</think>3", "?", "1+1", "2</think>3"),
        ("<think>1+1", "?", "1+1", ""),  # cut while it thought
        ("1+1", "?<think>\n", "1+1", ""),
        ("2", "?", "", "2"),
    ],
)
def test_a_reward_gets_the_answer_and_what_was_thought_apart(
    tokenizer, completion, prompt, thought, answer
):
    seen = []

    def per_row(completion, thinking):
        seen.append((completion, thinking))
        return 1.0

    def per_batch(completions, thinking):
        seen.append((*completions, *thinking))
        return [0.0 for _ in completions]

    rows = [{"question": prompt}]
    env = ReasoningGym(rows, rows, tokenizer, [per_row, per_batch], "{question}", thinking={})
    group = CompletionGroup(0, env.row("train", 0), (Completion((1,), completion, (0.0,), True),))
    assert np.array_equal(env.score([group]), [[1.0, 0.0]])
    assert seen == [(answer, thought)] * 2


def test_a_tag_that_decoding_drops_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"env.thinking.end: .* got '<eos>', a special token"):
        ReasoningGym(ROWS, ROWS, tokenizer, exact, "{question}", thinking={"end": "<eos>"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "{question}", "system_prompt": "x"}, "env.system_prompt: expected messages"),
        (
            {"prompt": "{question}", "chat_template_kwargs": {"a": 1}},
            "env.chat_template_kwargs: expected messages for the chat template, got the raw text",
        ),
        (
            {"conversation": [{"role": "system", "content": "{question}"}], "system_prompt": "x"},
            "without a system message, got both",
        ),
        ({"few_shot": {"rows": 16, "answer": "{answer}"}}, "fewer than the 16 different prompts"),
        ({"few_shot": {"rows": 2, "answer": "{answr}"}}, 'no column "answr", which env.few_shot'),
        (
            {"few_shot": {"rows": [{"question": "a"}], "answer": "{answer}"}},
            'env.few_shot.rows, row 0: no column "answer"',
        ),
        (
            {"system_prompt": "{nope}"},
            r'train, row \d+: no column "nope", which the prompt template',
        ),
        (
            {"train": [*ROWS, {"question": None, "answer": "1"}]},
            'train, row 20: the column "question" is None, which .* would print as "None"',
        ),
        (
            {"train": [*ROWS, {"question": "x", "anwser": "1"}]},
            "train, row 20: no column \"answer\", which the reward function 'exact' needs. "
            'Did you mean "anwser"',
        ),
    ],
)
def test_what_does_not_fit_the_rows_or_the_prompt_is_named(changes, message):
    with pytest.raises((ConfigError, DataError), match=message):
        build_task(settings(**changes), 0)


@pytest.mark.parametrize("closing", ["", "<bos> $A", "$A <eos>", "<bos> $A <eos>"])
def test_an_end_token_in_a_raw_prompt_is_kept_and_one_that_the_tokenizer_appends_is_not(
    make_tokenizer, closing
):
    tokenizer = make_tokenizer(closing=closing)
    for text in ("1+1=", "1+1=<eos>", "<eos>"):
        _, ids = Template.of("{q}").render({"q": text}, tokenizer)
        plain = tokenizer.encode(text, add_special_tokens=False)
        front = [tokenizer.bos_token_id] if "<bos>" in closing else []
        assert list(ids) == front + plain
