"""A round's generate and learn: N agents against one adapter, ragged groups, ranks, AgileRL, TRL.

The floor of N agents is one adapter (N = 1) with as many rows, in the same engine: what the
population costs above it is the price of having N adapters. Everything runs the embedded model with
P = 4, G = 8, T = 32 unless a line says otherwise.

    python experiments/bench/round.py [--quick] [--no-peers] [--out FILE]
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import Report, Samples, interleaved, median, parser, quiet, ratio
from peers import Peer, PeerError
from rounds import play

THREADS = quiet()

from jobs import Job, Work, family_base, load_base, population, questions  # noqa: E402 -- threads first
from shapes import FAMILIES  # noqa: E402

from evo_grpo.model.llama.departures import can_join_layers  # noqa: E402
from evo_grpo.types import Prompt  # noqa: E402

RAGGED = (4, 4, 6, 6, 8, 8, 12, 16)
UNEQUAL = (4, 4, 8, 8, 16, 16, 32, 32)
#: Tokens of a prompt in the part of the families: few, and as many as of a completion.
PROMPTS = (6, 32)
#: Least ratio of the modules' time to that of the joined layers, by shape.
FASTER = {"10M": {"generate": 1.0, "learn": 1.5}, "1M": {"generate": 1.3, "learn": 1.6}}


def scaling(report: Report, sizes: tuple[int, ...], work: Work, repeats: int) -> None:
    """Compare N agents with one adapter on the same total rows, for every N."""
    base = {}
    for size in sizes:
        ours = job("embedded", size, work)
        one = job("embedded", 1, Work(work.prompts * size, work.groups, work.tokens))
        assert ours.rows == one.rows
        samples = split(interleaved_phases({"ours": ours, "floor": one}, repeats))
        over = ratio(samples, "ours", "floor")
        base[size] = median(samples, "ours")
        report.add(
            "N agents over one adapter with the same rows (seconds)",
            N=size, rows=ours.rows, generate=median(samples, "ours generate"),
            learn=median(samples, "ours learn"), both=base[size], floor=median(samples, "floor"),
            over_floor=over, generate_over=ratio(samples, "ours generate", "floor generate"),
            learn_over=ratio(samples, "ours learn", "floor learn"),
            per_agent=base[size] / size,
        )  # fmt: skip
        if size == 8:
            report.at_most("N=8 generate + learn over one adapter, same rows", over, 1.05)


def ragged(report: Report, work: Work, repeats: int) -> None:
    """Compare group sizes 4 to 16 with equal ones, same total rows."""
    equal = job("embedded", 8, work)
    uneven = job("embedded", 8, Work(work.prompts, RAGGED, work.tokens))
    assert equal.rows == uneven.rows
    samples = split(interleaved_phases({"ragged": uneven, "equal": equal}, repeats))
    for name in ("equal", "ragged"):
        report.add(
            "Ragged groups (seconds)",
            groups=str(RAGGED if name == "ragged" else (8,) * 8), rows=equal.rows,
            generate=median(samples, f"{name} generate"), learn=median(samples, f"{name} learn"),
            both=median(samples, name),
        )  # fmt: skip
    report.at_most("ragged over equal groups", ratio(samples, "ragged", "equal"), 1.10)


def ranks(report: Report, work: Work, repeats: int) -> None:
    """Compare agents of ranks 4 to 32 with agents of the mean rank, same rows."""
    mean = round(sum(UNEQUAL) / len(UNEQUAL))
    # A quarter of the rows: the larger shape takes ten times as long.
    for shape, own in (("embedded", work), ("10M", Work(1, work.groups, work.tokens))):
        kinds = {"unequal": UNEQUAL, "mean": mean, "largest": max(UNEQUAL)}
        jobs = {name: job(shape, 8, own, rank=rank) for name, rank in kinds.items()}
        samples = split(interleaved_phases(jobs, repeats))
        over = ratio(samples, "unequal", "mean")
        report.add(
            f"Ranks {UNEQUAL} over {mean} in all agents (seconds)",
            shape=shape, generate=median(samples, "unequal generate"),
            learn=median(samples, "unequal learn"), both=median(samples, "unequal"),
            mean=median(samples, "mean"), over_mean=over,
            generate_over=ratio(samples, "unequal generate", "mean generate"),
            learn_over=ratio(samples, "unequal learn", "mean learn"),
            over_largest=ratio(samples, "unequal", "largest"),
        )  # fmt: skip
        report.at_most(f"ranks 4 to 32 over {mean}, generate + learn, {shape}", over, 1.05)


def shrunk(report: Report, work: Work, repeats: int) -> None:
    """Compare the agents that a population shrinks to with all of them, on the same rows."""
    whole = job("embedded", 8, work)
    for size in (4, 2):
        few = job("embedded", size, Work(work.prompts * 8 // size, work.groups, work.tokens))
        assert few.rows == whole.rows
        samples = split(interleaved_phases({"few": few, "eight": whole}, repeats))
        over = ratio(samples, "few", "eight")
        report.add(
            "A population of 8 after it has shrunk, same rows (seconds)",
            N=size, generate=median(samples, "few generate"), learn=median(samples, "few learn"),
            both=median(samples, "few"), eight=median(samples, "eight"), over_eight=over,
        )  # fmt: skip
        if size == 2:
            report.at_most("8 agents shrunk to 2 over 8, generate + learn, same rows", over, 1.03)


def paths(report: Report, size: int, work: Work, repeats: int) -> None:
    """Compare the specialized layers with the model's modules, which serve every architecture."""
    lean, modules = job("embedded", size, work), job("embedded", size, work)
    modules.cohort.base.specialized = False
    modules.cohort._engine = None  # the job has sampled already; the next call makes another
    samples = interleaved_phases({"lean": lean, "modules": modules}, repeats)
    for phase in ("generate", "learn"):
        report.add(
            f"The specialized layers over the model's modules, N={size} (seconds)",
            phase=phase, lean=median(samples, f"lean {phase}"),
            modules=median(samples, f"modules {phase}"),
            faster=ratio(samples, f"modules {phase}", f"lean {phase}"),
        )  # fmt: skip


def families(report: Report, given: argparse.Namespace, work: Work, repeats: int) -> None:
    """Compare the joined layers with the model's modules for families of architectures."""
    names, shapes = (("qwen3",), ("1M",)) if given.quick else (given.families, given.shapes)
    for shape, name, tokens in itertools.product(shapes, names, PROMPTS):
        # A quarter of the rows: the larger shape takes ten times as long.
        prompts = 1 if shape == "10M" else work.prompts
        own = Work(prompts, work.groups, work.tokens, tokens)
        sides: dict[str, Callable[[], float]] = {}
        for side in ("joined", "modules"):
            cohort, slots = population(family_base(name, shape), 8, own)
            cohort.base.specialized = side == "joined"
            if can_join_layers(cohort.base, cohort.slots.layers) != cohort.base.specialized:
                raise SystemExit(f"{name}, {shape}: the {side} side takes the other path")
            one = Job(cohort, slots, own)
            for phase in ("generate", "learn"):
                sides[f"{side} {phase}"] = partial(processor_seconds, getattr(one, phase))
        samples = interleaved(sides, repeats)
        over = {
            phase: ratio(samples, f"modules {phase}", f"joined {phase}")
            for phase in ("generate", "learn")
        }
        report.add(
            "The modules over the joined layers, N=8 (processor seconds)",
            family=name, shape=shape, prompt=tokens,
            generate=median(samples, "joined generate"), learn=median(samples, "joined learn"),
            generate_faster=over["generate"], learn_faster=over["learn"],
        )  # fmt: skip
        for phase, least in FASTER[shape].items():
            what = f"{name}, {shape}, prompts of {tokens}: {phase}, modules over joined layers"
            report.at_least(what, over[phase], least)


def processor_seconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call, which other programs of the machine disturb less."""
    start = time.process_time()
    call()
    return time.process_time() - start


def agilerl(report: Report, size: int, work: Work, repeats: int) -> None:
    """Compare with AgileRL at the embedded model, both of its generation paths."""
    targets = {"direct": 8.0, "loop": 30.0}
    what = "AgileRL over ours, generate + learn, {} path, embedded model"
    ours = job("embedded", size, work, questions(work.prompts))
    asked = agilerl_job("embedded", size, work)
    try:
        with Peer("agilerl", asked) as peer:
            samples = peer_samples(ours, peer, ("generate", "loop", "learn"), repeats)
    except PeerError as error:
        for path, target in targets.items():
            report.at_least(what.format(path), None, target, str(error))
        return
    peer_rows(report, f"AgileRL, embedded model, N={size}", samples, peer.facts)
    totals(samples, "direct", ("generate", "learn"))
    totals(samples, "loop", ("loop", "learn"))
    for path, target in targets.items():
        without = ratio(samples, f"{path} without gc", "ours")
        report.at_least(
            what.format(path), ratio(samples, path, "ours"), target,
            f"{without:.1f} with its gc.collect() time taken out",
        )  # fmt: skip


def agilerl_135m(report: Report, work: Work, repeats: int, *, shape: str) -> None:
    """Compare with AgileRL's direct path where garbage collection does not matter."""
    what = f"AgileRL over ours, generate + learn, direct path without gc, {shape}, N=4"
    ours = job(shape, 4, work, questions(work.prompts))
    try:
        with Peer("agilerl", agilerl_job(shape, 4, work)) as peer:
            samples = peer_samples(ours, peer, ("generate", "learn"), repeats)
    except PeerError as error:
        report.at_least(what, None, 2.0, str(error))
        return
    peer_rows(report, f"AgileRL, {shape}, N=4", samples, peer.facts)
    totals(samples, "direct", ("generate", "learn"))
    report.at_least(what, ratio(samples, "direct without gc", "ours"), 2.0)


def trl(report: Report, size: int, work: Work, repeats: int) -> None:
    """Compare with N steps of TRL's trainer, one after another."""
    what = f"TRL × {size} over ours, generate + learn, embedded model"
    ours = job("embedded", size, work, questions(work.prompts))
    asked = {
        "shape": "embedded",
        "prompts": work.prompts,
        "group": work.groups,
        "tokens": work.tokens,
    }
    try:
        with Peer("trl", asked) as peer:
            samples = interleaved(
                {
                    "ours": ours.both,
                    "trl": lambda: sum(peer.ask("step")["seconds"] for _ in range(size)),
                },
                repeats,
            )
    except PeerError as error:
        report.at_least(what, None, 2.5, str(error))
        return
    ours.check()
    report.add(
        f"TRL, embedded model, {size} steps one after another (seconds)",
        side="ours", seconds=median(samples, "ours"),
    )  # fmt: skip
    report.add(
        f"TRL, embedded model, {size} steps one after another (seconds)",
        side="TRL", seconds=median(samples, "trl"), **peer.facts["versions"],
    )  # fmt: skip
    report.at_least(what, ratio(samples, "trl", "ours"), 2.5)


def phases(report: Report, rounds: int) -> None:
    """Split whole rounds of the default run into their phases."""
    with tempfile.TemporaryDirectory(prefix="bench-round-") as folder:
        for line in play(Path(folder), rounds=rounds):
            report.add("A whole round of 8 agents, task sums, default settings (seconds)", **line)


def job(
    shape: str,
    size: int,
    work: Work,
    prompts: Sequence[Prompt] | None = None,
    rank: int | Sequence[int] = 8,
) -> Job:
    """Return agents over a base of their own and their work."""
    cohort, slots = population(load_base(shape), size, work, rank=rank)
    return Job(cohort, slots, work, prompts)


def agilerl_job(shape: str, size: int, work: Work) -> dict[str, Any]:
    """Return the same work as its adaptor takes it."""
    return {
        "shape": shape,
        "agents": size,
        "prompts": work.prompts,
        "group": work.groups,
        "tokens": work.tokens,
    }


def interleaved_phases(jobs: Mapping[str, Job], repeats: int) -> Samples:
    """Sample generate and learn of several populations in turns."""
    sides = {
        f"{name} {phase}": getattr(one, phase)
        for name, one in jobs.items()
        for phase in ("generate", "learn")
    }
    return interleaved(sides, repeats)


def split(samples: Samples) -> Samples:
    """Add each side's sum of generate and learn under its own name."""
    names = {name.rpartition(" ")[0] for name in samples}
    sums = {
        name: [
            a + b
            for a, b in zip(samples[f"{name} generate"], samples[f"{name} learn"], strict=True)
        ]
        for name in names
    }
    return {**samples, **sums}


def peer_samples(ours: Job, peer: Peer, commands: tuple[str, ...], repeats: int) -> Samples:
    """Sample ours and each of a peer's phases in turns; "... gc" is its gc.collect() time."""
    collected: Samples = {f"{command} gc": [] for command in commands}

    def asked(command: str) -> float:
        told = peer.ask(command)
        collected[f"{command} gc"].append(told["gc_seconds"])
        return float(told["seconds"])

    sides: dict[str, Any] = {"ours generate": ours.generate, "ours learn": ours.learn}
    for command in commands:
        sides[command] = lambda command=command: asked(command)
    samples = interleaved(sides, repeats)
    ours.check()
    # The first of each is the warm-up's.
    samples.update({name: values[1:] for name, values in collected.items()})
    samples["ours"] = [
        a + b for a, b in zip(samples["ours generate"], samples["ours learn"], strict=True)
    ]
    return samples


def totals(samples: Samples, name: str, commands: tuple[str, ...]) -> None:
    """Add a peer's sum over phases, with and without its garbage collection."""
    whole = [sum(values) for values in zip(*(samples[c] for c in commands), strict=True)]
    waste = [sum(values) for values in zip(*(samples[f"{c} gc"] for c in commands), strict=True)]
    samples[name] = whole
    samples[f"{name} without gc"] = [a - b for a, b in zip(whole, waste, strict=True)]


def peer_rows(report: Report, title: str, samples: Samples, facts: Mapping[str, Any]) -> None:
    """Report the medians of a peer's phases beside ours."""
    for name in samples:
        if not name.endswith(" gc") and name != "ours":
            gc = samples.get(f"{name} gc")
            report.add(
                f"{title} (seconds)",
                phase=name, seconds=median(samples, name),
                of_it_gc=None if gc is None else median(samples, f"{name} gc"),
            )  # fmt: skip
    report.add(f"{title} (seconds)", phase="versions", **facts["versions"])


PARTS = (
    "scaling",
    "ragged",
    "ranks",
    "shrunk",
    "paths",
    "families",
    "phases",
    "agilerl",
    "agilerl-135m",
    "trl",
)


def peers(report: Report, parts: Sequence[str], size: int, work: Work, repeats: int) -> None:
    """Run the comparisons with other packages that are asked for."""
    if "agilerl" in parts:
        agilerl(report, size, work, repeats)
    if "agilerl-135m" in parts and size > 2:
        agilerl_135m(report, Work(1, 4, 16), repeats, shape="135M")
    if "trl" in parts:
        trl(report, size, work, repeats)


def main() -> int:
    """Run the comparisons asked for."""
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--no-peers", action="store_true", help="ours and the floor alone")
    usual = [part for part in PARTS if part != "families"]
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=usual)
    arguments.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    arguments.add_argument("--shapes", nargs="+", choices=FASTER, default=list(FASTER))
    arguments.add_argument("--sizes", nargs="+", type=int, help="N of the scaling part")
    given = arguments.parse_args()
    report = Report("round", given)
    quick = given.quick
    work = Work(1, 8, 4) if quick else Work(4, 8, 32)
    repeats = given.repeats or (1 if quick else 7)
    size = 2 if quick else 8
    peer_repeats = given.repeats or (1 if quick else 3)
    parts = [p for p in given.parts if p in PARTS[:7] or not given.no_peers]
    if "scaling" in parts:
        scaling(report, given.sizes or ((1, 8) if quick else (1, 2, 4, 8, 16, 32)), work, repeats)
    if "ragged" in parts:
        ragged(report, work, repeats)
    if "ranks" in parts:
        ranks(report, work, repeats)
    if "shrunk" in parts:
        shrunk(report, work, repeats)
    if "paths" in parts:
        paths(report, size, work, repeats)
    if "families" in parts:
        families(report, given, work, repeats)
    if "phases" in parts:
        phases(report, 1 if quick else 4)
    peers(report, parts, size, work, peer_repeats)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
