"""Defines the cohort: the parts that the agents of a population share, and the agents' states.

The classes of the API (GRPO, Population) refer to a cohort; the round loop uses it directly.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from peft import LoraConfig

from evo_grpo.envs.protocol import Environment, Play, StartT, check_prompts
from evo_grpo.envs.rewards.weights import searched_weights, with_weights_of
from evo_grpo.envs.single_turn import ReasoningGym
from evo_grpo.errors import ConfigError
from evo_grpo.learn.learner import Learner
from evo_grpo.learn.rows import AgentBatch, AgentTraining
from evo_grpo.model.base import SharedBase
from evo_grpo.model.lora.load import copy_slot
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.population.cohort.offload import Offload
from evo_grpo.population.cohort.state import (
    AgentState,
    References,
    adapter_config,
    copy_tensors,
    inherit,
    put_tensors,
    resize,
    with_choices,
)
from evo_grpo.population.ranks.team import Team, deal, order_transfers
from evo_grpo.population.turns import Overlap
from evo_grpo.population.zero import together
from evo_grpo.population.zero.engine import ZeroEngine
from evo_grpo.rollout.engine import EngineFactory, RolloutEngine, RolloutRequest, make_engine
from evo_grpo.rollout.sampling import Sampling
from evo_grpo.schema.hparams import Hparams
from evo_grpo.seeding import derive
from evo_grpo.settings import AgentSettings
from evo_grpo.settings.algorithm import DEFAULT_OUTPUT_TOKENS
from evo_grpo.types import CompletionGroup, Member, Prompt, Slot


class Cohort:
    """N agents over one base, with the parts that they share.

    `objects` names the parts that are objects instead of settings: model, tokenizer, lora. `engine`
    creates the rollout engine at its first use. The agents are divided among the ranks of `team`.
    `accelerator` is the user's Accelerator, with the DeepSpeed stage of the settings.
    """

    def __init__(
        self,
        base: SharedBase,
        lora: LoraConfig,
        settings: AgentSettings,
        *,
        objects: Sequence[str] = (),
        engine: EngineFactory | None = None,
        team: Team | None = None,
        accelerator: Any = None,  # noqa: ANN401 -- accelerate is untyped
    ) -> None:
        self.base = base
        self.settings = settings
        base.row_limit.settle(settings.algorithm.max_model_len)
        self.objects = tuple(objects)
        self.hp_config = settings.search_space()
        self.seed = settings.seed
        self.slots = AdapterSlots(base, lora, derive(self.seed, "lora"), settings.lora.target_sets)
        self.references = References(self.slots)
        self.learner = Learner(self.slots, settings.algorithm, settings.engine)
        self.team = team or Team()
        self.overlap = Overlap(settings.engine.overlap, self.shards)
        self.accelerator = accelerator
        self._zero: ZeroEngine | None = None
        self.agents: dict[int, AgentState] = {}
        offloads = settings.engine.offload_adapters and base.device.type not in ("cpu", "mps")
        self.offload = Offload(self.slots, self.references, self.agents) if offloads else None
        self.archive: AgentState | None = None
        #: Plans after the last rounds of calls; see `api.unapplied`.
        self.unapplied: list[object] = []
        self._make_engine = engine or make_engine
        self._engine: RolloutEngine | None = None
        #: Number of the next new slot.
        self.next_slot = 0
        #: Id of the next new member.
        self.next_member = 0
        #: Calls so far that are not part of a round, each with its own random stream.
        self.calls = 0
        self._hint: int | None = None
        #: The environment's weights of the reward functions whose weights are searched, by name.
        self._reward_weights: dict[str, float] = {}

    @property
    def shards(self) -> int:
        """Number of shards; the agents of a shard generate and learn in one batch."""
        return 1 if self.trains_jointly else self.settings.engine.parts()

    @property
    def trains_jointly(self) -> bool:
        """Whether every rank has all agents, and all ranks train each agent together."""
        return self.settings.engine.zero is not None

    def begin(
        self, env: Environment[StartT], starts: Sequence[Sequence[StartT]], sizes: Sequence[int]
    ) -> Play:
        """Begin a play of an environment; if ranks train together, only the first rank plays."""
        if self.trains_jointly and self.team.size > 1:
            return together.FirstRankPlay(lambda: env.begin(starts, sizes), self.team)
        return env.begin(starts, sizes)

    def parts_here(self, slots: Sequence[Slot]) -> list[tuple[Slot, ...]]:
        """Divide the agents in `slots` that this rank has into parts, one batch for each shard."""
        shard = attrgetter("shard")
        agents = sorted((self.agents[slot] for slot in filter(self.is_local, slots)), key=shard)
        parts = [tuple(agent.slot for agent in part) for _, part in groupby(agents, shard)]
        if self.offload is not None:
            self.offload.order = parts
        return parts

    def place(self, slots: Sequence[Slot], *, weights: bool = True) -> None:
        """Distribute the agents of the next round among shards, and move each to its shard's rank.

        All ranks make the same call. Without `weights`, moved agents lose their weights.
        """
        ranks: dict[Slot, int] = {}
        for shard, members in enumerate(deal(slots, self.shards)):
            for slot in members:
                self.agents[slot].shard = shard
                ranks[slot] = shard % self.team.size  # in turn: the last shards may be empty
        self.move(ranks, weights=weights)

    def is_local(self, slot: int) -> bool:
        """Return whether this rank has an agent's weights."""
        return self._has(self.agents[slot].rank)

    def _has(self, rank: int) -> bool:
        return self.trains_jointly or rank == self.team.rank

    @property
    def max_output_tokens(self) -> int:
        """Largest limit of completion tokens of any agent."""
        longest = self.settings.algorithm.longest_output(self.hp_config)
        return longest or self._hint or DEFAULT_OUTPUT_TOKENS

    def output_tokens(self, hparams: Hparams) -> int:
        """Return the limit of an agent's completions, in tokens."""
        return hparams.max_output_tokens or self.max_output_tokens

    @property
    def engine(self) -> RolloutEngine:
        """The rollout engine, which is created at its first use and woken at each use."""
        engine = self.open_engine()
        engine.wake()
        return engine

    def open_engine(self) -> RolloutEngine:
        """Return the rollout engine; create it if there is none."""
        if self._engine is None:
            engine = self._make_engine(self.slots, self.settings)
            divided = self.trains_jointly and self.team.size > 1
            self._engine = together.DividedSampling(engine, self.team) if divided else engine
        return self._engine

    def close_engine(self) -> None:
        """Close the rollout engine, if there is one; the next use creates a new one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def reduced(self) -> dict[str, int]:
        """Return engine settings that were lowered to save memory, with their current values."""
        decoded: int | None = getattr(self._engine, "reduced", None)
        bounds = {
            "max_tokens_per_microbatch": self.learner.reduced,
            "max_decode_rows": decoded,
        }
        return {name: value for name, value in bounds.items() if value is not None}

    def take_decodes_by(self) -> tuple[str, ...]:
        """Return and forget the names of implementations that have sampled since the last call."""
        names: set[str] = getattr(self._engine, "decodes_by", set[str]())
        decodes_by = tuple(sorted(names))
        names.clear()
        return decodes_by

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt plus completion; None if neither model nor settings limit it."""
        lengths = [self.settings.algorithm.max_model_len, self.base.context_length]
        return min((length for length in lengths if length), default=None)

    def adapt_to(self, env: Environment[Any]) -> None:
        """Adopt the defaults of an environment, check its prompts, and load its reward models.

        The defaults are the tokenizer if the base has none, the completion length, and, if they are
        searched and an agent lacks them, reward weights and hyperparameters of names.
        """
        self.overlap.takes_turns(env)
        check_prompts(env, self.hp_config)
        self._reward_weights = searched_weights(env, self.hp_config)
        for agent in self.agents.values():
            hparams = with_choices(agent.hparams, self.hp_config)
            agent.hparams = with_weights_of(env, hparams, self._reward_weights)
        if self.base.tokenizer is None:
            self.base.tokenizer = env.tokenizer
        self._hint = env.max_output_tokens
        self.learner.limit_output(self.max_output_tokens)
        if self.context_length is not None:
            limit = (self.max_output_tokens,) if isinstance(env, ReasoningGym) else ()
            env.limit_context(self.context_length, *limit)
        if isinstance(env, ReasoningGym):
            for scorer in env.scorers:
                scorer.prepare(str(self.base.device))

    def next_call(self) -> int:
        """Count a call outside of rounds; return its number, which gives it a random stream."""
        self.calls += 1
        return self.calls

    def add(self, hparams: Hparams, shard: int = 0) -> AgentState:
        """Add an agent with the policy of the base, on the rank of a shard."""
        member = Member(id=self.next_member, agent=Slot(self.next_slot))
        self.next_member += 1
        state = self.add_spare(member, hparams, shard % self.team.size)
        state.shard = shard
        return state

    def add_spare(self, member: Member, hparams: Hparams, rank: int = 0) -> AgentState:
        """Add a slot that does not train, for weights that are kept or compared."""
        slot = Slot(self.next_slot)
        self.next_slot += 1
        hparams = hparams.with_weights(self._reward_weights)
        if self._has(rank):
            self.slots.add(f"actor_{slot}", adapter_config(self.slots, hparams))
        # The engine copies the shape of the first agent, and is made before any pass.
        if self.trains_jointly and self._zero is None:
            self._zero = together.make_zero_engine(
                self.slots, self.settings, self.team, self.accelerator
            )
            self.learner.updates = together.EngineSteps(self._zero, self.team)
        optimizer = self.fresh_optimizer(slot, hparams, rank)
        self.agents[slot] = AgentState(slot, hparams, optimizer, member, rank=rank)
        if self.settings.algorithm.separate_reference:
            self.add_reference(slot)
        return self.agents[slot]

    def remove(self, slot: int) -> None:
        """Remove an agent and free its slot's memory."""
        if len(self.agents) == 1:
            raise ConfigError(f"agent {slot}: is the only one; add another before removing it")
        state = self.agents.pop(slot)
        if self._has(state.rank):
            self._free(state)

    def _free(self, state: AgentState) -> None:
        names = [state.adapter, *([state.reference] if state.has_reference else ())]
        for name in names:
            if len(self.slots.names) > 1:  # a rank without agents keeps its last slot
                self.slots.remove(name)

    def add_reference(self, slot: int) -> None:
        """Give an agent a frozen reference slot equal to the base, if it has none."""
        state = self.agents[slot]
        if not state.has_reference:
            if self.is_local(slot):
                self.references.add(state)
            state.has_reference = True

    def freeze_reference(self, slot: int) -> None:
        """Copy the current policy of an agent into its reference slot; add the slot if missing."""
        self.add_reference(slot)
        state = self.agents[slot]
        copy_slot(self.slots, state.adapter, state.reference)

    def fresh_optimizer(
        self, slot: int, hparams: Hparams, rank: int | None = None
    ) -> torch.optim.Optimizer:
        """Return an AdamW (with ZeRO, a `ZeroOptimizer`) without moments over one slot.

        `rank` is the rank that has the slot; None means the rank in the agent's state.
        """
        here = self.is_local(slot) if rank is None else self._has(rank)
        # "agent" tells `update_lr` that learn sets this group's lr.
        placeholder = torch.nn.Parameter(torch.empty(0))
        parameters = self.slots.parameters(f"actor_{slot}") if here else [placeholder]
        group = {"params": parameters, "initial_lr": hparams.lr, "agent": True}
        if self._zero is not None:
            return together.ZeroOptimizer({**group, "lr": hparams.lr}, self._zero, f"actor_{slot}")
        return torch.optim.AdamW([group], lr=hparams.lr, weight_decay=0.0, fused=True)

    def check_hparams(self, hparams: Hparams) -> None:
        """Raise a ConfigError if no agent of this cohort can train with the hyperparameters."""
        self.learner.loss.of_agent(hparams)

    def set_hparams(self, slot: int, hparams: Hparams) -> None:
        """Set an agent's hyperparameters, after `check_hparams`; resize its adapter if necessary.

        The optimizer gets the new lr; `resize` says what becomes of AdamW's moments.
        """
        self.check_hparams(hparams)
        state = self.agents[slot]
        if self.is_local(slot):
            resize(self.slots, state, hparams, partial(self.fresh_optimizer, slot, hparams))
        state.hparams = hparams

    def copy(self, source: int, target: int, *, inherit_optimizer: bool = True) -> None:
        """Copy the weights of agent `source` to agent `target`; set its hyperparameters afterwards.

        Until then the target has its old ones, which may not suit the copied adapter. With
        `inherit_optimizer`, AdamW's moments are copied too, else the target has none. All ranks
        make this call; the agents may be on two ranks.
        """
        parent, child = self.agents[source], self.agents[target]
        hparams = child.hparams
        if parent.has_reference:
            self.add_reference(target)
        elif child.has_reference:
            if self.is_local(target):
                self.slots.remove(child.reference)
            child.has_reference = False
        if parent.rank == child.rank:
            self._copy_here(parent, child, inherit_optimizer=inherit_optimizer)
        else:
            self._send(parent, child, moments=inherit_optimizer)
        child.hparams = hparams
        child.history, child.rank_error = [], None
        child.counters = parent.counters

    def _copy_here(self, parent: AgentState, child: AgentState, *, inherit_optimizer: bool) -> None:
        if not self.is_local(child.slot):
            return
        copy_slot(self.slots, parent.adapter, child.adapter)
        if parent.has_reference:
            copy_slot(self.slots, parent.reference, child.reference)
        # The overwritten agent's moments must not outlive it.
        child.optimizer = self.fresh_optimizer(child.slot, child.hparams)
        if inherit_optimizer:
            inherit(parent.optimizer, child.optimizer)

    def _send(self, source: AgentState, target: AgentState, *, moments: bool) -> None:
        if source.rank == self.team.rank:
            self.team.send(copy_tensors(self.slots, source, moments=moments), target.rank)
        elif target.rank == self.team.rank:
            fresh = partial(self.fresh_optimizer, target.slot, target.hparams)
            put_tensors(self.slots, target, self.team.receive(source.rank), fresh)

    def move(self, ranks: Mapping[Slot, int], *, weights: bool = True) -> None:
        """Move agents to their new ranks, with weights and moments; all ranks make the same call.

        Without `weights` no tensors are sent; use this for agents that are overwritten next.
        """
        departed: list[AgentState] = []
        for slot, rank in order_transfers(ranks.items(), lambda m: (self.agents[m[0]].rank, m[1])):
            state = self.agents[slot]
            if state.rank == rank:
                continue
            before = replace(state)
            state.rank = rank
            if self.is_local(slot):
                if state.adapter not in self.slots.names:
                    self.slots.add(state.adapter, adapter_config(self.slots, state.hparams))
                if state.has_reference and state.reference not in self.slots.names:
                    self.references.add(state)
            if weights:
                self._send(before, state, moments=True)
            hparams = before.hparams
            if not weights or not self.is_local(slot):
                state.optimizer = self.fresh_optimizer(slot, hparams)
            if before.rank == self.team.rank:
                departed.append(before)
        # Free slots last: PEFT needs an adapter, and this rank has received its new agents by now.
        for state in departed:
            self._free(state)

    def set_member(self, slot: int, member: Member) -> None:
        """Set the member of a slot; a new member starts with an empty history."""
        state = self.agents[slot]
        if state.member.id != member.id:
            state.history = []
        mutated = state.member.id != member.id and bool(member.mutation.changes)
        state.member = member
        self.next_member = max(self.next_member, member.id + 1)
        if mutated:
            self.mutated(slot)

    def reserve_members(self, first_free: int) -> None:
        """Use no member id below `first_free`."""
        self.next_member = max(self.next_member, first_free)

    def generate(
        self,
        slots: Sequence[int],
        prompts: Sequence[Prompt],
        *,
        stream: Sequence[str | int],
        samples: int | None = None,
        sampling: Sampling | None = None,
    ) -> list[list[CompletionGroup]]:
        """Sample the same prompts for many agents in one call; return their groups, one per prompt.

        The slot is appended to `stream`. None as `samples` or `sampling` takes each agent's values.
        """
        requests = [self.request(slot, stream, samples, sampling) for slot in slots]
        return self.rollout([replace(request, prompts=prompts) for request in requests])

    def rollout(self, requests: Sequence[RolloutRequest]) -> list[list[CompletionGroup]]:
        """Sample the completions of all requests, with their agents on the device."""
        if self.settings.engine.rollout_settings.shares_base:
            self.bring(request.agent for request in requests)
        return self.engine.rollout(requests)

    def bring(self, slots: Iterable[int]) -> None:
        """Bring agents to the device; with `engine.offload_adapters`, move others to the host."""
        if self.offload is not None:
            self.offload.bring(slots)

    def request(
        self,
        slot: int,
        stream: Sequence[str | int],
        samples: int | None = None,
        sampling: Sampling | None = None,
    ) -> RolloutRequest:
        """Return the sampling request of an agent, without prompts; see `generate`."""
        state = self.agents[slot]
        return RolloutRequest(
            agent=slot,
            adapter=state.adapter,
            prompts=(),
            samples=samples or state.hparams.group_size,
            sampling=sampling or self.sampling(state.hparams),
            seed=derive(self.seed, *stream, slot),
        )

    def sampling(self, hparams: Hparams) -> Sampling:
        """Return the sampling parameters of an agent in training."""
        return Sampling.of(
            hparams,
            max_output_tokens=self.output_tokens(hparams),
            min_output_tokens=self.settings.algorithm.min_output_tokens,
        )

    def learn(
        self, batches: Sequence[AgentBatch], *, stream: Sequence[str | int]
    ) -> list[dict[str, float]]:
        """Take one GRPO step with the agent of each batch, in one forward and one backward."""
        states = [self.agents[batch.agent] for batch in batches]
        self.bring(state.slot for state in states)
        learning: list[AgentTraining] = []
        for s in states:
            reference = self.references.of(s)
            learning.append(AgentTraining(s.adapter, reference, s.hparams, s.optimizer))
            s.prepare_step(self.settings.algorithm.lr_schedule)
        self.slots.together = tuple(s.adapter for s in states) if self.shards > 1 else ()
        if self._engine is not None:
            self._engine.sleep()
        learn = partial(
            self.learner.learn,
            seed=derive(self.seed, *stream),
            # Rows that came without an engine have no sampler to correct for.
            exact_sampler=self._engine is None or self._engine.exact,
        )
        if self._zero is None:
            metrics = learn(learning, batches)
        else:
            metrics = together.learn_in_turns(learn, learning, batches, self.team)
        for state, values in zip(states, metrics, strict=True):
            state.steps += 1
            state.last = values
        return metrics

    def mutated(self, slot: int) -> None:
        """Call the hooks of an agent whose hyperparameters were mutated."""
        for hook in self.agents[slot].hooks:
            hook()

    def check_slot(self, slot: int) -> AgentState:
        """Return an agent's state; raise a ConfigError for an empty slot."""
        if slot not in self.agents:
            raise ConfigError(f"agent {slot}: expected one of {sorted(self.agents)}")
        return self.agents[slot]
