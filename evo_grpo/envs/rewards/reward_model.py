"""A reward model: a sequence classifier of transformers that scores completions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, final

from evo_grpo.envs.prompts import Template
from evo_grpo.envs.rewards.scorer import Scorer, needed_columns, template_rows
from evo_grpo.errors import ConfigError, RewardError
from evo_grpo.settings.rewards import ModelReward

if TYPE_CHECKING:
    from evo_grpo.model.classifier import Classifier  # for annotations only: it loads torch

DEFAULT_TEXT = "{prompt}{completion}"


@final
class RewardModel(Scorer):
    """Scores completions with the classifier that `settings` name; see `ModelReward`.

    Raises:
        ConfigError: A template is malformed.
    """

    __name__ = "model"

    def __init__(self, settings: ModelReward) -> None:
        self.settings = settings
        if settings.conversation is not None:
            messages = [message.model_dump() for message in settings.conversation]
            self._templates = [Template.of(messages)]
            if "prompt" in self._templates[0].conversations:
                raise ConfigError(
                    "env.reward: kind model, conversation: expected the role messages with "
                    "{messages}, the conversation of a row, got {prompt}, the text that the agent "
                    "was given"
                )
        else:
            texts = [settings.text or DEFAULT_TEXT, settings.text_pair]
            self._templates = [Template.of(text) for text in texts if text is not None]
        found = [name for made in self._templates for name in made.columns()]
        self.columns = needed_columns(found)
        self._classifier: Classifier | None = None
        self._warned = False
        #: The device computes for one thread at a time.
        self._serving = Lock()

    def fill(self, row: Mapping[str, Any]) -> None:
        """See `Scorer.fill`."""
        for template in self._templates:
            template.plain(row)

    def prepare(self, device: str) -> None:
        """Load the classifier to a device; see `Scorer.prepare`.

        Raises:
            ModelError: It cannot be loaded, or has no output or not the one that is asked for.
            ConfigError: It has no chat template for the conversation.
        """
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
        """Score completions in batches of `batch_size`; see `Scorer`."""
        with self._serving:
            return self._scores(completions, prompts, columns)

    def _scores(
        self,
        completions: Sequence[str],
        prompts: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
    ) -> list[float | RewardError]:
        self.prepare("auto")
        classifier, settings = self._classifier, self.settings
        assert classifier is not None, "it is prepared"
        rows = list(template_rows(completions, prompts, columns))
        if settings.conversation is not None:
            (template,) = self._templates
            texts = [classifier.chat(template.messages(row)) for row in rows]
            encoded = classifier.encode(texts, special_tokens=False)
        else:
            parts = [[template.plain(row) for row in rows] for template in self._templates]
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
