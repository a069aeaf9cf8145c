"""Stop strings and tokens over random models: completions are cut where one row alone is cut."""

import json
import random
from functools import cache

import tiny
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from evo_grpo.model.llama import decode
from evo_grpo.model.llama.cache import FixedCache
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.native import loop
from evo_grpo.rollout.native import native_engine as engines
from evo_grpo.rollout.native.native_engine import NativeEngine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.settings import AgentSettings
from evo_grpo.types import Prompt

WORDS = (
    "</answer> So, it's\n\nthe end: naïve café — 12 + 7 = 19. Don't stop </ans \\boxed{7} ÄÖ 数学"
)
KINDS = ("bytes", "pieces", "words")
SPECIAL = ["<pad>", "</s>", "<|end|>"]


@cache
def tokenizer_of(kind):
    """A tokenizer as byte-level BPE, SentencePiece or WordPiece models have it."""
    texts = [WORDS] * 4
    if kind == "bytes":
        own = Tokenizer(models.BPE())
        own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        own.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    elif kind == "pieces":
        own = Tokenizer(models.BPE(unk_token="<pad>"))
        own.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    else:
        own = Tokenizer(models.WordPiece(unk_token="<pad>"))
        own.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        own.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=150, special_tokens=SPECIAL, show_progress=False
        )
    own.train_from_iterator(texts, trainer)
    if kind == "pieces":
        own = with_bytes(own)
    return PreTrainedTokenizerFast(
        tokenizer_object=own,
        pad_token="<pad>",
        eos_token="</s>",
        additional_special_tokens=["<|end|>"],
        clean_up_tokenization_spaces=kind == "words",
    )


def with_bytes(own):
    """The tokenizer with tokens of single bytes, as Llama 2 has them."""
    data = json.loads(own.to_str())
    model = data["model"]
    first = len(model["vocab"])
    model["vocab"] |= {f"<0x{byte:02X}>": first + byte for byte in range(256)}
    model["byte_fallback"] = True
    own = Tokenizer.from_str(json.dumps(data))
    own.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return own


@cache
def slots_of(kind, device="cpu", **changes):
    """Two agents over a random model with a tokenizer."""
    tokenizer = tokenizer_of(kind)
    model = tiny.llama(vocab_size=len(tokenizer), **changes).to(device)
    return tiny.population(model, (4, 2), tokenizer)


def completions(results):
    """The completions of all requests, in one list."""
    return [one for groups in results for group in groups for one in group.completions]


def cut(tokenizer, completion, stop, least):
    """What a row alone gives: after each token, decode everything and look for every stop."""
    strings = [one for one in stop if isinstance(one, str)]
    early = tokenizer.decode(completion.token_ids[:least], skip_special_tokens=True)
    early = len(early.rstrip("\ufffd"))  # the first bytes of a character are none
    for count, token in enumerate(completion.token_ids, start=1):
        ids = completion.token_ids[:count]
        if token in stop and count > least:
            return ids, tokenizer.decode(ids[:-1], skip_special_tokens=True), True
        text = tokenizer.decode(ids, skip_special_tokens=True)
        places = [
            place
            for one in strings
            for place in range(len(text))
            if text.startswith(one, place) and place + len(one) > early
        ]
        if places and count > least:
            return ids, text[: min(places)], True
    return completion.token_ids, completion.text, completion.ended


def some_stops(draw, tokenizer, completions, prompt, least):
    """Strings and tokens that some completions have: across tokens, parts of others."""
    texts = [one.text for one in completions if one.text]
    stops = []
    for _ in range(draw.randint(1, 4)):
        text = draw.choice(texts or ["a"])
        place = draw.randrange(len(text))
        stops.append(text[place : place + draw.randint(1, 6)])
    if draw.random() < 0.3:
        stops.append(stops[0][: draw.randint(1, len(stops[0]))])
    if draw.random() < 0.3:
        stops.append(tokenizer.decode(prompt)[-3:] or "q")
    if not least and draw.random() < 0.3:  # tokens that end a row cannot be drawn before `least`
        stops.append(draw.randrange(2, len(tokenizer)))
    # Bytes that are no character are shown by a sign that stands for any of them.
    return [one for one in dict.fromkeys(stops) if "\ufffd" not in str(one)] or ["q"]


def cut_alike(draw, tokenizer, sample, *, apart=True):
    """One configuration of the engine of `sample`; returns how many rows a stop has ended.

    Without `apart`, no text depends on the prompt before it: a prompt is whole characters, and no
    string begins with the space that some tokenizers leave out at the beginning of a text.
    """
    prompts = [
        Prompt(i, "", tuple(draw.randrange(3, len(tokenizer)) for _ in range(length)))
        for i, length in enumerate(draw.choices(range(1, 9), k=3))
    ]
    if not apart:
        texts = [WORDS[draw.randrange(40) :][: draw.randint(2, 20)] for _ in prompts]
        prompts = [Prompt(i, t, tuple(tokenizer(t)["input_ids"])) for i, t in enumerate(texts)]
    least = draw.choice([0, 0, 0, 2, 9])
    sampling = Sampling(
        temperature=draw.choice([0.7, 1.0, 2.0]),
        max_output_tokens=draw.choice([1, 7, 20]),
        min_output_tokens=least,
    )
    seed = draw.randrange(2**31)
    requests = [
        RolloutRequest(i, name, prompts, draw.choice([1, 3]), sampling, seed)
        for i, name in enumerate(("a0", "a1"))
    ]
    whole = sample(requests, min_output_tokens=least)
    stop = some_stops(draw, tokenizer, whole, prompts[0].token_ids, least)
    if not apart:
        stop = [one for one in stop if not str(one).startswith(" ")] or ["q"]
    found = sample(requests, min_output_tokens=least, stop=stop)
    expected = [cut(tokenizer, one, stop, least) for one in whole]
    got = [(one.token_ids, one.text, one.ended) for one in found]
    assert got == expected, (stop, least)
    for one, before in zip(found, whole, strict=True):
        if before.logprobs is None:  # vLLM's are not exact behind a minimum of tokens
            assert one.logprobs is None
            continue
        own = before.logprobs[: len(one.token_ids)]
        torch.testing.assert_close(
            torch.tensor(one.logprobs), torch.tensor(own), atol=1e-4, rtol=0.0
        )
    return sum(len(a.token_ids) < len(b.token_ids) for a, b in zip(found, whole, strict=True))


def check(seed, monkeypatch, device="cpu"):
    """One configuration of the native engine; returns how many rows a stop has ended."""
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    gpu, refills, places = draw.random() < 0.5, draw.random() < 0.5, draw.choice([4, 6, 64])
    slots = slots_of(kind, device)
    with monkeypatch.context() as patch:
        patch.setattr(engines, "refills_rows", lambda device: refills)
        if gpu or refills:  # no other cache takes further rows
            patch.setattr(decode, "cache_for", lambda device, *layers: FixedCache(*layers))
        if gpu:
            patch.setattr(loop, "block_of", lambda device: 8)

        def sample(requests, **algorithm):
            settings = AgentSettings(algorithm=algorithm, engine={"max_decode_rows": places})
            return completions(NativeEngine(slots, settings).rollout(requests))

        return cut_alike(draw, tokenizer_of(kind), sample)
