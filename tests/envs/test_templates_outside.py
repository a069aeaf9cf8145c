"""Prompts by the chat templates of the most used models, which TRL's package has.

Each is the text of transformers' `apply_chat_template`, in a run and in `check`, or is refused
where it raises.
"""

import importlib.util
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evo_grpo.envs.conversations import MESSAGES
from evo_grpo.envs.prompts import Template
from evo_grpo.errors import ConfigError
from evo_grpo.sources import embedded_models
from evo_grpo.training.sizing.prompt_lengths import FileTokenizer

if importlib.util.find_spec("trl") is None:
    if os.environ.get("EVO_GRPO_OUTSIDE"):
        raise ImportError("expected trl, which make test-outside installs")
    pytest.skip("trl is not installed here: make test-outside", allow_module_level=True)

FOLDER = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
if len(NAMES) < 50:
    raise ImportError(f"expected trl's chat templates in {FOLDER}, got {len(NAMES)}")
SYSTEM, ASKED = {"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "2+2? "}
SAID = {"role": "assistant", "content": "<think>\nadd\n</think>\n\nIt is 4."}
CONVERSATIONS = {
    "user": [ASKED],
    "system": [SYSTEM, ASKED],
    "turns": [ASKED, SAID, {"role": "user", "content": "And {3}+3?"}],
    "system and turns": [SYSTEM, ASKED, SAID, ASKED],
    "begun": [ASKED, {"role": "assistant", "content": "It is"}],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
KEYWORDS = ({}, {"enable_thinking": False}, {"enable_thinking": True}, {"tools": [TOOL]})


@pytest.fixture(scope="module")
def bytewise():
    """A tokenizer of single bytes, which loses no character."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_those_of_apply_chat_template(name, bytewise, tmp_path):
    bytewise.chat_template = (FOLDER / f"{name}.jinja").read_text()
    bytewise.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(
        (embedded_models()["tiny-sums"] / "config.json").read_bytes()
    )
    made = 0
    for asked, messages in CONVERSATIONS.items():
        for keywords in KEYWORDS:
            begun = asked == "begun"
            try:
                expected = bytewise.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=not begun,
                    continue_final_message=begun,
                    **keywords,
                )
            except Exception:  # templates raise what they like
                expected = None
            template = Template(None, ({"role": MESSAGES, "content": "{chat}"},), keywords)
            for tokenizer in (bytewise, FileTokenizer(str(tmp_path))):
                if expected is None:
                    with pytest.raises(ConfigError):
                        template.render({"chat": messages}, tokenizer)
                    continue
                text, ids = template.render({"chat": messages}, tokenizer)
                assert text == expected, (asked, keywords)
                assert list(ids) == bytewise(expected, add_special_tokens=False)["input_ids"]
                made += 1
    assert made > 4
