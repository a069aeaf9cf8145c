"""The embedded models load offline without a warning and leave GRPO something to learn."""

import math
import string
import warnings
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

ASSETS = Path(str(files("evo_grpo") / "assets"))
NAMES = ("tiny-sums", "tiny-foods")
SAMPLES = 400
LARGEST_BYTES = 8_000_000

Embedded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module", params=NAMES)
def embedded(request: pytest.FixtureRequest) -> Embedded:
    """Load one embedded model; a warning on the way is an error."""
    return _load(request.param)


def _load(name: str) -> Embedded:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(ASSETS / name, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(ASSETS / name, local_files_only=True)
    return model.eval(), tokenizer


@torch.no_grad()
def _sample(embedded: Embedded, prompts: list[str], max_new_tokens: int) -> list[str]:
    """Draw at temperature 1 from the whole vocabulary, up to and including <eos>.

    Written out because ``generate`` draws from the global generator.
    """
    model, tokenizer = embedded
    generator = torch.Generator().manual_seed(0)
    ids = tokenizer(prompts, return_tensors="pt", add_special_tokens=False)["input_ids"]
    prompt_tokens = ids.shape[1]
    for _ in range(max_new_tokens):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, drawn], dim=1)
    texts = tokenizer.batch_decode(ids[:, prompt_tokens:])
    return [before + eos for before, eos, _ in (text.partition("<eos>") for text in texts)]


def _assert_within(hits: list[bool], lowest: float, highest: float) -> None:
    share = sum(hits) / len(hits)
    slack = 2 * math.sqrt(share * (1 - share) / len(hits))
    assert lowest - slack <= share <= highest + slack


def test_both_together_stay_small_enough_for_a_wheel() -> None:
    sizes = [path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()]
    assert sizes
    assert sum(sizes) < LARGEST_BYTES


def test_every_printable_character_is_one_token_and_comes_back(embedded: Embedded) -> None:
    _, tokenizer = embedded
    text = "".join(chr(code) for code in range(32, 127)) + "\n\t" + "  two  spaces , and ' s . \n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_character_outside_ascii_is_one_unknown_token(embedded: Embedded) -> None:
    _, tokenizer = embedded
    assert tokenizer("aé")["input_ids"][1:] == [tokenizer.unk_token_id]


def test_special_ids_differ_and_agree_with_the_model(embedded: Embedded) -> None:
    model, tokenizer = embedded
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
    assert (*ids, tokenizer.unk_token_id) == (0, 1, 2, 3)
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == ids
    assert model.config.vocab_size == len(tokenizer)
    assert len(tokenizer) % 8 == 0


@pytest.mark.parametrize("content", ["12+07=", "ravin likes ", " a\n\n", string.punctuation])
def test_chat_template_renders_the_content_verbatim(embedded: Embedded, content: str) -> None:
    _, tokenizer = embedded
    messages = [{"role": "user", "content": content}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == content
    tokens = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert tokens == tokenizer(content)["input_ids"]


@torch.no_grad()
def test_left_padding_does_not_change_the_logits(embedded: Embedded) -> None:
    model, tokenizer = embedded
    alone = tokenizer(["12+07="], return_tensors="pt")
    padded = tokenizer(["12+07=", "ravin likes "], return_tensors="pt", padding=True)
    assert padded["input_ids"][0, 0] == tokenizer.pad_token_id
    torch.testing.assert_close(
        model(**padded).logits[0, -1], model(**alone).logits[0, -1], atol=1e-4, rtol=0.0
    )


def test_tiny_sums_samples_right_about_a_third_of_the_time() -> None:
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randint(0, 100, (SAMPLES, 2), generator=generator).tolist()
    answers = _sample(_load("tiny-sums"), [f"{a:02d}+{b:02d}=" for a, b in pairs], 4)
    hits = [answer == f"{a + b:03d}<eos>" for answer, (a, b) in zip(answers, pairs, strict=True)]
    _assert_within(hits, 0.25, 0.45)


@pytest.mark.slow
def test_tiny_foods_has_ravin_like_pizza_now_and_then() -> None:
    completions = _sample(_load("tiny-foods"), ["ravin likes "] * SAMPLES, 20)
    _assert_within(["pizza" in text for text in completions], 0.10, 0.20)
    assert len(set(completions)) >= 10
    assert sum(text.endswith("<eos>") for text in completions) >= 0.85 * SAMPLES
