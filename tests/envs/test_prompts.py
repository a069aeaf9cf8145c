import logging

import pytest

from evo_grpo.envs.prompts import Template
from evo_grpo.errors import ConfigError, DataError

ROW = {"question": "1+1=", "two words": "x", "n": 7}


def test_a_raw_template_is_filled_and_encoded(tokenizer):
    text, ids = Template.of("Q: {question}\nA:").render(ROW, tokenizer)
    assert text == "Q: 1+1=\nA:"
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text)


def test_columns_may_have_spaces_formats_and_values_may_have_braces():
    template = Template.of("{two words} {n:03d} \\boxed{{}} {question}")
    assert template.plain({**ROW, "question": "{x}"}) == "x 007 \\boxed{} {x}"
    assert set(template.columns()) == {"two words", "n", "question"}
    template = Template.of("{question:>1000}|{n:,}|{question!r}")
    assert template.plain(ROW) == f"{'1+1=':>1000}|7|'1+1='"


@pytest.mark.parametrize(
    "conversation",
    [
        [{"role": "user", "content": "Q: {question}"}],
        [
            {"role": "user", "content": "2+2="},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "{question}"},
        ],
    ],
)
def test_a_conversation_is_what_the_tokenizer_itself_makes_of_it(tokenizer, conversation):
    text, ids = Template.of(conversation).render(ROW, tokenizer)
    messages = [{**m, "content": m["content"].format(**ROW)} for m in conversation]
    own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(ids) == own
    assert text.endswith("[user]" + messages[-1]["content"] + "[assistant]")


def test_a_chat_template_writes_its_own_special_tokens(make_tokenizer):
    closing = make_tokenizer(closing="<bos> $A <eos>")
    _, ids = Template.of([{"role": "user", "content": "{question}"}]).render(ROW, closing)
    assert closing.bos_token_id not in ids
    assert closing.eos_token_id not in ids


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a {} b", "expected a column's name in braces, got {}; .* doubled"),
        ("a {0} b", "expected a column's name in braces, got {0}"),
        ("{question.upper}", "expected a column's name in braces"),
        ("{question", "a brace that is no column is doubled"),
        ([], "expected a raw string or a list of messages"),
        (7, "expected a raw string or a list of messages .* got 7"),
        (None, "got None"),
        ([{"role": "user"}], "message 0: expected the keys role and content, got"),
        (["hello"], "message 0: expected the keys role and content"),
        ([{"role": "user", "content": 3}], "message 0: expected strings as role and content"),
        ("{q:>9999999999}", "expected a width of at most 1,000 characters, got '>99"),
        # The digits of other scripts are digits to Python's format too.
        ("{q:>\uff19\uff19\uff19\uff19}", "expected a width of at most 1,000 characters"),
        ("{q:{q.__class__}}", "expected a plain format such as {answer:03d}"),
        ("{q!x}", "expected !r, !s or !a, got !x"),
        ("{q:" + "9" * 5000 + "}", "expected a width of at most 1,000 characters"),
        ("{q[0]}", "expected a column's name in braces"),
    ],
)
def test_a_malformed_template_is_named_and_none_fills_the_memory(template, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Template.of(template)
    assert len(str(caught.value)) < 600


def test_a_tokenizer_without_a_chat_template_is_named(make_tokenizer):
    template = Template.of([{"role": "user", "content": "{question}"}])
    with pytest.raises(ConfigError, match=r"no chat template.*raw template instead"):
        template.render(ROW, make_tokenizer(chat_template=None))


def test_a_conversation_the_chat_template_refuses_is_named(tokenizer):
    template = Template.of(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{question}"}]
    )
    with pytest.raises(
        ConfigError, match="refuses messages with the roles system, user: no system"
    ):
        template.render(ROW, tokenizer)


@pytest.mark.parametrize(
    ("template", "value"),
    [("{q:c}", 10**9), ("{q:d}", None), ("{q:\0}", 1), ("{q:03d}", "1+1=")],
    ids=range(4),
)
def test_a_value_that_its_format_refuses_is_named(template, value):
    with pytest.raises(DataError, match="cannot be filled"):
        Template.of(template).plain({"q": value})


def test_a_long_prompt_is_encoded_without_a_word(make_tokenizer, caplog, monkeypatch):
    """transformers would warn of its length, just before the environment names the row."""
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 4
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    for template in ("{q}", [{"role": "user", "content": "{q}"}]):
        _, ids = Template.of(template).render({"q": "1" * 40}, tokenizer)
        assert len(ids) >= 40
    assert caplog.text == ""
