"""A small run as records, without a model: what terminals and commands show of it."""

import hashlib
from dataclasses import replace
from pathlib import Path

from evo_grpo.record.files import seal
from evo_grpo.record.records import AgentRecord, RoundRecord
from evo_grpo.record.run_dir import RunDir
from evo_grpo.schema.hparams import Hparams
from evo_grpo.settings import RunConfig, from_dict, to_yaml
from evo_grpo.types import Member, Mutation, Score

RANGES = ["evolve.hyperparameters={lr: {min: 1e-4, max: 1e-2}, temperature: {min: 0.5, max: 2}}"]
SUMMARY = {
    "base": {"mean": 0.331, "se": 0.02, "n": 256, "per_prompt": [0.331] * 256},
    "best": {
        "mean": 0.807,
        "se": 0.02,
        "n": 256,
        "per_prompt": [0.807] * 256,
        "kind": "last",
        "agent": 1,
        "member": 2,
        "parents": [0],
        "fitness": 0.75,
        "checkpoint": "checkpoints/round-0001/agent-01",
    },
    "gain": 0.476,
    "gain_se": 0.025,
    "rounds": 2,
    "wall_seconds": 3.0,
    "split": "test",
    "candidates": [
        {"kind": "last", "agent": 1, "member": 2, "parents": [0], "validation": None, "tie": None}
    ],
    "final_tokens": 0,
    "files": {},
}


def candidate(kind: str, agent: int | None, member: int, parents: list[int], mean: float, tie=None):
    """A finalist of summary.json that was compared."""
    return {
        "kind": kind,
        "agent": agent,
        "member": member,
        "parents": parents,
        "validation": {"mean": mean, "se": 0.03, "n": 64},
        "tie": tie,
    }


def mean_won() -> dict:
    """A summary in which the mean of the agents of `two_rounds` won the final comparison."""
    best = {**SUMMARY["best"], "kind": "mean", "agent": None, "member": 3, "parents": [2, 0]}
    best |= {"fitness": None, "checkpoint": "checkpoints/mean"}
    candidates = [
        candidate("last", 1, 2, [0], 0.70, tie=True),
        candidate("archive", 0, 0, [], 0.60, tie=False),
        candidate("mean", None, 3, [2, 0], 0.72),
    ]
    return {**SUMMARY, "best": best, "candidates": candidates}


def comparison(**means: float | None) -> dict:
    """A comparison of eight agents whose arms have these test results."""
    score = {"se": 0.012, "n": 256}
    tokens = {"training": 900, "evaluation": 100}
    arms = [
        {"name": name, "folder": ".", "tokens": tokens, "test": {"mean": mean, **score}}
        for name, mean in means.items()
    ]
    return {"agents": 8, "split": "test", "arms": arms}


def agent(slot: int, member: int, round: int, fitness: float | None, **more) -> AgentRecord:
    return AgentRecord(
        agent=slot,
        member=member,
        round=round,
        parent=more.pop("parent", None),
        state="ok" if fitness is not None else "failed",
        hparams=more.pop("hparams", Hparams(lr=1e-3, beta=0.0)),
        score=None if fitness is None else Score(fitness, 0.05, 64),
        metrics={"reward": 0.4, "kl": 0.0123, "zero_variance": 0.25, "rows": 64.0},
        tokens=1000,
        wall_seconds=1.5,
        checkpoint=f"checkpoints/round-{round:04d}/agent-{slot:02d}",
        **more,
    )


def two_rounds() -> list[RoundRecord]:
    """Two agents; after the first round, agent 1 becomes a copy of agent 0 with another lr."""
    moved = Mutation("mutate", {"lr": (1e-3, 1.2e-3)})
    child = Hparams(lr=1.2e-3, beta=0.0)
    seconds = {"learn": 2.0, "evaluate": 1.0}
    first, second = Member(0, 0), Member(2, 1, parent=0, born=1, mutation=moved)
    return [
        RoundRecord(
            0,
            (agent(0, 0, 0, 0.5), agent(1, 1, 0, 0.25)),
            seconds,
            (first, second),
            (Hparams(lr=1e-3, beta=0.0), child),
        ),
        RoundRecord(
            1,
            (agent(0, 0, 1, 0.625), agent(1, 2, 1, 0.75, parent=0, hparams=child, mutation=moved)),
            seconds,
            (first, second),
            (Hparams(lr=1e-3, beta=0.0), child),
        ),
    ]


def small_config(*overrides: str) -> RunConfig:
    settings = {"model": "tiny-sums", "env": "sums", "population": {"size": 2, "rounds": 2}}
    return from_dict(settings, [*RANGES, *overrides])


ADAPTER = {
    f"{SUMMARY['best']['checkpoint']}/actor/{name}": data
    for name, data in (
        ("adapter_model.safetensors", b"the winner's tensors"),
        ("adapter_config.json", b'{"peft_type": "LORA", "r": 8}'),
    )
}
"""What stands for the winner's adapter, by path in the run folder."""


def run_folder(
    path: str = "runs/one", rounds: int = 2, summary: bool = True, adapter: bool = False
) -> Path:
    """Write the run of `two_rounds`; its winner has files where `adapter` says so."""
    folder = RunDir.create(Path(path), "one", to_yaml(small_config()))
    with folder:
        for record in two_rounds()[:rounds]:
            files: dict[str, str] = {}
            for name, data in ADAPTER.items() if adapter and record.round == 1 else ():
                (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
                (folder.path / name).write_bytes(data)
                files[name] = hashlib.sha256(data).hexdigest()
            folder.append_round(replace(record, files=files))
        if summary:
            folder.write("summary.json", seal(SUMMARY))
    return Path(path)
