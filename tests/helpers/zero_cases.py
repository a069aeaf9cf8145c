"""What each process does in tests/deepspeed: agents on DeepSpeed's engine beside AdamW's own.

    python zero_cases.py STAGE FOLDER

All cases run in one process, for DeepSpeed takes its time to start. What is compared with is one
process with AdamW through the model's modules, which every process computes for itself.
"""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from peft import LoraConfig
from tiny_cohort import PLAIN, fresh, image, make_rows, perturb

from evo_grpo import GRPO
from evo_grpo.errors import ConfigError
from evo_grpo.learn.rows import AgentBatch
from evo_grpo.model.lora.targets import TargetSets
from evo_grpo.population.checkpoints.read import load_agent
from evo_grpo.population.checkpoints.write import save_agent
from evo_grpo.population.cohort.archive import add_spare_like
from evo_grpo.settings.keywords import agent_settings
from evo_grpo.training.assemble import Objects, build_cohort
from evo_grpo.types import Prompt

#: Group size, minibatches, epochs, KL term and clipping differ from agent to agent.
HPARAMS = [
    PLAIN.replace(lr=1e-3, beta=0.1, max_grad_norm=None),
    PLAIN.replace(lr=2e-3, update_epochs=2, batch_size=4, max_grad_norm=0.05),
    PLAIN.replace(lr=1e-3, group_size=3, beta=0.05, temperature=0.7),
]


#: The engine's adapter has rank 6, those of the agents 4 to begin with.
SEARCHED = {
    "lora.r": {"min": 1, "max": 6},
    "lora.target_modules": {"choices": ["attention", "all"]},
}
SETS = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "all": "all-linear"}


def build(**settings):
    given = {
        **{"seed": 7, "hyperparameters": {}, "device": "cpu", "separate_reference": True},
        **{"max_rows_per_microbatch": 3, "max_output_tokens": 6, **settings},
    }
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.1)
    objects = Objects(model=tiny.llama(initializer_range=0.5), lora=lora)
    cohort, _ = build_cohort(agent_settings(given, kind="grpo"), objects)
    # A model of its own declares no sets of layers; the engine is made with the first agent.
    cohort.slots.target_sets = TargetSets(cohort.slots.base, cohort.slots.config, SETS)
    own, cohort.settings = cohort.settings, cohort.settings.replace(hyperparameters=SEARCHED)
    for hparams in HPARAMS:
        perturb(cohort, cohort.add(hparams).slot)
    cohort.settings = own
    return cohort


class Pair:
    """The same agents on DeepSpeed's engine and each with an AdamW of its own.

    Args:
        stage: 2 or 3.
        tolerance: How far apart their weights may be.
    """

    def __init__(self, stage, tolerance):
        self.zero, self.own = build(zero=stage), build(base="sharded")
        self.tolerance = tolerance
        self.calls = 0

    def learn(self, slots, failing=()):
        """One learn call for some agents of both; nobody else may move by a bit."""
        self.calls += 1
        others = [slot for slot in self.zero.agents if slot not in slots]
        before = [image(self.zero, slot) for slot in others]
        told = []
        for cohort in (self.zero, self.own):
            batches = [AgentBatch(slot, self.rows(slot, failing)) for slot in slots]
            told.append(cohort.learn(batches, stream=("learn", self.calls)))
        for mine, theirs in zip(*told, strict=True):
            assert mine.keys() == theirs.keys()
            for name in mine.keys() - {"grad_norm"} if failing else mine:
                same = np.isclose(mine[name], theirs[name], 1e-4, 1e-4, equal_nan=True)
                assert same, (name, mine, theirs)
        for slot, then in zip(others, before, strict=True):
            now = image(self.zero, slot)
            for kind in ("actor", "reference", "moments"):
                assert all(torch.equal(value, now[kind][key]) for key, value in then[kind].items())
        return told[0]

    def rows(self, slot, failing):
        rows = make_rows(100 * self.calls + slot, groups=1 + slot, group_size=3)
        return fresh(rows, advantage=float("nan")) if slot in failing else rows

    def compare(self):
        """Weights and moments of all agents; returns the largest difference of weights."""
        worst = 0.0
        for slot in self.own.agents:
            one, two = image(self.zero, slot), image(self.own, slot)
            for kind in ("actor", "reference", "moments"):
                assert one[kind].keys() == two[kind].keys(), (slot, kind)
                for key, value in one[kind].items():
                    apart = float((value - two[kind][key]).abs().max())
                    if kind == "moments":  # as large as gradients, or their squares
                        assert apart <= 1e-5 * (1 + float(value.abs().max())), (slot, key, apart)
                        continue
                    assert apart <= self.tolerance, (slot, kind, key, apart)
                    worst = max(worst, apart)
        return worst


def steps(pair, folder):
    del folder
    for slots in ((0, 1, 2), (1,), (2, 0), (0, 1, 2)):
        pair.learn(slots)
        pair.compare()


def failure(pair, folder):
    del folder
    before = image(pair.zero, 1)
    told = pair.learn((0, 1, 2), failing=(1,))
    assert [metrics["failed"] for metrics in told] == [0, 1, 0]
    after = image(pair.zero, 1)
    assert all(torch.equal(v, after["actor"][k]) for k, v in before["actor"].items())
    pair.learn((0, 1, 2))
    pair.compare()


def clone(pair, folder):
    del folder
    for cohort in (pair.zero, pair.own):
        cohort.copy(0, 2)
        cohort.copy(1, 0, inherit_optimizer=False)
    pair.compare()
    pair.learn((0, 1, 2))
    # Weights that are written and not told to AdamW's own copy would be undone by this step.
    pair.compare()


def resizing(pair, folder):
    """Ranks that grow and shrink, and layers that go and come, between steps."""
    del folder

    def change(slot, **values):
        for cohort in (pair.zero, pair.own):
            cohort.set_hparams(slot, cohort.agents[slot].hparams.replace(**values))

    change(0, lora_r=6)
    change(1, lora_r=2)
    change(2, lora_target_modules="attention")
    for _ in range(2):
        pair.compare()
        pair.learn((0, 1, 2))
    pair.compare()
    # A new layer has no moments with AdamW, and moments of zero on the engine.
    change(2, lora_target_modules="all")
    for cohort in (pair.zero, pair.own):
        cohort.copy(0, 2)
        cohort.set_hparams(2, cohort.agents[0].hparams)
    pair.learn((0, 1, 2))
    pair.compare()
    with pytest.raises(ConfigError, match="expected a rank of at most 6"):
        pair.zero.set_hparams(0, pair.zero.agents[0].hparams.replace(lora_r=7))


def birth_and_death(pair, folder):
    del folder
    for cohort in (pair.zero, pair.own):
        born = cohort.add(HPARAMS[0]).slot
        kept = add_spare_like(cohort, 1)
        cohort.remove(0)
        assert (born, kept) == (3, 4)
    pair.compare()
    pair.learn((1, 2, 3))
    for cohort in (pair.zero, pair.own):
        cohort.copy(4, 2)
        cohort.remove(4)
    pair.learn((3, 2))
    pair.compare()


def sampling(pair, folder):
    del folder
    rng = np.random.default_rng(3)
    ids = [tuple(int(i) for i in rng.integers(3, 40, 2 + n % 4)) for n in range(5)]
    prompts = [Prompt(index, "", tokens) for index, tokens in enumerate(ids)]
    told = [
        cohort.generate(list(cohort.agents), prompts, stream=("sample",))
        for cohort in (pair.zero, pair.own)
    ]
    for mine, theirs in zip(*told, strict=True):
        assert [g.prompt for g in mine] == prompts
        for one, other in zip(mine, theirs, strict=True):
            for a, b in zip(one.completions, other.completions, strict=True):
                assert a.token_ids == b.token_ids
                assert np.allclose(a.logprobs, b.logprobs, atol=1e-4)


def saving(pair, folder):
    """Save here, load there: with and without moments and base, either way."""
    zero, own = pair.zero, pair.own
    rank = zero.team.rank
    for lora_only in (True, False):
        for optimizer in (True, False):
            name = f"{lora_only}-{optimizer}"
            where = folder / name
            save_agent(zero, 1, where, lora_only=lora_only, save_optimizer=optimizer)
            assert (where / "base").is_dir() != lora_only
            assert (where / "optimizer.safetensors").is_file() == optimizer
            pickled = [p for p in where.rglob("*") if p.suffix in (".pt", ".bin", ".pkl")]
            assert not pickled
            # By what knows nothing of DeepSpeed.
            load_agent(own, 2, where, load_optimizer=optimizer)
            saved, loaded = image(zero, 1), image(own, 2)
            for kind in ("actor", "reference", *(["moments"] if optimizer else [])):
                assert saved[kind].keys() == loaded[kind].keys()
                assert all(torch.equal(v, loaded[kind][k]) for k, v in saved[kind].items())
            assert bool(loaded["moments"]) == optimizer
            # And back.
            back = folder / f"{name}-back-{rank}"
            save_agent(own, 2, back, save_optimizer=optimizer)
            load_agent(zero, 2, back, load_optimizer=optimizer)
            again, there = image(zero, 2), image(own, 2)
            for kind in ("actor", "moments"):
                assert all(torch.equal(v, again[kind][k]) for k, v in there[kind].items())
            pair.learn((2,))
    agent = GRPO.load(folder / "False-True")
    assert agent.settings.engine.zero is None
    assert type(agent.state.optimizer) is torch.optim.AdamW
    pair.compare()


CASES = (steps, failure, clone, sampling, saving, resizing, birth_and_death)


def main():
    warnings.simplefilter("error")
    stage, folder = int(sys.argv[1]), Path(sys.argv[2])
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
    warnings.filterwarnings("ignore", "checkpoint .* holds no optimizer state")
    pair = Pair(stage, float(sys.argv[3]))
    for case in CASES:
        case(pair, folder)
        print(f"{case.__name__}: {pair.compare():.1e}", flush=True)


if __name__ == "__main__":
    main()
