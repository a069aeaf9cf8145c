"""The built-in engine: one prefill per (agent, prompt), one decode loop for the whole population.

Prompts are padded on the right. Causal attention does not see the padding, so the prefill needs no
mask; the decode mask hides the columns between a prompt's end and the first decoded column.
Position ids follow the real lengths. Models that padding would mislead, and rows longer than a
sliding window outside of the Llama family, are decoded one prompt length at a time.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import final

import numpy as np
import torch
from torch import Tensor

from evo_grpo.model import alone, base, ends
from evo_grpo.model.forward.choice import give_up_kernels, open_decoder
from evo_grpo.model.forward.fused import FusedForward, RowLayout, population_forward
from evo_grpo.model.forward.sending import send
from evo_grpo.model.llama.cuda.generate import KernelDecoder
from evo_grpo.model.llama.cuda.operators import KernelError
from evo_grpo.model.llama.decode import LlamaDecoder
from evo_grpo.model.llama.departures import can_join_layers
from evo_grpo.model.llama.weights import LlamaWeights
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.model.out_of_memory import free_cached, halved, is_out_of_memory
from evo_grpo.rollout.engine import RolloutEngine, RolloutRequest
from evo_grpo.rollout.native.ability import mixes_lengths, window_of
from evo_grpo.rollout.native.decoder import Decoder, ModuleDecoder, check_attention
from evo_grpo.rollout.native.graphs import StepGraphs
from evo_grpo.rollout.native.loop import DecodeLoop, refills_rows
from evo_grpo.rollout.native.rows import Output, RowQueue
from evo_grpo.settings import AgentSettings
from evo_grpo.settings.engine import Kernels
from evo_grpo.types import Completion, CompletionGroup

#: Most rows in one call of the decode loop per row decoded at once, where rows wait: all of them
#: have draws and output in memory, and finished ones are lost if memory runs out.
_WAVES = 8


_DECODES_BY: Mapping[type, str] = {KernelDecoder: "kernels", LlamaDecoder: "layers"}


@final
class NativeEngine(RolloutEngine):
    """Samples for all agents at once with the shared base and the current adapters.

    `settings` limit the context, and the rows and prompts decoded at once; None takes the defaults.
    If a call has more rows or prompts, its prompts are split into pieces, each with prompts of all
    agents.
    """

    exact = True

    def __init__(self, slots: AdapterSlots, settings: AgentSettings | None = None) -> None:
        settings = settings or AgentSettings()
        longest = settings.algorithm.max_model_len
        self.slots = slots
        self.base: base.SharedBase = slots.base
        self.ends = ends.StopRules(slots.base, settings.algorithm)
        self.max_rows = self._wanted_rows = settings.engine.decode_rows
        self.max_prompts = settings.engine.max_decode_prompts
        # Processes that compute together cannot repeat a call that ran out of memory.
        self.repeats = settings.engine.each_alone
        self._context = min(self.base.context_length or 1 << 30, longest or 1 << 30)
        self._window = window_of(self.base)
        with_graphs = settings.engine.cuda_graphs and self.base.device.type == "cuda"
        self._graphs = StepGraphs(self.base.device) if with_graphs else None
        self._kernels: Kernels = settings.engine.kernels
        self._by_modules = not self.base.specialized
        self.decodes_by: set[str] = set()
        self._choose_path()

    def _choose_path(self) -> None:
        """Choose joined layers if the model's code is that of its type, else decoding by modules.

        The model's code may change between calls; each change is probed once.
        """
        self._specialized = not self._by_modules and can_join_layers(self.base, self.slots.layers)
        self.mixes_lengths = True
        if not self._specialized:
            check_attention(self.base)
            self.mixes_lengths = mixes_lengths(self.base, self.slots.layers)

    @torch.no_grad()
    @alone.excluding_loads()
    def rollout(self, requests: Sequence[RolloutRequest]) -> list[list[CompletionGroup]]:
        """Sample the completions of all requests; see `RolloutEngine`."""
        for request in requests:
            request.check(self._context, self.base.vocabulary)
        if not self._by_modules:
            self._choose_path()
        if self._specialized or self._in_one_batch(requests):
            return self._sampled(requests)
        return self._by_length(requests)

    def _in_one_batch(self, requests: Sequence[RolloutRequest]) -> bool:
        """Return whether prompts of several lengths can share a batch."""
        if not self.mixes_lengths:
            return False
        if not self._window:
            return True
        longest = max((len(p.token_ids) for r in requests for p in r.prompts), default=0)
        output = max((r.sampling.max_output_tokens for r in requests), default=0)
        # `ModuleDecoder` keeps all columns, but a local layer attends only to its window.
        return longest + output <= self._window

    def _by_length(self, requests: Sequence[RolloutRequest]) -> list[list[CompletionGroup]]:
        """Sample the prompts of each length separately, with the same draws as in one batch."""
        lengths = sorted({len(p.token_ids) for r in requests for p in r.prompts})
        by_place: list[dict[int, CompletionGroup]] = [{} for _ in requests]
        for length in lengths:
            places = [
                [i for i, p in enumerate(r.prompts) if len(p.token_ids) == length] for r in requests
            ]
            part = [
                request.part(positions) for request, positions in zip(requests, places, strict=True)
            ]
            sampled = self._sampled(part, equal=True)
            for request_groups, positions, groups in zip(by_place, places, sampled, strict=True):
                request_groups.update(zip(positions, groups, strict=True))
        return [
            [request_groups[i] for i in range(len(request_groups))] for request_groups in by_place
        ]

    def _sampled(
        self, requests: Sequence[RolloutRequest], *, equal: bool = False
    ) -> list[list[CompletionGroup]]:
        """Sample the requests in pieces of prompts; pieces are larger where rows can wait."""
        groups: list[list[CompletionGroup]] = [[] for _ in requests]
        refills = self._specialized and not self.max_prompts and refills_rows(self.base.device)
        per_prompt = sum(r.samples for r in requests)
        longest = max((len(r.prompts) for r in requests), default=0)
        start = 0
        while start < longest:
            step = max(
                1, min(self.max_rows // max(1, per_prompt), self.max_prompts or self.max_rows)
            )
            stop = start + step * (_WAVES if refills else 1)
            part = {
                number: request.part(range(start, min(stop, len(request.prompts))))
                for number, request in enumerate(requests)
                if start < len(request.prompts)
            }
            try:
                places = step * per_prompt if refills else None
                sampled = self._completed(list(part.values()), places, equal=equal)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                most = max(len(r.prompts) for r in part.values())
                self._decode_fewer(per_prompt, min(step, most), error)
            else:
                start = stop
                for number, request_groups in zip(part, sampled, strict=True):
                    groups[number] += request_groups
                continue
            free_cached()
        return groups

    def _decode_fewer(self, per_prompt: int, prompts: int, error: BaseException) -> None:
        self.max_rows = halved(
            "engine.max_decode_rows",
            self.max_rows,
            per_prompt * prompts,
            error,
            "lower population.size or algorithm.group_size, or shorten algorithm.max_output_tokens",
            unit=per_prompt,
            repeats=self.repeats,
        )

    @property
    def reduced(self) -> int | None:
        """Number of rows decoded at once, if lack of memory has reduced it; else None."""
        return self.max_rows if self.max_rows < self._wanted_rows else None

    def _completed(
        self, requests: Sequence[RolloutRequest], places: int | None, *, equal: bool
    ) -> list[list[CompletionGroup]]:
        """Sample; sample again by torch's operations if a kernel cannot be compiled or launched."""
        try:
            return self._rollout(requests, places, equal=equal)
        except KernelError as error:
            give_up_kernels(self.base, error)
        return self._rollout(requests, places, equal=equal)

    def _rollout(
        self, requests: Sequence[RolloutRequest], places: int | None, *, equal: bool
    ) -> list[list[CompletionGroup]]:
        layout = RowLayout(
            tuple(r.adapter for r in requests), tuple(len(r.prompts) for r in requests)
        )
        columns = max(len(p.token_ids) for r in requests for p in r.prompts)
        # No step is past the limit of all rows: a model may fail at positions beyond its context.
        columns_out = max(
            min(r.sampling.max_output_tokens, self._context - len(p.token_ids))
            for r in requests
            for p in r.prompts
        )
        total = columns + columns_out
        with population_forward(self.slots.layers, layout, frozen=True) as fused:
            ids, lengths = self._pad(requests, columns)
            queue = RowQueue(
                requests,
                ids,
                lengths,
                places=places,
                steps=columns_out,
                vocabulary=self.base.vocabulary,
                context=self._context,
            )
            decoder = self._decoder(fused, total, equal=equal)
            loop = DecodeLoop(
                self.base,
                fused,
                decoder,
                queue,
                ends=self.ends,
                context=self._context,
                graphs=self._graphs if self._specialized and not equal else None,
            )
            output = loop.run()
            self.decodes_by.add(_DECODES_BY.get(type(decoder), "modules"))
        return self._groups(requests, output, loop.stops.lengths)

    def _decoder(self, fused: FusedForward, columns: int, *, equal: bool) -> Decoder:
        if equal or not self._specialized:
            return ModuleDecoder(self.base, equal=equal)
        weights = LlamaWeights.of(self.base, self.slots.layers)
        return open_decoder(weights, fused, columns, self._kernels)

    def _pad(self, requests: Sequence[RolloutRequest], columns: int) -> tuple[Tensor, Tensor]:
        """Return the padded prompts: ids (NP, columns) and lengths (NP,)."""
        prompts = [p.token_ids for r in requests for p in r.prompts]
        ids = np.full((len(prompts), columns), self.base.pad_id)
        for row, tokens in zip(ids, prompts, strict=True):
            row[: len(tokens)] = tokens
        sent = send([ids, np.array([len(tokens) for tokens in prompts])], self.base.device)
        return sent[0], sent[1]

    def _groups(
        self,
        requests: Sequence[RolloutRequest],
        output: Output,
        stopped: Mapping[int, int],
    ) -> list[list[CompletionGroup]]:
        """Return the groups of all requests; `stopped` has lengths of rows cut by a stop string."""
        tokens = output.tokens.t().cpu()
        counts: list[int] = (tokens >= 0).sum(1).tolist()
        for row, length in stopped.items():  # more may be drawn in the block that has the string
            counts[row] = length
        ids = [row[:n] for row, n in zip(tokens.tolist(), counts, strict=True)]
        values = [row[:n] for row, n in zip(output.logprobs.t().tolist(), counts, strict=True)]
        completions = (
            Completion(tuple(i), text, tuple(v), ended=ended)
            for i, v, (text, ended) in zip(ids, values, self.ends.texts(ids), strict=True)
        )
        return [
            [CompletionGroup(r.agent, p, tuple(islice(completions, r.samples))) for p in r.prompts]
            for r in requests
        ]
