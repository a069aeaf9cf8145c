"""Ranks over torch.distributed, started by accelerate, torchrun, Slurm or `evo-grpo run --nproc`.

Messages, of kilobytes, go over a gloo group on the CPU, independent of the devices' backend: gloo
detects at once that a process has ended. A thread waits for each message, so that the rank can stop
when `evo_grpo.population.ranks.heartbeat` reports a lost rank. Tensors are sent separately from the
pickle of a value, because pickling an adapter takes longer than sending it over 10 Gbit/s.
"""

import atexit
import io
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, NoReturn, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from evo_grpo.envs.rewards.functions import Board
from evo_grpo.errors import ConfigError, EvoGrpoError, LostRankError, OtherRankError
from evo_grpo.escaping import error_text
from evo_grpo.population.ranks import heartbeat
from evo_grpo.population.ranks.team import STORE, Lockstep, Team, is_one_of_several

#: Ranks wait for each other without a practical limit; the heartbeat reports a lost rank.
PATIENCE = timedelta(days=365)
START_VARIABLE = "EVO_GRPO_RANK_START_MINUTES"
"""Environment variable with the minutes within which all ranks must start."""
START_MINUTES = 10.0
"""Minutes within which all ranks must start if `START_VARIABLE` is not set."""
TO_SHARE = timedelta(minutes=1)
"""How long a rank that failed before the ranks connected tries to send its error to the others."""

T = TypeVar("T")
R = TypeVar("R")

_THREAD = "exchange between ranks"
#: One per process, like the process group of torch.distributed.
_heartbeat: heartbeat.Heartbeat | None = None
#: Boards of this process; each is a part of the store.
_boards = 0
_AT_ONCE = 1000
"""Greatest number of texts that are written to the store in one message."""


@final
class Ranks(Team):
    """The ranks of a run with several processes, connected by a gloo group; see `Team`."""

    def __init__(self, rank: int, size: int, group: Any, heartbeat: heartbeat.Heartbeat) -> None:  # noqa: ANN401 -- torch's group
        self.rank = rank
        self.size = size
        self._group = group
        self._heartbeat = heartbeat
        self._lockstep: Lockstep | None = None
        self._broken = False
        self._shared: BaseException | None = None

    def agree(self, part: T, decide: Callable[[list[T]], R]) -> R:
        """See `Team`."""
        return self._exchange(part, decide)

    @contextmanager
    def sharing_errors(self) -> Generator[None]:
        """See `Team`."""
        try:
            yield
        except BaseException as error:  # Ctrl-C too: the others wait for this rank
            if not self._is_shared(error):
                self._exchange(None, lambda _: None, error)
            raise

    def send(self, values: object, to: int) -> None:
        """See `Team`."""

        def transfer() -> None:
            pickled, tensors = pickle_without_tensors(values)
            shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
            dist.send_object_list([pickled, shapes], to, group=self._group)
            _wait(dist.isend(tensor, to, group=self._group) for tensor in tensors)

        self._meet(transfer)

    def receive(self, source: int) -> Any:  # noqa: ANN401 -- what was sent
        """See `Team`."""
        parts: list[Any] = [None, None]
        received: list[Tensor] = []

        def transfer() -> None:
            dist.recv_object_list(parts, source, group=self._group)
            received.extend(torch.empty(shape, dtype=dtype) for shape, dtype in parts[1])
            _wait(dist.irecv(tensor, source, group=self._group) for tensor in received)

        self._meet(transfer)
        return unpickle_with_tensors(parts[0], received)

    def board(self) -> Board:
        """See `Team`."""
        global _boards
        _boards += 1
        store: Any = distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage] -- no public one
        return _Board(distributed_c10d.PrefixStore(f"board-{_boards}", store.clone()), self)

    def in_lockstep(
        self, join_forward: Callable[[], None], join_backward: Callable[[], None]
    ) -> Lockstep:
        """See `Team`."""
        naming = self.naming_the_lost_rank(None)
        self._lockstep = Lockstep(self._highest, naming(join_forward), naming(join_backward))
        return self._lockstep

    @contextmanager
    def exchange(self) -> Generator[None]:
        """See `Team`."""
        self._broken = True
        try:
            yield
        except (OtherRankError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise self._other_ended(error) if _of_exchange(error) else error from error
        self._broken = False

    def _exchange(
        self, part: T, decide: Callable[[list[T]], R], error: BaseException | None = None
    ) -> R:
        """Send a part and receive the decision; with an error, send the error and raise it."""
        self._finish_passes(error)
        message = part, None if error is None else error_text(error)
        if self.rank == 0:
            messages: list[Any] = [None] * self.size
            self._meet(lambda: dist.gather_object(message, messages, group=self._group), error)
            failed_ranks = [n for n, (_, text) in enumerate(messages) if text is not None]
            answer: list[Any] = [None, ""]
            if failed_ranks:
                answer[1] = self._failed(failed_ranks[0], messages[failed_ranks[0]][1])
            else:
                try:
                    answer[0] = decide([value for value, _ in messages])
                except BaseException as failed:  # Ctrl-C too: the others wait for an answer
                    error, answer[1] = failed, self._failed(0, error_text(failed))
            self._meet(lambda: dist.broadcast_object_list(answer, src=0, group=self._group), error)
        else:
            answer = [None, None]

            def send_and_receive() -> None:
                dist.gather_object(message, dst=0, group=self._group)
                dist.broadcast_object_list(answer, src=0, group=self._group)

            self._meet(send_and_receive, error)
        if error is not None:
            self._shared = error
            raise error
        if answer[1]:
            raise OtherRankError(answer[1])
        return answer[0]

    def _failed(self, rank: int, text: str) -> str:
        return f"rank {rank} of {self.size} failed: {text}"

    def _is_shared(self, error: BaseException) -> bool:
        """Return whether the other ranks already know of an error or of its cause."""
        cause: BaseException | None = error
        while cause is not None:
            if cause is self._shared or isinstance(cause, OtherRankError):
                return True
            cause = cause.__cause__ or cause.__context__
        return False

    def _highest(self, number: int) -> int:
        shared = torch.tensor([number])
        self._meet(lambda: dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group))
        return int(shared)

    def _meet(self, exchange: Callable[[], object], error: BaseException | None = None) -> None:
        """Call `exchange` and wait for it without a time limit, unless a rank is lost.

        If the exchange fails and this rank has an `error`, raise that error.
        """
        result: Future[object] = Future()

        def run() -> None:
            try:
                result.set_result(exchange())
            except BaseException as error:
                result.set_exception(error)

        broken, self._broken = self._broken, True  # also after Ctrl-C: a message may be half sent
        threading.Thread(target=run, name=_THREAD, daemon=True).start()
        if why := self._heartbeat.wait(lambda s: bool(wait_for([result], s).done)):
            raise self._lost(why)
        with self.naming_the_lost_rank(error):
            result.result()
        self._broken = broken

    def _finish_passes(self, error: BaseException | None) -> None:
        """Take part in the remaining passes of other ranks before an exchange.

        After an error of this rank in the middle of a pass, or of an exchange, raise it instead:
        the other ranks then detect that this rank ends.
        """
        broken = self._broken or (self._lockstep is not None and self._lockstep.broken)
        if error is not None and broken:
            raise self._other_ended(error) if _of_exchange(error) else error
        if self._lockstep is not None:
            self._lockstep.idle()

    def check_for_lost_ranks(self) -> None:
        """Raise LostRankError if a rank is known to be lost, because this rank may wait for it."""
        if why := self._heartbeat.lost():
            raise self._lost(why)

    @contextmanager
    def naming_the_lost_rank(self, error: BaseException | None = None) -> Generator[None]:
        """If an exchange in the context fails, raise `error`, or else an error on the lost rank."""
        try:
            yield
        except (OtherRankError, torch.OutOfMemoryError):
            raise
        except RuntimeError as failure:
            raise error or self._other_ended(failure) from failure

    def _other_ended(self, failure: BaseException) -> LostRankError:
        why = self._heartbeat.closed() or f"another rank has ended ({error_text(failure)})"
        return self._lost(why)

    def _lost(self, why: str) -> LostRankError:
        return LostRankError(
            f"rank {self.rank} of {self.size} ends, since {why}; finished rounds are in the run "
            "folder; continue with: evo-grpo resume RUN"
        )


@final
class _Board:
    """A `Board` in torch.distributed's store, through which the ranks connected."""

    def __init__(self, store: Any, ranks: Ranks) -> None:  # noqa: ANN401 -- torch exports no Store
        self._store = store
        self._ranks = ranks

    def swap(self, name: str, old: str, new: str) -> str:
        """See `Board`."""
        with self._ranks.naming_the_lost_rank():
            return self._store.compare_set(name, old, new).decode()

    def write(self, texts: Mapping[str, str]) -> None:
        """See `Board`."""
        names = list(texts)
        with self._ranks.naming_the_lost_rank():
            for start in range(0, len(names), _AT_ONCE):
                part = names[start : start + _AT_ONCE]
                self._store.multi_set(part, [texts[name] for name in part])

    def read(self, names: Sequence[str]) -> Sequence[str]:
        """See `Board`."""
        self._ranks.check_for_lost_ranks()
        with self._ranks.naming_the_lost_rank():
            return [text.decode() for text in self._store.multi_get(list(names))]


def pickle_without_tensors(value: object) -> tuple[bytes, list[Tensor]]:
    """Return the pickle of a value without its plain tensors, and these tensors, contiguous."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def unpickle_with_tensors(pickled: bytes, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401 -- what was taken apart
    """Return the value that `pickle_without_tensors` pickled, with `tensors` inserted."""
    return _Unpickler(io.BytesIO(pickled), tensors).load()


@final
class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: object) -> int | None:
        if type(obj) is not Tensor or obj.requires_grad:  # it is more than its values
            return None
        self.tensors.append(obj.contiguous())
        return len(self.tensors) - 1


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def _wait(begun: Iterable[dist.Work | None]) -> None:
    """Begin all transfers, then wait for all, because one by one each would cost a round trip."""
    for work in list(begun):
        if work is not None:
            work.wait()


def _of_exchange(error: BaseException) -> bool:
    """Return whether an error in the middle of a pass came from the exchange between ranks."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def end_process(code: int) -> None:
    """End this process at once with an exit code if a thread still waits for other ranks.

    Otherwise the wait may return while Python shuts down, which aborts the process.
    """
    if _is_waiting():
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] -- os._exit leaves them out
        _flush_and_exit(code)


@atexit.register
def _end_failed() -> None:
    """End this process at once if a script ends with an error while a thread waits for ranks."""
    if _is_waiting() and hasattr(sys, "last_type"):
        _flush_and_exit(1)


def _is_waiting() -> bool:
    return any(thread.name in (_THREAD, heartbeat.THREAD) for thread in threading.enumerate())


def _flush_and_exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class _NotMetError(ConfigError):
    """Raised if the ranks have not connected in time."""


@contextmanager
def sharing_early_errors() -> Generator[None]:
    """If this rank fails before the ranks are connected, send its error to the other ranks."""
    try:
        yield
    except EvoGrpoError as error:
        # Do not wait a second time for ranks that have not connected in time.
        if (
            is_one_of_several()
            and not dist.is_initialized()
            and not isinstance(error, _NotMetError)
        ):
            # The others may not have started.
            with suppress(ConfigError), find_team(TO_SHARE).sharing_errors():
                raise error
        raise


def find_team(to_meet: timedelta | None = None) -> Team:
    """Return the ranks of the run that this process belongs to; connect them at the first call.

    `to_meet` is the time that the other ranks may take to start; None uses START_VARIABLE.
    """
    if not is_one_of_several():
        return Team()
    minutes = heartbeat.positive_from_environment(START_VARIABLE, START_MINUTES, "minutes")
    to_meet = to_meet or timedelta(minutes=minutes)
    if not dist.is_initialized():
        try:
            _join(to_meet)
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            raise _NotMetError(
                f"ranks: expected {os.environ.get('WORLD_SIZE')} processes that reach each other "
                f"at MASTER_ADDR={os.environ.get('MASTER_ADDR')} "
                f"MASTER_PORT={os.environ.get('MASTER_PORT')} within "
                f"{to_meet.total_seconds() / 60:g} minutes, got: {error_text(error)}; start all of "
                "them with one launcher (evo-grpo run --nproc, torchrun or accelerate launch), "
                f"choose a free port, or set {START_VARIABLE} where they need longer to start"
            ) from error
    global _heartbeat
    begins = _heartbeat is None
    if _heartbeat is None:
        # Use the store over which the ranks connected: it needs no further port. It has no public
        # name. Clone the client, because torch locks the original while it waits for a rank.
        store: Any = distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage] -- no public one
        store = distributed_c10d.PrefixStore("evo-grpo", store.clone())
        rank, size = dist.get_rank(), dist.get_world_size()
        limit = heartbeat.positive_from_environment(
            heartbeat.VARIABLE, heartbeat.SECONDS, "seconds"
        )
        _heartbeat = heartbeat.Heartbeat(rank, size, store, limit)
    # Every rank has written its first sign before it can create this group.
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    if begins:
        _heartbeat.start()
    return Ranks(dist.get_rank(), dist.get_world_size(), group, _heartbeat)


def _join(to_meet: timedelta) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    # Do not use accelerate's PartialState, which tries MPI first on a CPU and sets the number of
    # threads; it adopts an existing group. No data moves between devices, so NCCL is not needed.
    store, rank, size = _loopback_store(to_meet), -1, -1
    if store is not None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=to_meet)


def _loopback_store(to_meet: timedelta) -> Any:  # noqa: ANN401 -- torch exports no Store
    """Return a store that listens on the loopback alone, if the ranks meet there; else None.

    torch's own store accepts connections on all interfaces. None too if a launcher has a store.
    """
    try:
        address = socket.gethostbyname(os.environ["MASTER_ADDR"])
    except OSError:  # torch knows more kinds of addresses, and its error is reported
        return None
    if not ip_address(address).is_loopback:
        return None
    loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage] -- documented there
    port, size = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    if os.environ["RANK"] != "0":
        return store(address, port, size, timeout=to_meet)
    bound = os.environ.pop(STORE, "")
    listener = socket.socket(fileno=int(bound)) if bound else socket.create_server((address, port))
    os.set_inheritable(listener.fileno(), False)
    fd = listener.detach()
    return store(address, port, size, is_master=True, timeout=to_meet, master_listen_fd=fd)
