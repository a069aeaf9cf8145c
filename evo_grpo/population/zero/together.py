"""Trains each agent in all processes, which divide its sampling, optimizer and steps.

Every process has all agents and all rows, and makes the same decisions. The rows of a micro-batch
are divided among processes. DeepSpeed sums the gradients; metrics are summed at the end of a learn
call. Each process samples a part of the prompts and receives all completions; the first process
runs the environment and the rewards.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NoReturn, TypeVar, final

import torch
from peft import LoraConfig
from torch import Tensor

from evo_grpo.envs.protocol import Ask, Experience, Play
from evo_grpo.errors import ConfigError, RunFailedError
from evo_grpo.learn.metrics import MetricSums
from evo_grpo.learn.rows import AgentBatch, AgentTraining
from evo_grpo.learn.updates import Bucket
from evo_grpo.model.loading import pick_device
from evo_grpo.model.lora.configs import with_targets
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.population.ranks.team import Team
from evo_grpo.population.zero.engine import (
    TURN,
    LocalMoments,
    ZeroEngine,
    fill,
    own_accelerator,
    part_of,
)
from evo_grpo.rollout.engine import RolloutEngine, RolloutRequest
from evo_grpo.schema.hparams import LORA
from evo_grpo.schema.search_space import HyperparameterConfig
from evo_grpo.settings import AgentSettings
from evo_grpo.types import CompletionGroup


@final
class ZeroOptimizer(torch.optim.Optimizer):
    """AdamW of one agent: its lr and this process's part of its moments.

    The engine takes the steps. The parameter group has lr, betas and weight_decay; moments are
    padded with zeros to the engine's shapes.
    """

    def __init__(self, group: dict[str, Any], engine: ZeroEngine, adapter: str) -> None:
        super().__init__([group], {"lr": group["lr"], "weight_decay": 0.0, "betas": (0.9, 0.999)})
        self.engine, self.adapter = engine, adapter
        self.moments: LocalMoments = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole moments in the format of torch's AdamW; all processes call this."""
        groups = super().state_dict()["param_groups"]
        whole = self.engine.whole_moments(self.moments)
        places = {key: place for place, key in enumerate(self.engine.shapes)}
        shapes = self.engine.slots.shapes(self.adapter).items() if whole else ()
        state = {
            place: {
                name: value if name == "step" else part_of(value, shape).clone()
                for name, value in whole[places[key]].items()
            }
            for place, (key, shape) in enumerate(shapes)
        }
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments in the format of torch's AdamW; lr and other options are not loaded.

        Parameters without moments get zeros, and the step count of the other parameters.
        """
        keys = [*self.engine.slots.shapes(self.adapter)]
        by_key = {keys[place]: values for place, values in state_dict["state"].items()}
        example = next(iter(by_key.values()), {})
        whole: dict[int, dict[str, Tensor]] = {}
        for place, (key, shape) in enumerate(self.engine.shapes.items() if by_key else ()):
            whole[place] = {}
            for name, like in example.items():
                value = by_key[key][name] if key in by_key else None
                whole[place][name] = like if name == "step" else like.new_empty(shape)
                if name != "step":
                    fill(whole[place][name], value)
        self.moments = self.engine.own_moments(whole)

    def step(self, closure: Any = None) -> NoReturn:  # noqa: ANN401 -- torch's signature
        """Raise an error, because the engine holds the gradients."""
        del closure
        raise RunFailedError(
            "optimizer.step: expected the steps to be taken by learn, which gives DeepSpeed the "
            "gradients, got a call; call agent.learn(experiences)"
        )


def widest(slots: AdapterSlots, space: HyperparameterConfig) -> LoraConfig:
    """Return a LoRA configuration with the largest rank and all layers that any agent may have."""
    names, rank = space.names(), f"{LORA}r"
    ranks = [slots.config.r, *(slots.lora_config(name).r for name in slots.names)]
    ranks += [int(space[rank].max)] if rank in names else []
    layers = set[str]().union(*map(slots.modules, slots.names))
    targets = space[f"{LORA}target_modules"].choices if f"{LORA}target_modules" in names else ()
    layers |= {module for name in targets or () for module in slots.target_sets.modules(str(name))}
    config = with_targets(slots.config, layers)
    config.r = max(ranks)
    return config


def learn_in_turns(
    learn: Callable[[list[AgentTraining], list[AgentBatch]], list[dict[str, float]]],
    agents: Sequence[AgentTraining],
    batches: Sequence[AgentBatch],
    team: Team,
) -> list[dict[str, float]]:
    """Let agents learn one after the other, each in its turn on the engine; return their metrics.

    `learn` belongs to a learner whose updates are `EngineSteps`. All processes call this with equal
    agents and batches.
    """
    digest = hashlib.sha256()
    for row in (row for batch in batches for row in batch.rows):
        parts = (row.token_ids.tobytes(), row.mask.tobytes(), str(row.advantage).encode())
        digest.update(b"".join(parts))
    check_equal(team, digest.hexdigest(), "learn")
    metrics: list[dict[str, float]] = []
    with team.exchange():
        for agent, batch in zip(agents, batches, strict=True):
            optimizer = agent.optimizer
            assert isinstance(optimizer, ZeroOptimizer), "the cohort makes them"
            engine = optimizer.engine
            engine.begin(agent.adapter, optimizer.moments, optimizer.param_groups[0])
            metrics += learn([replace(agent, adapter=TURN, stream=agent.adapter)], [batch])
            optimizer.moments = engine.end(agent.adapter)
    return metrics


def make_zero_engine(
    slots: AdapterSlots,
    settings: AgentSettings,
    team: Team,
    accelerator: Any = None,  # noqa: ANN401 -- accelerate is untyped
) -> ZeroEngine:
    """Build the DeepSpeed engine of a cohort, after its first agent; all processes call this.

    `accelerator` is the user's, with DeepSpeed's plugin for the stage; None creates one.
    """
    stage, device = settings.engine.zero, pick_device(settings.engine.device)
    assert stage is not None, "engine.zero"
    if slots.base.dtype is torch.float16:
        raise ConfigError(
            f"engine.zero: expected a base in bfloat16 or float32, got {slots.base.name!r} in "
            "float16, whose gradients need a loss scale that DeepSpeed's engine does not know; "
            "set engine.dtype to bfloat16, or engine.zero to null"
        )
    active = accelerator if accelerator is not None else own_accelerator(stage, device)
    if active.num_processes != team.size:
        raise ConfigError(
            f"engine.zero: expected an accelerator of {team.size} processes, as many as were "
            f"started, got one of {active.num_processes}; start all with one launcher: torchrun, "
            "accelerate launch or evo-grpo run --nproc"
        )
    if stage == 3:
        slots.base.specialized = False  # stage 3 has no whole weights to join
    engine = ZeroEngine(slots, widest(slots, settings.search_space()), stage, active, device)
    if stage == 3 and team.size > 1:
        # Completions differ in length, so one process may decode when another has finished.
        slots.base.passes = team.in_lockstep(engine.idle_forward, _never)
    return engine


def check_equal(team: Team, digest: str, call: str) -> None:
    """Check by a digest that all processes that train together pass equal data to `call`."""
    if team.size > 1 and len(set(team.gather(digest))) > 1:
        raise RunFailedError(
            f"{call}: expected the same on all {team.size} processes, which divide it among "
            "themselves, got different prompts or rewards; give all of them the same data and "
            "seeds, and rewards of the first one"
        )


@final
class EngineSteps:
    """The `Updates` of a learner that takes its optimizer steps on the adapter of the engine."""

    def __init__(self, engine: ZeroEngine, team: Team) -> None:
        self.engine, self.team = engine, team
        self.parts, self.plain = engine.ranks, True

    def share(self, bucket: Bucket, *, last: bool) -> tuple[Bucket, bool]:
        """Return this rank's rows of a micro-batch and True; if it has none, a row and False."""
        self.engine.micro_batch(last=last)
        rows = bucket[self.engine.rank :: self.parts]
        # Every process makes the same passes, because each pass sums gradients.
        return (rows, True) if rows else (bucket[:1], False)

    def backward(self, loss: Tensor) -> None:
        """See `Updates`."""
        self.engine.backward(loss)

    def step(self, agents: Sequence[tuple[AgentTraining, dict[str, float]]]) -> None:
        """See `Updates`."""
        ((agent, entry),) = agents
        self.engine.step(agent.hparams.max_grad_norm)
        entry["grad_norm"] += self.engine.grad_norm
        if self.engine.stepped:
            entry["updates"] += 1
        else:
            entry["failed"] = 1.0

    def total(self, sums: MetricSums) -> None:
        """See `Updates`."""
        if self.team.size == 1:
            return
        parts = self.team.gather((_on_cpu(sums.values), _on_cpu(sums.peaks)))
        sums.values = _merged([values for values, _ in parts], torch.add, sums.device)
        sums.peaks = _merged([peaks for _, peaks in parts], torch.maximum, sums.device)


def _never() -> None:
    raise AssertionError("backwards are DeepSpeed's, and all processes have equally many")


def _on_cpu(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in values.items()}


def _merged(
    parts: Sequence[Mapping[str, Tensor]],
    merge: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
) -> dict[str, Tensor]:
    """Merge the sums of all processes; a process that counted no row has no sums."""
    names = dict.fromkeys(name for part in parts for name in part)
    sums = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: reduce(merge, values).to(device) for name, values in sums.items()}


T = TypeVar("T")


@final
class DividedSampling(RolloutEngine):
    """Samples every n-th prompt of each agent on each of n processes; see `RolloutEngine`.

    All processes pass the same requests.
    """

    def __init__(self, engine: RolloutEngine, team: Team) -> None:
        self.engine, self.team, self.exact = engine, team, engine.exact
        self.decodes_by = engine.decodes_by

    def rollout(self, requests: Sequence[RolloutRequest]) -> list[list[CompletionGroup]]:
        """Sample the completions of every request; see `RolloutEngine`."""
        check_equal(self.team, _digest(requests), "rollout")
        parts = self.team.gather(self._mine(requests))
        groups: list[list[CompletionGroup]] = []
        for number, request in enumerate(requests):
            in_order: list[CompletionGroup | None] = [None] * len(request.prompts)
            for rank, part in enumerate(parts):
                in_order[self._first(number, rank) :: self.team.size] = part[number]
            groups.append([group for group in in_order if group is not None])
        return groups

    def sleep(self) -> None:
        """See `RolloutEngine`."""
        self.engine.sleep()

    def wake(self) -> None:
        """See `RolloutEngine`."""
        self.engine.wake()

    def close(self) -> None:
        """See `RolloutEngine`."""
        self.engine.close()

    def _first(self, number: int, rank: int) -> int:
        """Return the position of the first prompt in request `number` that a rank samples."""
        return (rank + number) % self.team.size

    def _mine(self, requests: Sequence[RolloutRequest]) -> list[list[CompletionGroup]]:
        by_request: list[list[CompletionGroup]] = [[] for _ in requests]
        parts: list[tuple[int, RolloutRequest]] = []
        for number, request in enumerate(requests):
            start = self._first(number, self.team.rank)
            part = request.part(range(start, len(request.prompts), self.team.size))
            if part.prompts:
                parts.append((number, part))
        sampled = self.engine.rollout([request for _, request in parts])
        for (number, _), groups in zip(parts, sampled, strict=True):
            by_request[number] = groups
        return by_request


@final
class FirstRankPlay:
    """A play on the first rank, which sends asks and experiences to the other ranks; see `Play`.

    The user's rewards and environments may be nondeterministic, but ranks that train an agent
    together need equal results. All ranks make the same calls; only the first calls `begin`.
    """

    def __init__(self, begin: Callable[[], Play], team: Team) -> None:
        self._team = team
        with team.sharing_errors():
            self._play = begin() if team.rank == 0 else None

    def ask(self) -> Ask | None:
        """See `Play`."""
        return self._on_first(lambda play: play.ask())

    def tell(self, groups: Sequence[Sequence[CompletionGroup]]) -> None:
        """See `Play`."""
        self._on_first(lambda play: play.tell(groups))

    def experiences(self) -> list[Experience]:
        """See `Play`."""
        return self._on_first(lambda play: list(play.experiences()))

    def _on_first(self, call: Callable[[Play], T]) -> T:
        def result(_: object) -> T:
            assert self._play is not None, "the first rank has the play"
            return call(self._play)

        return self._team.agree(None, result)


def _digest(requests: Sequence[RolloutRequest]) -> str:
    digest = hashlib.sha256()
    for request in requests:
        prompts = [(prompt.token_ids, prompt.index) for prompt in request.prompts]
        digest.update(repr((replace(request, prompts=()), prompts)).encode())
    return digest.hexdigest()
