"""The vLLM engine, which samples for all agents and their adapters in one call."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from evo_grpo.errors import ConfigError
from evo_grpo.model.ends import StopRules
from evo_grpo.model.lora.adapter_files import CONFIG, WEIGHTS, write_tensors
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.rollout.engine import RolloutEngine, RolloutRequest
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.rollout.vllm import process
from evo_grpo.rollout.vllm.process import Child, can_sleep, largest_rank, rank_of
from evo_grpo.settings import AgentSettings, EngineConfig, VLLMSettings
from evo_grpo.types import Completion, CompletionGroup, Prompt

LEAST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one; below it, the engine samples greedily instead."""
_SHARED_MEMORY = Path("/dev/shm")


@final
class VLLMEngine(RolloutEngine):
    """Samples with vLLM, which loads each version of an adapter from files.

    vLLM computes with other kernels, so its log-probs differ from the trainer's: the learner
    corrects for the difference and reports it. The request's seed determines the draws of each row,
    but logits may be rounded differently in another batch, so tokens may differ. `link` is the
    connection to a running vLLM; None starts vLLM with the settings `engine.vllm`.
    """

    exact = False

    def __init__(
        self, slots: AdapterSlots, settings: AgentSettings, *, link: Child | None = None
    ) -> None:
        self.slots = slots
        self.base = slots.base
        self.ends = StopRules(slots.base, settings.algorithm)
        self._settings = settings
        self._vllm = settings.engine.vllm
        lengths = [settings.algorithm.max_model_len, slots.base.context_length]
        self._context = min((length for length in lengths if length), default=1 << 30)
        self._scratch = _folder(None)
        files = _folder(self._vllm.adapter_folder, _SHARED_MEMORY)
        self._folders = (self._scratch, files)
        self._remove = weakref.finalize(self, _remove, os.getpid(), self._folders)
        self._adapters = PublishedAdapters(slots, files)
        self.decodes_by: set[str] = set()
        self._asleep = False
        self._rank = largest_rank(slots, settings)
        self._link = link
        if link is None:
            self._start()

    @classmethod
    def check(cls, engine: EngineConfig) -> None:
        """Check that vLLM is installed; see `RolloutEngine`."""
        process.find_vllm(engine.vllm)

    def rollout(self, requests: Sequence[RolloutRequest]) -> list[list[CompletionGroup]]:
        """Sample the completions of all requests; see `RolloutEngine`."""
        for request in requests:
            request.check(self._context, self.base.vocabulary)
        with_prompts = [request for request in requests if request.prompts]
        if not with_prompts:
            return [[] for _ in requests]
        self.wake()
        self.decodes_by.add("vllm")
        adapters = [r.adapter for r in with_prompts if r.adapter is not None]
        if max((rank_of(self.slots, name) for name in adapters), default=0) > self._rank:
            self._start()
        parts = [self._part(request) for request in with_prompts]
        groups = iter(self._groups(parts, self._ask("generate", self._question(parts))))
        return [next(groups) if request.prompts else [] for request in requests]

    def sleep(self) -> None:
        """Free vLLM's memory until `wake`, if the device and the settings allow it."""
        if self._vllm.sleep_level and can_sleep(self.base) and not self._asleep:
            self._ask("sleep", {"level": self._vllm.sleep_level})
            self._asleep = True

    def wake(self) -> None:
        """Restore vLLM's memory, and check that it samples as before `sleep`."""
        if self._asleep:
            self._ask("wake", {})
            self._asleep = False

    def close(self) -> None:
        """End vLLM and remove the files that were written for it."""
        if self._link is not None:
            self._link.close()
            self._link = None
        self._remove()

    def _start(self) -> None:
        """Start vLLM, or restart it for a larger LoRA rank, and check that it samples."""
        if self._link is not None:
            self._link.close()
        self._adapters.forget()
        self._rank = largest_rank(self.slots, self._settings)
        keywords = process.llm_keywords(
            self.slots,
            self._settings,
            folder=process.base_folder(self.base, self._settings, self._scratch),
            context=self._context,
            rank=self._rank,
        )
        if self.ends.strings:
            keywords["tokenizer"] = process.tokenizer_folder(self.base, self._scratch)
            keywords["skip_tokenizer_init"] = False
        self._link = self._opened()
        trained = [name for name in self.slots.names if self.slots.is_trainable(name)]
        prompt = Prompt(0, "", (self.base.pad_id,))
        requests = [
            RolloutRequest(-1, name, [prompt], 1, Sampling(max_output_tokens=2), 0)
            for name in (None, *trained[:1])
        ]
        question = self._question([self._part(request) for request in requests])
        level = self._vllm.sleep_level if can_sleep(self.base) else 0
        self._ask("start", {"llm": keywords, "level": level, **question})

    def _opened(self) -> Child:
        variables = process.environment(self.base, self._settings)
        return Child(process.find_vllm(self._vllm), variables, self._folders, self._vllm.timeout)

    def _ask(self, operation: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._link is not None, "a closed engine is not used again"
        return self._link.ask(operation, values)

    def _part(self, request: RolloutRequest) -> _Part:
        published = None if request.adapter is None else self._adapters.current(request.adapter)
        finite = published is None or published.finite
        exact = finite and means_policy(request.sampling, self.base.vocabulary, self._vllm)
        return _Part(request, published if finite else None, finite=finite, exact=exact)

    def _question(self, parts: Sequence[_Part]) -> dict[str, Any]:
        ids, lengths, limits, seeds = array("i"), array("i"), array("i"), array("q")
        described: list[dict[str, Any]] = []
        for part in parts:
            request, adapter = part.request, part.adapter
            for prompt in request.prompts:
                room = self._context - len(prompt.token_ids)
                ids.extend(prompt.token_ids)
                lengths.append(len(prompt.token_ids))
                limits.append(min(request.sampling.max_output_tokens, room))
            seeds.extend(request.row_keys())
            sampling = sampling_keywords(request.sampling, self.ends, self._vllm)
            described.append(
                {
                    "adapter": adapter and [str(adapter.folder), adapter.id, str(adapter.folder)],
                    "prompts": len(request.prompts),
                    "samples": request.samples,
                    "sampling": sampling,
                }
            )
        arrays = {"ids": ids, "lengths": lengths, "limits": limits, "seeds": seeds}
        return {"requests": described, "remove": self._adapters.removed(), **arrays}

    def _groups(
        self, parts: Sequence[_Part], answer: Mapping[str, Any]
    ) -> Iterator[list[CompletionGroup]]:
        """Yield the groups of each request; the rows of the answer are in the same order."""
        tokens, values = answer["tokens"].tolist(), answer["logprobs"].tolist()
        ends = list(accumulate(answer["lengths"], initial=0))
        cut_rows = [(self.ends.cut(tuple(tokens[a:b])), a) for a, b in pairwise(ends)]
        rows = [(ids, tuple(values[a : a + len(ids)])) for ids, a in cut_rows]
        texts = self.ends.texts([ids for ids, _ in rows])
        outputs = iter(zip(rows, texts, answer["stopped"], strict=True))

        def completion(part: _Part) -> Completion:
            (ids, row_logprobs), (text, ended), stopped = next(outputs)
            logprobs = row_logprobs if part.exact or any(map(math.isnan, row_logprobs)) else None
            if not part.finite:
                logprobs = (math.nan,) * len(ids)
            return Completion(ids, text, logprobs, bool(stopped or ended))

        for part in parts:
            agent, samples = part.request.agent, range(part.request.samples)
            yield [
                CompletionGroup(agent, prompt, tuple(completion(part) for _ in samples))
                for prompt in part.request.prompts
            ]


@dataclass(frozen=True)
class _Part:
    """The request of one agent, as it is sent to vLLM.

    `adapter` is None for the base. If an agent's weights are not `finite`, the base samples
    instead, and the log-probs are NaN. `exact` says whether vLLM's log-probs are those of the
    policy; see `means_policy`.
    """

    request: RolloutRequest
    adapter: Published | None
    finite: bool
    exact: bool


def means_policy(sampling: Sampling, vocabulary: int, settings: VLLMSettings) -> bool:
    """Return whether vLLM's log-probs are `log_softmax(logits / temperature)`.

    vLLM reports log-probs of the distribution that it draws from, so filters and penalties change
    them: top_p 0.9 by 0.1 nats, a repetition penalty of 1.3 by 1.4 nats, min_output_tokens by 8
    nats.
    """
    return (
        sampling.temperature >= LEAST_TEMPERATURE
        and sampling.top_p >= 1
        and not 0 < sampling.top_k < vocabulary
        and sampling.min_p <= 0
        and sampling.repetition_penalty == 1
        and sampling.min_output_tokens <= 0
        and not settings.shapes_draws
    )


def sampling_keywords(
    sampling: Sampling, ends: StopRules, settings: VLLMSettings
) -> dict[str, Any]:
    """Return the keywords of `vllm.SamplingParams` that all rows of an agent share."""
    keywords: dict[str, Any] = {
        "n": 1,
        "temperature": sampling.temperature if sampling.temperature >= LEAST_TEMPERATURE else 0.0,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
        "min_tokens": sampling.min_output_tokens,
        "stop_token_ids": sorted(ends.ids),
        "detokenize": bool(ends.strings),
        # Always, because values that are not finite appear here.
        "logprobs": 0,
    }
    if sampling.top_k > 0:
        keywords["top_k"] = sampling.top_k
    if ends.strings:
        keywords["stop"] = list(ends.strings)
    return keywords


_IDS = count(1)
"""Ids for vLLM: 1, 2, ...; shared, because one vLLM may serve several engines of a process."""


@dataclass(frozen=True)
class Published:
    """One version of an adapter, as it is sent to vLLM.

    `folder` is in PEFT's format; its path is also the adapter's name for vLLM. No `id` or `folder`
    is used twice. An adapter that is not `finite` is not written.
    """

    version: int
    id: int
    folder: Path
    finite: bool


@final
class PublishedAdapters:
    """Writes an adapter when it is first needed, and removes its old versions.

    vLLM has separate caches by an adapter's name, path and id: an old id with a new path gives the
    old weights, and an old name the old keys and values. So all three are new for each version.
    """

    def __init__(self, slots: AdapterSlots, folder: Path) -> None:
        self._slots = slots
        self._folder = folder
        self._current: dict[str, Published] = {}
        self._removed: list[int] = []

    def current(self, name: str) -> Published:
        """Return the current version of an adapter; write it if it is new."""
        version = self._slots.versions[name]
        published = self._current.get(name)
        if published is None or published.version != version:
            self._drop(name)
            published = self._current[name] = self._write(name, version)
        return published

    def removed(self) -> list[int]:
        """Return the ids that vLLM can drop, including those of removed slots; each id once."""
        for name in self._current.keys() - set(self._slots.names):
            self._drop(name)
        removed, self._removed = self._removed, []
        return removed

    def forget(self) -> None:
        """Drop all versions, so that adapters are written again for a newly started vLLM."""
        for name in list(self._current):
            self._drop(name)
        self._removed.clear()

    def _drop(self, name: str) -> None:
        published = self._current.pop(name, None)
        if published is not None and published.finite:
            self._removed.append(published.id)
            shutil.rmtree(published.folder, ignore_errors=True)

    def _write(self, name: str, version: int) -> Published:
        number = next(_IDS)
        folder = self._folder / f"{name}-{version}-{number}"
        state = folded(self._slots, name)
        finite = all(bool(value.isfinite().all()) for value in state.values())
        if finite:
            folder.mkdir(parents=True)
            write_tensors(state, folder / WEIGHTS, {"format": "pt"})
            (folder / CONFIG).write_text(json.dumps(_config(self._slots, name), sort_keys=True))
        return Published(version, number, folder, finite)


def folded(slots: AdapterSlots, name: str) -> dict[str, Tensor]:
    """Return an adapter's weights by PEFT's keys, with one LoRA rank and scale 1 in all layers.

    vLLM has no ranks and scales per layer. So the scale of a layer is multiplied into its matrix B,
    and smaller ranks are padded with zeros.
    """
    rank = rank_of(slots, name)
    state = slots.state(name)
    for key, layer in slots.layers.items():
        key_a, key_b = (f"{key}.lora_{part}.weight" for part in "AB")
        if key_a in state:
            missing = rank - state[key_a].shape[0]
            state[key_a] = torch.nn.functional.pad(state[key_a], (0, 0, 0, missing))
            scaled = state[key_b] * layer.scaling[name]
            state[key_b] = torch.nn.functional.pad(scaled, (0, missing))
    return state


def _config(slots: AdapterSlots, name: str) -> dict[str, object]:
    """Return the contents of adapter_config.json for a folded adapter."""
    rank = rank_of(slots, name)
    modules = {key.split(".")[-3] for key in slots.shapes(name)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": slots.base.name,
        "inference_mode": True,
        "bias": "none",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
    }


def _folder(below: str | None, fast: Path | None = None) -> Path:
    """Create a private folder for this engine in `below`.

    If `below` is None, create it in `fast` if `fast` is writable, else among the temporary files.
    """
    if below is not None:
        place = Path(below).expanduser()
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"engine.vllm.adapter_folder: {below!r} cannot be created: {error.strerror}; give "
                "another folder, or leave it out"
            ) from error
    else:
        place = fast if fast is not None and os.access(fast, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="evo-grpo-vllm-", dir=place))


def _remove(owner: int, folders: Sequence[Path]) -> None:
    for folder in folders if os.getpid() == owner else ():
        shutil.rmtree(folder, ignore_errors=True)
