"""Engines around the native one: one that records its calls, and says that it is inexact."""

from dataclasses import replace

from evo_grpo.rollout.native.native_engine import NativeEngine


class SkewedEngine:
    """Samples as the native engine does, and reports log-probs that are off by `skew` nats.

    Its factory is `SkewedEngine.factory(...)`; `calls` lists what was asked of it.
    """

    def __init__(self, slots, settings, *, exact=False, skew=0.0):
        self.settings = settings
        self.exact = exact
        self.skew = skew
        self.calls = []
        self._asleep = False
        self._native = NativeEngine(slots, settings)

    @classmethod
    def factory(cls, **options):
        return lambda slots, settings: cls(slots, settings, **options)

    def rollout(self, requests):
        self.calls.append(("rollout", tuple(r.adapter for r in requests)))
        return [
            [replace(g, completions=tuple(map(self._skewed, g.completions))) for g in groups]
            for groups in self._native.rollout(requests)
        ]

    def _skewed(self, completion):
        # Unlike per token and per row, to either side, so that no mean or sum hides a mistake.
        return replace(
            completion,
            logprobs=tuple(
                v + self.skew * (token % 4 - 1.5)
                for token, v in zip(completion.token_ids, completion.logprobs, strict=True)
            ),
        )

    def sleep(self):
        if not self._asleep:
            self.calls.append(("sleep", ()))
        self._asleep = True

    def wake(self):
        if self._asleep:
            self.calls.append(("wake", ()))
        self._asleep = False

    def close(self):
        self.calls.append(("close", ()))
