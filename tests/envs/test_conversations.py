"""Rows whose column holds messages: what the model is asked, and what is refused by its row."""

import copy
import json

import pytest

import evo_grpo
from evo_grpo.envs.asking import asking
from evo_grpo.envs.registry import build_task
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import ConfigError, DataError
from evo_grpo.settings import EnvConfig
from evo_grpo.types import Completion, CompletionGroup

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}{{ m['name'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if brief %}!{% endif %}{% endif %}"
)
TURNS = [
    ("system", "Add."),
    ("user", "1 + {1}?"),  # braces are text here
    ("assistant", "2"),
    ("user", "2 + 2?"),
    ("assistant", "4"),
    ("user", "3 + 3?"),
]


def conversation(turns, number=0):
    """The last messages of a dialogue, of which the last one is the user's."""
    made = [{"role": role, "content": content} for role, content in TURNS[-turns:]]
    made[-1]["content"] += f" ({number})"
    return made


ROWS = [{"prompt": conversation(2 + n % 5, n), "answer": str(n)} for n in range(20)]


@pytest.fixture
def tokenizer(make_tokenizer):
    return make_tokenizer(chat_template=CHAT)


def score(completion, answer):
    return float(completion == answer)


def made_of(env, tokenizer, **more):
    return ReasoningGym.from_task(
        build_task(EnvConfig(kind="dataset", train=env, reward=score, **more), 0), tokenizer
    )


def reference(tokenizer, messages, **more):
    more = {"add_generation_prompt": True} | more
    return tuple(tokenizer.apply_chat_template(messages, return_dict=False, **more))


def written(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def as_dataset(folder, rows):
    return pytest.importorskip("datasets").Dataset.from_list(rows)


def as_frame(folder, rows):
    return pytest.importorskip("pandas").DataFrame(rows)


def as_parquet(folder, rows):
    as_frame(folder, rows).to_parquet(folder / "rows.parquet")
    return str(folder / "rows.parquet")


def as_csv(folder, rows):
    path = folder / "rows.csv"
    texts = [{**row, "prompt": json.dumps(row["prompt"])} for row in rows]
    as_frame(folder, texts).to_csv(path)
    return str(path)


FORMS = (written, lambda _, rows: rows, as_dataset, as_frame, as_parquet, as_csv)


@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_is_asked_token_for_token_as_its_chat_template_writes_it(
    form, tokenizer, tmp_path
):
    expected = {reference(tokenizer, row["prompt"]) for row in ROWS}
    given = form(tmp_path, copy.deepcopy(ROWS))
    for env in (
        made_of(given, tokenizer),
        ReasoningGym.from_task(evo_grpo.DatasetEnv(given, score).task(0), tokenizer),
        ReasoningGym(given, given, tokenizer, score, validation_dataset=given),
    ):
        asked = [p.token_ids for s in ("train", "validation", "test") for p in env.prompts(s)]
        assert set(asked) == expected


def test_messages_are_parted_into_question_and_target(tokenizer):
    rows = [
        {"messages": [*conversation(3, n), {"role": "assistant", "content": str(n)}]}
        for n in range(20)
    ]
    seen = []

    def right(completion, prompt, messages, target):
        seen.append((prompt, messages[-1]["role"]))
        return float(completion == target)

    env = ReasoningGym(rows, rows, tokenizer, right)
    for prompt in env.prompts("test"):
        asked = prompt.columns["messages"][:-1]
        assert prompt.token_ids == reference(tokenizer, asked)
        answers = [Completion((1,), one, (0.0,), True) for one in (prompt.columns["target"], "x")]
        assert env.score([CompletionGroup(0, prompt, answers)]).tolist() == [[1.0], [0.0]]
        assert seen[-1] == (prompt.text, "assistant")  # the column is the person's


def test_parts_of_text_are_joined_and_other_keys_reach_the_template(tokenizer):
    parts = [{"type": "text", "text": "Say "}, "it", {"type": "text", "text": "!", "image": None}]
    message = {"role": "user", "content": parts, "name": "Ann", "tool_calls": None}
    rows = [{"prompt": [message, {**message, "name": None}]}] * 3
    env = ReasoningGym(rows, [{"prompt": "Say it!"}], tokenizer, len_of)
    assert env.prompts("train")[0].text == "<userAnn>Say it!<user>Say it!<assistant>"
    assert env.prompts("test")[0].text == "<user>Say it!<assistant>"


def len_of(completion):
    return float(len(completion))


def test_a_system_prompt_examples_and_keywords_surround_a_conversation(tokenizer):
    rows = [{"prompt": conversation(5, n), "answer": str(n)} for n in range(20)]
    example = {"prompt": conversation(6, 99), "answer": "99"}
    shots = {"rows": [example], "answer": "{answer}"}
    solved = [*example["prompt"][1:], {"role": "assistant", "content": "99"}]
    system = {"role": "system", "content": "Add."}
    env = made_of(
        rows, tokenizer, system_prompt="Add.", few_shot=shots, chat_template_kwargs={"brief": True}
    )
    for prompt in env.prompts("train"):
        asked = [system, *solved, *prompt.columns["prompt"]]
        assert prompt.token_ids == reference(tokenizer, asked, brief=True)
    # The system message of a row comes before the examples.
    own = [{"prompt": [system, *row["prompt"]], "answer": row["answer"]} for row in rows]
    for prompt in made_of(own, tokenizer, few_shot=shots).prompts("train"):
        question = prompt.columns["prompt"][1:]
        assert prompt.token_ids == reference(tokenizer, [system, *solved, *question])
    taken = made_of(own, tokenizer, few_shot={"rows": 2, "answer": "{answer}"})
    assert taken.prompts("train")[0].text.count("<system>") == 1


def test_a_last_message_of_the_assistant_in_a_prompt_is_continued(tokenizer):
    begun = [*conversation(3), {"role": "assistant", "content": "It is"}]
    env = ReasoningGym([{"prompt": begun}] * 3, [{"prompt": begun}], tokenizer, len_of)
    expected = {"add_generation_prompt": False, "continue_final_message": True}
    assert env.prompts("test")[0].token_ids == reference(tokenizer, begun, **expected)


def test_a_column_of_another_name_is_named_by_the_role_messages(tokenizer):
    rows = [{"chat": conversation(4, n)} for n in range(20)]
    template = [{"role": "messages", "content": "{chat}"}]
    env = ReasoningGym(rows, rows, tokenizer, len_of, template)
    assert env.prompts("test")[0].token_ids in {reference(tokenizer, r["chat"]) for r in rows}
    with pytest.raises(ConfigError, match=r"expected a column alone, such as \{messages\}"):
        ReasoningGym(rows, rows, tokenizer, len_of, [{"role": "messages", "content": "Q {chat}"}])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"expected text, or messages such as .*, got '\[\]'"),
        (["Hi"], "message 0: expected the keys role and content, "),
        ([{"from": "human", "value": "Hi"}], "message 0: expected the keys role and content"),
        ([{"role": "human", "content": "Hi"}], "one of system.* as role, got .*'human'"),
        ([{"role": "user", "content": None}], "message 0: expected content to be text, or parts"),
        (
            [{"role": "user", "content": [{"type": "image", "text": "a"}]}],
            "parts of .*image",
        ),
        ("[{'name': 'Ann', 'role': 'user', 'content': 'Hi'}]", "also as JSON, got"),
        ({"role": "user", "content": "Hi"}, "expected text, or messages"),
        (7, "expected text, or messages"),
    ],
)
def test_what_is_no_conversation_is_refused_by_its_row(tmp_path, prompt, message):
    given = written(tmp_path, [*ROWS, {"prompt": prompt, "answer": "1"}])
    with pytest.raises(DataError, match=rf"^train \(.*rows.jsonl\), line 21: .*{message}"):
        evo_grpo.DatasetEnv(given, score)


@pytest.mark.parametrize("prompt", ["{question}", [{"role": "user", "content": "{question}"}]])
@pytest.mark.parametrize("value", [["1", "2"], conversation(2), conversation(2)[0]])
def test_a_list_where_text_was_meant_is_refused_by_its_row(tokenizer, prompt, value):
    rows = [{"question": "1"}, {"question": value}]
    with pytest.raises(DataError, match=r'^train, row 1: .*"question" is a (list|mapping) where'):
        ReasoningGym(rows, rows, tokenizer, len_of, prompt)
    with pytest.raises(DataError, match=r'^train, row 0: .*"question" is a list where text'):
        ReasoningGym([{"question": conversation(2)}], rows, tokenizer, len_of, "Q: {question}")
    # Numbers within a text, and what a conversion prints, are meant.
    rows = [{"question": [1, 2]}]
    for text in ("Add {question}.", "{question!r}"):
        env = ReasoningGym(rows, rows, tokenizer, len_of, text)
        assert "[1, 2]" in env.prompts("test")[0].text


def test_two_system_messages_are_refused_by_their_row(tokenizer):
    with pytest.raises(DataError, match=r"^train, row 4: .*and so has the template of the prompt"):
        made_of(ROWS, tokenizer, system_prompt="Add.")


def test_a_prompt_after_training_is_asked_as_a_conversation(tmp_path, tokenizer):
    how = asking(EnvConfig(kind="dataset", train=written(tmp_path, ROWS), reward=["a:b"]), 0)
    assert how.columns == ["prompt"]
    text, _ = how.template.render({"prompt": "2 + 2?"}, tokenizer)
    assert text == "<user>2 + 2?<assistant>"
    text, _ = how.template.render({"prompt": json.dumps(conversation(2))}, tokenizer)
    assert text == "<assistant>4<user>3 + 3? (0)<assistant>"
