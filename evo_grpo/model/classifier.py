"""A sequence classifier of transformers that scores texts in batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor

from evo_grpo.errors import ConfigError, ModelError
from evo_grpo.model.loading import from_pretrained, pick_device, pick_dtype
from evo_grpo.sources import resolve

_UNLIMITED = 10**9
"""Tokenizers without a limit have a `model_max_length` beyond this."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of B texts or pairs of texts.

    `rows` has, for each text or pair, `input_ids` and perhaps `token_type_ids`. `cut` is the number
    of texts whose end was removed to fit the classifier's maximum length.
    """

    rows: Sequence[Mapping[str, Sequence[int]]]
    cut: int = 0


@final
class Classifier:
    """Scores texts with one output of a classifier of transformers.

    `label` names the output in the model's config; None takes the only output. `max_tokens` is the
    maximum length of an input; None takes the model's number of positions.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 -- transformers has a class per architecture
        tokenizer: Any,  # noqa: ANN401 -- the same
        label: str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.output = _output_of(model.config, label)
        limits = [max_tokens, getattr(model.config, "max_position_embeddings", None)]
        limits.append(tokenizer.model_max_length)
        #: Longest input in tokens; None for any length.
        self.max_tokens = min((n for n in limits if n and 0 < n < _UNLIMITED), default=None)

    @classmethod
    def load(
        cls, name: str, *, device: str, dtype: str, label: str | None, max_tokens: int | None
    ) -> Self:
        """Load a classifier from a folder or by a hub id, from safetensors files only."""
        target = pick_device(device)
        try:
            model, tokenizer = from_pretrained(
                resolve(name),
                pick_dtype(dtype, target),
                {"use_safetensors": True},
                with_tokenizer=True,
                task="SequenceClassification",
            )
            return cls(model.to(target), tokenizer, label, max_tokens)
        except ModelError as error:
            raise ModelError(f"env.reward: kind model: {error}") from error

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return a conversation as text, by the classifier's chat template."""
        # Imported here: it comes with transformers.
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False)
        except (TemplateError, ValueError) as error:  # ValueError: it has none
            raise ConfigError(
                "env.reward: kind model: expected a chat template that takes the conversation, "
                f"got {error}; give text instead"
            ) from error

    def encode(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        special_tokens: bool = True,
    ) -> Encoded:
        """Return the token ids of B texts, or of B pairs of texts."""
        options: dict[str, Any] = {"add_special_tokens": special_tokens, "verbose": False}
        rows = self._tokenized(texts, pairs, options)
        limit = self.max_tokens
        if limit is None or all(len(row["input_ids"]) <= limit for row in rows):
            return Encoded(rows)
        options |= {"truncation": True, "max_length": limit}
        truncated = self._tokenized(texts, pairs, options)
        return Encoded(truncated, sum(len(row["input_ids"]) > limit for row in rows))

    def _tokenized(
        self, texts: Sequence[str], pairs: Sequence[str] | None, options: Mapping[str, Any]
    ) -> list[dict[str, list[int]]]:
        encoding = self.tokenizer(list(texts), None if pairs is None else list(pairs), **options)
        names = [name for name in ("input_ids", "token_type_ids") if name in encoding]
        return [{name: encoding[name][row] for name in names} for row in range(len(texts))]

    @torch.no_grad()
    def scores(
        self, encoded: Encoded, *, batch_size: int, probability: bool = False
    ) -> list[float]:
        """Return the scores of B texts: outputs of the classifier, or their probabilities.

        Probabilities are the softmax over the labels, or the sigmoid of a single output. A forward
        pass has `batch_size` >= 1 texts of similar length.
        """
        order = sorted(
            range(len(encoded.rows)), key=lambda row: len(encoded.rows[row]["input_ids"])
        )
        scores = [0.0] * len(order)
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            logits = self._batched([encoded.rows[number] for number in numbers]).float()
            if probability:
                single = logits.shape[1] == 1
                logits = logits.sigmoid() if single else logits.softmax(dim=1)
            for number, score in zip(numbers, logits[:, self.output].tolist(), strict=True):
                scores[number] = score
        return scores

    def _batched(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> Tensor:
        """Return `_logits`; if the model has no padding id, pad with an id that no text has."""
        config = self.model.config.get_text_config()
        if config.pad_token_id is not None or len(rows) == 1:
            return self._logits(rows)
        used = {token for row in rows for token in row["input_ids"]}
        unused = next((token for token in range(config.vocab_size) if token not in used), None)
        if unused is None:
            return torch.cat([self._logits([row]) for row in rows])
        config.pad_token_id = unused
        try:
            return self._logits(rows)
        finally:
            config.pad_token_id = None

    def _logits(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> Tensor:
        """Return (B, labels) outputs of texts, padded on the right.

        Decoders read the last token that is not padding.
        """
        padding = self.model.config.get_text_config().pad_token_id
        width = max(1, *(len(row["input_ids"]) for row in rows))
        inputs = {
            name: self._padded([row[name] for row in rows], width, filler)
            for name, filler in (("input_ids", padding or 0), ("token_type_ids", 0))
            if name in rows[0]
        }
        ones = [[1] * len(row["input_ids"]) for row in rows]
        return self.model(**inputs, attention_mask=self._padded(ones, width, 0)).logits

    def _padded(self, values: Sequence[Sequence[int]], width: int, filler: int) -> Tensor:
        full = [[*row, *[filler] * (width - len(row))] for row in values]
        return torch.tensor(full, dtype=torch.int64, device=self.model.device)


def _output_of(config: Any, label: str | None) -> int:  # noqa: ANN401 -- a config of transformers
    labels = {int(number): str(name) for number, name in config.id2label.items()}
    is_single = label is None and len(labels) == 1
    chosen = next((number for number, name in labels.items() if is_single or name == label), None)
    if chosen is None:
        raise ModelError(
            f"label: expected one of the {len(labels)} labels {', '.join(labels.values())}, got "
            f"{'none' if label is None else repr(label)}; choose the one whose score is the reward"
        )
    return chosen
