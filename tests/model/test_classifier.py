"""A classifier in batches against transformers, one text at a time."""

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from evo_grpo.errors import ModelError
from evo_grpo.model.classifier import Classifier

TEXTS = ["a", "some words", "a much longer text than the others", "b", "words, again", ""]
PAIRS = ["x", "q", "y z", "the answer", "b", "a"]
SHAPE = {
    "vocab_size": 110,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
}


def tokenizer(chat_template=None):
    characters = ["[PAD]", "[CLS]", "[SEP]", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: index for index, token in enumerate(characters)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.add_special_tokens(["[PAD]", "[CLS]", "[SEP]"])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", chat_template=chat_template
    )


def model(kind, labels=1, **changes):
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        if kind == "bert":
            config = BertConfig(**SHAPE, num_labels=labels, pad_token_id=0, **changes)
            return BertForSequenceClassification(config).eval()
        # "decoder" pads with a token that ends the texts, "unpadded" has no padding token.
        padding = {"decoder": 2, "unpadded": None}[kind]
        config = LlamaConfig(**SHAPE, num_labels=labels, pad_token_id=padding, **changes)
        return LlamaForSequenceClassification(config).eval()


@torch.no_grad()
def one_by_one(model, tokens, *texts):
    """What transformers gives for each text alone, (B, labels)."""
    rows = zip(*texts, strict=True)
    kept = [tokens(*row, return_tensors="pt") for row in rows]
    if model.config.model_type != "bert":
        for row in kept:
            row.pop("token_type_ids", None)
    return torch.cat([model(**row).logits for row in kept])


@pytest.mark.parametrize("kind", ["bert", "decoder", "unpadded"])
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_scores_in_batches_equal_those_of_single_texts(kind, batch_size):
    tokens = tokenizer()
    if kind != "bert":
        tokens.model_input_names = ["input_ids", "attention_mask"]
    made = Classifier(model(kind), tokens)
    for texts in ([TEXTS], [TEXTS, PAIRS]):
        expected = one_by_one(made.model, tokens, *texts)[:, 0].tolist()
        assert len(set(expected)) == len(TEXTS)
        scores = made.scores(made.encode(*texts), batch_size=batch_size)
        assert scores == pytest.approx(expected, abs=1e-5)
    assert made.model.config.pad_token_id == {"bert": 0, "decoder": 2, "unpadded": None}[kind]


def test_without_a_padding_token_one_that_no_text_has_serves_as_padding(monkeypatch):
    tokens = tokenizer()
    tokens.model_input_names = ["input_ids", "attention_mask"]
    made, logits, sizes = Classifier(model("unpadded"), tokens), Classifier._logits, []
    monkeypatch.setattr(
        Classifier, "_logits", lambda self, rows: sizes.append(len(rows)) or logits(self, rows)
    )
    encoded = made.encode(TEXTS)
    made.scores(encoded, batch_size=100)
    assert sizes == [len(TEXTS)]
    made.model.config.vocab_size = 1 + max(max(row["input_ids"]) for row in encoded.rows)
    used = encoded.rows[0] | {"input_ids": [*range(made.model.config.vocab_size)]}
    made._batched([used | {"attention_mask": [1] * len(used["input_ids"])}, encoded.rows[0]])
    assert sizes[1:] == [1, 1]


def test_a_label_is_chosen_by_its_name_and_may_be_a_probability():
    names = {0: "bad", 1: "good", 2: "fine"}
    classifier = model("bert", 3, id2label=names, label2id={v: k for k, v in names.items()})
    made = Classifier(classifier, tokenizer(), "good")
    logits = one_by_one(classifier, made.tokenizer, TEXTS)
    encoded = made.encode(TEXTS)
    assert made.scores(encoded, batch_size=4) == pytest.approx(logits[:, 1].tolist(), abs=1e-5)
    assert made.scores(encoded, batch_size=4, probability=True) == pytest.approx(
        logits.softmax(dim=1)[:, 1].tolist(), abs=1e-5
    )
    single = Classifier(model("bert"), tokenizer())
    expected = one_by_one(single.model, single.tokenizer, TEXTS).sigmoid()[:, 0].tolist()
    found = single.scores(single.encode(TEXTS), batch_size=4, probability=True)
    assert found == pytest.approx(expected, abs=1e-5)
    for label in (None, "better"):
        with pytest.raises(ModelError, match="one of the 3 labels bad, good, fine, got"):
            Classifier(classifier, tokenizer(), label)


def test_a_long_text_loses_its_end():
    made = Classifier(model("bert"), tokenizer(), max_tokens=10)
    encoded = made.encode(["short", "a text that is too long", "a text t"])
    assert encoded.cut == 1
    assert [len(row["input_ids"]) for row in encoded.rows] == [7, 10, 10]
    assert encoded.rows[1] == encoded.rows[2]
    assert Classifier(model("bert"), tokenizer(), max_tokens=1000).max_tokens == 64


def test_a_model_without_a_head_of_its_own_is_refused(tmp_path):
    model("unpadded").model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    given = {"device": "cpu", "dtype": "auto", "label": None, "max_tokens": None}
    with pytest.raises(ModelError, match=r"env.reward: kind model: .*weights of its config.json"):
        Classifier.load(str(tmp_path), **given)
    with pytest.raises(ModelError, match=r"^env.reward: kind model: model: .* no config.json"):
        Classifier.load(str(tmp_path.parent), **given)
