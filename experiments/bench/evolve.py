"""Evolution and checkpoints: select, mutate and copy; save; load; what the training waits for.

    python experiments/bench/evolve.py [--quick] [--no-peers] [--out FILE]

The population evolves at the SmolLM2-135M shape, 8 agents with AdamW's moments, rank 8. AgileRL
evolves as many at the same shape: every agent is cloned with its base model.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from common import Report, interleaved, median, parser, quiet, ratio
from peers import Peer, PeerError
from rounds import play

THREADS = quiet()

from jobs import Job, Work, folder_bytes, load_base, population  # noqa: E402 -- threads first

from evo_grpo.evolve.explore.mutate import Mutations  # noqa: E402
from evo_grpo.evolve.generation import next_generation  # noqa: E402
from evo_grpo.evolve.select.tournament import TournamentSelection  # noqa: E402
from evo_grpo.population.checkpoints.read import load_agent  # noqa: E402
from evo_grpo.population.checkpoints.write import save_agent  # noqa: E402
from evo_grpo.population.cohort.cohort import Cohort  # noqa: E402
from evo_grpo.population.round import apply  # noqa: E402
from evo_grpo.schema.search_space import HyperparameterConfig, RLParameter  # noqa: E402
from evo_grpo.settings import EvolveConfig  # noqa: E402
from evo_grpo.types import Score  # noqa: E402

AGENTS = 8
RANGES = HyperparameterConfig(
    lr=RLParameter(min=1e-6, max=1e-4), beta=RLParameter(min=1e-3, max=1e-1)
)
WHAT = "AgileRL's select + mutate over ours, without gc, {}, {} agents"


class Evolution:
    """Repeated select, mutate and copy over one population.

    Args:
        cohort: The agents.
        slots: All of them.
    """

    def __init__(self, cohort: Cohort, slots: list[int]) -> None:
        """Seed the draws."""
        self.cohort = cohort
        self.slots = slots
        self.rng = np.random.default_rng(0)
        self.selection = TournamentSelection()
        self.copies: list[int] = []

    def __call__(self) -> None:
        """Evolve once, as `play_round` does."""
        states = [self.cohort.agents[slot] for slot in self.slots]
        histories = [[Score(float(self.rng.random()), 0.1, 8)] for _ in states]
        plan = self.selection.plan(histories, len(states), self.rng)
        generation = next_generation(
            plan,
            tuple(state.member for state in states),
            tuple(state.hparams for state in states),
            Mutations(no_mutation=0.0, rl_hp=1.0),
            RANGES,
            self.rng,
            round=0,
            next_id=self.cohort.next_member,
        )
        inherit = EvolveConfig().inherit_optimizer
        apply(self.cohort, self.slots, generation, inherit_optimizer=inherit)
        self.copies.append(sum(o.parent != o.position for o in plan))


def evolution(report: Report, shape: str, repeats: int, peer_repeats: int) -> None:
    """Time select + mutate + copy, save and load; and the peer's, unless its repeats are 0."""
    work = Work(1, 4, 2)
    cohort, slots = population(load_base(shape), AGENTS, work)
    # One step gives every agent its moments.
    Job(cohort, slots, work).learn()
    evolve = Evolution(cohort, slots)
    with tempfile.TemporaryDirectory(prefix="bench-evolve-") as name:
        folder = Path(name)

        def save() -> None:
            for slot in slots:
                save_agent(cohort, slot, folder / f"agent-{slot}")

        def load() -> None:
            for slot in slots:
                load_agent(cohort, slot, folder / f"agent-{slot}", load_optimizer=True)

        samples = interleaved({"evolve": evolve, "save": save, "load": load}, repeats)
        size = folder_bytes(folder)
    title = f"{AGENTS} agents, {shape} (seconds)"
    for phase in samples:
        name = phase if phase == "evolve" else f"{phase}, all agents"
        report.add(title, side="ours", phase=name, seconds=median(samples, phase))
    report.add(
        title,
        side="ours",
        phase="copies per evolution, mean",
        seconds=float(np.mean(evolve.copies)),
    )
    report.add(title, side="ours", phase="MiB of all checkpoints", seconds=size / 2**20)
    if peer_repeats:
        _peer(report, title, shape, evolve, peer_repeats)


def _peer(report: Report, title: str, shape: str, evolve: Evolution, repeats: int) -> None:
    job = {"shape": shape, "agents": AGENTS, "prompts": 1, "group": 4, "tokens": 2}
    what = WHAT.format(shape, AGENTS)
    try:
        with Peer("agilerl", job) as peer:
            peer.ask("generate")
            peer.ask("learn")
            collected: list[float] = []

            def theirs() -> float:
                told = peer.ask("evolve")
                collected.append(told["gc_seconds"])
                return float(told["seconds"])

            samples = interleaved({"ours": evolve, "theirs": theirs}, repeats)
            saved, loaded = peer.ask("save"), peer.ask("load")
    except PeerError as error:
        report.at_least(what, None, 200.0, str(error))
        return
    samples["without gc"] = [a - b for a, b in zip(samples["theirs"], collected[1:], strict=True)]
    beside = median(samples, "ours")
    report.add(title, side="ours", phase="evolve, in turns with AgileRL's", seconds=beside)
    for phase, seconds in (
        ("evolve", median(samples, "theirs")),
        ("evolve without gc", median(samples, "without gc")),
        ("save, one agent", saved["seconds"]),
        ("load, one agent", loaded["seconds"]),
    ):
        report.add(title, side="AgileRL", phase=phase, seconds=seconds)
    note = f"{ratio(samples, 'theirs', 'ours'):.0f} with its gc.collect() time"
    report.at_least(what, ratio(samples, "without gc", "ours"), 200.0, note)


def checkpoint_wait(report: Report, rounds: int) -> None:
    """Share of a round that the training thread spends on checkpoints and records."""
    with tempfile.TemporaryDirectory(prefix="bench-evolve-") as folder:
        lines = play(Path(folder), rounds=rounds)
    for line in lines:
        report.add(
            "A round of 8 agents, task sums, default settings (seconds)",
            **line, checkpoint_share=line["checkpoint"] / line["whole"],
            with_commit=(line["checkpoint"] + line["commit"]) / line["whole"],
        )  # fmt: skip
    shares = [line["checkpoint"] / line["whole"] for line in lines]
    commits = [(line["checkpoint"] + line["commit"]) / line["whole"] for line in lines]
    note = f"{float(np.median(commits)):.3f} with the records, lineage and leaderboard"
    report.at_most("checkpoint wait, share of the round", float(np.median(shares)), 0.05, note)


def main() -> int:
    """Measure evolution and checkpoints."""
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--no-peers", action="store_true", help="ours alone")
    given = arguments.parse_args()
    quick = given.quick
    report = Report("evolve", given)
    shape = "1M" if quick else "135M"
    repeats = given.repeats or (2 if quick else 9)
    # Half a minute each: every agent of the peer is cloned with its base.
    evolution(report, shape, repeats, 0 if quick or given.no_peers else given.repeats or 5)
    checkpoint_wait(report, 1 if quick else 4)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
