"""What crosses the network in a run of several processes, by kind, over what the kernel counts.

    taskset -c 0 python experiments/bench/wire.py [--quick] [--ranks 2 4 16] [--parts counts pairs]

counts   the default task on gloo ranks of this machine, with and without a folder that all see.
         Counted is what each rank receives from others; in a network namespace of its own, where
         `unshare` may make one, the loopback carries nothing else, and its counters check the sum.
pairs    whether ranks 2 and 3 wait for a transfer between ranks 0 and 1, and how fast one is
paper    a round of many agents on many cards, on paper: a tournament draws the plan, no copy is
         refused, and each transfer begins when both of its ranks have made those before it
cards    a round of 8 and 32 agents on 1 to 8 cards of one machine, on paper: computed seconds
         as `evo-grpo check --gpu` counts them, and the children that are sent
"""

import argparse
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

OWN_NETWORK = "BENCH_OWN_NETWORK"


def in_own_network() -> bool:
    """Start this script again where the loopback is its own; return whether it is."""
    if OWN_NETWORK not in os.environ and shutil.which("unshare") and shutil.which("ip"):
        alone = ["unshare", "--map-root-user", "--net"]
        if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0:
            up = 'ip link set lo up && exec "$@"'
            os.environ[OWN_NETWORK] = "1"
            os.execvp("unshare", [*alone, "sh", "-c", up, "sh", sys.executable, *sys.argv])
    return OWN_NETWORK in os.environ


OWN = in_own_network()
os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import Report, parser, quiet  # noqa: E402 -- after the network is chosen

quiet()

import numpy as np  # noqa: E402 -- after the threads are fixed, as what follows
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rounds import DEFAULT  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

from evo_grpo import settings as configuration  # noqa: E402
from evo_grpo.evolve.select.tournament import TournamentSelection  # noqa: E402
from evo_grpo.population.plan import RankReport  # noqa: E402
from evo_grpo.population.ranks import heartbeat, ranks  # noqa: E402
from evo_grpo.population.ranks.ranks import pickle_without_tensors  # noqa: E402
from evo_grpo.population.ranks.team import deal, order_transfers  # noqa: E402
from evo_grpo.population.steps import CheckpointFiles  # noqa: E402
from evo_grpo.training.run import run  # noqa: E402
from evo_grpo.types import Score  # noqa: E402

FORK = multiprocessing.get_context("fork")  # torch is imported once
SECONDS = 600
#: Rounds that keep all agents, and one after which half of them leave.
ROUNDS = 4
SETTINGS = (
    "population.steps_per_round=2", "algorithm.group_size=4", "algorithm.prompts_per_step=2",
    "evolve.fitness.prompts=64", "evolve.fitness.test_prompts=8", "evolve.significance=null",
    "engine.device=cpu",
)  # fmt: skip
#: What an exchange is for, by the function that makes it.
KINDS = {
    "play_round": "reports and plans",
    "wait_while_paused": "reports and plans",
    "copy": "children",
    "move": "agents that move",
    "finalists": "finalists, at the end",
    "check_same_run": "comparison of inputs",
    "check_same_base": "comparison of inputs",
    "agree_on_path": "comparison of inputs",
}
OTHER = "other, at the start and the end"
#: Ethernet, IP and TCP headers of a packet of the loopback, with time stamps.
HEADERS = 66
PREFIX = len("default_pg/evo-grpo/")


class Counts:
    """Bytes and messages that this rank receives from others, by kind and direction."""

    def __init__(self) -> None:
        """Count from now on, in this process."""
        self.kind = OTHER
        self.bytes, self.messages = Counter[str](), Counter[str]()
        self.sizes: list[dict[str, float]] = []
        for name in ("all_gather", "gather", "broadcast", "irecv"):
            self._wrap(name, getattr(self, f"_{name}"))
        for name in ("_exchange", "send", "receive"):
            self._name(name)
        self.watch_signs()

    def add(self, what: str, size: int, messages: int = 1) -> None:
        """Count messages of a kind."""
        self.bytes[what] += size
        self.messages[what] += messages

    def _wrap(self, name: str, count: Callable[..., None]) -> None:
        """Count the tensors of the calls that all exchanges consist of."""
        call = getattr(distributed_c10d, name)

        def counted(*given: Any, **named: Any) -> Any:  # noqa: ANN401
            done = call(*given, **named)
            count(*given, **named)
            return done

        for module in (distributed_c10d, dist):  # the package's calls, and those within torch
            setattr(module, name, counted)

    def _all_gather(self, parts: Sequence[torch.Tensor], part: torch.Tensor, **_: object) -> None:
        others = len(parts) - 1
        self.add(f"{self.kind}: sizes", others * part.nbytes, others)

    def _gather(
        self, part: torch.Tensor, gather_list: Sequence[torch.Tensor] | None, **_: object
    ) -> None:
        others = len(gather_list) - 1 if gather_list else 0
        self.add(f"{self.kind}: to the first rank", others * part.nbytes, others)

    def _broadcast(self, part: torch.Tensor, group_src: int, **_: object) -> None:
        if dist.get_rank() != group_src:
            self.add(f"{self.kind}: from the first rank", part.nbytes)

    def _irecv(self, part: torch.Tensor, *_: object, **__: object) -> None:
        self.add(f"{self.kind}: between two ranks", part.nbytes)

    def _name(self, name: str) -> None:
        """Let an exchange be known by the function that makes it."""
        call = getattr(ranks.Ranks, name)

        def named(team: ranks.Ranks, *given: Any) -> Any:  # noqa: ANN401
            self.kind = _kind()
            if name == "_exchange" and isinstance(given[0], RankReport):
                self._look_into(given[0], first=team.rank == 0)
            if name == "send":
                self.sizes.append(_of_agent(given[0]))
            return call(team, *given)

        setattr(ranks.Ranks, name, named)

    def _look_into(self, report: RankReport, *, first: bool) -> None:
        """Measure the parts of a report."""
        whole, files = _size(report), _size(report.files)
        lean = _size(replace(report, files=CheckpointFiles()))
        if not first and report.files.unwritten:
            self.add("(of them checkpoints)", whole - lean, 0)
        if not first:
            self.add("(of them reports, without checkpoints)", lean, 0)
        agents = list(report.agents.values())
        parts = ("score", "evaluation", "tally")
        alone = {one: float(np.mean([_size(getattr(a, one)) for a in agents])) for one in parts}
        samples = float(np.mean([_size(a.tally.samples) for a in agents]))
        self.sizes.append(
            {"report_of_an_agent": lean / len(agents), "files": files / len(agents), **alone,
             "of_tally_samples": samples}
        )  # fmt: skip

    def watch_signs(self) -> None:
        """Count what heartbeats ask of the store, and what it answers."""
        begin = heartbeat.Heartbeat.__init__

        def watched(self_: Any, rank: int, size: int, store: Any, limit: float) -> None:  # noqa: ANN401
            begin(self_, rank, size, _CountedStore(store, self), limit)

        heartbeat.Heartbeat.__init__ = watched


class _CountedStore:
    """The store of the heartbeats; each key goes there with a prefix."""

    def __init__(self, store: Any, counts: Counts) -> None:  # noqa: ANN401
        self.store, self.counts = store, counts

    def set(self, key: str, value: str) -> None:
        self.counts.add("heartbeats", PREFIX + len(key) + len(value))
        self.store.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = self.store.multi_get(keys)
        size = sum(PREFIX + len(key) + len(value) for key, value in zip(keys, found, strict=True))
        self.counts.add("heartbeats", size, 2)
        return found

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        found = self.store.compare_set(key, expected, wanted)
        size = PREFIX + len(key) + len(expected) + len(wanted) + len(found)
        self.counts.add("heartbeats", size, 2)
        return found


def _kind() -> str:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name not in KINDS:
        frame = frame.f_back
    if frame is not None and frame.f_code.co_name == "move":
        above = frame.f_back
        return KINDS["finalists" if above and above.f_code.co_name == "finalists" else "move"]
    return OTHER if frame is None else KINDS[frame.f_code.co_name]


def _size(value: object) -> int:
    return len(pickle.dumps(value))


def _of_agent(packed: Any) -> dict[str, float]:  # noqa: ANN401
    """Return what is sent for an agent, and its parameters."""
    parameters = sum(t.numel() for t in packed.actor.state.values())
    pickled, tensors = pickle_without_tensors(packed)
    size = sum(t.nbytes for t in tensors)
    return {
        "agent_sent": size + len(pickled), "parameters": parameters, "tensors": len(tensors),
        "bytes_of_tensors_per_parameter": size / parameters,
        "bytes_per_parameter": (size + len(pickled)) / parameters,
    }  # fmt: skip


def loopback() -> tuple[int, int]:
    """Return the bytes and packets that the loopback has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, values = line.partition(":")
        if name.strip() == "lo":
            size, packets, *_ = values.split()
            return int(size), int(packets)
    raise SystemExit("wire: expected a line lo in /proc/net/dev, which Linux has")


def sent_again() -> int:
    """Return the TCP segments that were sent a second time."""
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def in_ranks(size: int, folder: Path, program: Callable[[], object]) -> list[Any]:
    """Call a program in so many ranks; return what it returns in each, by rank."""
    port = free_port()

    def one(rank: int) -> None:
        with (folder / f"rank-{rank}.txt").open("w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCH_CPP_LOG_LEVEL="ERROR",
        )  # fmt: skip
        (folder / f"rank-{rank}.json").write_text(json.dumps(program()))

    processes = [FORK.Process(target=one, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    until = time.monotonic() + SECONDS
    for rank, process in enumerate(processes):
        process.join(max(1.0, until - time.monotonic()))
        if process.exitcode != 0:
            for other in processes:
                other.kill()
            said = (folder / f"rank-{rank}.txt").read_text()[-2000:]
            raise SystemExit(f"wire: rank {rank} of {size} ended with {process.exitcode}:\n{said}")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


def counted_run(size: int, agents: int, folder: Path, *, apart: bool) -> list[Any]:
    """Play a run on so many ranks; return the counts of each."""
    sizes = [*[agents] * (ROUNDS - 1), agents // 2]
    own = [
        f"population.size={agents}", f"population.rounds={ROUNDS}", f"population.sizes={sizes}",
        f"engine.shards={size}", *SETTINGS,
    ]  # fmt: skip

    def play() -> dict[str, Any]:
        # A relative path names another folder for each, as it would on several machines.
        place = folder / (os.environ["RANK"] if apart else "all")
        place.mkdir(exist_ok=True)
        os.chdir(place)
        counts, start = Counts(), time.monotonic()
        ranks.find_team()
        met = loopback()
        begun = time.monotonic()
        run(configuration.load(DEFAULT, own), out="run")
        return {
            "bytes": counts.bytes, "messages": counts.messages, "sizes": counts.sizes,
            "met": met, "seconds": time.monotonic() - begun, "to_meet": begun - start,
        }  # fmt: skip

    return in_ranks(size, folder, play)


def count(report: Report, size: int, agents: int, *, apart: bool) -> None:
    """Count what a run of so many ranks sends."""
    where = f"{size} ranks, {agents} agents, {'no folder that all see' if apart else 'one folder'}"
    with tempfile.TemporaryDirectory(prefix="bench-wire-") as name:
        before, packets_before = loopback()
        again = sent_again()
        parts = counted_run(size, agents, Path(name), apart=apart)
        after, packets_after = loopback()
    total, messages = Counter[str](), Counter[str]()
    for part in parts:
        total.update(part["bytes"])
        messages.update(part["messages"])
    seconds = max(part["seconds"] for part in parts)
    sent = [one for part in parts for one in part["sizes"] if "agent_sent" in one]
    for kind in sorted(total):
        report.add(f"Received from other ranks: {where}", kind=kind, bytes=total[kind],
                   messages=messages[kind] or None, bytes_per_rank=total[kind] / size)  # fmt: skip
    counted = sum(value for kind, value in total.items() if not kind.startswith("("))
    packets = packets_after - packets_before
    seen, met = after - before, parts[0]["met"][0] - before
    met_packets = parts[0]["met"][1] - packets_before
    while_met = seen - met - HEADERS * (packets - met_packets)
    report.add(
        "Against the kernel's counters of the loopback", ranks=size, apart=apart, seconds=seconds,
        counted=counted, kernel=seen, to_meet=met, headers=HEADERS * (packets - met_packets),
        rest=while_met - counted,
        messages=sum(messages.values()), sent_again=sent_again() - again,
    )  # fmt: skip
    report.at_most(f"{where}: share of the kernel's bytes without a kind",
                   (while_met - counted) / seen, 0.05)  # fmt: skip
    looked = [one for part in parts for one in part["sizes"] if "score" in one]
    means = {name: float(np.mean([one[name] for one in looked])) for name in looked[0]}
    report.add("Bytes of an agent in the report of its rank", ranks=size, apart=apart, **means)
    if sent:
        means = {name: float(np.mean([one[name] for one in sent])) for name in sent[0]}
        report.add("An agent that is sent", ranks=size, apart=apart, agents=len(sent), **means)


def pairs(report: Report, megabytes: int) -> None:
    """See whether ranks 2 and 3 wait for ranks 0 and 1, and time transfers of some size."""
    wait = 2.0
    values = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(megabytes)]

    def exchange(*moves: tuple[int, int], value: object = None) -> float:
        begin = time.perf_counter()
        for source, target in moves:
            if team.rank == source:
                team.send(value, target)
            elif team.rank == target:
                team.receive(source)
        return time.perf_counter() - begin

    def play() -> dict[str, float]:
        global team
        team = ranks.find_team()
        team.wait_for_all()
        if team.rank == 0:
            time.sleep(wait)
        apart = exchange((0, 1), (2, 3))
        team.wait_for_all()
        if team.rank == 0:
            time.sleep(wait)
        chained = exchange((0, 1), (1, 2), (2, 3))
        team.wait_for_all()
        transfer = exchange((0, 1), value=values)
        team.wait_for_all()
        return {"apart": apart, "chained": chained, "transfer": transfer}

    with tempfile.TemporaryDirectory(prefix="bench-wire-") as name:
        parts = in_ranks(4, Path(name), play)
    for what, moves in (("apart", "0 to 1, 2 to 3"), ("chained", "0 to 1, 1 to 2, 2 to 3")):
        for rank in (2, 3):
            report.add("Seconds in transfers, the first of which begins late", transfers=moves,
                       late=wait, rank=rank, seconds=parts[rank][what])  # fmt: skip
    waited = max(parts[rank]["apart"] for rank in (2, 3))
    report.at_most("seconds that ranks 2 and 3 wait for a transfer of 0 and 1", waited, wait / 2)
    seconds = max(parts[rank]["transfer"] for rank in (0, 1))
    report.add("One transfer on the loopback", megabytes=megabytes, seconds=seconds,
               megabytes_per_second=megabytes / seconds)  # fmt: skip


def transfers(agents: int, places: int, cards: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Draw the children and the moves after a round, as pairs of ranks, in their order."""
    rng = np.random.default_rng(seed)
    histories = [[Score(float(mean), 0.0, 1)] for mean in rng.random(agents)]
    plan = TournamentSelection().plan(histories, places, rng)

    def places_of(slots: Sequence[int]) -> dict[int, int]:
        dealt = deal(slots, cards)
        return {s: card for card, own in enumerate(dealt) for s in own}

    before, after = places_of(range(agents)), places_of([one.position for one in plan])
    children = [
        (before[one.parent], before[one.position]) for one in plan if one.parent != one.position
    ]
    return children, [(before[slot], rank) for slot, rank in after.items() if before[slot] != rank]


def seconds_of(
    moves: Sequence[tuple[int, int]], size: float, node: int, inside: float, between: float
) -> float:
    """Return the seconds of transfers of `size` bytes, each rank in its own order.

    Transfers between two machines of `node` cards share the bytes a second `between` in and out of
    each; within a machine each has `inside`.
    """
    queues: dict[int, list[int]] = {}
    for number, (source, target) in enumerate(moves):
        queues.setdefault(source, []).append(number)
        queues.setdefault(target, []).append(number)
    heads = dict.fromkeys(queues, 0)
    left, clock = dict.fromkeys(range(len(moves)), size), 0.0
    while left:
        due = {queue[heads[r]] for r, queue in queues.items() if heads[r] < len(queue)}
        active = [n for n in due if all(queues[r][heads[r]] == n for r in moves[n])]
        crossing = [n for n in active if moves[n][0] // node != moves[n][1] // node]
        out = Counter(moves[n][0] // node for n in crossing)
        into = Counter(moves[n][1] // node for n in crossing)
        rates = dict.fromkeys(active, inside)
        for n in crossing:
            most = max(out[moves[n][0] // node], into[moves[n][1] // node])
            rates[n] = min(inside, between / most)
        step = min(left[n] / rates[n] for n in active)
        clock += step
        for n in active:
            left[n] -= step * rates[n]
            if left[n] <= 1e-6 * size:
                del left[n]
                for rank in moves[n]:
                    heads[rank] += 1
    return clock


def paper(report: Report, given: argparse.Namespace) -> None:
    """Put a large population on paper."""
    size = 12 * given.parameters
    inside, between = given.inside * 1e9, given.between * 1e9 / 8

    def seconds(moves: Sequence[tuple[int, int]]) -> float:
        return seconds_of(moves, size, given.node, inside, between)

    title = (
        f"On paper, {given.per_card} agents a card, {given.parameters / 1e6:g} M parameters each"
    )
    for cards in given.cards:
        agents = cards * given.per_card
        for places in (agents, agents // 2) if given.per_card > 1 else (agents,):
            children, moves = transfers(agents, places, cards, 0)
            for kind, drawn in (("children", children), ("moves", moves)):
                away = [move for move in drawn if move[0] != move[1]]
                if not away:
                    continue
                crossing = [m for m in away if m[0] // given.node != m[1] // given.node]
                report.add(
                    f"{title}: what is sent", cards=cards, agents=agents, next_round=places,
                    kind=kind, number=len(drawn), to_another_rank=len(away),
                    to_another_machine=len(crossing), gigabytes=len(away) * size / 1e9,
                )  # fmt: skip
                report.add(
                    f"{title}: seconds", cards=cards, next_round=places, kind=kind,
                    one_after_another=size
                    * (len(crossing) / between + (len(away) - len(crossing)) / inside),
                    in_order_of_slots=seconds(away), as_implemented=seconds(
                        order_transfers(away, lambda ends: ends)
                    ), least_of_network=_busiest(crossing, given.node) * size / between,
                    least_of_rank=_busiest(away, 1) * size / max(inside, between),
                )  # fmt: skip


#: A round on cards of one machine: steps, prompts and completions of an agent, and their tokens.
STEPS, PROMPTS, GROUP, PROMPT, OUTPUT, VALIDATION = 4, 4, 8, 64, 128, 64


def on_cards(report: Report, given: argparse.Namespace) -> None:
    """Put a round of a few agents on the cards of one machine: computed and sent seconds."""
    from jobs import counted

    def computed(shape: str, own: int) -> float:
        """Return the seconds in which a card computes the round of so many agents."""
        card, prompts = counted(shape, given.card, own), own * PROMPTS
        rows = prompts * GROUP
        step = card.rollout(rows, prompts, PROMPT, OUTPUT)
        step += card.learn(rows, prompts, PROMPT, OUTPUT)
        looked = own * VALIDATION
        return STEPS * step + card.rollout(looked, looked, PROMPT, OUTPUT)

    for shape in ("0.5B", "3B", "7B"):
        linears = counted(shape, given.card).linears
        size = 12 * sum(ranks * inputs + 8 * outputs for inputs, outputs, ranks in linears)
        size *= counted(shape, given.card).shape.layers
        for agents in (8, 32):
            alone = computed(shape, agents)
            for cards in (1, 2, 4, 8):
                children, _ = transfers(agents, agents, cards, 0)
                away = order_transfers([m for m in children if m[0] != m[1]], lambda ends: ends)
                sent = seconds_of(list(away), size, cards, given.inside * 1e9, 1.0)
                whole = computed(shape, agents // cards) + sent
                report.add(
                    f"A round on cards of one machine ({given.card}), seconds", shape=shape,
                    agents=agents, cards=cards, computed=whole - sent, children_sent=sent,
                    round=whole, faster=alone / whole,
                )  # fmt: skip


def _busiest(moves: Sequence[tuple[int, int]], node: int) -> int:
    """Return how many transfers leave the machine that most leave, or reach one."""
    out, into = (Counter(move[side] // node for move in moves) for side in (0, 1))
    return max([*out.values(), *into.values()], default=0)


def main() -> int:
    """Run the parts asked for."""
    arguments = parser(str(__doc__).partition("\n")[0])
    names = ("counts", "pairs", "paper", "cards")
    arguments.add_argument("--parts", nargs="+", choices=names, default=list(names))
    arguments.add_argument("--ranks", nargs="+", type=int, help="of the counts")
    arguments.add_argument("--agents", type=int, default=32, help="of the counts")
    arguments.add_argument("--megabytes", type=int, default=48, help="of the timed transfer")
    arguments.add_argument("--parameters", type=float, default=40e6, help="of an agent, on paper")
    cards = [8, 64, 128, 512]
    arguments.add_argument("--cards", nargs="+", type=int, default=cards, help="on paper")
    arguments.add_argument("--per-card", type=int, default=8, help="agents, on paper")
    arguments.add_argument("--node", type=int, default=8, help="cards of a machine, on paper")
    arguments.add_argument("--card", default="h100", help="of a round on a few cards")
    arguments.add_argument("--between", type=float, default=10.0, help="Gbit/s, of machines")
    arguments.add_argument("--inside", type=float, default=1.0, help="GB/s, within a machine")
    given = arguments.parse_args()
    report = Report("wire", given)
    if "counts" in given.parts:
        if not OWN:
            print("wire: no network namespace; the loopback counts others too", file=sys.stderr)
        for size in given.ranks or ([2] if given.quick else [2, 4, 16]):
            for apart in (False, True):
                count(report, size, 8 if given.quick else given.agents, apart=apart)
    if "pairs" in given.parts:
        pairs(report, 4 if given.quick else given.megabytes)
    if "paper" in given.parts:
        paper(report, given)
    if "cards" in given.parts:
        on_cards(report, given)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
