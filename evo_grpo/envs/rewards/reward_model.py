"""A reward model: a sequence classifier of transformers that scores completions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, final

from evo_grpo.envs.prompts import Template
from evo_grpo.envs.rewards.scorer import Scorer, template_rows
from evo_grpo.errors import ConfigError, RewardError
from evo_grpo.settings.rewards import ModelReward

if TYPE_CHECKING:
    from evo_grpo.model.classifier import Classifier  # for annotations only: it loads torch

DEFAULT_TEXT = "{prompt}{completion}"


@final
class RewardModel(Scorer):
    """Scores completions with the classifier that `settings` name; see `ModelReward`."""

    __name__ = "model"

    def __init__(self, settings: ModelReward) -> None:
        self.settings = settings
        if settings.conversation is not None:
            messages = [message.model_dump() for message in settings.conversation]
            templates = [Template.of(messages)]
            if "prompt" in templates[0].conversations:
                raise ConfigError(
                    "env.reward: kind model, conversation: expected the role messages with "
                    "{messages}, the conversation of a row, got {prompt}, the text that the agent "
                    "was given"
                )
        else:
            texts = [settings.text or DEFAULT_TEXT, settings.text_pair]
            templates = [Template.of(text) for text in texts if text is not None]
        super().__init__(templates)
        self._classifier: Classifier | None = None
        self._warned = False
        #: The device computes for one thread at a time.
        self._serving = Lock()

    def prepare(self, device: str) -> None:
        """Load the classifier to a device."""
        if self._classifier is not None:
            return
        # Imported here: it loads torch, and `evo-grpo check` must answer at once.
        from evo_grpo.model.classifier import Classifier

        settings = self.settings
        self._classifier = Classifier.load(
            settings.name,
            device=device,
            dtype=settings.dtype,
            label=settings.label,
            max_tokens=settings.max_tokens,
        )

    def __call__(
        self, *, completions: Sequence[str], prompts: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | RewardError]:
        """Score completions in batches of `batch_size`."""
        with self._serving:
            rows = list(template_rows(completions, prompts, columns))
            return self._scores(rows)

    def _scores(self, rows: Sequence[Mapping[str, Any]]) -> list[float | RewardError]:
        self.prepare("auto")
        classifier, settings = self._classifier, self.settings
        assert classifier is not None, "it is prepared"
        if settings.conversation is not None:
            (template,) = self.templates
            texts = [classifier.chat(template.messages(row)) for row in rows]
            encoded = classifier.encode(texts, special_tokens=False)
        else:
            parts = [[template.plain(row) for row in rows] for template in self.templates]
            encoded = classifier.encode(*parts)
        if encoded.cut and not self._warned:
            self._warned = True
            warnings.warn(
                f"env.reward: kind model: {encoded.cut} of {len(rows)} texts are longer than the "
                f"{classifier.max_tokens} tokens that {settings.name!r} reads and lose their end, "
                "which is not scored; lower max_output_tokens, or choose another reward model",
                stacklevel=2,
            )
        scores = classifier.scores(
            encoded, batch_size=settings.batch_size, probability=settings.output == "probability"
        )
        return list(scores)
