"""A character tokenizer with a chat template whose text shows every role, and rows to ask with."""

import importlib
import os
import sys
from pathlib import Path

import doubles
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

pytest.register_assert_rewrite("env_contract")

#: Set by `make test-outside`: the folder that real packages must come from. Without it one that is
#: missing is skipped. Absolute, since tests change the current directory.
OUTSIDE = "EVO_GRPO_OUTSIDE" in os.environ and Path(os.environ["EVO_GRPO_OUTSIDE"]).resolve()

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


@pytest.fixture(scope="session")
def chat_tokenizer():
    """With a chat template that takes a system message."""
    refused = "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    return build(CHAT_TEMPLATE.replace(refused, ""))


@pytest.fixture
def rows():
    return [{"question": f"{n}+1=", "answer": str(n + 1), "level": n % 3} for n in range(40)]


@pytest.fixture
def install(request, monkeypatch):
    """`install("gem", "real" or "double")`: a package, or what stands in for the calls to it."""

    def installed(name, which):
        if which == "real" and OUTSIDE:
            assert Path(importlib.import_module(name).__file__).is_relative_to(OUTSIDE)
            return
        if which == "real":
            reason = f"{name} is not installed here; its double is tested instead"
            pytest.importorskip(name, reason=reason)
            return
        for known in [key for key in sys.modules if key.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, known)
        for key, made in getattr(doubles, name)().items():
            monkeypatch.setitem(sys.modules, key, made)

    return installed


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Write a module into the current directory, which `module:function` finds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def written(name, text):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(text)

    return written
