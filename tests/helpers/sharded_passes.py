"""What each rank does in `test_sharded`: agents over a divided base, compared with a whole one.

Ranks have unequally many agents, rows, tokens to sample and passes; one of them has none at times.
"""

import warnings

import numpy as np
import tiny
import torch
from peft import LoraConfig
from tiny_cohort import PLAIN, image, make_rows, perturb

from evo_grpo.learn.rows import AgentBatch
from evo_grpo.population.ranks.ranks import find_team
from evo_grpo.settings.keywords import agent_settings
from evo_grpo.training.assemble import Objects, build_cohort
from evo_grpo.types import Prompt

THIRD_LAYER = r".*\.2\..*(q_proj|down_proj)"


def deep():
    return tiny.llama(num_hidden_layers=3, initializer_range=0.5)


CASES = {
    "llama": (deep, {}, {}),
    "recomputed": (tiny.llama, {"gradient_checkpointing": True}, {}),
    "qwen2 with dropout": (tiny.qwen2, {}, {"lora_dropout": 0.3}),
    "gpt2": (tiny.gpt2, {}, {"target_modules": ["c_attn", "c_proj"]}),
    "adapters in the third layer": (deep, {}, {"target_modules": THIRD_LAYER}),
    "recomputed, in the third layer": (
        deep,
        {"gradient_checkpointing": True},
        {"target_modules": THIRD_LAYER},
    ),
}
#: Agents: two on the first rank, one on the second, which differ in group size and KL term.
HPARAMS = [
    PLAIN.replace(group_size=2, beta=0.1),
    PLAIN.replace(group_size=5, update_epochs=2),
    PLAIN.replace(group_size=3, beta=0.05, batch_size=4),
]
SHARDS = (0, 0, 1)


def build(case, team):
    model, settings, lora = CASES[case]
    given = {"seed": 7, "hyperparameters": {}, "device": "cpu", "base": "sharded", "shards": 2,
             "max_rows_per_microbatch": 3, "max_output_tokens": 9, **settings}  # fmt: skip
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **lora})
    cohort, _ = build_cohort(
        agent_settings(given, kind="grpo"), Objects(model=model(), lora=config), team
    )
    for hparams, shard in zip(HPARAMS, SHARDS, strict=True):
        slot = cohort.add(hparams, shard).slot
        if cohort.is_local(slot):
            perturb(cohort, slot)
    return cohort


def prompts(count):
    rng = np.random.default_rng(5)
    ids = [tuple(int(i) for i in rng.integers(3, 40, 3 + n)) for n in range(count)]
    return [Prompt(index, "", tokens) for index, tokens in enumerate(ids)]


def work(cohort, step):
    """One step of this rank's agents, as unlike that of the other rank as can be."""
    found = {}
    for shard in cohort.parts_here(tuple(cohort.agents)):
        count = 4 if 0 in shard else 1
        groups = cohort.generate(shard, prompts(count), stream=("test", step))
        rows = [make_rows(10 * step + slot, groups=1 + 2 * (slot == 1)) for slot in shard]
        if step == 1 and 0 not in shard:
            rows = [[] for _ in shard]
        batches = [AgentBatch(slot, r) for slot, r in zip(shard, rows, strict=True)]
        metrics = cohort.learn(batches, stream=("learn", step))
        for slot, own, values in zip(shard, groups, metrics, strict=True):
            found[slot] = ([c.token_ids for g in own for c in g.completions], values["grad_norm"])
    return found


def compare(case, team):
    divided, whole = build(case, team), build(case, None)
    assert divided.base.passes is not None
    assert whole.base.passes is None
    share = divided.base.bytes_here / whole.base.bytes_here
    for step in range(3):
        mine = work(divided, step)
        team.wait_for_all()
        expected = work(whole, step)
        assert mine == {slot: expected[slot] for slot in mine}, (mine, expected)
    # One rank alone, as in the final comparison.
    alone = None
    if team.rank == 0:
        alone = divided.generate([0], prompts(3), stream=("alone",))
    alone = team.first(alone)
    same = whole.generate([0], prompts(3), stream=("alone",))
    assert alone == same
    # FSDP2's notes on forwards without a backward, which would fill the memory of a long run.
    assert not divided.base.trunk._get_fsdp_state()._comm_ctx.post_forward_order
    for slot in divided.agents:
        if divided.is_local(slot):
            one, two = image(divided, slot), image(whole, slot)
            for kind in ("actor", "moments"):
                assert one[kind].keys() == two[kind].keys()
                for key, value in one[kind].items():
                    assert torch.equal(value, two[kind][key]), (slot, kind, key)
    return share


if __name__ == "__main__":
    warnings.simplefilter("error")
    ranks = find_team()
    for name in CASES:
        print(f"{name}: {compare(name, ranks):.3f}", flush=True)
