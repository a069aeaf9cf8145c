"""vLLM as the engine of a population: one call for all agents, each with its own adapter."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, final

from evo_grpo.errors import ConfigError
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.rollout.engine import RolloutRequest
from evo_grpo.rollout.requests import check_request, decoded, row_keys
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.rollout.vllm.adapters import Published, PublishedAdapters, rank_of
from evo_grpo.rollout.vllm.links import Child, Inside, Link
from evo_grpo.rollout.vllm.sampling import means_policy, sampling_keywords
from evo_grpo.rollout.vllm.server import Message
from evo_grpo.rollout.vllm.start import (
    base_folder,
    can_sleep,
    environment,
    find_vllm,
    inside_environment,
    largest_rank,
    llm_keywords,
    tokenizer_folder,
)
from evo_grpo.settings import AgentSettings
from evo_grpo.team.ranks import announced
from evo_grpo.types import Completion, CompletionGroup, Prompt

_SHARED_MEMORY = Path("/dev/shm")


@final
class VLLMEngine:
    """Samples with vLLM, to which adapters are handed as files, one version after the other.

    vLLM computes with kernels of its own, so its numbers are not the trainer's: the learner
    corrects for the difference and reports it. Its draws follow from the request's seed, row by
    row; which tokens they choose depends on logits that another batch rounds otherwise.

    Args:
        slots: Adapters over the base.
        settings: What the agents are made of; `engine.vllm` says how vLLM runs.
        link: A vLLM that is started already; None starts one, as the settings say.

    Attributes:
        exact: False.

    Raises:
        EngineUnavailable: vLLM is not installed, or does not start.
        ModelError: It cannot run the base or its adapters.
    """

    exact = False

    def __init__(
        self, slots: AdapterSlots, settings: AgentSettings, *, link: Link | None = None
    ) -> None:
        self.slots = slots
        self.base = slots.base
        self._settings = settings
        self._vllm = settings.engine.vllm
        lengths = [settings.algorithm.max_model_len, slots.base.context_length]
        self._context = min((length for length in lengths if length), default=1 << 30)
        self._scratch = _folder(None)
        files = _folder(self._vllm.adapter_folder, _SHARED_MEMORY)
        self._folders = (self._scratch, files)
        self._remove = weakref.finalize(self, _remove, os.getpid(), self._folders)
        self._adapters = PublishedAdapters(slots, files)
        self._asleep = False
        self._rank = largest_rank(slots, self._vllm)
        self._link = link
        if link is None:
            self._start()

    def rollout(self, requests: Sequence[RolloutRequest]) -> list[list[CompletionGroup]]:
        """Sample every request's completions in one call; see `RolloutEngine`."""
        for request in requests:
            check_request(request, self._context)
        asked = [request for request in requests if request.prompts]
        if not asked:
            return [[] for _ in requests]
        self.wake()
        named = [r.adapter for r in asked if r.adapter is not None]
        if max((rank_of(self.slots, name) for name in named), default=0) > self._rank:
            self._start()
        parts = [self._part(request) for request in asked]
        values, arrays = self._question(parts)
        done = iter(self._groups(parts, self._ask("generate", values, arrays)))
        return [next(done) if request.prompts else [] for request in requests]

    def publish(self, versions: Mapping[str, int]) -> None:
        """Note which adapters changed; they are written when they are next asked for."""
        self._adapters.announce(versions)

    def sleep(self) -> None:
        """Have vLLM give up memory until `wake`, where the device can and the settings say so."""
        if self._vllm.sleep_level and can_sleep(self.base) and not self._asleep:
            self._ask("sleep", {"level": self._vllm.sleep_level})
            self._asleep = True

    def wake(self) -> None:
        """Have vLLM take its memory back; it is compared with what it was before."""
        if self._asleep:
            self._ask("wake", {})
            self._asleep = False

    def close(self) -> None:
        """End vLLM and remove what was written for it."""
        if self._link is not None:
            self._link.close()
            self._link = None
        self._remove()

    def _start(self) -> None:
        """Start vLLM, anew where an adapter needs more room, and see that it samples."""
        if self._link is not None:
            self._link.close()
        self._adapters.forget()
        self._rank = largest_rank(self.slots, self._vllm)
        keywords = llm_keywords(
            self.slots,
            self._settings,
            folder=base_folder(self.base, self._settings, self._scratch),
            context=self._context,
            rank=self._rank,
        )
        if self._vllm.stop_sequences:
            keywords["tokenizer"] = tokenizer_folder(self.base, self._scratch)
        self._link = self._opened()
        trained = [name for name in self.slots.names if self.slots.is_trainable(name)]
        prompt = Prompt(0, "", (self.base.pad_id,))
        first = [
            RolloutRequest(-1, name, [prompt], 1, Sampling(max_output_tokens=2), 0)
            for name in (None, *trained[:1])
        ]
        values, arrays = self._question([self._part(request) for request in first])
        self._ask("start", {"llm": keywords, **values}, arrays)

    def _opened(self) -> Link:
        if self._vllm.process == "child":
            python = find_vllm(self._vllm)
            return Child(python, environment(self.base, self._settings), self._folders)
        if announced():
            raise ConfigError(
                "engine.vllm.process: expected child where a run has several processes, got "
                "inside: vLLM would take their connections for its own; leave it out"
            )
        find_vllm(self._vllm)
        return Inside(inside_environment())

    def _ask(
        self,
        operation: str,
        values: Mapping[str, Any],
        arrays: Mapping[str, array[Any]] | None = None,
    ) -> Message:
        assert self._link is not None, "a closed engine is not used again"
        return self._link.ask(operation, values, arrays)

    def _part(self, request: RolloutRequest) -> _Part:
        published = None if request.adapter is None else self._adapters.current(request.adapter)
        finite = published is None or published.finite
        tell = finite and means_policy(request.sampling, self.base.vocabulary, self._vllm)
        return _Part(request, published if finite else None, finite=finite, tell=tell)

    def _question(self, parts: Sequence[_Part]) -> tuple[dict[str, Any], dict[str, array[Any]]]:
        """Return what `server.Session.generate` takes."""
        ids, lengths, limits, seeds = array("i"), array("i"), array("i"), array("q")
        asked: list[dict[str, Any]] = []
        for part in parts:
            request, adapter = part.request, part.adapter
            for prompt in request.prompts:
                room = self._context - len(prompt.token_ids)
                ids.extend(prompt.token_ids)
                lengths.append(len(prompt.token_ids))
                limits.append(min(request.sampling.max_output_tokens, room))
            seeds.extend(row_keys(request))
            sampling = sampling_keywords(request.sampling, self.base.eos_ids, self._vllm)
            asked.append(
                {
                    "adapter": adapter and [adapter.name, adapter.id, str(adapter.folder)],
                    "prompts": len(request.prompts),
                    "samples": request.samples,
                    "sampling": sampling,
                }
            )
        arrays = {"ids": ids, "lengths": lengths, "limits": limits, "seeds": seeds}
        return {"requests": asked, "remove": self._adapters.removed()}, arrays

    def _groups(self, parts: Sequence[_Part], answer: Message) -> Iterator[list[CompletionGroup]]:
        """Yield the groups of each request, from the rows of an answer in the same order."""
        tokens, values = answer.arrays["tokens"].tolist(), answer.arrays["logprobs"].tolist()
        ends = list(accumulate(answer.arrays["lengths"], initial=0))
        rows = [(tuple(tokens[a:b]), tuple(values[a:b])) for a, b in pairwise(ends)]
        texts = decoded(self.base, [ids for ids, _ in rows])
        done = iter(zip(rows, texts, answer.arrays["stopped"], strict=True))
        eos = set(self.base.eos_ids)

        def completion(part: _Part) -> Completion:
            (ids, own), text, stopped = next(done)
            logprobs = own if part.tell or any(map(math.isnan, own)) else None
            if not part.finite:
                logprobs = (math.nan,) * len(ids)
            return Completion(ids, text, logprobs, bool(stopped or eos & set(ids[-1:])))

        for part in parts:
            agent, samples = part.request.agent, range(part.request.samples)
            yield [
                CompletionGroup(agent, prompt, tuple(completion(part) for _ in samples))
                for prompt in part.request.prompts
            ]


@dataclass(frozen=True)
class _Part:
    """A request on its way to vLLM.

    Attributes:
        request: As it came.
        adapter: What vLLM is to use, None for the base.
        finite: False for an agent whose weights are not, in whose place the base samples: its
            completions count for nothing.
        tell: Whether vLLM's log-probs mean what ours do.
    """

    request: RolloutRequest
    adapter: Published | None
    finite: bool
    tell: bool


def _folder(below: str | None, fast: Path | None = None) -> Path:
    """Make a folder of this engine's own, which only its user can read.

    Args:
        below: Where; None chooses among the temporary files.
        fast: A better place, where there is one.
    """
    if below is not None:
        place = Path(below).expanduser()
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"engine.vllm.adapter_folder: {below!r} cannot be made: {error.strerror}; name "
                "another, or leave it out"
            ) from error
    else:
        place = fast if fast is not None and os.access(fast, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="evo-grpo-vllm-", dir=place))


def _remove(owner: int, folders: Sequence[Path]) -> None:
    for folder in folders if os.getpid() == owner else ():
        shutil.rmtree(folder, ignore_errors=True)
