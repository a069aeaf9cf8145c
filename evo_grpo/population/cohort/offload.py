"""With `engine.offload_adapters`, keeps in host memory the agents that are not computing.

Agents compute part by part (see `deal`). The weights, references and AdamW's moments of the current
part are on the device, and those of the next part are copied there meanwhile. All other agents are
in host memory, pinned on CUDA.

A slot is never divided between device and host. Its parameters stay the same objects, and only
their `data` changes, so copies, checkpoints and changes of rank work wherever the slot is.
"""

import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any, final

import torch
from torch import Tensor

from evo_grpo.errors import RunFailedError
from evo_grpo.model.lora.slots import AdapterSlots
from evo_grpo.model.out_of_memory import is_out_of_memory
from evo_grpo.population.cohort.state import AgentState, References
from evo_grpo.types import Slot

#: Bytes to whose multiples the tensors of a slot are aligned in host memory.
_ALIGNED = 16


@dataclass(frozen=True)
class _Prefetched:
    """A copy of a slot on the device; the slot itself is still in host memory.

    `tensors` are the copies. `version` is the slot's version and `moments` are its AdamW moments at
    the time of the copy, to detect later changes.
    """

    version: int
    moments: Sequence[Tensor]
    tensors: Sequence[Tensor]


@final
class Offload:
    """Moves agents between a device and host memory; new slots begin in host memory.

    `agents` is a mapping to which its owner may add agents later. `order` has the parts into which
    the agents of this process are divided, in the order in which they compute.
    """

    def __init__(
        self, slots: AdapterSlots, references: References, agents: Mapping[int, AgentState]
    ) -> None:
        self.slots = slots
        self.order: Sequence[Sequence[Slot]] = ()
        self._references = references
        self._agents = agents
        self._ahead: dict[str, _Prefetched] = {}
        self._device = slots.base.device
        self._on_cuda = self._pins = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._on_cuda else None
        slots.begin_on_host = True

    def bring(self, agents: Iterable[int]) -> None:
        """Bring agents, with all other agents of their part, to the device; prefetch the next part.

        All other agents return to host memory. Nothing is copied for slot -1, the base alone.
        """
        computing = set(agents)
        numbers = [i for i, part in enumerate(self.order) if not computing.isdisjoint(part)]
        following = self.order[(numbers[-1] + 1) % len(self.order)] if numbers else ()
        present = self._names(computing.union(*(self.order[i] for i in numbers)))
        upcoming = self._names(following)
        leaving = [n for n in self.slots.names if n not in present and self._device in self._at(n)]
        coming = [name for name in present if self._at(name) != {self._device}]
        if not (leaving or coming):
            return  # the next part is on its way
        self._wait()  # before the memory of copies that are dropped has another use
        needed = {**present, **upcoming}
        self._ahead = {n: ahead for n, ahead in self._ahead.items() if n in needed}
        self.slots.derived.clear()  # stacked weights of agents that leave
        with _explaining_memory_error(
            "the host", "use a machine with more memory, or lower population.size"
        ):
            for name in leaving:
                self._install(name, self._on_host(name))
        if self._on_cuda:  # reads of host memory do not wait for copies by themselves
            torch.cuda.current_stream(self._device).synchronize()
        with _explaining_memory_error("the device", "raise engine.shards, or lower model.lora.r"):
            for name in coming:
                self._install(name, self._fetched(name))
        self._wait()
        self._fetch_ahead([name for name in upcoming if name not in present])

    def _fetch_ahead(self, names: Sequence[str]) -> None:
        """Begin to copy slots to the device, as far as the device's memory suffices."""
        try:
            for name in names:
                if not self._is_fresh(name):
                    self._ahead.pop(name, None)  # free it first
                    version, moments = self.slots.versions[name], self._moments(name)
                    self._ahead[name] = _Prefetched(version, moments, self._to_device(name))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise

    def _fetched(self, name: str) -> Sequence[Tensor]:
        fresh = self._is_fresh(name)
        ahead = self._ahead.pop(name, None)
        return ahead.tensors if fresh and ahead is not None else self._to_device(name)

    def _is_fresh(self, name: str) -> bool:
        """Return whether a slot was prefetched and has not changed since."""
        ahead = self._ahead.get(name)
        if ahead is None or ahead.version != self.slots.versions[name]:
            return False
        now = self._moments(name)
        return len(now) == len(ahead.moments) and all(map(is_, now, ahead.moments))

    def _to_device(self, name: str) -> list[Tensor]:
        tensors = self._tensors(name)
        # Allocate on the computing stream: memory is free once its computation ends.
        copies = [torch.empty(x.shape, dtype=x.dtype, device=self._device) for x in tensors]
        with self._beside():
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=self._on_cuda)
        return copies

    def _on_host(self, name: str) -> list[Tensor]:
        tensors = self._tensors(name)
        sizes = [-(-x.nbytes // _ALIGNED) * _ALIGNED for x in tensors]
        # One allocation for all: pinning takes long, and the system limits the number of areas.
        areas = zip(self._host_bytes(sum(sizes)).split(sizes), tensors, strict=True)
        copies = [area[: x.nbytes].view(x.dtype).view(x.shape) for area, x in areas]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=self._on_cuda)
        return copies

    def _host_bytes(self, count: int) -> Tensor:
        """Return `count` bytes of host memory, pinned if possible."""
        if self._pins:
            try:
                return torch.empty(count, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                warnings.warn(
                    f"engine.offload_adapters: the system pins no further {count:,} bytes of host "
                    f"memory ({_first_line(error)}); other agents are kept in memory that is not "
                    "pinned, and copying them takes longer. Raise the limit of locked memory "
                    "(ulimit -l), or lower population.size",
                    UserWarning,
                    stacklevel=2,
                )
        return torch.empty(count, dtype=torch.uint8)

    def _install(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors of a slot by `tensors`, which are in the order of `_tensors`."""
        remaining = iter(tensors)
        for parameter in self.slots.parameters(name):
            parameter.data = next(remaining)
        for values in self._states(name):
            for key in values:
                values[key] = next(remaining)

    def _tensors(self, name: str) -> list[Tensor]:
        return [p.detach() for p in self.slots.parameters(name)] + self._moments(name)

    def _moments(self, name: str) -> list[Tensor]:
        return [value for values in self._states(name) for value in values.values()]

    def _states(self, name: str) -> list[dict[str, Any]]:
        """Return AdamW's state of each parameter of a slot; skip parameters without state."""
        for agent in self._agents.values():
            if agent.adapter == name:
                state = agent.optimizer.state
                return [state[p] for p in self.slots.parameters(name) if p in state]
        return []

    def _names(self, agents: Iterable[int]) -> dict[str, None]:
        """Return the names of the slots of this process's `agents` and of their references."""
        states = [self._agents[slot] for slot in sorted(agents) if slot in self._agents]
        here = [state for state in states if state.adapter in self.slots.names]
        names = [name for s in here for name in (s.adapter, self._references.of(s)) if name]
        return dict.fromkeys(names)

    def _at(self, name: str) -> set[torch.device]:
        """Return the devices of a slot's tensors: one, or two after Ctrl-C interrupted a move."""
        return {tensor.device for tensor in self._tensors(name)}

    @contextmanager
    def _beside(self) -> Generator[None]:
        """Run copies on a second CUDA stream, beside the computation; see `_wait`."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _wait(self) -> None:
        """Make later computation wait for the copies that have begun."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


@contextmanager
def _explaining_memory_error(where: str, remedy: str) -> Generator[None]:
    """Replace an allocator's error by an error that names the setting and the remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunFailedError(
            f"engine.offload_adapters: {where} ran out of memory while agents were copied to it "
            f"({_first_line(error)}); {remedy}, and resume the run"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
