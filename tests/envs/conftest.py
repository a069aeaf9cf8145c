"""A character tokenizer with a chat template whose text shows every role, and rows to ask with."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def build(chat_template=CHAT_TEMPLATE, closing=""):
    characters = ["<pad>", "<eos>", "<bos>", "\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: index for index, token in enumerate(characters)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    if closing:
        backend.post_processor = processors.TemplateProcessing(
            single=closing, special_tokens=[("<bos>", 2), ("<eos>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        chat_template=chat_template,
    )


@pytest.fixture(scope="session")
def make_tokenizer():
    return build


@pytest.fixture(scope="session")
def tokenizer():
    return build()


@pytest.fixture
def rows():
    return [{"question": f"{n}+1=", "answer": str(n + 1), "level": n % 3} for n in range(40)]
